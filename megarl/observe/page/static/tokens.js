// One sample token by token: each token has the colour of a chosen value, and shows all its values.

import { Chart } from "./charts.js";
import { choice, h, number, toNumber } from "./dom.js";

const AT_ONCE = 2000; // tokens drawn before the reader asks for more
// name -> [title, kind of colours, meaning, columns of the record it needs, value of token i]
const VALUES = {
  gap: ["gap", "diverging", "the trainer's log-prob less the engine's", ["old_log_probs", "rollout_log_probs"], (v, i) => v.old_log_probs[i] - v.rollout_log_probs[i]],
  ratio: ["ratio", "ratio", "probability in the last update over probability before the updates", ["log_probs", "old_log_probs"], (v, i) => Math.exp(v.log_probs[i] - v.old_log_probs[i])],
  advantage: ["advantage", "diverging", "advantage of the token", ["advantages"], (v, i) => v.advantages[i]],
  entropy: ["entropy", "sequential", "entropy of the policy at the token, in nats", ["entropy"], (v, i) => v.entropy[i]],
  probability: ["engine's probability", "probability", "probability with which the engine sampled the token", ["rollout_log_probs"], (v, i) => Math.exp(v.rollout_log_probs[i])],
  version: ["version", "sequential", "version of the weights that sampled the token", ["versions"], (v, i) => v.versions[i]],
};

export function tokenPanel(record) {
  const head = h("h4", {}, "Tokens");
  const recorded = record.token_values;
  if (!recorded || !Array.isArray(recorded.tokens)) return [head, missing(record)];
  const tokens = recorded.tokens;
  const values = Object.fromEntries(Object.entries(recorded.values ?? {}).map(([name, column]) => [name, column.map(toNumber)]));
  const complete = (columns) => columns.every((name) => values[name]?.length === tokens.length);
  const present = Object.entries(VALUES).filter(([, [, , , columns]]) => complete(columns));
  const absent = Object.entries(VALUES).filter(([, [, , , columns]]) => !complete(columns)).map(([, [title]]) => title);
  const mask = values.mask ?? tokens.map(() => 1);
  const strip = h("div", { class: "strip" });
  const facts = h("p", { class: "note token-facts", "aria-live": "polite" }, "Point to a token.");
  const note = h("p", { class: "note" });
  const chart = new Chart({ title: "along the response", note: "", tick: "", log: false }, { xLabel: "token", height: 90 });
  let name = present.length ? present[0][0] : "";
  let count = Math.min(AT_ONCE, tokens.length);

  function draw() {
    const [title, kind, meaning, , value] = VALUES[name];
    const numbers = tokens.map((_, i) => (mask[i] ? value(values, i) : null));
    const finite = numbers.filter((x) => x !== null && Number.isFinite(x));
    const most = finite.reduce((a, x) => Math.max(a, Math.abs(x)), 0) || 1;
    const [low, high] = [finite.reduce((a, x) => Math.min(a, x), Infinity), finite.reduce((a, x) => Math.max(a, x), -Infinity)];
    note.textContent = `${title}: ${meaning}. ${finite.length ? `From ${number(low)} to ${number(high)} over ${number(finite.length)} tokens in the loss` : "No token is in the loss"}; crossed out: not sampled by the policy or not in the loss.${absent.length ? ` Not recorded: ${absent.join(", ")}.` : ""}${recorded.left_out ? ` The first ${number(tokens.length)} of ${number(tokens.length + recorded.left_out)} recorded tokens; tokens/ has all.` : ""}`;
    const share = (x) => {
      if (kind === "diverging") return x / most;
      if (kind === "ratio") return Math.max(-1, Math.min(1, Math.log(x) / (Math.log(Math.max(high, 1 / Math.max(low, 1e-6))) || 1)));
      if (kind === "probability") return x - 1;
      return high > low ? (x - low) / (high - low) : 0;
    };
    strip.replaceChildren(...tokens.slice(0, count).map((text, i) => {
      const token = h("span", { class: mask[i] ? "token" : "token masked" }, visible(text));
      token.dataset.index = i;
      if (numbers[i] !== null) {
        const x = share(numbers[i]);
        if (!Number.isFinite(numbers[i])) token.classList.add("non-finite");
        else token.style.backgroundColor = `color-mix(in srgb, var(${x < 0 ? "--low" : "--high"}) ${Math.round(Math.min(1, Math.abs(x)) * 75)}%, transparent)`;
      }
      return token;
    }));
    if (count < tokens.length) {
      strip.append(h("button", { type: "button", class: "more", onclick: () => { count = Math.min(tokens.length, count + 5 * AT_ONCE); draw(); } }, `${number(tokens.length - count)} more tokens`));
    }
    chart.set([{ label: title, color: "--c0", dash: [], x: tokens.map((_, i) => i), y: numbers.map((x) => (x === null || Number.isFinite(x) ? x : null)), gap: (i) => (mask[i] ? "not finite" : "not in the loss") }]);
  }

  function point(event) {
    const token = event.target.closest(".token");
    if (!token) return;
    const i = Number(token.dataset.index);
    strip.querySelector(".pointed")?.classList.remove("pointed");
    token.classList.add("pointed");
    const shown = present.map(([, [title, , , , value]]) => `${title} ${number(value(values, i))}`);
    facts.textContent = [`token ${i} ${JSON.stringify(tokens[i])}`, mask[i] ? "" : "not in the loss", ...shown].filter(Boolean).join(" · ");
  }
  strip.addEventListener("pointerover", point);
  strip.addEventListener("click", point);

  if (!present.length) return [head, h("p", { class: "empty" }, "The record has tokens and no value per token.")];
  const pick = choice("Value", present.map(([key, [title]]) => [key, title]), name, (next) => { name = next; draw(); });
  draw();
  return [head, h("div", { class: "controls" }, h("label", {}, "colour ", pick)), note, facts, strip, chart.element];
}

function visible(text) {
  return String(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅";
}

// Without recorded tokens: what the sample itself says about its tokens, and what does not exist.
function missing(record) {
  const spans = (record.spans ?? []).map(([start, version]) => `version ${version} from token ${start}`);
  const rewards = (record.steps ?? []).map(([token, reward]) => `reward ${number(reward)} at token ${token}`);
  const versions = spans.length ? spans.join(", ") : `all tokens were sampled by version ${record.version ?? "?"}`;
  return h("div", { class: "empty" },
    h("p", {}, record.token_damage || "The tokens of this sample were not recorded: no ratio, gap, advantage, entropy and mask per token. The setting observe.token_samples_per_step records them for some samples of each step."),
    h("p", {}, [`Known: ${versions}`, ...rewards].join("; ") + "."));
}
