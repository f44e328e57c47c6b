"use strict";
// Accuracy against what it costs.

const COSTS = [
  { key: "macs_ratio", front: "pareto", curve: "step-after" },
  { key: "images_per_s", front: "pareto_speed", curve: "step-before" }, // of one device each: others do not compare
];
const MOST_NAMES = 14;
const NAME_HEIGHT = 14; // pixels
const WIDE = 8; // times that the dearest row costs of the cheapest, from which the axis is logarithmic

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

/** Return the points that nothing significantly beats and none of the others is above for less, by what they cost. */
function frontOf(points, { curve }) {
  const dear = curve === "step-after" ? d3.ascending : d3.descending; // MACs, or images a second
  const able = points.filter((point) => point.front);
  able.sort((a, b) => dear(a.x, b.x) || b.y - a.y);
  let best = -Infinity;
  const front = able.filter(({ y }) => y > best && ((best = y), true));
  return d3.sort(front, (point) => point.x);
}

function costPlot(width, points, cost, headed) {
  const front = frontOf(points, cost);
  const names = points.length <= MOST_NAMES ? points : front.slice(0, MOST_NAMES);
  const best = front.map(({ name, x, y }) => `${name} (${x.toPrecision(3)}, ${y.toFixed(3)})`).join(", ");
  const [least, most] = d3.extent(points, (point) => point.y);
  const costs = d3.extent(points, (point) => point.x);
  const wide = costs[0] > 0 && costs[1] / costs[0] > WIDE;
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
      ...(wide ? { type: "log", domain: costs, tickFormat: "~g" } : { domain: ends(costs) }),
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
