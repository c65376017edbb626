// Line charts on a canvas: several curves, bands, logarithmic axes, a crosshair, zoom by dragging.

import { color, formatter, h, number } from "./dom.js";

const LEFT = 54; // at least; longer numbers of the axis get more
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;
export const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 2], [12, 4], [4, 2], [10, 2, 4, 2]];

export function niceTicks(low, high, count, least = 0) {
  if (!(high > low)) return [low];
  const raw = Math.max(least, (high - low) / count);
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((value) => value >= raw);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// About four ticks, and at least two: with a single one a reader cannot tell the scale.
function valueTicks(low, high) {
  const ticks = niceTicks(low, high, 4);
  return ticks.length < 2 ? niceTicks(low, high, 8) : ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power += 1) ticks.push(10 ** power);
  if (ticks.length < 2) return valueTicks(low, high); // at most one power of ten is between them
  const every = Math.ceil(ticks.length / 5);
  return ticks.filter((_, i) => i % every === 0);
}

// The texts of `ticks`, with as many digits as make them different.
function tickLabels(ticks, format) {
  for (let digits = 4; ; digits += 1) {
    const labels = ticks.map((tick) => format(tick, digits));
    if (digits > 12 || new Set(labels).size === labels.length) return labels;
  }
}

// The index of the point that is nearest to `x` in increasing `xs`.
export function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

