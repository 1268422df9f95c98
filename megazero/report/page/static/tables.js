// Tables: sorting by a heading, searching, and rows that are shown on request.

class SortableTable {
  constructor(root) {
    this.table = root.querySelector("table");
    this.body = this.table.tBodies[0];
    this.rows = [...this.body.rows];
    this.heads = [...this.table.tHead.rows[0].cells];
    this.search = root.querySelector(".search");
    this.all = root.querySelector(".all");
    this.shown = root.querySelector(".shown");
    this.texts = this.rows.map((row) => row.textContent.toLowerCase());
    this.heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => this.sort(column));
    });
    this.search?.addEventListener("input", () => this.filter());
    this.all?.addEventListener("change", () => this.filter());
    this.filter();
  }

  // Ascending, and descending at the second call. Rows without a value stay at the end.
  sort(column) {
    const head = this.heads[column];
    const up = head.getAttribute("aria-sort") !== "ascending";
    this.heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const keyed = this.rows.map((row) => [valueOf(row.cells[column]), row]);
    keyed.sort(([a], [b]) =>
      a === null ? (b === null ? 0 : 1) : b === null ? -1 : up ? compare(a, b) : compare(b, a),
    );
    this.body.append(...keyed.map(([, row]) => row));
  }

  filter() {
    const wanted = (this.search?.value || "").toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0;
    this.rows.forEach((row, number) => {
      const quiet = row.classList.contains("quiet") && this.all && !this.all.checked && !wanted.length;
      row.hidden = quiet || !wanted.every((word) => this.texts[number].includes(word));
      visible += !row.hidden;
    });
    if (this.shown) this.shown.textContent = visible < this.rows.length ? `${visible} of ${this.rows.length} rows` : "";
  }
}

function valueOf(cell) {
  if (cell.classList.contains("none")) return null;
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
