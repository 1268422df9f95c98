// What every picture along the axis has: a frame that can be pointed at, zoomed and walked through by keys.
class Picture {
  constructor(charts, title, height) {
    this.charts = charts;
    this.values = null; // what part of its values is shown; null: all that is visible
    this.figure = put(charts.grid, "figure", { class: "chart" });
    this.head = put(this.figure, "figcaption");
    put(this.head, "h3", {}, title);
    const help = `${charts.root.dataset.from}-help`;
    const frame = { class: "frame", tabindex: 0, role: "group", "aria-label": title, "aria-describedby": help };
    this.frame = put(this.figure, "div", frame);
    this.svg = put(this.frame, "svg", { height, role: "img", "aria-label": `${title}: a chart` });
    this.cursor = put(this.frame, "svg", { class: "over", height, "aria-hidden": "true" }); // moves, so is drawn apart
    this.height = height;
    this.listen();
  }

  listen() {
    const value = (x) => this.sx.back(Math.min(this.sx.to, Math.max(this.sx.from, x)));
    pointers(this.frame, {
      at: (x) => this.charts.at(value(x)),
      leave: () => this.charts.at(null),
      reset: () => this.charts.reset(),
      wheel: (x, factor) => this.charts.zoom(factor, value(x)),
      selecting: (...places) => this.band(...places),
      selected: (x0, x1, y0, y1) => {
        this.band(null, null, null, null);
        if (x0 !== null) this.charts.show(...[value(x0), value(x1)].sort((a, b) => a - b));
        else this.select(y0, y1);
      },
    });
    keyed(
      this.frame,
      (shift) => this.keys(shift),
      () => {
        this.charts.point();
        this.charts.say(this.spoken());
      }
    );
  }

  keys(shift) {
    const charts = this.charts;
    return {
      ArrowLeft: () => (shift ? charts.move(-0.25) : charts.step(-1)),
      ArrowRight: () => (shift ? charts.move(0.25) : charts.step(1)),
      PageUp: () => charts.step(-100),
      PageDown: () => charts.step(100),
      Home: () => charts.goTo(charts.whole()[0]),
      End: () => charts.goTo(charts.whole()[1]),
      "+": () => charts.zoom(0.5, charts.middle()),
      "=": () => charts.zoom(0.5, charts.middle()),
      "-": () => charts.zoom(2, charts.middle()),
      0: () => charts.reset(),
      Escape: () => charts.reset(),
      l: () => this.toggleLog?.(),
      L: () => this.toggleLog?.(),
    };
  }

  select() {}

  band(x0, x1, y0, y1) {
    this.selection?.remove();
    this.selection = undefined;
    if (x0 === null && y0 === null) return;
    const box =
      x0 !== null
        ? { x: Math.min(x0, x1), width: Math.abs(x1 - x0), y: CHART.top, height: this.bottom - CHART.top }
        : { x: this.sx.from, width: this.sx.to - this.sx.from, y: Math.min(y0, y1), height: Math.abs(y1 - y0) };
    this.selection = put(this.svg, "rect", { class: "band", ...box });
  }

  // A new drawing: the axis below, and the line of the pointer.
  begin() {
    this.width = Math.max(200, Math.round(this.frame.clientWidth));
    this.svg.replaceChildren();
    for (const each of [this.svg, this.cursor]) {
      each.setAttribute("width", this.width);
      each.setAttribute("height", this.height);
      each.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    }
    this.bottom = this.height - CHART.bottom;
    this.sx = scale(...this.charts.view(), CHART.left, this.width - CHART.right);
    const places = ticks(this.sx, (this.sx.to - this.sx.from) / 90);
    const named = tickWords(places, this.charts.axis.key === "hours" ? "number" : "count");
    places.forEach((value, at) => {
      const x = this.sx.of(value);
      put(this.svg, "path", { class: "line", d: `M${x.toFixed(1)} ${CHART.top}V${this.bottom}` });
      put(this.svg, "text", { x, y: this.bottom + 16, "text-anchor": "middle" }, named[at]);
    });
    this.clip = `clip-${this.charts.root.dataset.from}-${this.charts.parts.indexOf(this)}`;
    const box = {
      x: this.sx.from - 6,
      width: this.sx.to - this.sx.from + 12,
      y: CHART.top - 3,
      height: this.bottom - CHART.top + 6,
    };
    put(put(this.svg, "clipPath", { id: this.clip }), "rect", box);
    this.behind = put(this.svg, "g");
    this.inside = put(this.svg, "g", { "clip-path": `url(#${this.clip})` });
  }

