// One sample: its reward, its facts, and the conversation with its tools.

import { h, number, plural } from "./dom.js";

const RENDERED = new Set(["prompt", "response", "turns", "reward", "reason", "parts", "prompt_length", "response_length", "finish_reason", "tool_use", "token_values", "token_damage"]);
const ENDS = { length: "length", turns: "the limit of turns", tool_time: "the limit of seconds in tools" };
const FAILURES = { refused: "refused", error: "failed", timeout: "timed out", crash: "crashed" };
// Source text of a tool call in the hermes and DeepSeek formats. It is folded: the tool's turn shows the parsed call.
const WRITTEN_CALL = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<｜tool▁calls▁begin｜>[\s\S]*?(?:<｜tool▁calls▁end｜>|$))/;

export function sampleParts(record) {
  const turns = (Array.isArray(record.turns) ? record.turns : []).filter((turn) => turn && typeof turn === "object");
  return [
    h("div", { class: "verdict" }, h("b", {}, `reward ${number(record.reward)}`), record.reason ? h("span", { class: "reason" }, String(record.reason)) : null),
    facts(record),
    h("h4", {}, "Prompt"),
    long(record.prompt),
    ...(turns.length ? conversation(turns) : [h("h4", {}, "Response"), long(record.response)]),
  ];
}

function facts(record) {
  const pairs = Object.entries(record.parts ?? {}).map(([name, value]) => [name, number(value)]);
  pairs.push(["length", `${number(record.prompt_length)} + ${number(record.response_length)} tokens`]);
  pairs.push(["ended by", ENDS[record.finish_reason] ?? String(record.finish_reason ?? "–")]);
  const use = record.tool_use;
  if (use) {
    const failed = use.failures ? ` (${number(use.failures)} failed${use.timeouts ? `, ${number(use.timeouts)} timed out` : ""})` : "";
    pairs.push(["tools", `${plural(use.turns, "turn")}, ${plural(use.calls, "call")}${failed}, ${number(use.seconds)} s`]);
  }
  for (const [name, value] of Object.entries(record)) {
    if (RENDERED.has(name) || (Array.isArray(value) && !value.length) || value === null) continue;
    pairs.push([name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : number(value)]);
  }
  return h("dl", { class: "pairs" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function long(text) {
  const shown = String(text ?? "");
  return shown ? h("pre", {}, shown) : h("p", { class: "empty" }, "Empty.");
}

function conversation(turns) {
  let replies = 0;
  return turns.map((turn) => {
    if (turn.role === "tool") return toolTurn(turn);
    if (turn.role === "user") return userTurn(turn);
    if (turn.role === "left out") return h("p", { class: "note" }, turn.text);
    replies += 1;
    const parts = String(turn.text ?? "").split(WRITTEN_CALL).filter((text) => text.trim());
    return h("div", { class: "turn" },
      h("h4", {}, `Turn ${replies}${turn.tokens ? ` · ${plural(turn.tokens, "token")}` : ""}${turn.reward ? ` · reward ${number(turn.reward)}` : ""}`),
      parts.map((text) => (WRITTEN_CALL.test(text) ? h("details", { class: "written" }, h("summary", {}, "source text of the call"), h("pre", {}, text)) : h("pre", {}, text.trim()))),
      parts.length ? null : h("p", { class: "empty" }, "Empty turn."));
  });
}

// An interaction's reply, in the user's place; its reward is of the turn before it.
function userTurn(turn) {
  return h("div", { class: "turn" },
    h("h4", {}, `User${turn.tokens ? ` · ${plural(turn.tokens, "token")}` : " · ends the conversation"}${turn.reward ? ` · reward ${number(turn.reward)}` : ""}`),
    h("pre", {}, String(turn.text ?? "")));
}

// A tool's turn, folded: its first line has the call, its duration and its failure.
function toolTurn(turn) {
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const args = Array.isArray(turn.arguments) ? turn.arguments : Object.entries(turn.arguments ?? {});
  const call = args.map(([name, value]) => `${name}: ${plain(value)}`).join(", ").replace(/\s+/g, " ");
  const figures = [turn.seconds ? `${number(turn.seconds)} s` : "", turn.tokens ? plural(turn.tokens, "token") : "", turn.reward ? `reward ${number(turn.reward)}` : ""].filter(Boolean);
  return h("details", { class: `call${turn.failure ? " failed" : ""}` },
    h("summary", {}, h("b", {}, turn.name || "tool"), h("span", { class: "arguments" }, call.slice(0, 200)), turn.failure ? h("span", { class: "failure" }, FAILURES[turn.failure] ?? String(turn.failure)) : null, h("span", { class: "figures-of-call" }, figures.join(" · "))),
    args.flatMap(([name, value]) => [h("h4", {}, name), h("pre", {}, plain(value))]),
    h("h4", {}, turn.failure ? "Error message to the policy" : "Answer"),
    h("pre", {}, String(turn.text ?? "")));
}
