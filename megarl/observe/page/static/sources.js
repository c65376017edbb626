// Tables of data sources for each step.

import { get } from "./api.js";
import { choice, h, number } from "./dom.js";

export function createSources(root, app) {
  let run = app.runs.find(({ id }) => String(id) === app.params.get("run")) ?? app.shown[0];
  let steps = [];
  let following = !app.params.get("step"); // stays at the newest step until another is chosen
  const pick = choice("Run", app.runs.map(({ id, label }) => [String(id), label]), String(run.id), (id) => {
    run = app.runs.find((each) => String(each.id) === id);
    app.setParams({ run: id, step: "" });
    following = true;
    load();
  });
  pick.hidden = app.runs.length === 1;
  const step = h("select", { "aria-label": "Step", onchange: () => choose(step.selectedIndex) });
  const note = h("p", { class: "note" });
  const tables = h("div", { "aria-live": "polite" });
  const move = (by) => choose(Math.max(0, Math.min(step.selectedIndex + by, steps.length - 1)));
  const controls = h("span", { class: "steps" }, h("button", { type: "button", title: "earlier step", onclick: () => move(-1) }, "‹"), step, h("button", { type: "button", title: "later step", onclick: () => move(1) }, "›"));
  root.append(h("div", { class: "controls" }, pick, controls), note, tables);

  async function load() {
    let answer;
    try {
      answer = await get(`runs/${run.id}/sources`);
    } catch (error) {
      note.textContent = error.message;
      return;
    }
    ({ steps } = answer);
    controls.hidden = !steps.length;
    const meaning = "All samples of the step, including groups that were not trained on. Time-outs, crashes and errors count samples that could not be scored.";
    const left = steps.length < answer.of ? ` ${number(steps.length)} of ${number(answer.of)} steps are shown, including the steps with the most samples that could not be scored; metrics.jsonl has all steps.` : "";
    note.textContent = steps.length ? meaning + left : "No step has metrics by data source.";
    step.replaceChildren(...steps.map((each) => h("option", { value: each.step }, `step ${number(each.step)}${each.not_scored ? ` · ${number(each.not_scored)} not scored` : ""}`)));
    const wanted = steps.findIndex((each) => String(each.step) === app.params.get("step"));
    show(following || wanted < 0 ? steps.length - 1 : wanted);
  }

  function choose(place) {
    following = place === steps.length - 1;
    app.setParams({ step: following ? "" : steps[place].step });
    show(place);
  }

  function show(place) {
    step.selectedIndex = place;
    tables.replaceChildren(...(steps[place]?.tables ?? []).map((content) => h("section", { class: "card" }, h("h2", {}, content.title), h("div", { class: "scroll" }, table(content)))));
  }

  load();
  return {
    update(changed) {
      if (changed.get(run.id)?.has("metrics")) load();
    },
  };
}

function table({ head, faults, rows, left_out: leftOut }) {
  return h("table", { class: "sources" },
    h("thead", {}, h("tr", {}, ["data source", ...head].map((label) => h("th", { scope: "col" }, label)))),
    h("tbody", {},
      rows.map(([source, cells]) => h("tr", {}, h("th", { scope: "row" }, source), cells.map((cell, i) => h("td", { class: faults[i] && cell ? "fault" : "" }, cell)))),
      leftOut ? h("tr", {}, h("td", { colSpan: head.length + 1 }, `and ${number(leftOut)} more, in metrics.jsonl`)) : null));
}
