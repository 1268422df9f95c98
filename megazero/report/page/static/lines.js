// Runs as numbers to draw: what counts along an axis, smoothing, and the path of a line through any number of points.

// A run of the page's data, with the views that charts ask for again and again.
class Run {
  constructor(data, number) {
    this.name = data.name;
    this.number = number;
    this.marks = data.marks;
    this.starts = data.starts;
    this.columns = Object.fromEntries(Object.entries(data.columns).map(([key, column]) => [key, decoded(column)]));
    this.points = {};
    for (const [key, points] of Object.entries(data.points)) {
      const axes = Object.fromEntries(Object.entries(points.axes).map(([axis, column]) => [axis, decoded(column)]));
      this.points[key] = { axes, values: decoded(points.values) };
    }
    this.made = new Map();
  }

  remembered(key, make) {
    if (!this.made.has(key)) this.made.set(key, make());
    return this.made.get(key);
  }

  // Along an axis on which steps stand once, a step counts as the last process made it. {rows, pale}: the steps that
  // count, and slices of those that were made again.
  rows(axis) {
    return this.remembered(`rows ${axis.key}`, () => {
      const x = this.columns[axis.key] || new Float64Array(0);
      const bounds = [...this.starts, x.length];
      const kept = [],
        pale = [];
      let again = Infinity;
      for (let part = this.starts.length - 1; part >= 0; part--) {
        const [start, stop] = [bounds[part], bounds[part + 1]];
        const end = axis.again ? stop : lowerBound(x, again, start, stop);
        kept.push([start, end]);
        if (end < stop) pale.push([Math.max(start, end - 1), stop]);
        again = Math.min(again, x[start]);
      }
      const rows = new Int32Array(kept.reduce((sum, [start, end]) => sum + end - start, 0));
      let at = 0;
      for (const [start, end] of kept.reverse()) {
        for (let row = start; row < end; row++) rows[at++] = row;
      }
      return { rows, pale };
    });
  }

  // {x, y} of a column along an axis, smoothed over about so many steps (0: as it is).
  line(column, axis, smoothing = 0) {
    return this.remembered(`line ${column} ${axis.key} ${smoothing}`, () => {
      const { rows } = this.rows(axis);
      const pick = (key) => Float64Array.from(rows, (row) => this.columns[key][row]);
      if (!smoothing) return { x: pick(axis.key), y: pick(column) };
      const raw = this.line(column, axis);
      return { x: raw.x, y: smoothed(raw.y, smoothing) };
    });
  }

  // Lines of steps that were made again.
  pale(column, axis) {
    const [x, y] = [this.columns[axis.key], this.columns[column]];
    return this.rows(axis).pale.map(([start, stop]) => ({ x: x.subarray(start, stop), y: y.subarray(start, stop) }));
  }

  dots(key, axis) {
    const points = this.points[key];
    return points && points.axes[axis.key] ? { x: points.axes[axis.key], y: points.values } : undefined;
  }

  forgetSmoothed() {
    for (const key of this.made.keys()) if (key.startsWith("line ") && !key.endsWith(" 0")) this.made.delete(key);
  }
}

// An exponential mean whose weights fall to 1/e over so many steps. What is not finite has no weight, and the first
// steps are the mean of those before them (the bias of the zero at which the sum begins is divided out).
function smoothed(values, steps) {
  const keep = Math.exp(-1 / steps);
  const out = new Float64Array(values.length);
  let sum = 0,
    weight = 0;
  for (let at = 0; at < values.length; at++) {
    if (Number.isFinite(values[at])) {
      sum = keep * sum + (1 - keep) * values[at];
      weight = keep * weight + (1 - keep);
      out[at] = sum / weight;
    } else out[at] = NaN;
  }
  return out;
}

// Least and greatest of what is visible; of a logarithmic scale what is above 0. `into`: [least, greatest] so far.
function extremes(line, range, log, into) {
  const from = Math.max(0, lowerBound(line.x, range[0]) - 1);
  const to = Math.min(line.x.length, lowerBound(line.x, range[1]) + 1);
  for (let at = from; at < to; at++) {
    const value = line.y[at];
    if (!Number.isFinite(value) || (log && value <= 0)) continue;
    if (value < into[0]) into[0] = value;
    if (value > into[1]) into[1] = value;
  }
}

// The path of a line. Where several points share a pixel, their first, least, greatest and last are drawn, so that no
// spike is lost and the path is never longer than four corners for each pixel.
function pathOf(line, sx, sy) {
  const from = Math.max(0, lowerBound(line.x, sx.low) - 1);
  const to = Math.min(line.x.length, lowerBound(line.x, sx.high) + 1);
  const out = [];
  let open = false,
    pixel = NaN,
    cell = null;
  const corner = (x, y) => {
    out.push(`${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`);
    open = true;
  };
  const flush = () => {
    if (!cell) return;
    const { x, first, low, high, last, fell } = cell;
    for (const y of [first, ...(fell ? [low, high] : [high, low]), last]) corner(x, y);
    cell = null;
  };
  const sparse = to - from < 2 * (sx.to - sx.from);
  for (let at = from; at < to; at++) {
    const value = line.y[at];
    if (!Number.isFinite(value) || (sy.log && value <= 0)) {
      if (open && !cell && out.at(-1)[0] === "M") out.push("h0"); // a point between two gaps is a dot
      flush();
      open = false;
      continue;
    }
    const [x, y] = [sx.of(line.x[at]), sy.of(value)];
    if (sparse) {
      corner(x, y);
    } else if (cell && Math.round(x) === pixel) {
      if (y < cell.low) [cell.low, cell.fell] = [y, false];
      if (y > cell.high) [cell.high, cell.fell] = [y, true];
      cell.last = y;
    } else {
      flush();
      pixel = Math.round(x);
      cell = { x: pixel, first: y, low: y, high: y, last: y, fell: false };
    }
  }
  flush();
  if (out.length && out.at(-1)[0] === "M") out.push("h0");
  return out.join("");
}