export class Chart {
  // spec: {title, note, tick, log}; onzoom([from, to] or null) replaces the visible range of all charts.
  constructor(spec, { onzoom = null, xLabel = "step", height = 210 } = {}) {
    Object.assign(this, { spec, onzoom, xLabel, curves: [], bands: [], range: null, marks: [], log: false });
    this.format = formatter(spec.tick || "");
    this.canvas = h("canvas", { class: "plot", role: "img", "aria-label": spec.title });
    this.canvas.style.height = `${height}px`;
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { class: "chart" }, h("h3", {}, spec.title), spec.note ? h("p", { class: "note" }, spec.note) : null, this.legend, h("div", { class: "frame" }, this.canvas, this.tip));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.listen();
  }

  close() {
    this.observer.disconnect();
  }

  // curves: {label, color (a CSS variable), dash, x, y, smooth?, gap?}, where gap(i) says why y[i] is null; bands: {color, x, low, high}; marks: x of vertical lines.
  set(curves, bands = [], marks = []) {
    this.curves = curves.filter((curve) => curve.x.length);
    this.bands = bands;
    this.marks = marks;
    this.log = Boolean(this.spec.log) && this.curves.some((curve) => curve.y.some((value) => value > 0)); // it needs a positive value
    this.legend.replaceChildren(
      ...(this.curves.length > 1 ? this.curves : []).map((curve) => {
        const line = h("i", { class: "line" });
        line.style.borderTopColor = `var(${curve.color})`;
        line.style.borderTopStyle = curve.dash.length ? "dashed" : "solid";
        return h("span", {}, line, curve.label);
      }),
    );
    this.draw();
  }

  bounds() {
    const xs = this.curves.flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1]]);
    const [from, to] = this.range ?? [Math.min(...xs), Math.max(...xs)];
    let [low, high] = [Infinity, -Infinity];
    const visit = (x, y) => {
      for (let i = 0; i < x.length; i += 1) {
        const value = y[i];
        if (x[i] < from || x[i] > to || value === null || (this.log && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    };
    for (const curve of this.curves) visit(curve.x, curve.y);
    for (const band of this.bands) { visit(band.x, band.low); visit(band.x, band.high); }
    if (low > high) [low, high] = this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      if (high / low < 1.1) [low, high] = [low / 2, high * 2];
    } else {
      const margin = high > low ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
      const [least, most] = [low, high];
      low -= margin;
      high += margin;
      if ((least >= 0 && low < 0) || (this.spec.zero && low > 0)) low = 0;
      if (most <= 0 && high > 0) high = 0;
    }
    return { from, to: to > from ? to : from + 1, low, high };
  }

  draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    if (!this.curves.length) {
      pen.fillStyle = color("--faint");
      pen.fillText("no values", LEFT, height / 2);
      return;
    }
    const bounds = this.bounds();
    const { from, to, low, high } = bounds;
    const scale = this.log ? Math.log10 : (value) => value;
    const [bottom, span] = [scale(low), scale(high) - scale(low) || 1];
    const ticks = this.log ? logTicks(low, high) : valueTicks(low, high);
    const labels = tickLabels(ticks, this.format);
    const left = Math.max(LEFT, 10 + Math.ceil(Math.max(...labels.map((label) => pen.measureText(label).width))));
    this.x = (value) => left + ((value - from) / (to - from)) * (width - left - RIGHT);
    this.y = (value) => height - BOTTOM - ((scale(value) - bottom) / span) * (height - TOP - BOTTOM);
    this.inverse = (pixel) => from + ((pixel - left) / (width - left - RIGHT)) * (to - from);
    this.axes(pen, bounds, width, height, left, ticks, labels);
    pen.save();
    pen.beginPath();
    pen.rect(left, TOP - 2, width - left - RIGHT + 2, height - TOP - BOTTOM + 4);
    pen.clip();
    for (const band of this.bands) this.band(pen, band, low);
    pen.strokeStyle = color("--faint");
    pen.lineWidth = 1;
    pen.setLineDash([3, 3]);
    for (const mark of this.marks) { pen.beginPath(); pen.moveTo(this.x(mark), TOP); pen.lineTo(this.x(mark), height - BOTTOM); pen.stroke(); }
    for (const curve of this.curves) {
      pen.strokeStyle = pen.fillStyle = color(curve.color);
      if (curve.smooth) {
        this.line(pen, curve.x, curve.y, curve.dash, 1, 0.28);
        this.line(pen, curve.x, curve.smooth, curve.dash, 1.8, 1);
      } else this.line(pen, curve.x, curve.y, curve.dash, 1.4, 1);
    }
    pen.restore();
    if (this.drag) {
      pen.fillStyle = color("--accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(...this.drag), TOP, Math.abs(this.drag[1] - this.drag[0]), height - TOP - BOTTOM);
      pen.globalAlpha = 1;
    }
  }

  axes(pen, { from, to }, width, height, left, ticks, labels) {
    pen.strokeStyle = color("--line");
    pen.fillStyle = color("--faint");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [i, tick] of ticks.entries()) {
      const y = Math.round(this.y(tick)) + 0.5;
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - RIGHT, y); pen.stroke();
      pen.fillText(labels[i], left - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const least = this.xLabel === "hour" ? 0 : 1; // steps and tokens are whole
    for (const tick of niceTicks(from, to, Math.max(2, Math.floor(width / 90)), least)) pen.fillText(number(tick), this.x(tick), height - BOTTOM + 5);
    pen.textAlign = "right";
    pen.textBaseline = "alphabetic";
  }

  line(pen, x, y, dash, thickness, alpha) {
    pen.setLineDash(dash);
    pen.lineWidth = thickness;
    pen.globalAlpha = alpha;
    pen.beginPath();
    let open = false;
    const absent = (i) => y[i] === null || (this.log && y[i] <= 0);
    for (let i = 0; i < x.length; i += 1) {
      if (absent(i)) { open = false; continue; }
      if (open) pen.lineTo(this.x(x[i]), this.y(y[i]));
      else {
        pen.moveTo(this.x(x[i]), this.y(y[i]));
        const alone = i + 1 >= x.length || absent(i + 1);
        if (alone) pen.fillRect(this.x(x[i]) - 1.5, this.y(y[i]) - 1.5, 3, 3);
      }
      open = true;
    }
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  // least: the lower end of the axis, where values end that a logarithmic axis does not have.
  band(pen, { color: name, x, low, high }, least) {
    const points = x.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null && !(this.log && high[i] <= 0));
    const bottom = (i) => (this.log ? Math.max(low[i], least) : low[i]);
    pen.fillStyle = color(name);
    pen.globalAlpha = 0.12;
    pen.beginPath();
    points.forEach((i) => pen.lineTo(this.x(x[i]), this.y(high[i])));
    points.reverse().forEach((i) => pen.lineTo(this.x(x[i]), this.y(bottom(i))));
    pen.fill();
    pen.globalAlpha = 1;
  }

  listen() {
    const { canvas } = this;
    const pixel = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && this.onzoom && this.curves.length) {
        canvas.setPointerCapture(event.pointerId);
        this.drag = [pixel(event), pixel(event)];
      }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) { this.drag[1] = pixel(event); this.draw(); }
      this.point(pixel(event));
    });
    canvas.addEventListener("pointerup", () => {
      if (!this.drag) return;
      const [from, to] = this.drag.map((at) => this.inverse(at)).sort((a, b) => a - b);
      const wide = Math.abs(this.drag[1] - this.drag[0]) > 6;
      this.drag = null;
      if (wide) this.onzoom([from, to]);
      else this.draw();
    });
    canvas.addEventListener("dblclick", () => this.onzoom?.(null));
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  point(at) {
    if (!this.curves.length || !this.inverse) return;
    const x = this.inverse(at);
    const rows = this.curves.map((curve) => {
      const i = nearest(curve.x, x);
      const smooth = curve.smooth ? ` (${this.format(curve.smooth[i] ?? NaN)})` : "";
      const gap = curve.gap ?? (() => "not finite");
      return { curve, at: curve.x[i], text: `${curve.y[i] === null ? gap(i) : this.format(curve.y[i])}${smooth}` };
    });
    const place = rows[0].at;
    this.tip.replaceChildren(
      h("b", {}, `${this.xLabel} ${number(place)}`),
      ...rows.map(({ curve, at: position, text }) => {
        const dot = h("i", { class: "dot" });
        dot.style.background = `var(${curve.color})`;
        return h("div", {}, dot, `${curve.label} `, h("span", {}, position === place ? text : `${text} (${this.xLabel} ${number(position)})`));
      }),
    );
    this.tip.hidden = false;
    const left = at > this.canvas.clientWidth / 2;
    this.tip.style.left = left ? "" : `${at + 14}px`;
    this.tip.style.right = left ? `${this.canvas.clientWidth - at + 14}px` : "";
  }
}
