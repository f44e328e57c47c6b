"use strict";
// Charts as SVG: accuracy against dense over cost, and values with their intervals as dots.

const LINEAR = 2; // points of loss below which the axis is linear; above it is logarithmic
const TICKS = [0, 0.5, -0.5, 1, -1, 2, -2, 5, -5, 10, -10, 20, -20, -50, -100];
const BEYOND = 4; // the axis leaves out `random` if it loses more than this many times the largest loss of the others
const MOST = 24; // number of strategies that colours and dashes can distinguish
const MOST_DOTS = 60; // rows of a table of dots
const DASHES = ["", "6 2", "9 2 2 2", "2 2"]; // colours, shapes and dashes have the same order as in pictures
const FIRST = [0, 1, 2, 3, 1, 3]; // dash of the first line of each colour
const REFERENCES = new Map([
  ["oracle", "8 3 1 3"],
  ["random_inside", "1 3"],
  ["random", "1 5"],
]);
const AXES = {
  macs_ratio: "MACs spent, share of dense",
  gmacs: "GMACs an image",
  speed_up: "images/s, multiple of dense",
};
const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
  "M-4-4h8v8h-8z",
  "M0-6L6 0L0 6L-6 0z",
  "M0-5L5 4H-5z",
  "M0 5L5-4H-5z",
  "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
];
const isCostly = (row) => row.macs_ratio > 1 + 1e-6;
const MARKS = { deployable: SHAPES[0], baseline: SHAPES[1], oracle: SHAPES[3] };

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const rule = (kind, x1, y1, x2, y2) => svg("line", { class: kind, x1, y1, x2, y2 });
const words = (text, x, y, anchor = "middle") => svg("text", { x, y, "text-anchor": anchor }, text);

/** Return the lines of the strategies that cost less than dense, each beginning at dense; x is the cost. */
function linesOf(setting, axis) {
  const dense = setting.rows.find((row) => row.strategy === "dense");
  const from = dense?.[axis];
  if (from == null || dense.accuracy == null) return [];
  const lines = new Map();
  for (const row of setting.rows) {
    if (row === dense || row[axis] == null || row.accuracy == null || row.macs_ratio >= 1) continue;
    const value = (key) => 100 * (row[`accuracy_delta${key}`] ?? row.accuracy_delta ?? row.accuracy - dense.accuracy);
    const line = lines.get(row.strategy) ?? { name: row.strategy, kind: row.kind, points: [{ x: from, y: 0 }] };
    line.points.push({ x: row[axis], y: value(""), low: value("_low"), high: value("_high"), row });
    lines.set(row.strategy, line);
  }
  for (const { points } of lines.values())
    points.sort((a, b) => (b.row === undefined ? 1 : a.row ? b.row.macs_ratio - a.row.macs_ratio : -1));
  return [...lines.values()];
}

/** Return the ends of the vertical axis, in points. */
function span(lines) {
  const lowest = (of) => Math.min(-0.5, ...of.flatMap((line) => line.points.map((p) => p.low ?? p.y)));
  const random = lines.filter((line) => line.name === "random");
  const others = lowest(lines.filter((line) => line.name !== "random"));
  const bottom = lowest(random) < BEYOND * others ? others : Math.min(others, lowest(random));
  return [bottom, Math.max(0.2, ...lines.flatMap((line) => line.points.map((p) => p.high ?? p.y)))];
}

/** Return rising positions near the wanted ones, at least `distance` apart, and between two ends if there is room. */
function apart(wanted, distance, first, last) {
  const lower = (places) => {
    let least = first;
    return places.map((y) => (least = Math.max(y, least) + distance) - distance);
  };
  const higher = (places) => {
    let most = last;
    return places.reduceRight((all, y) => [(most = Math.min(y, most) - distance) + distance, ...all], []);
  };
  const [down, up] = [lower(wanted), higher(wanted)];
  return higher(lower(down.map((y, k) => (y + up[k]) / 2)));
}

