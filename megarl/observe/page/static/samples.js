// Groups and samples with filters; the server reads the files page by page.

import { get } from "./api.js";
import { choice, debounce, h, number, plural, toNumber } from "./dom.js";
import { sampleParts } from "./transcript.js";
import { tokenPanel } from "./tokens.js";

const PAGES_AT_ONCE = 4; // pages without a match that are read before the reader is asked

export function createSamples(root, app) {
  let run = app.runs.find(({ id }) => String(id) === app.params.get("run")) ?? app.shown[0];
  let steps = [];
  let remark = ""; // which samples a report has
  let asked = 0; // number of the newest question: answers to older ones are dropped
  let following = !app.params.get("step"); // stays at the newest step until another is chosen
  const pick = choice("Run", app.runs.map(({ id, label }) => [String(id), label]), String(run.id), (id) => {
    run = app.runs.find((each) => String(each.id) === id);
    following = true;
    app.setParams({ run: id, step: "", offset: "" });
    open();
  });
  pick.hidden = app.runs.length === 1;
  const step = h("input", { type: "number", min: 0, "aria-label": "Step", title: "List from this step's samples on, back in time" });
  const field = (name, props) => h("input", { ...props, "aria-label": name, value: app.params.get(name) || "", class: "narrow" });
  const least = field("least", { type: "number", step: "any", placeholder: "reward from" });
  const most = field("most", { type: "number", step: "any", placeholder: "to" });
  const staleness = field("staleness", { type: "number", min: 0, placeholder: "lag from" });
  const source = field("source", { type: "search", placeholder: "data source" });
  const finish = choice("Ended by", [["", "any end"], ["stop", "stop"], ["length", "length"], ["turns", "turns"], ["tool_time", "tool time"]], app.params.get("finish") || "", () => filter());
  const tools = choice("Tools", [["", "with and without tools"], ["called", "called a tool"], ["failed", "a call failed"]], app.params.get("tools") || "", () => filter());
  const spread = choice("Group", [["", "all groups"], ["some", "rewards differ"], ["none", "all rewards equal"]], app.params.get("spread") || "", () => filter());
  const text = h("input", { type: "search", placeholder: "text", "aria-label": "Text", value: app.params.get("text") || "" });
  const note = h("p", { class: "note" });
  const list = h("div", { class: "sample-list", role: "listbox", tabIndex: 0, "aria-label": "Samples" });
  const detail = h("div", { class: "sample-detail" });
  const browser = h("div", { class: "browser" }, list, detail);
  const move = (by) => {
    const at = step.value === "" ? Infinity : Number(step.value); // may be a step without samples
    const next = by > 0 ? steps.find((each) => each > at) ?? steps[steps.length - 1] : steps.findLast((each) => each < at) ?? steps[0];
    if (next === undefined) return;
    step.value = next;
    chosenStep();
  };
  root.append(
    h("div", { class: "controls" }, pick,
      h("span", { class: "steps" }, h("button", { type: "button", title: "earlier step ([)", onclick: () => move(-1) }, "‹"), step, h("button", { type: "button", title: "later step (])", onclick: () => move(1) }, "›"), h("button", { type: "button", onclick: () => { following = true; app.setParams({ step: "", offset: "" }); open(); } }, "newest")),
      spread, least, most, finish, tools, staleness, source, text),
    note, browser,
  );

  const conditions = () => ({ least: least.value, most: most.value, staleness: staleness.value, source: source.value, finish: finish.value, tools: tools.value, spread: spread.value, text: text.value });
  const filter = debounce(() => { app.setParams(conditions()); list.scrollTop = 0; load(); }, 200);
  for (const input of [least, most, staleness, source, text]) input.addEventListener("input", filter);
  step.addEventListener("change", chosenStep);

  function chosenStep() {
    following = Number(step.value) === steps[steps.length - 1];
    app.setParams({ step: following ? "" : step.value, offset: "" });
    load();
  }

  async function open() {
    try {
      ({ steps, note: remark = "" } = await get(`runs/${run.id}/sample_steps`));
    } catch (error) {
      note.textContent = error.message;
      return;
    }
    if (!steps.length) {
      list.replaceChildren();
      detail.replaceChildren();
      note.textContent = "No samples were written (observe.samples_per_step; SFT and DPO sample nothing).";
      return;
    }
    step.value = following ? steps[steps.length - 1] : app.params.get("step");
    await load();
  }

  // Load the first page of the list; `next` continues it.
  async function load(next = null) {
    const question = ++asked;
    if (!next) list.replaceChildren();
    note.textContent = "Reading …";
    let [start, looked, matched] = [next?.start ?? [Number(step.value), 0], next?.looked ?? 0, 0];
    const damaged = next?.damaged ?? [];
    try {
      for (let pages = 0; start && !matched && pages < PAGES_AT_ONCE; pages += 1) {
        const page = await get(`runs/${run.id}/samples`, { step: start[0], offset: start[1], ...conditions() });
        if (question !== asked) return;
        looked += page.looked_at;
        damaged.push(...page.damaged);
        page.groups.forEach((group) => list.append(...groupRows(group)));
        matched += page.groups.reduce((sum, group) => sum + group.samples.length, 0);
        start = page.next;
      }
    } catch (error) {
      if (question === asked) note.textContent = error.message;
      return;
    }
    const shown = list.querySelectorAll("[role=option]").length;
    note.textContent = [`${plural(shown, "sample")} of the ${number(looked)} looked at.`, start ? "" : "These are all up to this step.", remark, ...damaged].filter(Boolean).join(" ");
    if (start) {
      const more = h("button", { type: "button", class: "more", onclick: () => { more.remove(); load({ start, looked, damaged }); } }, `continue at step ${number(start[0])}`);
      list.append(more);
    }
    if (!next) {
      const wanted = app.params.get("offset");
      const at = wanted && list.querySelector(`[data-step="${Number(step.value)}"][data-offset="${Number(wanted)}"]`);
      const first = at || list.querySelector("[role=option]");
      if (!at) app.setParams({ offset: "" }); // the reader has not opened the sample that is shown first
      if (first) show(first, !matchMedia("(max-width: 760px)").matches || Boolean(at), Boolean(at));
      else detail.replaceChildren(h("p", { class: "empty" }, "No sample passes the filters."));
    }
  }

  function groupRows(group) {
    const rewards = group.rewards.map(toNumber);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
    const dots = rewards.slice(0, 32).map((reward) => {
      const dot = h("i", { class: "reward-dot", title: number(reward) });
      dot.style.opacity = high > low ? 0.2 + 0.8 * ((reward - low) / (high - low)) : 0.6;
      return dot;
    });
    const head = h("div", { class: `group${high > low ? "" : " flat"}`, role: "presentation" },
      h("span", {}, `step ${number(group.step)} · group ${group.group ?? "?"}`),
      h("span", { class: "dots", title: high > low ? "rewards of the group" : "all rewards of the group are equal" }, dots),
      h("b", {}, number(mean, 3)),
      h("small", {}, [group.data_source, group.row].filter(Boolean).join(" · ")));
    return [head, ...group.samples.map((sample) => {
      const marks = [sample.finish_reason === "stop" ? "" : sample.finish_reason, sample.calls ? plural(sample.calls, "call") : "", sample.failures ? `${sample.failures} failed` : "", sample.staleness ? `lag ${sample.staleness}` : ""].filter(Boolean);
      const row = h("div", { class: "sample", role: "option", onclick: () => show(row, true, true) },
        h("div", { class: "head" }, h("b", {}, number(sample.reward)), h("span", { class: "marks" }, marks.join(" · ")), h("span", { class: "length" }, `${number(sample.response_length)} tok`)),
        h("div", { class: "snippet" }, sample.snippet || "(empty response)"));
      Object.assign(row.dataset, { step: group.step, offset: sample.offset });
      return row;
    })];
  }

  // opened: show the sample's text. chosen: the reader opened it, so that the address names it and the list stays.
  async function show(row, opened, chosen) {
    list.querySelectorAll("[aria-selected=true]").forEach((other) => other.setAttribute("aria-selected", "false"));
    row.setAttribute("aria-selected", "true");
    if (!opened) { detail.replaceChildren(); return; }
    browser.classList.add("open");
    root.classList.add("open");
    const place = { step: row.dataset.step, offset: row.dataset.offset };
    if (chosen && row.dataset.step === step.value) app.setParams({ step: following ? "" : step.value, offset: place.offset });
    row.scrollIntoView({ block: "nearest" });
    try {
      const record = await get(`runs/${run.id}/sample`, place);
      if (row.getAttribute("aria-selected") !== "true") return;
      const back = h("button", { type: "button", class: "back", onclick: () => close(row) }, "‹ samples");
      detail.replaceChildren(back, ...sampleParts(record), ...tokenPanel(record));
      detail.scrollTop = 0;
    } catch (error) {
      detail.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }

  // On a narrow screen the list and a sample replace each other.
  function close(row) {
    browser.classList.remove("open");
    root.classList.remove("open");
    row.scrollIntoView({ block: "center" });
  }

  function choose(by) {
    const rows = [...list.querySelectorAll("[role=option]")];
    const at = rows.findIndex((row) => row.getAttribute("aria-selected") === "true");
    const next = rows[Math.max(0, Math.min(at + by, rows.length - 1))];
    if (next) show(next, true, true);
  }

  const keys = (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { j: () => choose(1), k: () => choose(-1), ArrowDown: () => choose(1), ArrowUp: () => choose(-1), "[": () => move(-1), "]": () => move(1), "/": () => text.focus() }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  document.addEventListener("keydown", keys);
  open();
  return {
    close: () => document.removeEventListener("keydown", keys),
    update(changed) {
      if (!changed.get(run.id)?.has("samples")) return;
      get(`runs/${run.id}/sample_steps`).then((answer) => {
        const newest = steps[steps.length - 1];
        ({ steps } = answer);
        // A reader who has scrolled or opened a sample keeps the list.
        const untouched = following && list.scrollTop === 0 && !browser.matches(":hover, :focus-within") && !app.params.get("offset");
        if (untouched || newest === undefined) { step.value = steps[steps.length - 1]; load(); }
        else note.textContent = `Step ${number(steps[steps.length - 1])} has samples: “newest” shows them.`;
      }, (error) => { note.textContent = error.message; });
    },
  };
}
