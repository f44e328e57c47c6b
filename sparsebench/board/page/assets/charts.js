"use strict";
// The charts: Observable Plot draws, in colours that follow the theme.

const KINDS = [
  ["baseline", "circle"],
  ["deployable", "square"],
  ["oracle", "diamond"],
];
const COLOUR = { domain: KINDS.map(([kind]) => kind), range: KINDS.map(([kind]) => `var(--${kind})`) };
const SYMBOL = { domain: KINDS.map(([kind]) => kind), range: KINDS.map(([, symbol]) => symbol) };
const COSTS = [
  { key: "macs_ratio", front: "pareto", curve: "step-after" },
  { key: "images_per_s", front: "pareto_speed", curve: "step-before" }, // of one device each: others do not compare
];
const MOST_PLOTS = 12,
  MOST_NAMES = 14,
  MOST_BARS = 40,
  MOST_CURVES = 8;
const NAME_HEIGHT = 14,
  GAP = 28; // pixels
const CLIP = 40; // characters of a name in a chart

function clip(text, most = CLIP) {
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}

/** Draw each part of something into a section, several beside each other and with headings. */
function drawParts(section, parts, draw) {
  const place = section.querySelector(".plots");
  const several = parts.size > 1;
  section.classList.toggle("several", several);
  const room = place.clientWidth,
    beside = several ? Math.max(1, Math.min(parts.size, Math.floor(room / 440))) : 1;
  const width = Math.max(260, Math.min(860, room / beside - (beside > 1 ? GAP : 0)));
  place.style.setProperty("--beside", beside);
  const made = [...parts].slice(0, MOST_PLOTS).map(([name, items]) => {
    const svg = draw(items, name, width);
    svg.setAttribute("role", "img");
    for (const mark of svg.querySelectorAll("g[aria-label]")) {
      // a picture has one label
      mark.dataset.mark = mark.getAttribute("aria-label");
      mark.removeAttribute("aria-label");
    }
    return make("div", { class: "plot-of" }, ...(several ? [make("h3", {}, clip(name, 80))] : []), svg);
  });
  const more = parts.size - made.length;
  if (more > 0) made.push(make("p", {}, `${counted(more, "more chart")}: filter by task or model to see them.`));
  place.replaceChildren(...made);
}

/** Return the ends of an axis; one value alone has some room around it. */
function ends(values) {
  const [low, high] = d3.extent(values);
  return low === high ? [low - 0.05, high + 0.05] : [low, high];
}

function partOf({ task, model, n_train }) {
  return [task, model, n_train == null ? null : `N ${n_train}`].filter(Boolean).join(" \u00b7 ");
}

function legend() {
  const dot = () => make("span", { class: "dot", "aria-hidden": "true" });
  const item = ([kind]) => make("span", { class: kind }, dot(), kind);
  return make("p", { class: "legend" }, ...KINDS.map(item));
}

/** Accuracy against what it costs, a part a task and, for speeds, a device. */
function drawCost(section, view, rows, chosen) {
  const keys = new Set(view.columns.map(({ key }) => key));
  const costs = COSTS.filter(({ key }) => keys.has(key));
  section.hidden = !costs.length || !keys.has("accuracy");
  if (section.hidden) return;
  const cost = costs.find(({ key }) => key === chosen) ?? costs[0];
  const headed = (wanted) => view.columns.find(({ key }) => key === wanted).heading;
  section
    .querySelector("select")
    .replaceChildren(
      ...costs.map(({ key }) => make("option", { value: key, selected: key === cost.key }, headed(key))),
    );
  const points = rows.map((row) => pointOf(row, cost)).filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y));
  const parts = d3.group(points, (point) => point.part);
  for (const [name, part] of [...parts]) {
    if (parts.size > 1 && part.length === 1) parts.delete(name); // nothing to compare
  }
  drawParts(section, parts, (part, name, width) => costPlot(width, part, cost, headed));
  section.querySelector(".legend")?.remove();
  section.querySelector(".plots").before(legend());
}

