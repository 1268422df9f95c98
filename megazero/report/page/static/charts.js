// Charts of lines that share an axis, a zoom and a place of the pointer.

const CHART = { height: 210, left: 68, right: 14, top: 8, bottom: 26, row: 18 };

class Charts {
  constructor(root) {
    const data = dataOf(root);
    this.root = root;
    this.axes = data.axes.filter((axis) => data.runs.some((run) => run.columns[axis.key]));
    this.axis = this.axes[0];
    this.runs = data.runs.map((run, number) => new Run(run, number));
    this.shown = new Set(this.runs);
    this.smoothing = 0;
    this.range = null; // of the axis; null: all of it
    this.place = null; // of the pointer on the axis
    this.say = announcer(root);
    if (!data.charts.length) return; // of a run without a step; the words above say so
    this.controls();
    this.grid = put(root, "div", { class: "grid" });
    this.parts = [];
    if (this.runs.some((run) => run.marks.length)) this.parts.push(new Marks(this));
    for (const chart of data.charts) {
      if (this.runs.some((run) => linesIn(chart, run).length)) this.parts.push(new LineChart(this, chart));
    }
    this.redraw = beforeFrame(() => {
      this.parts.forEach((part) => part.draw());
      const smooth = this.smoothing ? `, smoothed over ${grouped(this.smoothing)} steps` : "";
      this.printed.textContent = `Along the axis: ${this.axis.name}${smooth}`;
    });
    this.point = beforeFrame(() => this.parts.forEach((part) => part.point()));
    new ResizeObserver(this.redraw).observe(this.grid);
    this.redraw();
  }

  controls() {
    const bar = put(this.root, "div", { class: "controls", role: "group", "aria-label": "How charts are drawn" });
    if (this.axes.length > 1) {
      const label = put(bar, "label", {}, "Along ");
      const select = put(label, "select", { class: "axis" });
      for (const axis of this.axes) put(select, "option", { value: axis.key }, axis.name);
      select.addEventListener("change", () => {
        this.axis = this.axes.find((axis) => axis.key === select.value);
        [this.range, this.place] = [null, null];
        this.redraw();
      });
    }
    const label = put(bar, "label", {}, "Smooth over ");
    const slider = put(label, "input", { type: "range", min: 0, max: 12, step: 1, value: 0, class: "smoothing" });
    const output = put(label, "output", {}, "1 step");
    slider.addEventListener("input", () => {
      this.smoothing = Number(slider.value) && 2 ** Number(slider.value);
      output.textContent = this.smoothing ? `${grouped(this.smoothing)} steps` : "1 step";
      this.runs.forEach((run) => run.forgetSmoothed());
      this.redraw();
    });
    button(bar, "−", "Zoom out (key -)", () => this.zoom(2, this.middle())).classList.add("out");
    button(bar, "+", "Zoom in (key +)", () => this.zoom(0.5, this.middle())).classList.add("in");
    this.resetButton = button(bar, "Whole run", "Show everything (key 0, or a double click)", () => this.reset());
    this.resetButton.classList.add("reset");
    if (this.runs.length > 1) this.runSwitches();
    this.help();
    this.printed = put(this.root, "p", { class: "printed" });
  }

  runSwitches() {
    const list = put(this.root, "div", { class: "runs", role: "group", "aria-label": "Runs that are drawn" });
    for (const run of this.runs) {
      const label = put(list, "label", { class: `run ${colour(run)}` });
      const box = put(label, "input", { type: "checkbox", checked: "" });
      swatch(label, run);
      put(label, "span", {}, run.name);
      box.addEventListener("change", () => {
        if (box.checked) this.shown.add(run);
        else this.shown.delete(run);
        this.redraw();
      });
    }
  }

