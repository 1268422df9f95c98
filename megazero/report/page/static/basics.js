// Elements, numbers as words, and the data of a page.

const SVG = "http://www.w3.org/2000/svg";

// A new element at the end of a parent. Attributes that are undefined are left out; `text` and `html` are content.
function put(parent, tag, attributes = {}, text = undefined) {
  const drawn = parent instanceof SVGElement || tag === "svg";
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) element.setAttribute(name, value);
  }
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function button(parent, words, title, action) {
  const made = put(parent, "button", { type: "button", title }, words);
  made.addEventListener("click", action);
  return made;
}

// Keys of a picture that has the focus: keys(shift) has an action for each, and `after` follows it.
function keyed(element, keys, after) {
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = keys(event.shiftKey)[event.key];
    if (!action) return;
    event.preventDefault();
    action();
    after();
  });
}

function dataOf(element) {
  return JSON.parse(document.getElementById(element.dataset.from).textContent);
}

// A column as the page has it (charts.coded): straight pieces, or values with null for what is not finite.
function decoded(column) {
  if (column.values) return Float64Array.from(column.values, (value) => (value === null ? NaN : value));
  const total = column.pieces.reduce((sum, [, , count]) => sum + count, 0);
  const out = new Float64Array(total);
  let at = 0;
  for (const [first, step, count] of column.pieces) {
    for (let number = 0; number < count; number++) out[at++] = first + step * number;
  }
  return out;
}

// The first index of sorted values in [from, to) that is not below a value.
function lowerBound(values, wanted, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] < wanted) from = middle + 1;
    else to = middle;
  }
  return from;
}

function nearestIndex(values, wanted) {
  const after = lowerBound(values, wanted);
  if (after === 0) return values.length ? 0 : -1;
  if (after === values.length) return after - 1;
  return wanted - values[after - 1] <= values[after] - wanted ? after - 1 : after;
}

function digits(value, number) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) {
    return value
      .toExponential(Math.max(0, number - 1))
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  }
  const places = size === 0 ? 0 : Math.max(0, number - 1 - Math.floor(Math.log10(size)));
  const text = value.toFixed(Math.min(places, 12));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function grouped(value) {
  return Math.round(value)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, ",");
}

function scaled(value, base, units, number) {
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  return [digits(value, number), units[unit]];
}

function secondsWords(value, number) {
  const size = Math.abs(value);
  if (size >= 1000) {
    const whole = Math.round(size);
    const clock = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
    return clock.map((part, place) => (place ? String(part).padStart(2, "0") : part)).join(":");
  }
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6, number)} µs`;
  return size < 1 ? `${digits(value * 1e3, number)} ms` : `${digits(value, number)} s`;
}

// How numbers are written, by `Chart.shows`. number: of digits.
const WORDS = {
  number: (value, number) => digits(value, number),
  whole: (value) => grouped(value),
  count: (value, number) => scaled(value, 1000, ["", "k", "M", "B", "T"], number).join(""),
  share: (value, number) => `${digits(value * 100, number)}%`,
  bytes: (value, number) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], number).join(" "),
  seconds: secondsWords,
};

function words(value, shows, unit = "", number = 5) {
  if (!Number.isFinite(value)) return "not finite";
  return WORDS[shows](value, number) + (unit ? ` ${unit}` : "");
}

// Words for people who cannot see the page, after the last of several changes.
function announcer(parent) {
  const place = put(parent, "p", { class: "unseen", role: "status", "aria-live": "polite" });
  let waiting = 0;
  return (text) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => (place.textContent = text), 150);
  };
}

// Calls a function once before the next frame, however often it is asked for.
function beforeFrame(action) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      action();
    });
  };
}
