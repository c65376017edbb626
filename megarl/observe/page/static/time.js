// Phases of the steps, who waits for whom, and the timeline of the last steps.

import { get } from "./api.js";
import { choice, color, h, number, plural } from "./dom.js";

export function createTime(root, app) {
  let run = app.runs.find(({ id }) => String(id) === app.params.get("run")) ?? app.shown[0];
  let data = null;
  const pick = choice("Run", app.runs.map(({ id, label }) => [String(id), label]), String(run.id), (id) => {
    run = app.runs.find((each) => String(each.id) === id);
    app.setParams({ run: id });
    load();
  });
  pick.hidden = app.runs.length === 1;
  const note = h("p", { class: "note" });
  const waits = h("table", { class: "waits" });
  const bars = new Canvas("Seconds of each phase by step", 280, drawBars);
  const line = new Canvas("Timeline of the last steps", 120, drawTimeline);
  const legend = h("div", { class: "legend" });
  const lineNote = h("p", { class: "note" });
  root.append(
    h("div", { class: "controls" }, pick), note,
    h("section", { class: "card" }, h("h2", {}, "Who waits for whom"), h("div", { class: "scroll" }, waits)),
    h("section", { class: "card" }, h("h2", {}, "Phases"), legend, bars.element),
    h("section", { class: "card" }, h("h2", {}, "Timeline"), lineNote, line.element),
  );

  async function load() {
    const asked = run;
    try {
      const answer = await get(`runs/${asked.id}/phases`);
      if (asked !== run) return;
      data = answer;
      note.textContent = "";
      drawWaits(waits, data.waits);
      legend.replaceChildren(...data.phases.names.map((name, i) => {
        const dot = h("i", { class: "dot" });
        dot.style.background = `var(${phaseColor(name, i)})`;
        return h("span", {}, dot, name);
      }));
      const { steps, rows } = data.timeline;
      lineNote.textContent = steps.length
        ? `Steps ${steps[0]} to ${steps[1]}. Scroll with Ctrl to zoom, then drag to move; double-click for all. trace.json opens in ui.perfetto.dev.`
        : data.has_trace ? "trace.json has no finished phase yet." : "The run has no trace.json.";
      line.setHeight(Math.max(60, rows.length * ROW + 30));
      bars.draw();
      line.draw();
    } catch (error) {
      note.textContent = error.message;
    }
  }

  function drawBars(pen, width, height, hits) {
    if (!data?.phases.names.length) return;
    const { x, names, seconds, per_bar: perBar } = data.phases;
    const totals = x.map((_, i) => names.reduce((sum, name) => sum + (seconds[name][i] ?? 0), 0));
    const most = Math.max(...totals, 1e-9);
    const size = (width - 56) / x.length;
    pen.fillStyle = color("--faint");
    pen.textAlign = "right";
    for (const share of [0, 0.5, 1]) pen.fillText(`${number(most * share, 3)} s`, 48, 14 + (height - 40) * (1 - share));
    pen.textAlign = "center";
    const every = Math.ceil(x.length / Math.max(2, Math.floor(width / 90)));
    x.forEach((step, i) => { if (i % every === 0) pen.fillText(number(step), 52 + (i + 0.5) * size, height - 6); });
    x.forEach((step, i) => {
      let bottom = height - 26;
      names.forEach((name, k) => {
        const tall = ((seconds[name][i] ?? 0) / most) * (height - 40);
        pen.fillStyle = color(phaseColor(name, k));
        pen.fillRect(52 + i * size, bottom - tall, Math.max(1, size - (size > 4 ? 1 : 0)), tall);
        bottom -= tall;
      });
      const rows = names.map((name) => `${name}: ${number(seconds[name][i], 3)} s`);
      hits.push([52 + i * size, 0, size, height, [`${perBar > 1 ? "mean around step" : "step"} ${number(step)}: ${number(totals[i], 3)} s`, ...rows]]);
    });
  }

  function drawTimeline(pen, width, height, hits, zoom) {
    const { rows = [], spans = [] } = data?.timeline ?? {};
    if (!spans.length) return;
    const left = Math.min(180, width * 0.34);
    const end = Math.max(...spans.map(([, , begin, seconds]) => begin + seconds));
    const [from, to] = zoom.range ?? [0, end];
    zoom.inverse = (pixel) => from + ((pixel - left) / (width - left - 8)) * (to - from);
    zoom.limits = [0, end];
    const at = (seconds) => left + ((seconds - from) / (to - from)) * (width - left - 8);
    pen.textBaseline = "middle";
    rows.forEach((row, i) => {
      pen.textAlign = "left";
      pen.fillStyle = color(i % 2 ? "--card" : "--ground");
      pen.fillRect(0, i * ROW, width, ROW);
      pen.fillStyle = color("--soft");
      pen.fillText(cut(pen, row, left - 8), 4, i * ROW + ROW / 2);
    });
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left, height);
    pen.clip();
    const named = [...new Set(spans.map(([, name]) => name))];
    for (const [row, name, begin, seconds, step] of spans) {
      if (begin + seconds < from || begin > to) continue;
      pen.fillStyle = color(phaseColor(name, named.indexOf(name)));
      const [x, wide] = [at(begin), Math.max(1, at(begin + seconds) - at(begin))];
      pen.fillRect(x, row * ROW + 3, wide, ROW - 6);
      hits.push([x - 2, row * ROW, wide + 4, ROW, [`${name}${step === null ? "" : `, step ${step}`}`, `${number(seconds, 3)} s, from ${number(begin, 4)} s`]]);
    }
    pen.restore();
    pen.fillStyle = color("--faint");
    pen.textAlign = "center";
    for (const share of [0, 0.25, 0.5, 0.75]) pen.fillText(`${number(from + share * (to - from), 3)} s`, left + share * (width - left - 8) + 14, rows.length * ROW + 14);
  }

  load();
  return {
    update(changed) {
      const kinds = changed.get(run.id);
      if (kinds && (kinds.has("metrics") || kinds.has("trace"))) load();
    },
    redraw() { bars.draw(); line.draw(); },
    close() { bars.close(); line.close(); },
  };
}