  help() {
    const details = put(this.root, "details", { class: "help" });
    put(details, "summary", {}, "How to move in the charts");
    const text =
      "Drag across a chart to zoom all of them along the axis, or up and down to zoom its values. Ctrl and the " +
      "wheel zoom too; a double click shows everything. With the keyboard: Tab goes to a chart, left and right arrows to the " +
      "next step (with Shift they move what is shown), Home and End to the ends, + and - zoom, 0 shows everything, " +
      "L switches the logarithmic scale.";
    put(details, "p", { id: `${this.root.dataset.from}-help` }, text);
  }

  whole() {
    const range = [Infinity, -Infinity];
    for (const run of this.runs) {
      const { rows } = run.rows(this.axis);
      const x = run.columns[this.axis.key];
      if (rows.length) {
        range[0] = Math.min(range[0], x[rows[0]]);
        range[1] = Math.max(range[1], x[rows.at(-1)]);
      }
      for (const key of Object.keys(run.points)) {
        const places = run.dots(key, this.axis)?.x || [];
        for (const value of places) if (value < range[0]) range[0] = value;
        for (const value of places) if (value > range[1]) range[1] = value;
      }
    }
    if (range[0] > range[1]) return [0, 1];
    return range[0] === range[1] ? [range[0] - 0.5, range[1] + 0.5] : range;
  }

  view() {
    return this.range || this.whole();
  }

  // A place on the axis in words.
  where(place) {
    return words(place, this.axis.key === "hours" ? "number" : "whole");
  }

  middle() {
    const [low, high] = this.view();
    return this.place !== null && this.place >= low && this.place <= high ? this.place : (low + high) / 2;
  }

  zoom(factor, around) {
    const whole = this.whole();
    this.range = zoomed(this.view(), factor, around, whole, (whole[1] - whole[0]) * 1e-5);
    this.redraw();
  }

  show(low, high) {
    const whole = this.whole();
    const least = (whole[1] - whole[0]) * 1e-5;
    this.range = high - low < least ? this.range : within(low, high, whole);
    this.redraw();
  }

  move(share) {
    const [low, high] = this.view();
    this.show(low + (high - low) * share, high + (high - low) * share);
  }

  reset() {
    this.range = null;
    this.parts.forEach((part) => (part.values = null));
    this.redraw();
  }

  at(place) {
    this.place = place;
    this.point();
  }

  // To the next step of the first run that is drawn; `by`: how many steps on.
  step(by) {
    const run = this.runs.find((each) => this.shown.has(each) && each.columns[this.axis.key]);
    if (!run) return;
    const { rows } = run.rows(this.axis);
    const x = this.remembered(run, rows);
    const [low, high] = this.view();
    const from =
      this.place === null ? (by > 0 ? lowerBound(x, low) - by : lowerBound(x, high)) : nearestIndex(x, this.place);
    this.goTo(x[Math.min(x.length - 1, Math.max(0, from + by))]);
  }

  remembered(run, rows) {
    const x = run.columns[this.axis.key];
    return run.remembered(`x ${this.axis.key}`, () => Float64Array.from(rows, (row) => x[row]));
  }

  goTo(place) {
    const [low, high] = this.view();
    if (place < low || place > high) this.show(place - (high - low) / 2, place + (high - low) / 2);
    this.at(place);
  }
}

function colour(run) {
  return `run-${run.number % 8}`;
}

// Runs beyond the eighth have a colour again, with dashes; so have further columns of one run.
function dashes(run, column) {
  return ["", "6 3", "2 2", "8 3 2 3"][(Math.floor(run.number / 8) + column) % 4] || undefined;
}

function swatch(parent, run, column = 0) {
  const picture = put(parent, "svg", { class: `swatch ${colour(run)}`, width: 22, height: 10, "aria-hidden": "true" });
  put(picture, "path", { d: "M1 5H21", "stroke-dasharray": dashes(run, column) });
}

function linesIn(chart, run) {
  const lines = Object.keys(chart.lines).filter((key) => run.columns[key]);
  const dots = Object.keys(chart.points).filter((key) => run.points[key]);
  return [
    ...lines.map((key) => ({ key, name: chart.lines[key] })),
    ...dots.map((key) => ({ key, name: chart.points[key], dots: true })),
  ];
}