  cursorLine() {
    this.cursor.replaceChildren();
    const { place } = this.charts;
    if (place === null || place < this.sx.low || place > this.sx.high) return null;
    const x = this.sx.of(place);
    put(this.cursor, "path", { d: `M${x.toFixed(1)} ${CHART.top}V${this.bottom}` });
    put(this.cursor, "text", { x, y: this.bottom + 16, "text-anchor": "middle" }, this.charts.where(place));
    return place;
  }
}

// A chart of lines: every run and column, smoothed over their own pale lines, and dots for evaluations.
class LineChart extends Picture {
  constructor(charts, data) {
    super(charts, data.title, CHART.height);
    this.data = data;
    this.log = data.log;
    const names = charts.runs.flatMap((run) => linesIn(data, run).map((line) => line.name));
    this.several = new Set(names).size > 1;
    this.logButton = button(this.head, "log", "Logarithmic scale (key L)", () => this.toggleLog());
    this.logButton.classList.add("log");
    this.key = put(this.head, "ul", { class: "key" });
  }

  toggleLog() {
    this.log = !this.log;
    this.values = null;
    this.draw();
  }

  drawn() {
    const { axis, smoothing } = this.charts;
    const out = [];
    for (const run of this.charts.runs.filter((each) => this.charts.shown.has(each))) {
      linesIn(this.data, run).forEach(({ key, name, dots }, column) => {
        const raw = dots ? run.dots(key, axis) : run.columns[axis.key] && run.line(key, axis);
        if (!raw) return;
        const smooth = smoothing && !dots && this.data.smooth ? run.line(key, axis, smoothing) : undefined;
        const pale = dots || smooth ? [] : run.pale(key, axis);
        const title = [this.charts.runs.length > 1 ? run.name : "", this.several ? name : ""]
          .filter(Boolean)
          .join(", ");
        out.push({ run, column, title: title || name || this.data.title, raw, smooth, pale, dots });
      });
    }
    return out;
  }

  draw() {
    this.begin();
    this.lines = this.drawn();
    this.logButton.setAttribute("aria-pressed", this.log);
    this.sy = this.valueScale();
    this.valueAxis();
    for (const [name, value] of this.data.levels) this.level(name, value);
    this.resumed();
    for (const line of this.lines) this.line(line);
    this.point();
  }

  valueScale() {
    const into = [Infinity, -Infinity];
    const range = [this.sx.low, this.sx.high];
    for (const line of this.lines) extremes(line.smooth || line.raw, range, this.log, into);
    for (const [, value] of this.data.levels) {
      if (this.log && value <= 0) continue;
      [into[0], into[1]] = [Math.min(into[0], value), Math.max(into[1], value)];
    }
    this.empty = into[0] > into[1];
    let [low, high] = this.empty ? [1, 10] : into;
    if (this.values) [low, high] = this.values;
    else if (this.log)
      [low, high] = low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    else {
      if (this.data.zero) low = Math.min(0, low);
      const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
      [low, high] = [low === 0 && this.data.zero ? 0 : low - room, high + room];
    }
    return scale(low, high, this.bottom, CHART.top, this.log);
  }

