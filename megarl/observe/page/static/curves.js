// Charts of the shown runs. A chart loads its curves when it comes into view, and then what has been appended.

import { get } from "./api.js";
import { Chart, DASHES } from "./charts.js";
import { debounce, h, number } from "./dom.js";

const MOST_NAMES = 60; // in one request
const MOST_CHARTS = 300;

// charts(names): the charts of a page that does not show the usual ones. onNames: receives the runs' metrics.
export function createCurves(root, app, { charts: chosenCharts = null, onNames = null } = {}) {
  let all = []; // {spec, chart, visible}
  let names = [];
  let resumes = {}; // run id -> steps
  let remark = ""; // about the runs' curves
  let missing = ""; // why charts are not shown
  let range = null;
  let closed = false;
  const data = new Map(); // "run\nmetric" -> {since, x, y, smooth}
  const place = h("div", { class: "charts" });
  const rest = h("div", { class: "charts" });
  const fold = h("details", { hidden: true }, h("summary", {}, "All metrics"), rest);
  const words = h("input", { type: "search", placeholder: "chart or metric", "aria-label": "Chart or metric", value: app.params.get("text") || "" });
  const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "Smoothing", value: app.params.get("smoothing") || 0 });
  const weight = h("output", {});
  const hours = h("select", { "aria-label": "Horizontal axis" }, h("option", { value: "step" }, "step"), h("option", { value: "hours" }, "hours in steps"));
  hours.value = app.params.get("x") === "hours" ? "hours" : "step";
  const logarithmic = h("input", { type: "checkbox", checked: app.params.get("log") === "1" });
  const whole = h("button", { type: "button", hidden: true, onclick: () => zoom(null) }, "whole range");
  const note = h("p", { class: "note" });
  root.append(h("div", { class: "controls" }, words, h("label", {}, "smoothing ", smoothing, weight), h("label", {}, "x ", hours), h("label", {}, logarithmic, " log scale"), whole), note, place, fold);

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const item = all.find(({ chart }) => chart.element === entry.target);
      if (item) item.visible = entry.isIntersecting;
    }
    load();
  }, { rootMargin: "300px" });

  const metricsOf = ({ spec }) => [...spec.series.map(([name]) => name), ...(spec.band ?? [])];
  const key = (run, name) => `${run.id}\n${name}`;
  const load = debounce(loadVisible, 30);
  const showNotes = () => { note.textContent = [missing, remark].filter(Boolean).join(" "); };

  async function loadVisible() {
    const wanted = [...new Set(all.filter((item) => item.visible).flatMap(metricsOf))];
    try {
      await Promise.all(app.shown.map((run) => loadRun(run, wanted)));
      showNotes();
    } catch (error) {
      note.textContent = error.message;
    }
    if (!closed) all.filter((item) => item.visible).forEach(draw);
  }

  // Ask for the metrics of a run, together for all that the page has up to the same line.
  async function loadRun(run, wanted) {
    const lines = app.states.get(run.id)?.metrics;
    const bySince = new Map();
    for (const name of wanted) {
      const since = data.get(key(run, name))?.since;
      if (since && lines && since[0] === lines[0] && since[1] >= lines[1]) continue;
      const place = since ? since.join() : "";
      bySince.set(place, [...(bySince.get(place) ?? []), name]);
    }
    for (const [since, members] of bySince) {
      for (let i = 0; i < members.length; i += MOST_NAMES) await loadPart(run, since, members.slice(i, i + MOST_NAMES));
    }
  }

  async function loadPart(run, since, members) {
    const [epoch, lines] = since ? since.split(",") : [null, null];
    const settings = `${smoothing.value} ${hours.value}`;
    const answer = await get(`runs/${run.id}/curves`, { name: members, epoch, lines, smoothing: smoothing.value, x: hours.value });
    if (settings !== `${smoothing.value} ${hours.value}`) return; // changed meanwhile
    for (const name of members) {
      const before = data.get(key(run, name));
      const news = answer.curves[name] ?? { x: [], y: [] };
      if (answer.whole || news.thinned || !before || before.since.join() !== since) {
        if (!answer.whole && before && before.since.join() !== since) continue; // another answer came first
        data.set(key(run, name), { since: answer.since, x: news.x, y: news.y, smooth: news.smooth });
      } else {
        before.since = answer.since;
        before.x.push(...news.x);
        before.y.push(...news.y);
        before.smooth?.push(...(news.smooth ?? []));
      }
    }
  }

  function draw({ spec, chart }) {
    const several = app.shown.length > 1;
    const curves = app.shown.flatMap((run) => spec.series.map(([name, label], i) => {
      const curve = data.get(key(run, name));
      if (!curve) return null;
      const text = several ? [run.label, spec.series.length > 1 ? label : ""].filter(Boolean).join(" · ") : label;
      return { ...curve, label: text, color: `--c${(several ? run.id : i) % 12}`, dash: several ? DASHES[i % DASHES.length] : [] };
    })).filter(Boolean);
    const bands = several || !spec.band ? [] : app.shown.map((run) => {
      const [low, high] = spec.band.map((name) => data.get(key(run, name)));
      const same = low && high && low.x.length === high.x.length; // thinned curves may have different points
      return same ? { color: "--c0", x: low.x, low: low.y, high: high.y } : null;
    }).filter(Boolean);
    chart.xLabel = hours.value === "hours" ? "hour" : "step";
    chart.range = range;
    const marks = hours.value === "hours" ? [] : app.shown.flatMap((run) => resumes[run.id] ?? []);
    chart.set(curves, bands, marks);
  }

  function zoom(next) {
    range = next;
    whole.hidden = range === null;
    all.forEach(({ chart }) => { chart.range = range; chart.draw(); });
  }

  function build(specs) {
    seen.disconnect();
    all.forEach(({ chart }) => chart.close());
    const usual = new Set(specs.flatMap((spec) => spec.series.map(([name]) => name)));
    const others = chosenCharts ? [] : names.filter((name) => !usual.has(name)).map((name) => ({ title: name, note: "", series: [[name, name]], band: null, tick: "", log: false, other: true }));
    const needle = words.value.trim().toLowerCase();
    const passes = (spec) => !needle || [spec.title, ...spec.series.flat()].join("\n").toLowerCase().includes(needle);
    const passing = [...specs, ...others].filter(passes);
    all = passing.slice(0, MOST_CHARTS).map((spec) => ({ spec, visible: false, chart: new Chart({ ...spec, log: spec.log || logarithmic.checked }, { onzoom: zoom }) }));
    const usualCharts = all.filter(({ spec }) => !spec.other);
    place.replaceChildren(...usualCharts.map(({ chart }) => chart.element));
    rest.replaceChildren(...all.filter(({ spec }) => spec.other).map(({ chart }) => chart.element));
    fold.hidden = !rest.children.length;
    if (needle) fold.open = true;
    missing = "";
    if (!all.length) missing = names.length ? "No chart or metric has this name." : "No finished step yet.";
    else if (passing.length > all.length) missing = `The first ${number(all.length)} of ${number(passing.length)} charts; the filter finds the others.`;
    showNotes();
    all.forEach(({ chart }) => seen.observe(chart.element));
  }

  let specs = [];
  async function loadCharts() {
    try {
      const answer = await get("charts");
      ({ resumes } = answer);
      const resumed = app.shown.some((run) => resumes[run.id]?.length);
      remark = [answer.note, resumed ? "Dotted lines: the run was resumed." : ""].filter(Boolean).join(" ");
      if (closed || (answer.names.join() === names.join() && all.length)) return;
      names = answer.names;
      specs = chosenCharts ? chosenCharts(names) : answer.charts;
      onNames?.(names);
      build(specs);
    } catch (error) {
      note.textContent = error.message;
    }
  }

  function again() {
    weight.textContent = Number(smoothing.value).toFixed(2);
    app.setParams({ smoothing: Number(smoothing.value) ? smoothing.value : "", x: hours.value === "hours" ? "hours" : "" });
    data.clear();
    load();
  }
  smoothing.addEventListener("input", debounce(again, 120));
  hours.addEventListener("change", () => { zoom(null); again(); });
  logarithmic.addEventListener("change", () => { app.setParams({ log: logarithmic.checked ? "1" : "" }); build(specs); });
  words.addEventListener("input", debounce(() => { app.setParams({ text: words.value }); build(specs); }, 150));
  weight.textContent = Number(smoothing.value).toFixed(2);
  loadCharts();
  return {
    update(changed) {
      if (![...changed.values()].some((kinds) => kinds.has("metrics"))) return;
      loadCharts();
      load();
    },
    redraw: () => all.forEach(({ chart }) => chart.draw()),
    close() {
      closed = true;
      seen.disconnect();
      all.forEach(({ chart }) => chart.close());
    },
  };
}
