"use strict";
// The table: TanStack Table sorts and filters, this shows what comes out. Of long tables only the rows in sight exist.

const NOT_REACHED = "not reached";
const MISSING = new Set([null, undefined, "", "not ranked"]);
const ALL_AT_ONCE = 150; // rows; longer tables have only those in sight
const BEYOND = 12; // rows above and below those in sight
const WIDEST = 26; // characters of a cell, the rest is cut with an ellipsis
const BADGES = new Set(["checks", "badge"]);
const natural = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/** Return a view's rows as {value by key, text by column, search}, and a TanStack table of them. */
function makeView({ name, title, length, columns, values, texts }) {
  const entries = (packed) => Object.entries(packed).map(([key, column]) => [key, unpacked(column)]);
  const value = entries(values),
    text = entries(texts);
  const data = Array.from({ length }, (_, at) => rowAt(at, columns, value, text));
  const width = Object.fromEntries(columns.map((column) => [column.key, widthOf(column, data)]));
  const table = TableCore.createTable({
    data,
    columns: columns.map(({ key }) => ({
      id: key,
      accessorFn: (row) => sortable(row.value[key]),
      sortUndefined: "last",
      sortingFn: (a, b, id) => compare(a.getValue(id), b.getValue(id)),
      filterFn: (row, id, wanted) => row.original.text[id] === wanted,
    })),
    globalFilterFn: (row, id, wanted) => row.original.search.includes(wanted),
    getColumnCanGlobalFilter: (column) => column.id === columns[0].key, // once a row: it looks at all of it
    getCoreRowModel: TableCore.getCoreRowModel(),
    getFilteredRowModel: TableCore.getFilteredRowModel(),
    getSortedRowModel: TableCore.getSortedRowModel(),
    onStateChange: () => {},
    renderFallbackValue: null,
    state: {},
  });
  return { name, title, columns, data, width, table };
}

/** Return the values of a column, which may be packed as page.py does it. */
function unpacked(column) {
  if (column.floats === undefined) return column.of ? column.at.map((k) => column.of[k]) : column;
  const bytes = new DataView(Uint8Array.from(atob(column.floats), (c) => c.charCodeAt(0)).buffer);
  const numbers = Array.from({ length: bytes.byteLength / 4 }, (_, k) => bytes.getFloat32(4 * k, true));
  return numbers.map((x) => (Number.isNaN(x) ? null : Number(x.toPrecision(9)))); // no more digits than there are
}

function rowAt(at, columns, values, texts) {
  const value = Object.fromEntries(values.map(([key, column]) => [key, column[at]]));
  const text = Object.fromEntries(columns.map(({ key }) => [key, MISSING.has(value[key]) ? "-" : String(value[key])]));
  for (const [key, column] of texts) text[key] = column[at];
  return { value, text, search: Object.values(text).join("\n").toLowerCase() };
}

function sortable(value) {
  if (MISSING.has(value)) return undefined;
  return value === NOT_REACHED ? Infinity : value;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a - b;
  return natural.compare(a, b);
}

function widthOf({ key, heading }, data) {
  const words = Math.max(...heading.split(" ").map((word) => word.length)) + 2;
  const mark = key === "kind" || BADGES.has(key) ? 3 : 0; // a dot, or a frame
  return Math.min(
    WIDEST,
    data.reduce((most, row) => Math.max(most, row.text[key].length + mark), words),
  );
}

/** Return the columns and rows that the state asks for; oracles come last, however it is sorted. */
function select(view, state) {
  const known = new Set(view.columns.map((column) => column.key));
  view.table.setOptions((options) => ({
    ...options,
    state: {
      ...view.table.initialState,
      sorting: state.sort.filter(({ id }) => known.has(id)),
      globalFilter: state.search.trim().toLowerCase() || undefined,
      columnFilters: Object.entries(state.filters)
        .filter(([id]) => known.has(id))
        .map(([id, value]) => ({ id, value })),
    },
  }));
  const sorted = view.table.getSortedRowModel().rows.map((row) => row.original);
  const oracle = ({ value }) => value.kind === "oracle";
  return {
    columns: view.columns.filter(({ key }) => state.columns === null || state.columns.includes(key)),
    filtered: view.table.getFilteredRowModel().rows.map((row) => row.original),
    rows: [...sorted.filter((row) => !oracle(row)), ...sorted.filter(oracle)],
    oracles: sorted.filter(oracle).length,
  };
}

class TableOnScreen {
  constructor(table, scroll, onSort) {
    Object.assign(this, { table, scroll, onSort });
    this.caption = make("caption", { class: "hidden" });
    this.group = make("colgroup");
    this.head = make("thead");
    this.body = make("tbody");
    table.append(this.caption, this.group, this.head, this.body);
    scroll.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(scroll);
  }