/** Return round numbers between two numbers, about `most` or fewer. */
function ticksOf(low, high, most) {
  const size = 10 ** Math.floor(Math.log10((high - low) / most || 1));
  const step = size * ([1, 2, 5].find((times) => (high - low) / (times * size) <= most) ?? 10);
  const first = Math.ceil(low / step - 1e-6);
  return Array.from({ length: Math.floor(high / step + 1e-6) - first + 1 }, (_, k) => +((first + k) * step).toFixed(9));
}

/** Draw lines into an element: chosen lines with colours and names, references, and all others in grey. */
function drawLines(place, { lines, on, axis, describe, onHover, toggle }) {
  const shown = lines.filter((line) => on.includes(line.name) || REFERENCES.has(line.name));
  const named = shown.length ? shown : lines;
  const width = Math.max(300, place.clientWidth),
    narrow = width < 560;
  const letters = narrow ? 14 : 20;
  const margin = { top: 24, left: 60, bottom: 44, right: narrow ? 132 : 196 };
  const height = Math.max(narrow ? 340 : 400, 16 * named.length + margin.top + margin.bottom);
  const right = width - margin.right,
    floor = height - margin.bottom;
  const xs = named.flatMap((line) => line.points.map((p) => p.x));
  const [least, most] = [Math.min(...xs), Math.max(...xs)];
  const [from, to] = axis === "speed_up" ? [least, most] : [most, least]; // dense, with the most MACs, is at the left
  const x = (value) => margin.left + ((value - from) / (to - from || 1)) * (right - margin.left);
  const [bottom, top] = span(named).map((y) => Math.asinh(y / LINEAR));
  const room = 0.04 * (top - bottom);
  const y = (points) =>
    margin.top + ((top + room - Math.asinh(points / LINEAR)) / (top - bottom + 2 * room)) * (floor - margin.top);
  const seen = (p) => y(p.y) <= floor && p.x >= least && p.x <= most;
  const path = (line) =>
    line.points.map((p, k) => `${k ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p.y).toFixed(1)}`).join("");
  const last = ({ name, points }) => `${name} ${signed(points.at(-1).y)} points at ${+points.at(-1).x.toFixed(2)}`;
  const label = `Accuracy against dense over ${AXES[axis]}: ${named.map(last).join("; ")}.`;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  const mark = (line, style, left, high) => {
    const [d, transform] = [SHAPES[on.indexOf(line.name) % 6], `translate(${left} ${high}) scale(.8)`];
    return svg("path", { class: `mark ${style.class}`, d, transform });
  };
  const drawn = [];
  for (const tick of TICKS) {
    if (y(tick) > floor || y(tick) < margin.top - 1 || drawn.some((other) => Math.abs(y(other) - y(tick)) < 18))
      continue;
    drawn.push(tick);
    picture.append(
      rule(tick ? "grid" : "zero", margin.left, y(tick), right, y(tick)),
      words(tick ? signed(tick) : "dense 0", margin.left - 7, y(tick) + 4, "end"),
    );
  }
  for (const tick of ticksOf(least, most, narrow ? 5 : 9))
    picture.append(rule("grid", x(tick), floor, x(tick), floor + 4), words(String(tick), x(tick), floor + 18));
  picture.append(words(AXES[axis], (margin.left + right) / 2, height - 6));
  picture.append(words("accuracy against dense, points", 0, 12, "start"));
  const frame = svg("rect", { x: margin.left, y: 0, width: right - margin.left + 6, height: floor });
  const inside = svg("g", { "clip-path": "url(#inside)" });
  for (const line of lines) if (!named.includes(line)) inside.append(svg("path", { class: "other", d: path(line) }));
  for (const line of named) {
    const style = look(line, on);
    inside.append(svg("path", { ...style, class: `line ${style.class}`, d: path(line) }));
    if (REFERENCES.has(line.name) && !on.includes(line.name)) continue;
    for (const p of line.points.slice(1))
      inside.append(rule(`bar ${style.class}`, x(p.x), y(p.low), x(p.x), y(p.high)), mark(line, style, x(p.x), y(p.y)));
  }
  const hover = svg("path", { class: "hover", d: "" });
  inside.append(hover);
  picture.append(svg("clipPath", { id: "inside" }, frame), inside);
  const ends = named
    .map((line) => ({ line, x: x(line.points.at(-1).x), y: y(line.points.at(-1).y) }))
    .sort((a, b) => a.y - b.y);
  const short = shortNames(named.map((line) => line.name), letters);
  const wanted = ends.map((end) => end.y);
  const places = apart(wanted, 16, margin.top, floor);
  ends.forEach((end, k) => {
    const style = look(end.line, on),
      away = end.y > floor;
    const beyond = away ? ` (${signed(end.line.points.at(-1).y, 0)})` : "";
    const d = `M${end.x} ${end.y}H${right + 4}L${right + 12} ${places[k]}h4`;
    if (!away) picture.append(svg("path", { class: `join ${style.class}`, d }));
    if (!away && on.includes(end.line.name)) picture.append(mark(end.line, style, right + 16, places[k]));
    const name = words(short.get(end.line.name) + beyond, right + 24, places[k] + 4, "start");
    name.classList.add("name");
    picture.append(name);
  });
  const near = (event) => {
    const box = picture.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = { distance: 30 };
    for (const line of lines)
      for (const p of line.points)
        if (p.row && seen(p)) {
          const distance = Math.hypot(x(p.x) - px, y(p.y) - py) - (named.includes(line) ? 4 : 0);
          if (distance < best.distance) best = { distance, line, point: p };
        }
    return best.line && { ...best, left: x(best.point.x), top: y(best.point.y) };
  };
  picture.addEventListener("pointermove", (event) => {
    const point = near(event);
    hover.setAttribute("d", point ? path(point.line) : "");
    onHover(point);
  });
  picture.addEventListener("pointerleave", () => (hover.setAttribute("d", ""), onHover()));
  picture.addEventListener("click", (event) => {
    const point = near(event);
    if (point) toggle(point.line.name);
  });
  const stops = stopsOf(named, {
    seen,
    describe,
    toggle,
    position: (p) => [x(p.x), y(p.y)],
    onFocus: (stop) => {
      hover.setAttribute("d", stop ? path(stop.line) : "");
      onHover(stop && { ...stop, left: x(stop.point.x), top: y(stop.point.y) });
    },
  });
  const focused = document.activeElement?.dataset?.stop;
  picture.append(...stops);
  place.replaceChildren(picture);
  if (focused) (stops.find((stop) => stop.dataset.stop === focused) ?? stops[0])?.focus();
}