function pointOf({ value, text }, { key, front }) {
  const speed = key === "images_per_s";
  return {
    x: value[key],
    y: value.accuracy,
    low: value.accuracy_low ?? value.accuracy,
    high: value.accuracy_high ?? value.accuracy,
    kind: value.kind,
    name: clip(value.strategy),
    front: value[front] === "yes",
    part: [partOf(value), speed ? value.device : null].filter(Boolean).join(" \u00b7 "),
    title: `${clip(value.strategy)}\n${clip(value.budget)}\n${text[key]}\naccuracy ${text.accuracy}`,
  };
}

function costPlot(width, points, cost, headed) {
  const front = d3.sort(
    points.filter((point) => point.front),
    (point) => point.x,
  );
  const names = points.length <= MOST_NAMES ? points : front.slice(0, MOST_NAMES);
  const best = front.map(({ name, x, y }) => `${name} (${x.toPrecision(3)}, ${y.toFixed(3)})`).join(", ");
  const [least, most] = d3.extent(points, (point) => point.y);
  return Plot.plot({
    className: "plot",
    width,
    height: 380,
    marginLeft: 48,
    marginBottom: 40,
    marginRight: 30,
    insetLeft: 20,
    insetRight: 40,
    insetTop: 24,
    insetBottom: 8,
    style: { fontSize: "12px" },
    color: COLOUR,
    symbol: SYMBOL,
    x: {
      label: headed(cost.key),
      labelAnchor: "center",
      labelArrow: "none",
      ticks: 6,
      nice: true,
      domain: ends(points.map(({ x }) => x)),
    },
    y: {
      label: "accuracy",
      grid: true,
      labelArrow: "none",
      nice: true,
      domain: ends(points.flatMap(({ low, high }) => [low, high])),
    },
    ariaLabel:
      `Accuracy against ${headed(cost.key)}, ${counted(points.length, "row")}: accuracies from ` +
      `${least.toFixed(3)} to ${most.toFixed(3)}. Pareto front: ${best || "not known"}.`,
    marks: [
      Plot.line(front, { x: "x", y: "y", curve: cost.curve, stroke: "var(--front)", strokeWidth: 1.5 }),
      Plot.ruleX(points, { x: "x", y1: "low", y2: "high", stroke: "kind", strokeOpacity: 0.45, strokeWidth: 1.5 }),
      Plot.dot(points, {
        x: "x",
        y: "y",
        fill: "kind",
        symbol: "kind",
        r: points.length > 200 ? 3 : 5,
        stroke: "var(--page)",
        strokeWidth: 1,
      }),
      ...named(names, 300),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: "title", fill: "var(--raised)", lineWidth: 24 })),
    ],
  });
}

/** Return marks of names beside their points; above each other where points are close, NAME_HEIGHT pixels a name. */
function named(points, pixels) {
  const span = d3.max(points, ({ high }) => high) - d3.min(points, ({ low }) => low) || 1;
  const placed = [];
  for (const point of d3.sort(points, ({ y }) => y)) {
    const close = placed.filter((other) => Math.abs(other.x - point.x) < 0.25 * Math.max(point.x, other.x));
    const at = (point.y / span) * pixels;
    placed.push({ ...point, at, up: Math.max(at, ...close.map(({ up }) => up + NAME_HEIGHT)) });
  }
  return placed.map((point) =>
    Plot.text([point], {
      x: "x",
      y: "y",
      text: "name",
      textAnchor: "start",
      dx: 9,
      dy: point.at - point.up,
      fill: "currentColor",
      stroke: "var(--page)",
      strokeWidth: 4,
    }),
  );
}

/** Success rates by number of training samples; the strategies of the table's rows, those whose chips are pressed. */
class Curves {
  constructor(section, curves) {
    Object.assign(this, { section, curves, pressed: new Map() });
    const headings = ["task", "model", "strategy", "budget", "N", "succeeded", "of", "low", "high"];
    const lines = (one) =>
      one.sizes.map((size, k) => [
        one.task,
        one.model,
        one.strategy,
        one.budget,
        size,
        decimals(one.rates[k]),
        one.n[k],
        decimals(one.low[k]),
        decimals(one.high[k]),
      ]);
    numbersOf(section, headings, curves.flatMap(lines));
  }