  show(view, { columns, rows, oracles }, sort) {
    Object.assign(this, { columns, lines: lines(rows, oracles), first: -1 });
    this.caption.textContent = `${view.title}, ${counted(rows.length, "row")}`;
    this.table.setAttribute("aria-rowcount", this.lines.length + 1);
    this.group.replaceChildren(
      ...columns.map(({ key }) => {
        const col = make("col");
        col.style.width = `calc(${view.width[key]}ch + 1.6rem)`;
        return col;
      }),
    );
    this.header(columns, sort);
    const widths = columns.reduce((sum, { key }) => sum + view.width[key], 0);
    this.table.style.width = `calc(${widths}ch + ${1.6 * columns.length}rem)`; // a fixed layout needs one
    this.scroll.classList.toggle("long", rows.length > ALL_AT_ONCE);
    const still = this.head.querySelector("th.strategy"); // what has the focus is not scrolled to below it
    this.scroll.style.scrollPaddingLeft = `${still?.offsetWidth ?? 0}px`;
    this.draw();
  }

  header(columns, sort) {
    const focused = document.activeElement?.dataset?.sort;
    this.head.replaceChildren(
      make(
        "tr",
        { "aria-rowindex": "1" },
        ...columns.map((column) => {
          const at = sort.find(({ id }) => id === column.key);
          const sorted = at && (at.desc ? "descending" : "ascending");
          const arrow = make(
            "span",
            { class: "arrow", "aria-hidden": "true" },
            at ? (at.desc ? "\u2193" : "\u2191") : "",
          );
          const button = make(
            "button",
            { type: "button", "data-sort": column.key, title: column.what },
            make("span", {}, column.heading),
            arrow,
          );
          button.addEventListener("click", (event) => this.onSort(column, event.shiftKey));
          return make("th", { scope: "col", class: classOf(column), "aria-sort": sorted }, button);
        }),
      ),
    );
    if (focused) this.head.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
  }

  /** Make the rows in sight, and as much room as the others would take. */
  draw() {
    if (!this.lines) return;
    const n = this.lines.length;
    let [first, last] = [0, n];
    if (n > ALL_AT_ONCE) {
      const height = this.height();
      const seen = Math.ceil(this.scroll.clientHeight / height) + 2 * BEYOND;
      first = Math.max(0, Math.min(n - seen, Math.floor(this.scroll.scrollTop / height) - BEYOND));
      first -= first % 2; // stripes stay where they are
      last = Math.min(n, first + seen + 1);
    }
    if (first === this.first && last === this.last) return;
    Object.assign(this, { first, last });
    const made = this.lines.slice(first, last).map((line, k) => this.line(line, first + k));
    if (!n)
      made.push(
        make("tr", {}, make("td", { colSpan: this.columns.length, class: "none" }, "No row is left by the filters.")),
      );
    this.body.replaceChildren(...this.room(first), ...made, ...this.room(n - last));
  }

  height() {
    return parseFloat(getComputedStyle(this.scroll).getPropertyValue("--row"));
  }

  room(rows) {
    if (!rows) return [];
    const row = make("tr", { class: "room", "aria-hidden": "true" }, make("td", { colSpan: this.columns.length }));
    row.style.height = `${rows * this.height()}px`;
    return [row];
  }

  line(line, at) {
    const place = { "aria-rowindex": String(at + 2) };
    if (line.divider) {
      return make(
        "tr",
        { ...place, class: "divider" },
        make("td", { colSpan: this.columns.length }, make("span", {}, line.divider)),
      );
    }
    const row = make("tr", { ...place, class: `${line.value.kind} ${at % 2 ? "odd" : "even"}` });
    for (const column of this.columns) row.append(cell(line, column));
    return row;
  }
}

function lines(rows, oracles) {
  if (!oracles) return rows;
  const divider = { divider: "Oracles: they see which tokens matter, and are not ranked" };
  return [...rows.slice(0, rows.length - oracles), divider, ...rows.slice(rows.length - oracles)];
}

function classOf({ key, shown }) {
  return `${shown === "text" && key !== "rank" ? "text" : "number"} ${key}`;
}

function cell(row, column) {
  const text = row.text[column.key];
  const name = column.key === "strategy" ? "th" : "td";
  const attributes = { class: classOf(column), scope: name === "th" && "row", title: text.length > WIDEST && text };
  if (text === "-") return make(name, attributes, make("span", { class: "missing" }, text));
  if (column.key === "kind") return make(name, attributes, make("span", { class: "dot", "aria-hidden": "true" }), text);
  if (BADGES.has(column.key))
    return make(name, attributes, make("span", { class: `badge ${text.split(/\W/)[0]}` }, text));
  const [value, interval] = column.interval ? text.split(" [") : [text];
  const shown = value === NOT_REACHED ? make("span", { class: "unreached" }, value) : value;
  return make(name, attributes, shown, ...(interval ? [make("span", { class: "interval" }, ` [${interval}`)] : []));
}
