"use strict";
// Success rates by number of training samples.

const MOST_CURVES = 8; // until the reader presses others
const MOST_CHIPS = 40;

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
    const names = [...new Set(mine.map(rowOf))].slice(0, MOST_CHIPS);
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
