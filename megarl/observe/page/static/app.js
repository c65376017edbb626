// The frame of the page: runs, tabs, following.

import { get } from "./api.js";
import { ago, clock, h } from "./dom.js";
import { createCurves } from "./curves.js";
import { createNotices } from "./notices.js";
import { createOverview } from "./overview.js";
import { createRecipe } from "./recipe.js";
import { createSamples } from "./samples.js";
import { createSources } from "./sources.js";
import { createSystem } from "./system.js";
import { createTime } from "./time.js";

const PERIOD = 1000; // milliseconds between two looks
const RETRY = 3000;
const PAGES = {
  overview: ["Overview", createOverview],
  curves: ["Curves", createCurves],
  time: ["Time", createTime],
  samples: ["Samples", createSamples],
  sources: ["Sources", createSources],
  system: ["System", createSystem],
  notices: ["Notices", createNotices],
  recipe: ["Recipe", createRecipe],
};

const byId = (id) => document.getElementById(id);

const app = {
  runs: [], // {id, label, path, color}
  states: new Map(), // run id -> the last answer of /api/state
  hidden: new Set(), // ids of runs that are switched off
  params: new URLSearchParams(),
  get shown() {
    return this.runs.filter((run) => !this.hidden.has(run.id));
  },
  // Keep the state of a page in the address, so that a reload and a link show the same.
  setParams(values) {
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") this.params.delete(name);
      else this.params.set(name, value);
    }
    history.replaceState(null, "", `#${current}${this.params.size ? `?${this.params}` : ""}`);
  },
};

let current = "";
let page = null;
let follow = false;
let frozenAt = null; // when report.html was written; null: the page has a server

function open() {
  const [name, query] = location.hash.slice(1).split("?");
  const next = name in PAGES ? name : "overview";
  app.params = new URLSearchParams(query || "");
  current = next;
  page?.close?.();
  for (const link of byId("tabs").children) {
    link.setAttribute("aria-current", link.dataset.page === next ? "page" : "false");
    if (link.dataset.page === next) link.scrollIntoView({ block: "nearest", inline: "center" });
  }
  const root = h("div", { class: `page ${next}` });
  byId("page").replaceChildren(root);
  page = PAGES[next][1](root, app);
  document.title = `${PAGES[next][0]} · ${app.runs.map((run) => run.label).join(", ")} · megarl`;
}

function drawRuns() {
  byId("runs").replaceChildren(
    ...app.runs.map((run) => {
      const state = app.states.get(run.id);
      const chip = h(
        "button",
        {
          class: "chip",
          type: "button",
          title: run.path,
          "aria-pressed": String(!app.hidden.has(run.id)),
          disabled: app.runs.length === 1,
          onclick: () => {
            if (app.hidden.has(run.id)) app.hidden.delete(run.id);
            else if (app.shown.length > 1) app.hidden.add(run.id);
            drawRuns();
            open();
          },
        },
        h("i", { class: `dot c${run.id % 12}` }),
        h("span", {}, run.label),
        state ? h("small", { class: state.status }, state.status) : null,
      );
      return chip;
    }),
  );
}

function drawConnection(error) {
  const place = byId("connection");
  place.classList.toggle("bad", Boolean(error));
  if (error) {
    place.textContent = error.status === 403 ? "the token is no longer valid" : "megarl view does not answer";
    return;
  }
  if (frozenAt) {
    place.textContent = `report of ${clock(frozenAt)}`;
    return;
  }
  const written = Math.max(...app.runs.map((run) => app.states.get(run.id)?.written ?? 0));
  place.textContent = written ? `written ${ago(Date.now() / 1000 - written)}` : "";
}

// Ask once for the states; pages load what has changed.
async function look() {
  let answer;
  try {
    answer = await get("state");
  } catch (error) {
    drawConnection(error);
    return false;
  }
  const changed = new Map(); // run id -> kinds of news
  for (const state of answer.runs) {
    const before = app.states.get(state.id);
    const kinds = Object.keys(state).filter((kind) => JSON.stringify(state[kind]) !== JSON.stringify(before?.[kind]));
    if (before && kinds.length) changed.set(state.id, new Set(kinds));
    app.states.set(state.id, state);
  }
  drawConnection(null);
  if (changed.size) {
    if ([...changed.values()].some((kinds) => kinds.has("status"))) drawRuns();
    page?.update?.(changed);
  }
  return true;
}

async function loop() {
  for (;;) {
    const answered = follow && !document.hidden ? await look() : true;
    await new Promise((resolve) => setTimeout(resolve, answered ? PERIOD : RETRY));
  }
}

async function start() {
  const { runs, follow: initially, written = null } = await get("runs");
  app.runs = runs;
  follow = initially;
  frozenAt = written;
  byId("follow").parentElement.hidden = Boolean(frozenAt);
  byId("follow").checked = follow;
  byId("follow").addEventListener("change", () => {
    follow = byId("follow").checked;
    if (follow) look();
  });
  byId("tabs").replaceChildren(
    ...Object.entries(PAGES).map(([name, [title]]) => {
      const link = h("a", { href: `#${name}` }, title);
      link.dataset.page = name;
      return link;
    }),
  );
  await look(); // before the page loads its data: the next look sees what is written from here on
  drawRuns();
  open();
  window.addEventListener("hashchange", open);
  document.addEventListener("visibilitychange", () => {
    if (follow && !document.hidden) look();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.redraw?.());
  if (!frozenAt) loop();
}

start().catch((error) => {
  byId("page").replaceChildren(h("p", { class: "error" }, error.message));
});
