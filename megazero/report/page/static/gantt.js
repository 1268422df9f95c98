// What lanes do over time. Blocks are drawn on a canvas, which takes any number of them; lines and words around it have
// the colours of the page.

const LANE = { row: 20, bar: 15, left: 116, right: 12, axis: 24, least: 26 };

class GanttChart {
  constructor(root) {
    const data = dataOf(root);
    this.root = root;
    this.unit = data.unit;
    this.kinds = data.kinds;
    this.labels = data.labels;
    this.end = data.end;
    this.range = null; // of time; null: all of it
    this.chosen = null; // {lane, span} under the pointer or the keys
    this.say = announcer(root);
    this.rows = this.laidOut(data.lanes);
    this.lanes = this.rows.filter((row) => row.starts);
    this.build(data.title);
    this.redraw = beforeFrame(() => this.draw());
    new ResizeObserver(this.redraw).observe(this.frame);
    matchMedia("(resolution: 1dppx)").addEventListener("change", this.redraw);
  }

  // Rows from top to bottom: a heading for each group, and its lanes.
  laidOut(lanes) {
    const rows = [];
    let group = "";
    for (const lane of lanes) {
      if (lane.group !== group) rows.push({ heading: lane.group });
      group = lane.group;
      const [starts, ends] = [decoded(lane.starts), decoded(lane.ends)];
      rows.push({ name: lane.name, group, starts, ends, kinds: lane.kinds, labels: lane.labels });
    }
    rows.forEach((row, number) => (row.y = number * LANE.row));
    return rows;
  }

  build(title) {
    const bar = put(this.root, "div", { class: "controls", role: "group", "aria-label": "What is shown" });
    button(bar, "−", "Zoom out (key -)", () => this.zoom(2, this.middle())).classList.add("out");
    button(bar, "+", "Zoom in (key +)", () => this.zoom(0.5, this.middle())).classList.add("in");
    button(bar, "◂", "Earlier (Shift and left arrow)", () => this.move(-0.5));
    button(bar, "▸", "Later (Shift and right arrow)", () => this.move(0.5));
    button(bar, "Whole step", "Show everything (key 0, or a double click)", () => this.reset()).classList.add("reset");
    this.readout = put(bar, "output", { class: "said" });
    const key = put(this.root, "ul", { class: "key" });
    for (const [name, colour] of this.kinds) {
      const item = put(key, "li");
      put(item, "span", { class: "box", style: `background: ${colour}` });
      put(item, "span", {}, name);
    }
    const help =
      "Drag to zoom, Ctrl and the wheel too; a double click shows everything. With the keyboard: arrows go from " +
      "block to block and from lane to lane, with Shift they move what is shown; + and - zoom, 0 shows everything.";
    const id = `${this.root.dataset.from}-help`;
    const frame = { class: "frame", tabindex: 0, role: "group", "aria-label": title, "aria-describedby": id };
    this.frame = put(this.root, "div", frame);
    put(this.root, "p", { class: "help", id }, help);
    this.axis = put(this.frame, "svg", { class: "axis", height: LANE.axis, "aria-hidden": "true" });
    const area = put(this.frame, "div");
    this.behind = put(area, "svg", { class: "behind", "aria-hidden": "true" });
    this.canvas = put(area, "canvas", { role: "img", "aria-label": `${title}: blocks of time` });
    this.svg = put(area, "svg", { "aria-hidden": "true" });
    this.height = this.rows.length * LANE.row + 4;
    this.listen();
  }

  listen() {
    const time = (x) => this.sx.back(Math.min(this.sx.to, Math.max(this.sx.from, x)));
    pointers(this.svg, {
      at: (x, y) => this.choose(this.spanAt(time(x), y)),
      leave: () => this.choose(null),
      reset: () => this.reset(),
      wheel: (x, factor) => this.zoom(factor, time(x)),
      selecting: (x0, x1) => this.band(x0, x1),
      selected: (x0, x1) => {
        this.band(null, null);
        if (x0 !== null) this.show(...[time(x0), time(x1)].sort((a, b) => a - b));
      },
    });
    keyed(
      this.frame,
      (shift) => this.keys(shift),
      () => this.say(this.readout.textContent)
    );
  }

