// Elements and formats. Texts of a run enter the page only as text nodes.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && !name.startsWith("aria")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// JSON has no NaN and infinities: megarl writes them as strings.
const NON_FINITE = new Set(["NaN", "Infinity", "-Infinity"]);

export function toNumber(value) {
  return typeof value === "string" && NON_FINITE.has(value) ? Number(value) : value;
}

export function number(value, digits = 4) {
  value = toNumber(value);
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2));
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
}

// The formats of the report's charts: ".0%", ".2~%", ".1e", "". Each is a function of a value and a number of digits.
export function formatter(tick) {
  if (tick.endsWith("%")) return (value, digits = 4) => `${number(100 * value, digits)} %`;
  if (tick.endsWith("e")) return (value, digits = 4) => (value === 0 ? "0" : value.toExponential(digits - 3));
  return number;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export function clock(seconds) {
  if (typeof seconds !== "number") return "";
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function debounce(action, milliseconds) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), milliseconds);
  };
}

// A select element: choices are [value, text].
export function choice(label, choices, value, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) });
  select.append(...choices.map(([key, text]) => h("option", { value: key }, text)));
  select.value = value;
  return select;
}