  valueAxis() {
    if (this.empty) {
      const middle = { x: (this.sx.from + this.sx.to) / 2, y: (CHART.top + this.bottom) / 2, "text-anchor": "middle" };
      put(this.svg, "text", middle, this.log ? "nothing above 0 here" : "no numbers here");
      return;
    }
    const places = ticks(this.sy, 4, this.data.shows);
    const named = tickWords(places, this.data.shows);
    places.forEach((value, at) => {
      const y = this.sy.of(value);
      put(this.behind, "path", { class: "line", d: `M${this.sx.from} ${y.toFixed(1)}H${this.sx.to}` });
      put(this.svg, "text", { x: this.sx.from - 6, y: y + 4, "text-anchor": "end" }, named[at]);
    });
  }

  level(name, value) {
    const y = this.sy.of(value);
    put(this.inside, "path", { class: "level", d: `M${this.sx.from} ${y.toFixed(1)}H${this.sx.to}` });
    const words = `${name}: ${this.words(value)}`;
    put(this.svg, "text", { class: "level", x: this.sx.to - 4, y: y - 5, "text-anchor": "end" }, words);
  }

  // Where a process went on.
  resumed() {
    const key = this.charts.axis.key;
    for (const run of this.charts.runs.filter((each) => this.charts.shown.has(each))) {
      const marks = run.marks.filter((mark) => mark.kind === "resume" && key in mark.at);
      for (const mark of marks.length > 50 ? [] : marks) {
        const line = `M${this.sx.of(mark.at[key]).toFixed(1)} ${CHART.top}V${this.bottom}`;
        put(this.inside, "path", { class: `resumed ${colour(run)}`, d: line });
      }
    }
  }

  line({ run, column, raw, smooth, pale, dots }) {
    const group = put(this.inside, "g", { class: `curve ${colour(run)}` });
    const style = { "stroke-dasharray": dashes(run, column) };
    for (const part of pale) put(group, "path", { class: "pale", d: pathOf(part, this.sx, this.sy) });
    put(group, "path", { class: smooth ? "pale" : "main", d: pathOf(raw, this.sx, this.sy), ...style });
    if (smooth) put(group, "path", { class: "main", d: pathOf(smooth, this.sx, this.sy), ...style });
    if (!dots || raw.x.length > 400) return;
    for (let at = 0; at < raw.x.length; at++) {
      if (!Number.isFinite(raw.y[at]) || (this.log && raw.y[at] <= 0)) continue;
      put(group, "circle", { cx: this.sx.of(raw.x[at]).toFixed(1), cy: this.sy.of(raw.y[at]).toFixed(1), r: 2.5 });
    }
  }

  // The value of every line at the pointer; without one the last value.
  point() {
    const place = this.cursorLine();
    const old = this.key.children;
    this.lines.forEach(({ run, column, title, raw, smooth }, number) => {
      const line = smooth || raw;
      const at = place === null ? line.x.length - 1 : nearestIndex(line.x, place);
      const value = at >= 0 ? line.y[at] : NaN;
      const item = old[number] || this.keyItem();
      if (item.dataset.of !== `${run.number} ${column}`) {
        item.dataset.of = `${run.number} ${column}`;
        item.className = colour(run);
        item.firstChild.replaceChildren();
        swatch(item.firstChild, run, column);
        item.children[1].textContent = this.lines.length > 1 || this.several ? title : "";
      }
      item.lastChild.textContent = at < 0 ? "–" : `${place === null ? "last " : ""}${this.words(value)}`;
      if (
        place !== null &&
        at >= 0 &&
        Number.isFinite(value) &&
        line.x[at] >= this.sx.low &&
        line.x[at] <= this.sx.high
      ) {
        const y = this.sy.of(value);
        if (y >= CHART.top - 3 && y <= this.bottom + 3) {
          put(this.cursor, "circle", { class: colour(run), cx: this.sx.of(line.x[at]), cy: y, r: 4 });
        }
      }
    });
    while (old.length > this.lines.length) old[old.length - 1].remove();
  }

  keyItem() {
    const item = put(this.key, "li");
    put(item, "span");
    put(item, "span", { class: "name" });
    put(item, "output");
    return item;
  }

  words(value) {
    return words(value, this.data.shows, this.data.unit);
  }

