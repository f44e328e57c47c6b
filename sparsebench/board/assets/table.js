"use strict";
// The table of strategies at one budget: sorting, filtering, and copying as text.

const AT_ONCE = 60; // rows that are drawn before the reader asks for all
const WIDEST = 60; // most characters of a cell
const ORACLES = "Oracles: they know which tokens matter and are not ranked";
const APART = [
  ["", (row) => row.kind !== "oracle" && !isCostly(row)],
  [ORACLES, (row) => row.kind === "oracle" && !isCostly(row)],
  ["Cost more than dense", isCostly],
];
const natural = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function clip_(text, most) {
  const letters = Array.from(text);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}\u2026` : text;
}

/** Return names in which entries of one strategy have only the parameters that tell them apart. */
function entryNames(names) {
  const partsOf = (name) => {
    const [, strategy, parameters, rest] = /^(\w+)(?:\(((?:[^()]|\([^()]*\))*)\))?((?:,| by )[^]*)?$/.exec(name) ?? [null, name];
    return { strategy, parameters: parameters ? parameters.split(/,(?![^(]*\))/) : [], rest: rest ?? "" };
  };
  const entries = new Map();
  for (const name of names) {
    const { strategy } = partsOf(name);
    if (!entries.has(strategy)) entries.set(strategy, new Map());
    entries.get(strategy).set(name, partsOf(name));
  }
  const shorter = new Map();
  for (const [strategy, ofNames] of entries) {
    const lists = [...ofNames.values()].map(({ parameters }) => parameters);
    const areEqual = lists.every((parameters) => String(parameters) === String(lists[0]));
    const common = areEqual ? [] : lists[0].filter((one) => lists.every((parameters) => parameters.includes(one)));
    for (const [name, { parameters, rest }] of ofNames) {
      const left = parameters.filter((one) => !common.includes(one));
      shorter.set(name, `${strategy}${left.length ? `(${left})` : ""}${rest}`);
    }
  }
  return shorter;
}

/** Return a text of at most `most` characters for each name; different names have different texts. */
function shortNames(names, most) {
  const texts = entryNames(names);
  const cut = cutNames([...texts.values()], most);
  return new Map([...texts].map(([name, text]) => [name, cut.get(text)]));
}

function cutNames(names, most) {
  const letters = new Map(names.map((name) => [name, Array.from(name)]));
  const short = new Map(names.map((name) => [name, clip_(name, most)]));
  const alike = () => {
    const groups = new Map();
    for (const [name, text] of short) groups.set(text, [...(groups.get(text) ?? []), name]);
    return [...groups.values()].filter((group) => group.length > 1);
  };
  for (const group of alike()) {
    // Keep the beginning, and the part where the names differ.
    const [first, ...others] = group.map((name) => letters.get(name));
    const place = first.findIndex((letter, k) => others.some((other) => other[k] !== letter));
    const begin = Math.floor(most / 2) - 1;
    const room = most - begin - 1;
    for (const name of group) {
      const all = letters.get(name);
      const start = Math.max(begin, Math.min(place < 0 ? first.length : place, all.length - room));
      short.set(name, `${all.slice(0, begin).join("")}\u2026${clip_(all.slice(start).join(""), room)}`);
    }
  }
  const numbers = new Map();
  for (const name of alike().flat()) {
    const begin = Array.from(short.get(name)).slice(0, most - ` ${short.size}`.length).join("");
    numbers.set(begin, (numbers.get(begin) ?? 0) + 1);
    short.set(name, `${begin} ${numbers.get(begin)}`);
  }
  return short;
}

const NUMBERS = {
  percent: (value) => (100 * value).toFixed(1),
  points: (value) => signed(100 * value, 1),
  samples: (value) => String(+value.toPrecision(3)),
  ratio: (value) => String(+value.toPrecision(3)),
  times: (value) => value.toFixed(2),
  speed: (value) => String(Math.round(value)),
  count: String,
  p: (value) => String(+value.toPrecision(2)),
};

/** Return the text of a row's value, with its interval. */
function format(row, { key, unit, interval }) {
  const number = NUMBERS[unit] ?? ((value) => value.toFixed(3));
  const write = (value) => (typeof value === "number" ? number(value) : String(value));
  const [value, low, high] = [row[key], row[`${key}_low`], row[`${key}_high`]];
  if (value == null || value === "") return "-";
  const alone = !interval || typeof value !== "number" || low == null;
  return alone ? write(value) : `${write(value)} [${write(low)}, ${write(high)}]`;
}

/** Return the rows of a table in groups. Each group is sorted, with missing values last. */
function select(setting, { budget, search, sort }) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = setting.columns.filter(({ unit }) => ["text", "link"].includes(unit)).map(({ key }) => key);
  const has = (row) => {
    row.text ??= String(texts.map((key) => row[key] ?? "")).toLowerCase();
    return words.every((word) => row.text.includes(word));
  };
  const rows = setting.rows.filter((row) => (row.at == null || row.at === budget) && has(row));
  const column = setting.columns.find(({ key }) => key === sort.key) ?? setting.columns[0];
  const value = (row) => {
    const entry = row[column?.key];
    if (entry == null || entry === "") return null;
    if (["text", "link"].includes(column.unit) || typeof entry === "number") return entry;
    return Number.parseFloat(String(entry).replace(/^\D+/, "")) || Infinity; // "not reached", or the number of a bound
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b || 0 : natural.compare(a, b));
  const compare = ([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : order(a, b) * (sort.falling ? -1 : 1));
  const sorted = rows.map((row) => [value(row), row]).sort(compare);
  const groups = APART.map(([title, belongs]) => ({ title, rows: sorted.map(([, row]) => row).filter(belongs) }));
  return groups.filter((group) => group.rows.length);
}

/** Draw a table, with all rows or only the first AT_ONCE. */
function drawTable(table, { setting, groups, columns, sort, papers, all, onSort }) {
  const focused = document.activeElement?.dataset?.sort;
  const headings = columns.map(({ key, heading, what, unit }) => {
    const sorted = key === sort.key && (sort.falling ? "descending" : "ascending");
    const button = make("button", { type: "button", "data-sort": key, title: what }, heading);
    if (sorted) button.append(make("span", { "aria-hidden": "true" }, sort.falling ? " \u2193" : " \u2191"));
    button.addEventListener("click", () => onSort(key));
    return make("th", { scope: "col", class: classOf(key, unit), "aria-sort": sorted }, button);
  });
  let left = all ? Infinity : AT_ONCE;
  const short = shortNames(setting.rows.map((row) => row.strategy), WIDEST);
  const bodies = groups.map(({ title, rows }) => {
    const body = make("tbody");
    for (const row of rows.slice(0, left))
      body.append(make("tr", { class: row.kind }, ...columns.map((column) => cell(row, column, papers, short))));
    left -= body.children.length;
    const divider = make("th", { colSpan: columns.length, scope: "rowgroup" }, make("span", {}, title));
    if (title && body.children.length) body.prepend(make("tr", { class: "divider" }, divider));
    return body;
  });
  const none = make("td", { colSpan: columns.length || 1 }, "No row matches the filter.");
  if (!groups.length) bodies.push(make("tbody", {}, make("tr", {}, none)));
  const head = make("thead", {}, make("tr", {}, ...headings));
  table.replaceChildren(make("caption", { class: "hidden" }, setting.title), head, ...bodies);
  if (focused) table.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
}

function classOf(key, unit) {
  return ["text", "link"].includes(unit) && key !== "rank" ? key : `number ${key}`;
}

function cell(row, column, papers, names) {
  const text = format(row, column);
  const short = column.key === "strategy" ? names.get(row.strategy) : clip_(text, WIDEST);
  const title = short !== text && clip_(text, 500);
  if (column.unit === "link" && /^https?:\/\//.test(row[column.key]))
    return make("td", { class: column.key }, make("a", { href: row[column.key], rel: "noreferrer", title: text }, column.heading));
  if (column.key !== "strategy")
    return make("td", { class: classOf(column.key, column.unit), title }, ...parts(short, column));
  const [citation, address] = papers.get(row.strategy_name) ?? [];
  const lines = breakable(short);
  const paper = { href: address, rel: "noreferrer", title: citation || "the paper" };
  const name = address ? [make("a", paper, ...lines)] : lines;
  return make("th", { scope: "row", class: "strategy", title }, ...name);
}

/** Return a name in parts, between which lines may break: after underscores and commas. */
function breakable(name) {
  return name.split(/(?<=[_,])/).flatMap((part, k) => (k ? [make("wbr"), part] : [part]));
}

/** Return a text with its interval in a separate element. */
function parts(text, { interval }) {
  const [value, ends] = interval ? text.split(" [") : [text];
  return ends ? [value, make("span", { class: "interval" }, ` [${ends}`)] : [value];
}

// As in tables.py: signs of Markdown, addresses of mail, and places where a spreadsheet sees a formula.
const SIGNS = /[\\|~$`]|\*(?=\S)|(?<=\S)\*|(?<![\p{L}\p{N}])_|_(?![\p{L}\p{N}])|&(?=#?\w+;)/gu;
const LINKS = /<(?=[A-Za-z/!?])|(?<!\[ )\](?=[(\[:])|:(?=\/\/)|(?<=\b[wW]{3})\./g;
const MAIL = /(?<=[\w.+-])@(?=[\w-]+\.)/g;
const FORMULA = /(^|;)(?=\s*(?:[=+@\uff0b\uff0d\uff1d\uff20]|-.))/g;

const COPIES = {
  Markdown(head, body, sides) {
    const escaped = (cell) => cell.replace(SIGNS, "\\$&").replace(LINKS, "\\$&").replace(MAIL, "@ ");
    const isAddress = (cell) => /^https?:\/\/[\w.~!$&*+,;=:@%/?#-]+$/.test(cell);
    const clean = (cell) => (isAddress(cell) ? `<${cell}>` : escaped(cell.replace(/\s+/g, " ")));
    const line = (cells) => `| ${cells.map(clean).join(" | ")} |\n`;
    return [line(head), `|${sides.map((right) => (right ? "---:" : ":---")).join("|")}|\n`, ...body.map(line)].join("");
  },
  CSV(head, body, sides) {
    const quoted = (cell) => (/[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);
    const safe = (cell, k) => quoted(sides[k] ? cell : cell.replace(FORMULA, "$1'"));
    return [head, ...body].map((cells) => `${cells.map(safe).join(",")}\n`).join("");
  },
};

/** Return the shown rows and columns as Markdown or CSV. In spreadsheets a rank such as 1-7 would be a date. */
function copied(form, { groups, columns }) {
  const text = (row, column) => {
    const shown = format(row, column);
    return form === "CSV" && column.key === "rank" ? shown.replace(/^(\d+)-(\d+)$/, "$1 to $2") : shown;
  };
  const body = groups.flatMap(({ rows }) => rows.map((row) => columns.map((column) => text(row, column))));
  const sides = columns.map(({ key, unit }) => classOf(key, unit).startsWith("number"));
  return COPIES[form]([...columns.map(({ heading }) => heading)], body, sides);
}