  keys(shift) {
    return {
      ArrowLeft: () => (shift ? this.move(-0.25) : this.next(-1)),
      ArrowRight: () => (shift ? this.move(0.25) : this.next(1)),
      ArrowUp: () => this.otherLane(-1),
      ArrowDown: () => this.otherLane(1),
      Home: () => this.pick(this.lane(), 0),
      End: () => this.pick(this.lane(), this.lane().starts.length - 1),
      "+": () => this.zoom(0.5, this.middle()),
      "=": () => this.zoom(0.5, this.middle()),
      "-": () => this.zoom(2, this.middle()),
      0: () => this.reset(),
      Escape: () => this.reset(),
    };
  }

  view() {
    return this.range || [0, this.end];
  }

  middle() {
    if (!this.chosen) return (this.view()[0] + this.view()[1]) / 2;
    const { lane, span } = this.chosen;
    return (lane.starts[span] + lane.ends[span]) / 2;
  }

  zoom(factor, around) {
    this.range = zoomed(this.view(), factor, around, [0, this.end], this.end * 1e-6);
    this.redraw();
  }

  show(low, high) {
    if (high - low > this.end * 1e-6) this.range = within(low, high, [0, this.end]);
    this.redraw();
  }

  move(share) {
    const [low, high] = this.view();
    this.show(low + (high - low) * share, high + (high - low) * share);
  }

  reset() {
    this.range = null;
    this.redraw();
  }

  lane() {
    return this.chosen ? this.chosen.lane : this.lanes[0];
  }

  next(by) {
    const lane = this.lane();
    const first = Math.min(lane.starts.length - 1, lowerBound(lane.ends, this.view()[0]));
    this.pick(lane, this.chosen ? this.chosen.span + by : first);
  }

  otherLane(by) {
    const from = this.lane();
    const at = Math.min(this.lanes.length - 1, Math.max(0, this.lanes.indexOf(from) + by));
    const time = this.chosen ? from.starts[this.chosen.span] : this.view()[0];
    this.pick(this.lanes[at], lowerBound(this.lanes[at].ends, time));
  }

  // Choose a block by the keys, and bring it into sight.
  pick(lane, span) {
    const number = Math.min(lane.starts.length - 1, Math.max(0, span));
    const [low, high] = this.view();
    const [start, end] = [lane.starts[number], lane.ends[number]];
    if (start < low || end > high)
      this.show((start + end) / 2 - (high - low) / 2, (start + end) / 2 + (high - low) / 2);
    this.choose({ lane, span: number });
    const above = lane.y - this.frame.scrollTop;
    const below = lane.y + LANE.row + LANE.axis - this.frame.scrollTop - this.frame.clientHeight;
    if (above < 0) this.frame.scrollTop += above;
    if (below > 0) this.frame.scrollTop += below;
  }

  spanAt(time, y) {
    const lane = this.lanes.find((each) => y >= each.y && y < each.y + LANE.row);
    if (!lane) return null;
    const slack = (2 / (this.sx.to - this.sx.from)) * (this.sx.high - this.sx.low); // two pixels
    const span = lowerBound(lane.ends, time - slack);
    return span < lane.starts.length && lane.starts[span] <= time + slack ? { lane, span } : null;
  }

  choose(chosen) {
    this.chosen = chosen;
    this.readout.textContent = chosen ? this.told(chosen) : "";
    this.mark();
  }

  told({ lane, span }) {
    const [start, end] = [lane.starts[span], lane.ends[span]];
    const time = (value) => (this.unit === "s" ? words(value, "seconds") : words(value, "number", this.unit));
    const where = [lane.group, lane.name].filter(Boolean).join(", ");
    const kind = this.kinds[lane.kinds[span]][0];
    const when = `${time(end - start)}, from ${time(start)} to ${time(end)}`;
    return `${this.labels[lane.labels[span]]} (${kind}; ${where}): ${when}`;
  }