  spoken() {
    const { axis, place } = this.charts;
    const where = place === null ? "" : `${axis.name} ${this.charts.where(place)}: `;
    return where + [...this.key.children].map((item) => item.textContent.trim()).join("; ");
  }

  select(y0, y1) {
    this.values = [this.sy.back(y0), this.sy.back(y1)].sort((a, b) => a - b);
    this.draw();
  }
}

// What happened, above the charts: a row for each kind of mark and run.
class Marks extends Picture {
  constructor(charts) {
    super(charts, "Events", 0);
    this.figure.classList.add("wide");
    this.key = put(this.head, "p", { class: "said" });
  }

  rows() {
    const out = [];
    for (const run of this.charts.runs.filter((each) => this.charts.shown.has(each))) {
      for (const kind of new Set(run.marks.map((mark) => mark.kind))) {
        const marks = run.marks.filter((mark) => mark.kind === kind && this.charts.axis.key in mark.at);
        if (marks.length) out.push({ run, kind, marks });
      }
    }
    return out;
  }

  draw() {
    this.lines = this.rows();
    this.height = CHART.top + CHART.row * Math.max(1, this.lines.length) + CHART.bottom;
    this.begin();
    const key = this.charts.axis.key;
    this.lines.forEach(({ run, kind, marks }, row) => {
      const y = CHART.top + CHART.row * (row + 0.5);
      const several = this.charts.runs.length > 1;
      const group = put(this.inside, "g", { class: `mark ${colour(run)} ${kind.replaceAll(" ", "-")}` });
      put(
        this.svg,
        "text",
        { class: several ? colour(run) : "", x: this.sx.from - 12, y: y + 4, "text-anchor": "end" },
        kind,
      );
      let last = -Infinity;
      for (const mark of marks) {
        const [from, to] = [this.sx.of(mark.at[key]), this.sx.of(mark.until?.[key] ?? mark.at[key])];
        if (to < this.sx.from || from > this.sx.to || to < last + 1) continue;
        last = to;
        put(group, "path", { d: symbol(kind, from, y), class: "symbol" });
        if (to - from > 3) put(group, "path", { class: "span", d: `M${from.toFixed(1)} ${y}H${to.toFixed(1)}` });
      }
    });
    this.point();
  }

  point() {
    const place = this.cursorLine();
    const near = place === null ? undefined : this.nearest(this.sx.of(place));
    this.key.textContent = near ? `${near.run} ${near.mark.kind} at ${near.where}: ${near.mark.words}`.trim() : "";
  }

  nearest(pixel) {
    const key = this.charts.axis.key;
    let best,
      distance = 8;
    for (const { run, marks } of this.lines) {
      for (const mark of marks) {
        const [from, to] = [this.sx.of(mark.at[key]), this.sx.of(mark.until?.[key] ?? mark.at[key])];
        const away = pixel < from ? from - pixel : pixel > to ? pixel - to : 0;
        if (away < distance) {
          distance = away;
          const where = `${this.charts.axis.name} ${this.charts.where(mark.at[key])}`;
          best = { mark, where, run: this.charts.runs.length > 1 ? `${run.name},` : "" };
        }
      }
    }
    return best;
  }

  spoken() {
    return this.key.textContent || "nothing happened here";
  }
}

// A shape for each kind, so that colour is not needed to tell them apart.
function symbol(kind, x, y) {
  const at = (dx, dy) => `${(x + dx).toFixed(1)} ${(y + dy).toFixed(1)}`;
  const shapes = {
    save: `M${at(-4, 4)}H${(x + 4).toFixed(1)}V${y - 4}H${(x - 4).toFixed(1)}Z`,
    resume: `M${at(-3, -5)}L${at(5, 0)}L${at(-3, 5)}Z`,
    skip: `M${at(-4, -4)}L${at(4, 4)}M${at(-4, 4)}L${at(4, -4)}`,
    "not finite": `M${at(0, -6)}L${at(5, 4)}H${(x - 5).toFixed(1)}Z`,
  };
  return shapes[kind] || `M${at(0, -5)}V${y + 5}`;
}