const ROW = 20;
const KNOWN = ["gen", "update_actor", "old_log_prob", "reference", "weight_sync", "eval", "save", "update_critic", "values", "adv", "drain"];

function phaseColor(name, i) {
  if (name === "other") return "--line";
  const place = KNOWN.indexOf(name);
  return `--c${(place >= 0 ? place : i) % 12}`;
}

function cut(pen, text, width) {
  let shown = text;
  while (shown.length > 2 && pen.measureText(shown).width > width) shown = `${shown.slice(0, -2)}…`;
  return shown;
}

function drawWaits(table, { steps, rows }) {
  if (!steps) {
    table.replaceChildren(h("caption", {}, "No finished step yet."));
    return;
  }
  const show = ({ seconds, share }) => {
    const bar = h("i", { class: "share" });
    bar.style.width = `${Math.min(100, 100 * share)}%`;
    return [h("td", {}, seconds === null ? "–" : `${number(seconds, 3)} s`), h("td", { class: "meter" }, bar, h("span", {}, share === null ? "–" : `${number(100 * share, 3)} %`))];
  };
  table.replaceChildren(
    h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", { colSpan: 2 }, `last ${plural(steps, "step")}, mean`), h("th", { colSpan: 2 }, "all steps, mean"))),
    h("tbody", {}, rows.map(({ text, recent, all }) => h("tr", {}, h("th", { scope: "row" }, text), show(recent), show(all)))),
  );
}

// A canvas with a tooltip over rectangles: paint(pen, width, height, hits, zoom) adds [x, y, width, height, lines] to hits.
class Canvas {
  constructor(label, height, paint) {
    this.paint = paint;
    this.zoom = { range: null, inverse: null, limits: null };
    this.hits = [];
    this.canvas = h("canvas", { class: "plot", role: "img", "aria-label": label });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("div", { class: "frame" }, this.canvas, this.tip);
    this.setHeight(height);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.listen();
  }

  setHeight(height) { this.canvas.style.height = `${height}px`; }
  close() { this.observer.disconnect(); }

  draw() {
    const { canvas } = this;
    const [width, height, ratio] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio || 1];
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.hits = [];
    this.paint(pen, width, height, this.hits, this.zoom);
  }

  listen() {
    const { canvas, zoom } = this;
    let drag = null;
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const limit = ([from, to]) => {
      const [[low, high], wide] = [zoom.limits, to - from];
      const begin = Math.max(low, Math.min(from, high - wide));
      return wide >= high - low ? null : [begin, begin + wide];
    };
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (drag && zoom.range) {
        const by = zoom.inverse(drag) - zoom.inverse(x);
        zoom.range = limit([zoom.range[0] + by, zoom.range[1] + by]);
        drag = x;
        this.draw();
      }
      const hit = [...this.hits].reverse().find(([left, top, wide, tall]) => x >= left && x < left + wide && y >= top && y < top + tall);
      this.tip.hidden = !hit;
      if (!hit) return;
      this.tip.replaceChildren(...hit[4].map((text, i) => h(i ? "div" : "b", {}, text)));
      const left = x > canvas.clientWidth / 2;
      this.tip.style.left = left ? "" : `${x + 14}px`;
      this.tip.style.right = left ? `${canvas.clientWidth - x + 14}px` : "";
      this.tip.style.top = `${Math.max(0, Math.min(y, canvas.clientHeight - 60))}px`;
    });
    canvas.addEventListener("pointerdown", (event) => { if (zoom.inverse && event.pointerType === "mouse") drag = place(event)[0]; });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; drag = null; });
    canvas.addEventListener("dblclick", () => { zoom.range = null; this.draw(); });
    canvas.addEventListener("wheel", (event) => {
      if (!zoom.inverse || !event.ctrlKey) return;
      event.preventDefault();
      const middle = zoom.inverse(place(event)[0]);
      const [from, to] = zoom.range ?? zoom.limits;
      const factor = event.deltaY > 0 ? 1.25 : 0.8;
      zoom.range = limit([middle - (middle - from) * factor, middle + (to - middle) * factor]);
      this.draw();
    }, { passive: false });
  }
}
