// In report.html this file takes the place of api.js: it answers from the data inside the page.

import { toNumber } from "./dom.js";

const data = JSON.parse(document.getElementById("data").textContent);
const PAGE = 64; // samples per answer; then the group is completed
const rounded = (value) => Number(value.toPrecision(6));

export async function get(path, params = {}) {
  if (path in data.answers) return data.answers[path];
  const answer = { "runs/0/curves": curves, "runs/0/samples": samples, "runs/0/sample": sample }[path];
  if (!answer) throw new Error(`This report has no ${path}.`);
  return answer(params);
}

function curves({ name, smoothing, x }) {
  const { metrics, between, places, steps, hours } = data.curves;
  const answer = {};
  for (const metric of [name].flat()) {
    if (!(metric in metrics)) continue;
    const [number, y] = metrics[metric];
    answer[metric] = { x: places[number].map((place) => (x === "hours" ? hours : steps)[place]), y, thinned: false };
    if (Number(smoothing)) answer[metric].smooth = smoothed(y, Number(smoothing), ...(between[metric] ?? []));
  }
  return { since: data.answers.state.runs[0].metrics, whole: true, curves: answer };
}

// The running mean of `smoothed` of megarl/observe/page/metrics_table.py. A thinned curve has the means and counts of the values
// before each point that the report leaves out; the mean stands for each of them.
function smoothed(values, weight, means, counts) {
  let [mean, total] = [0, 0];
  const add = (value, count) => {
    const kept = weight ** count;
    [mean, total] = [kept * mean + (1 - kept) * value, kept * total + (1 - kept)];
  };
  return values.map((value, i) => {
    if (counts?.[i]) add(means[i], counts[i]);
    if (value !== null) add(value, 1);
    return total ? rounded(mean / total) : null;
  });
}

// `offset` is the number of the group at which an earlier answer ended.
function samples({ step, offset, ...conditions }) {
  const first = Number(offset) || data.samples.findIndex((group) => group.step <= Number(step));
  const answer = { groups: [], next: null, looked_at: 0, damaged: [] };
  let count = 0;
  for (let i = first; i >= 0 && i < data.samples.length; i += 1) {
    const group = data.samples[i];
    if (count >= PAGE) {
      answer.next = [group.step, i];
      break;
    }
    answer.looked_at += group.samples.length;
    const passing = acceptsGroup(group, conditions) ? group.samples.filter(({ record }) => accepts(record, conditions)) : [];
    if (passing.length) answer.groups.push({ ...group, samples: passing });
    count += passing.length;
  }
  return answer;
}

// The conditions of `SampleFilter` of megarl/observe/page/sample_pages.py.
function acceptsGroup(group, { spread }) {
  if (!spread) return true;
  const different = new Set(group.rewards.map(Number).filter((reward) => !Number.isNaN(reward)));
  return (different.size > 1) === (spread === "some");
}

function accepts(record, { least, most, source, finish, tools, staleness, text }) {
  const isSet = (bound) => bound !== undefined && bound !== null && bound !== "";
  const reward = Number(toNumber(record.reward));
  return (!isSet(least) || reward >= Number(least))
    && (!isSet(most) || reward <= Number(most))
    && (!source || record.data_source === source)
    && (!finish || record.finish_reason === finish)
    && (!tools || Boolean(record.tool_use?.[tools === "failed" ? "failures" : "calls"]))
    && (!isSet(staleness) || Number(record.staleness) >= Number(staleness))
    && (!text || allText(record).includes(text.toLowerCase()));
}

function allText(record) {
  const turns = (record.turns ?? []).flatMap((turn) => [turn.name, turn.text, ...turn.arguments.flat()]);
  return [record.prompt, record.response, record.reason, record.row, ...turns].join("\n").toLowerCase();
}

function sample({ step, offset }) {
  const group = data.samples.find((each) => each.step === Number(step) && each.samples.some((item) => item.offset === Number(offset)));
  if (!group) throw new Error("This report does not have the sample; megarl view shows all samples.");
  return group.samples.find((item) => item.offset === Number(offset)).record;
}
