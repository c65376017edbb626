// Notices and warnings of the shown runs, the newest first.

import { get } from "./api.js";
import { choice, clock, debounce, h, number } from "./dom.js";

const MOST_ROWS = 1000; // in the list

export function createNotices(root, app) {
  const loaded = new Map(); // run id -> {epoch, count, notices, damaged}
  const list = h("ol", { class: "list notices" });
  const count = h("p", { class: "note" });
  const words = h("input", { type: "search", placeholder: "text", "aria-label": "Text of the notice", value: app.params.get("text") || "" });
  const level = choice("Level", [["", "all levels"], ["warning", "warnings"]], app.params.get("level") || "", draw);
  words.addEventListener("input", debounce(draw, 150));
  root.append(h("div", { class: "controls" }, level, words), count, list);

  async function load(run) {
    const before = loaded.get(run.id);
    let answer;
    try {
      answer = await get(`runs/${run.id}/notices`, { first: before ? before.count : 0 });
      if (before && answer.epoch !== before.epoch) answer = await get(`runs/${run.id}/notices`);
    } catch (error) {
      count.textContent = error.message;
      return;
    }
    const kept = before && answer.epoch === before.epoch ? before.notices : [];
    loaded.set(run.id, { ...answer, notices: [...kept, ...answer.notices] });
    draw();
  }

  function draw() {
    app.setParams({ text: words.value, level: level.value });
    const needle = words.value.toLowerCase();
    const rows = app.shown.flatMap((run) => (loaded.get(run.id)?.notices ?? []).map((notice) => ({ ...notice, run })));
    const passing = rows.filter((row) => (!level.value || row.level === level.value) && row.text.toLowerCase().includes(needle));
    passing.sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
    const whole = app.shown.reduce((sum, run) => sum + (loaded.get(run.id)?.count ?? 0), 0);
    const damaged = app.shown.flatMap((run) => loaded.get(run.id)?.damaged ?? []);
    const listed = passing.length > MOST_ROWS ? `The newest ${number(MOST_ROWS)} are listed; the text finds the others.` : "";
    count.textContent = [`${number(passing.length)} of ${number(whole)} notices.`, listed, ...damaged].filter(Boolean).join(" ");
    list.replaceChildren(
      ...passing.slice(0, MOST_ROWS).map((row) =>
        h(
          "li",
          { class: row.level === "warning" ? "warning" : "" },
          app.shown.length > 1 ? h("i", { class: `dot c${row.run.id % 12}`, title: row.run.label }) : null,
          h("span", { class: "when" }, [clock(row.time), row.step === null ? "" : `step ${row.step}`, row.event].filter(Boolean).join(" · ")),
          h("span", {}, row.text),
        ),
      ),
    );
  }

  app.shown.forEach(load);
  return {
    update(changed) {
      app.shown.filter((run) => changed.get(run.id)?.has("notices")).forEach(load);
    },
  };
}
