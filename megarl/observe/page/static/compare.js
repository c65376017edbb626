// The charts of megarl compare's page.

import { Chart } from "./charts.js";

const { charts, series } = JSON.parse(document.getElementById("data").textContent);
const zoom = (range) => drawn.forEach((chart) => { chart.range = range; chart.draw(); });
const drawn = charts.map((spec) => {
  const chart = new Chart(spec, { onzoom: zoom });
  document.getElementById("charts").append(chart.element);
  chart.set(spec.series.map(([name, label], i) => ({ ...series[name], label, color: `--c${i}`, dash: [] })));
  return chart;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((chart) => chart.draw()));
