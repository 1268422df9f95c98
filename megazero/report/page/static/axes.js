// Scales from values to pixels, round numbers on them, and how people move along one: drag, wheel and keys.

// A scale of [low, high] onto [from, to] pixels; logarithmic if `log`.
function scale(low, high, from, to, log = false) {
  const by = log ? Math.log10 : (value) => value;
  const [first, last] = [by(low), by(high)];
  const per = (to - from) / (last - first || 1);
  const of = (value) => from + (by(value) - first) * per;
  const back = (pixel) => {
    const value = first + (pixel - from) / per;
    return log ? 10 ** value : value;
  };
  return { low, high, from, to, log, of, back };
}

// Round numbers within a scale, about as many as wanted; `base` 1024 for bytes.
function ticks(of, wanted, shows = "number") {
  if (of.log) return logTicks(of, wanted);
  const span = of.high - of.low;
  const unit = shows === "bytes" ? 1024 ** Math.max(0, Math.floor(Math.log(Math.max(span, 1)) / Math.log(1024))) : 1;
  const rough = span / unit / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.7) * unit;
  const out = [];
  for (let number = Math.ceil(of.low / step - 1e-9); number * step <= of.high + step * 1e-9; number++) {
    out.push(number * step);
  }
  return out;
}

function logTicks(of, wanted) {
  const [first, last] = [Math.floor(Math.log10(of.low)), Math.ceil(Math.log10(of.high))];
  const decades = last - first;
  const within = decades > wanted ? [1] : decades > wanted / 2 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / (wanted * 1.5)));
  const out = [];
  for (let power = first; power <= last; power += every) {
    for (const each of within) {
      const value = each * 10 ** power;
      if (value >= of.low * 0.9999 && value <= of.high * 1.0001) out.push(value);
    }
  }
  return out.length > 1 ? out : ticks({ ...of, log: false }, wanted);
}

// Short words for numbers on an axis: with as many digits as tell neighbours apart.
function tickWords(values, shows) {
  for (let number = 2; number < 9; number++) {
    const out = values.map((value) => (value === 0 ? "0" : words(value, shows, "", number)));
    const exact = values.every(
      (value, at) => (shows !== "number" && shows !== "count") || near(out[at], value, values),
    );
    if (exact && new Set(out).size === out.length) return out;
  }
  return values.map((value) => words(value, shows, "", 9));
}

function near(text, value, values) {
  const factor = { k: 1e3, M: 1e6, B: 1e9, T: 1e12 }[text.at(-1)] || 1;
  const span = Math.abs(values.at(-1) - values[0]) || Math.abs(value);
  return (
    Math.abs(parseFloat(text.replaceAll(",", "")) * factor - value) <= Math.max(span * 1e-3, Math.abs(value) * 1e-6)
  );
}

// A range that keeps its width where it fits, within the whole one.
function within(low, high, whole) {
  const width = Math.min(high - low, whole[1] - whole[0]);
  const start = Math.min(Math.max(low, whole[0]), whole[1] - width);
  return [start, start + width];
}

// A range that is `factor` as wide, with one place of it staying where it is.
function zoomed(range, factor, around, whole, least) {
  const width = Math.max(least, (range[1] - range[0]) * factor);
  if (width >= whole[1] - whole[0]) return null;
  const share = (around - range[0]) / (range[1] - range[0] || 1);
  return within(around - width * share, around + width * (1 - share), whole);
}

// Pointers on an area. `on` has: at(x, y), leave(), selecting(x0, x1, y0, y1) and selected(x0, x1, y0, y1), where y is
// null for a drag along the axis; wheel(x, factor), reset(). Places are pixels in the area.
function pointers(area, on) {
  let start = null;
  const place = (event) => {
    const box = area.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const selection = (x, y) => {
    const [across, along] = [Math.abs(x - start[0]), Math.abs(y - start[1])];
    return along > 2 * across ? [null, null, start[1], y] : [start[0], x, null, null];
  };
  const long = (x, y) => Math.hypot(x - start[0], y - start[1]) > 6;
  area.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = place(event);
    area.setPointerCapture(event.pointerId);
  });
  area.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (start && long(x, y)) on.selecting(...selection(x, y));
    else on.at(x, y);
  });
  area.addEventListener("pointerup", (event) => {
    if (!start) return;
    const [x, y] = place(event);
    if (long(x, y)) on.selected(...selection(x, y));
    start = null;
  });
  area.addEventListener("pointercancel", () => {
    start = null;
    on.selecting(null, null, null, null);
  });
  area.addEventListener("pointerleave", () => start || on.leave());
  area.addEventListener("dblclick", () => on.reset());
  area.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      on.wheel(place(event)[0], event.deltaY > 0 ? 1.25 : 0.8);
    },
    { passive: false },
  );
}
