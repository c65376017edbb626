// Status, facts, key figures, faults and missing data of each run.

import { get } from "./api.js";
import { clock, h } from "./dom.js";

export function createOverview(root, app) {
  const places = new Map(app.shown.map((run) => [run.id, h("section", { class: "run" })]));
  root.append(...places.values());

  async function load(run) {
    const place = places.get(run.id);
    try {
      place.replaceChildren(...content(await get(`runs/${run.id}/overview`), run));
    } catch (error) {
      place.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }

  app.shown.forEach(load);
  return {
    update(changed) {
      for (const run of app.shown) {
        const kinds = changed.get(run.id);
        if (kinds && ["metrics", "notices", "status", "summary", "samples", "silent_minutes"].some((kind) => kinds.has(kind))) load(run);
      }
    },
  };
}

function content(data, run) {
  const figures = data.figures.map(({ label, value, detail }) =>
    h("div", { class: "figure" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "detail" }, detail)),
  );
  const facts = data.facts.flatMap(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)));
  return [
    h("div", { class: "title" }, h("i", { class: `dot c${run.id % 12}` }), h("h2", {}, data.label), h("span", { class: `status ${data.status.kind}` }, data.status.text)),
    h("p", { class: "note" }, data.path),
    h("dl", { class: "facts" }, facts),
    data.error ? h("p", { class: "error" }, data.error) : null,
    data.gaps.length ? h("ul", { class: "gaps" }, data.gaps.map((text) => h("li", {}, text))) : null,
    h("div", { class: "figures" }, figures),
    data.advice.length ? h("h3", {}, "Advice") : null,
    data.advice.length ? h("ul", { class: "list" }, data.advice.map(advice)) : null,
    data.faults.length ? h("h3", {}, "Faults") : null,
    data.faults.length ? h("p", { class: "note" }, "Starts that failed or were killed, and deaths of engines and trainers in a run that went on.") : null,
    data.faults.length
      ? h("ul", { class: "list" }, data.faults.map((fault) => h("li", { class: "warning" }, h("span", { class: "when" }, [clock(fault.time), fault.step === null ? "" : `step ${fault.step}`, fault.event].filter(Boolean).join(" · ")), ` ${fault.cause ?? "unknown cause"}`)))
      : null,
    ...provenance(data.provenance),
  ].filter(Boolean);
}

function provenance(lines) {
  if (!lines.length) return [];
  const rows = lines.map(([label, value]) => h("tr", {}, h("th", { scope: "row" }, label), h("td", {}, value)));
  return [
    h("h3", {}, "Provenance"),
    h("p", { class: "note" }, "Of the last start. `megarl reproduce` compares it with an installation, and repeats the run."),
    h("table", { class: "provenance" }, h("tbody", {}, rows)),
  ];
}

function advice({ kind, what, evidence, changes, note }) {
  const tries = changes.flatMap((change, number) => [number ? " or " : "\nTry ", h("code", {}, change)]);
  return h("li", { class: "warning" }, h("span", { class: "when" }, kind), " ", h("b", {}, what), `: ${evidence}`, tries, note ? `\n${note}` : "");
}