/** Return an element for each visible point. Tab reaches one of them, arrow keys go to the others, and Enter toggles. */
function stopsOf(named, { seen, describe, toggle, position, onFocus }) {
  const rows = named.map((line) => line.points.filter((p) => p.row && seen(p))).filter((points) => points.length);
  const made = new Map();
  const go = (row, k) => {
    const points = rows[(row + rows.length) % rows.length];
    made.get(points[Math.max(0, Math.min(k, points.length - 1))]).focus();
  };
  rows.forEach((points, row) =>
    points.forEach((point, k) => {
      const line = named.find((line) => line.points.includes(point));
      const [cx, cy] = position(point);
      const stop = svg("circle", { class: "stop", cx, cy, r: 8, role: "button", "aria-label": describe(point.row) });
      stop.dataset.stop = `${line.name} ${k}`;
      stop.tabIndex = made.size ? -1 : 0;
      stop.addEventListener("focus", () => {
        for (const other of made.values()) other.tabIndex = other === stop ? 0 : -1;
        onFocus({ line, point });
      });
      stop.addEventListener("blur", () => onFocus());
      stop.addEventListener("keydown", (event) => {
        const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
        const [down, right] = moves[event.key] ?? [0, 0];
        if (down || right) go(row + down, k + right);
        else if (["Enter", " "].includes(event.key)) toggle(line.name);
        else return;
        event.preventDefault();
      });
      made.set(point, stop);
    }),
  );
  return [...made.values()];
}

/** Return the style of a line: by its position among the chosen lines, all different, or that of a reference. */
function look({ name }, on) {
  const place = on.indexOf(name);
  if (place < 0)
    return { class: name === "oracle" ? "oracle" : "baseline", "stroke-dasharray": REFERENCES.get(name) ?? "" };
  return { class: `c${place % 6}`, "stroke-dasharray": DASHES[(FIRST[place % 6] + Math.floor(place / 6)) % 4] };
}