  draw(rows) {
    const mine = inTable(this.curves, rows);
    this.section.hidden = !mine.length;
    const names = [...new Set(mine.map(rowOf))];
    const on = names.filter((name, k) => this.pressed.get(name) ?? k < MOST_CURVES);
    const colour = new Map(names.map((name, k) => [name, d3.schemeTableau10[k % 10]]));
    this.chips(rows, names, on, colour);
    const drawn = mine.filter((curve) => on.includes(rowOf(curve)));
    drawParts(this.section, d3.group(drawn, partOf), (part, name, width) => curvePlot(width, part, name, on, colour));
  }

  chips(rows, names, on, colour) {
    const place = this.section.querySelector(".chips");
    const focused = document.activeElement?.dataset?.curve;
    place.replaceChildren(
      ...names.map((name) => {
        const mark = make("span", { class: "swatch", "aria-hidden": "true" });
        mark.style.background = colour.get(name);
        const attributes = { type: "button", "aria-pressed": String(on.includes(name)), "data-curve": name };
        const button = make("button", attributes, mark, clip(name.replace("\n", ", ")));
        button.addEventListener("click", () => {
          this.pressed.set(name, !on.includes(name));
          this.draw(rows);
        });
        return button;
      }),
    );
    if (focused) place.querySelector(`[data-curve="${CSS.escape(focused)}"]`)?.focus();
  }
}

function rowOf({ strategy, budget }) {
  return `${strategy}\n${budget}`;
}

/** Return those of curves or groups that are of a row in the table, in its order. */
function inTable(items, rows) {
  const byTask = rows.some(({ value }) => value.task != null);
  const key = (one) => JSON.stringify([one.strategy, one.budget, ...(byTask ? [one.task, one.model] : [])]);
  const order = new Map(rows.map(({ value }, k) => [key(value), k]));
  return d3.sort(
    items.filter((one) => order.has(key(one))),
    (one) => order.get(key(one)),
  );
}

function curvePlot(width, curves, part, names, colour) {
  const sizes = [...new Set(curves.flatMap((curve) => curve.sizes))].sort(d3.ascending);
  const points = curves.flatMap((curve) =>
    curve.sizes.map((size, k) => ({
      row: rowOf(curve),
      size,
      rate: curve.rates[k],
      low: curve.low[k],
      high: curve.high[k],
      title: `${clip(curve.strategy)}\n${clip(curve.budget)}\nN ${size}: ${curve.rates[k].toFixed(3)} of ${curve.n[k]}`,
    })),
  );
  const last = curves.map((curve) => `${clip(curve.strategy)} ${curve.rates.at(-1).toFixed(2)}`).join(", ");
  return Plot.plot({
    className: "plot",
    width,
    height: 340,
    marginLeft: 48,
    marginBottom: 40,
    style: { fontSize: "12px" },
    color: { domain: names, range: names.map((name) => colour.get(name)) },
    symbol: { domain: names, range: ["circle", "square", "diamond", "triangle", "star", "cross", "wye"] },
    x: { type: "log" },
    y: { label: "success rate", domain: [0, 1], grid: true, labelArrow: "none", ticks: 5 },
    ariaLabel: `Success rate by number of training samples, ${clip(part, 80)}. At the most samples: ${last}.`,
    marks: [
      Plot.axisX(sizes.slice(-Math.floor(width / 44)), {
        text: (size) => String(size),
        label: "training samples, N",
        labelAnchor: "center",
        labelArrow: "none",
      }),
      Plot.ruleY([0.5], { stroke: "currentColor", strokeDasharray: "2 4", strokeOpacity: 0.6 }),
      Plot.areaY(points, {
        x: "size",
        y1: "low",
        y2: "high",
        fill: "row",
        z: "row",
        fillOpacity: 0.16 / Math.sqrt(curves.length),
      }),
      Plot.lineY(points, { x: "size", y: "rate", stroke: "row", z: "row", strokeWidth: 2 }),
      Plot.dot(points, {
        x: "size",
        y: "rate",
        fill: "row",
        symbol: "row",
        r: 4,
        stroke: "var(--page)",
        strokeWidth: 1,
      }),
      Plot.tip(points, Plot.pointer({ x: "size", y: "rate", title: "title", fill: "var(--raised)", lineWidth: 24 })),
    ],
  });
}