  draw() {
    this.width = Math.max(240, this.frame.clientWidth);
    this.sx = scale(...this.view(), LANE.left, this.width - LANE.right);
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / this.height);
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.axis.style.width = `${this.width}px`;
    for (const each of [this.behind, this.canvas, this.svg]) {
      each.style.width = `${this.width}px`;
      each.style.height = `${this.height}px`;
    }
    const paint = this.canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, this.width, this.height);
    paint.font = "11px system-ui, sans-serif";
    paint.textBaseline = "middle";
    this.lanes.forEach((lane) => this.blocks(paint, lane));
    this.lines();
    this.mark();
  }

  blocks(paint, lane) {
    const { sx } = this;
    const y = lane.y + (LANE.row - LANE.bar) / 2;
    const from = lowerBound(lane.ends, sx.low),
      to = lowerBound(lane.starts, sx.high);
    const small = new Map(); // of one pixel: kind -> how much of it
    let pixel = NaN;
    const flush = () => {
      let [kind, most, sum] = [null, 0, 0];
      small.forEach((share, each) => {
        sum += share;
        if (share > most) [kind, most] = [each, share];
      });
      small.clear();
      if (kind === null) return;
      paint.globalAlpha = Math.max(0.25, Math.min(1, sum));
      paint.fillStyle = this.kinds[kind][1];
      paint.fillRect(pixel, y, 1, LANE.bar);
      paint.globalAlpha = 1;
    };
    for (let span = from; span < to; span++) {
      const left = Math.max(sx.of(lane.starts[span]), sx.from);
      const right = Math.min(sx.of(lane.ends[span]), sx.to);
      if (right - left < 1) {
        if (Math.floor(left) !== pixel) flush();
        pixel = Math.floor(left);
        small.set(lane.kinds[span], (small.get(lane.kinds[span]) || 0) + right - left);
        continue;
      }
      flush();
      paint.fillStyle = this.kinds[lane.kinds[span]][1];
      paint.fillRect(left, y, right - left - (right - left > 3 ? 0.6 : 0), LANE.bar);
      if (right - left > LANE.least) this.label(paint, this.labels[lane.labels[span]], left, right, y, paint.fillStyle);
    }
    flush();
  }

  label(paint, text, left, right, y, colour) {
    paint.save();
    paint.beginPath();
    paint.rect(left, y, right - left - 3, LANE.bar);
    paint.clip();
    paint.fillStyle = isLight(colour) ? "#111" : "#fff";
    paint.fillText(text, left + 4, y + LANE.bar / 2 + 0.5);
    paint.restore();
  }

  lines() {
    for (const each of [this.svg, this.behind, this.axis]) each.replaceChildren();
    const places = ticks(this.sx, (this.sx.to - this.sx.from) / 90);
    const named = tickWords(places, this.unit === "s" ? "seconds" : "number");
    places.forEach((value, at) => {
      const x = this.sx.of(value);
      put(this.behind, "path", { class: "line", d: `M${x.toFixed(1)} 0V${this.height}` });
      put(this.axis, "text", { x, y: 16, "text-anchor": "middle" }, named[at]);
    });
    for (const row of this.rows) {
      const place = { x: row.heading ? 0 : LANE.left - 8, y: row.y + 14, "text-anchor": row.heading ? "start" : "end" };
      put(this.svg, "text", { class: row.heading ? "heading" : "", ...place }, row.heading || row.name);
      if (!row.heading)
        put(this.behind, "path", { class: "base", d: `M${this.sx.from} ${row.y + LANE.row - 1}H${this.sx.to}` });
    }
    this.choice = put(this.svg, "g", { class: "choice" });
  }

  // An outline around the chosen block.
  mark() {
    this.choice.replaceChildren();
    if (!this.chosen) return;
    const { lane, span } = this.chosen;
    const [left, right] = [this.sx.of(lane.starts[span]), this.sx.of(lane.ends[span])].map((x) =>
      Math.min(this.sx.to, Math.max(this.sx.from, x)),
    );
    const box = { x: left - 1, width: Math.max(2, right - left + 2), y: lane.y + 1, height: LANE.row - 2 };
    put(this.choice, "rect", box);
  }

  band(x0, x1) {
    this.selection?.remove();
    if (x0 === null) return;
    const box = { x: Math.min(x0, x1), width: Math.abs(x1 - x0), y: 0, height: this.height };
    this.selection = put(this.svg, "rect", { class: "band", ...box });
  }
}

// Whether dark words can be read on a colour (#rrggbb), by the relative luminance of WCAG 2.
function isLight(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179;
}