function signed(value, digits) {
  const text = digits === undefined ? String(+Math.abs(value).toFixed(1)) : Math.abs(value).toFixed(digits);
  return `${+text === 0 ? "" : value < 0 ? "-" : "+"}${text}`;
}

/** Return a table with a dot and an interval in each row, the best on top, "not reached" last. */
function dots(setting, column, wide) {
  const { key, unit } = column,
    logarithmic = unit === "samples";
  const rows = setting.rows.filter((row) => row[key] != null && !isCostly(row));
  const order = (row) => (typeof row[key] === "number" ? row[key] : Infinity) * (column.falling ? -1 : 1);
  rows.sort((a, b) => order(a) - order(b));
  const shown = rows.slice(0, MOST_DOTS);
  const ends = shown.flatMap((row) => [row[key], row[`${key}_low`], row[`${key}_high`]]).filter(Number.isFinite);
  const bend = logarithmic ? Math.log : (value) => value;
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  const [low, high] = [bend(least), bend(logarithmic || most > least ? most : least + 1)];
  const at = (value) => `${(4 + (92 * (bend(value) - low)) / (high - low || 1)).toFixed(2)}%`;
  const factor = { percent: 100, points: 100 }[unit] ?? 1;
  const number = wide ? 7 : 3;
  const powers = Array.from({ length: 24 }, (_, k) => 2 ** k).filter((tick) => tick >= least && tick <= most);
  const ticks = logarithmic
    ? powers.filter((_, k) => k % Math.ceil(powers.length / number) === 0)
    : ticksOf(factor * least, factor * most, number).map((tick) => tick / factor);
  const scale = svg("svg", { class: "dot", "aria-hidden": "true" });
  scale.append(...ticks.map((tick) => words(String(+(factor * tick).toFixed(6)), at(tick), 14)));
  const names = rows.map((row) => row.strategy);
  const label = (row) => {
    const alone = names.indexOf(row.strategy) === names.lastIndexOf(row.strategy);
    return alone || !row.budget ? row.strategy : `${row.strategy}, ${row.budget}`;
  };
  const short = shortNames(shown.map(label), 40);
  const dense = shown.find((row) => row.strategy === "dense")?.[key];
  const body = shown.map((row) => {
    const [from, to] = [row[`${key}_low`], row[`${key}_high`]];
    const dot = svg("svg", { class: `dot ${row.kind}`, "aria-hidden": "true" });
    dot.append(...ticks.map((tick) => rule("grid", at(tick), 0, at(tick), "100%")));
    if (Number.isFinite(dense)) dot.append(rule("zero", at(dense), 0, at(dense), "100%"));
    if (Number.isFinite(from)) dot.append(rule("bar", at(from), "50%", Number.isFinite(to) ? at(to) : "100%", "50%"));
    const mark = svg("path", { class: "mark", d: MARKS[row.kind] });
    if (Number.isFinite(row[key])) dot.append(svg("svg", { x: at(row[key]), y: "50%", overflow: "visible" }, mark));
    const value = make("td", { class: "number" }, ...parts(format(row, column), column));
    const name = make("th", { scope: "row" }, ...breakable(short.get(label(row))));
    return make("tr", {}, name, value, make("td", { class: "wide" }, dot));
  });
  const head = make("tr", {}, make("th", { scope: "col" }, "strategy"));
  head.append(make("th", { scope: "col", class: "number" }, column.heading));
  head.append(make("th", { scope: "col", class: "wide" }, make("span", { class: "hidden" }, "drawn"), scale));
  const lacking = [...new Set(setting.rows.filter((row) => row[key] == null).map((row) => row.strategy))];
  const more = rows.length > MOST_DOTS ? `${rows.length - MOST_DOTS} more are not drawn. ` : "";
  const lack = lacking.length ? `Not measured: ${clip_(lacking.join(", "), 400)}.` : "";
  const caption = make("caption", { class: "hidden" }, `${column.heading}: ${setting.title}`);
  const table = make("table", { class: "dots" }, caption, make("thead", {}, head), make("tbody", {}, ...body));
  return [table, make("p", { class: "soft" }, more + lack)];
}