/** Bars of each group's accuracy, of the table's rows. */
class Groups {
  constructor(section, groups) {
    Object.assign(this, { section, groups });
    const headings = ["task", "model", "strategy", "budget", "group", "accuracy", "low", "high", "seeds"];
    numbersOf(
      section,
      headings,
      groups.map((one) => [
        one.task,
        one.model,
        one.strategy,
        one.budget,
        one.group,
        decimals(one.accuracy),
        decimals(one.low),
        decimals(one.high),
        one.n_seeds,
      ]),
    );
  }

  draw(rows) {
    const mine = inTable(this.groups, rows);
    this.section.hidden = !mine.length;
    drawParts(this.section, d3.group(mine, partOf), (part, name, width) => groupPlot(width, part, name));
  }
}

function groupPlot(width, all, part) {
  const rows = [...new Set(all.map(rowOf))].slice(0, MOST_BARS);
  const groups = all.filter((one) => rows.includes(rowOf(one)));
  const several = new Set(groups.map(({ strategy }) => strategy)).size < new Set(groups.map(rowOf)).size;
  const label = (row) => clip(several ? row.replace("\n", ", ") : row.split("\n")[0], several ? 30 : 18);
  const names = [...new Set(groups.map(({ group }) => group))];
  const bars = groups.map((one) => ({
    ...one,
    row: rowOf(one),
    title: `${clip(one.strategy)}\n${clip(one.group)}\naccuracy ${one.accuracy.toFixed(3)}`,
  }));
  const beside = width > 150 * names.length; // below each other where there is no room
  const facet = beside ? "fx" : "fy";
  const marginLeft = 20 + 7 * Math.max(...rows.map((row) => label(row).length));
  return Plot.plot({
    className: "plot",
    width,
    marginLeft,
    marginTop: 30,
    marginBottom: 40,
    style: { fontSize: "12px" },
    marginRight: beside ? 20 : 100,
    height: 70 + (beside ? 1 : names.length) * (24 * rows.length + 14),
    color: COLOUR,
    x: {
      domain: [0, 1],
      ticks: [0, 0.5, 1],
      tickFormat: "~g",
      grid: true,
      label: "accuracy",
      labelAnchor: "center",
      labelArrow: "none",
    },
    y: { domain: rows, label: null, tickSize: 0, tickFormat: label },
    [facet]: { domain: names, label: null, tickFormat: (name) => clip(name, 24), padding: 0.1 },
    ariaLabel: `Accuracy by group, ${clip(part, 80)}: ${counted(names.length, "group")}, ${counted(rows.length, "row")}.`,
    marks: [
      Plot.barX(bars, {
        x1: 0,
        x2: "accuracy",
        y: "row",
        [facet]: "group",
        fill: "kind",
        fillOpacity: 0.75,
        insetTop: 2,
        insetBottom: 2,
      }),
      Plot.ruleY(
        bars.filter(({ low }) => low !== null),
        { x1: "low", x2: "high", y: "row", [facet]: "group", strokeOpacity: 0.8 },
      ),
      Plot.ruleX([0], { strokeOpacity: 0.5 }),
      Plot.tip(
        bars,
        Plot.pointerY({
          x: "accuracy",
          y: "row",
          [facet]: "group",
          title: "title",
          fill: "var(--raised)",
          lineWidth: 24,
        }),
      ),
    ],
  });
}

function decimals(x) {
  return x === null ? "-" : x.toFixed(3);
}

/** Fill a section's numbers, as a table, when they are first asked for. */
function numbersOf(section, headings, rows) {
  const details = section.querySelector("details.numbers");
  details.addEventListener("toggle", () => {
    if (details.querySelector("table")) return;
    const line = (name, cells) =>
      make("tr", {}, ...cells.map((text) => make(name, name === "th" ? { scope: "col" } : {}, String(text))));
    const title = section.querySelector("h2").textContent;
    const table = make(
      "table",
      {},
      make("caption", { class: "hidden" }, title),
      make("thead", {}, line("th", headings)),
      make("tbody", {}, ...rows.map((row) => line("td", row))),
    );
    details.append(
      make("div", { class: "scroll long", role: "region", tabindex: "0", "aria-label": `${title}: numbers` }, table),
    );
  });
}
