// Metrics of the fleet, of devices and hosts, of weight sync and checkpoints.

import { h } from "./dom.js";
import { createCurves } from "./curves.js";

const PREFIXES = ["fleet/", "recovery/", "run/", "perf/", "rollout/engines", "rollout/load_seconds", "rollout/wait_seconds/", "rollout/outage_seconds", "weight_sync/", "checkpoint/", "host/"];

export function createSystem(root, app) {
  const note = h("p", { class: "note" });
  root.append(note);
  const place = h("div");
  root.append(place);
  return createCurves(place, app, {
    charts: (names) => names
      .filter((name) => PREFIXES.some((prefix) => name.startsWith(prefix)))
      .map((name) => ({ title: name, note: "", series: [[name, name]], band: null, tick: "", log: false })),
    onNames: (names) => {
      const has = names.some((name) => name.startsWith("host/"));
      note.textContent = has ? "" : "These runs record no load of devices, hosts and network. The figures below are measured by the trainers and the controller.";
    },
  });
}
