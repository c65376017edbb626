// The settings of the runs side by side, and their differences.

import { get } from "./api.js";
import { debounce, h, number } from "./dom.js";

export function createRecipe(root, app) {
  let data = null;
  const words = h("input", { type: "search", placeholder: "key or value", "aria-label": "Key or value", value: app.params.get("text") || "" });
  const different = h("input", { type: "checkbox", checked: app.params.get("same") !== "shown" });
  const count = h("p", { class: "note" });
  const missing = h("p", { class: "note" });
  const table = h("table", { class: "settings" });
  const files = h("div");
  const option = h("label", {}, different, " only differences");
  words.addEventListener("input", debounce(draw, 150));
  different.addEventListener("change", draw);
  const controls = h("div", { class: "controls", hidden: true }, words, option);
  root.append(controls, count, missing, h("div", { class: "scroll" }, table), files);

  function draw() {
    if (!data?.names.length) return;
    controls.hidden = false;
    const several = data.names.length > 1;
    option.hidden = !several;
    app.setParams({ text: words.value, same: several && !different.checked ? "shown" : "" });
    const needle = words.value.toLowerCase();
    const differs = (row) => row.values.some((value) => value !== row.values[0]);
    const rows = data.rows.filter(
      (row) => (!several || !different.checked || differs(row)) && [row.key, ...row.values].join("\n").toLowerCase().includes(needle),
    );
    const differing = data.rows.filter(differs).length;
    count.textContent = several
      ? `${number(differing)} of ${number(data.rows.length)} settings differ.`
      : `${number(data.rows.length)} settings. Open several runs to compare them: megarl view RUN RUN`;
    table.replaceChildren(
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), data.names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", { class: several && differs(row) ? "differs" : "" }, h("th", { scope: "row" }, row.key), row.values.map((value) => h("td", { class: value === null ? "absent" : "" }, value === null ? "absent" : value))))),
    );
  }

  get("recipes").then((answer) => {
    data = answer;
    files.replaceChildren(...data.texts.map((text, i) => h("details", {}, h("summary", {}, `recipe.resolved.yaml of ${data.names[i]}`), h("pre", {}, text))));
    missing.textContent = data.absent.map((label) => `There is no recipe.resolved.yaml in the directory of ${label}, so its settings are not known.`).join(" ");
    draw();
  }, (error) => { count.textContent = error.message; });
  return {};
}
