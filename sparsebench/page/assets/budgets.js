"use strict";
// Accuracy by the share of dense MACs that is really spent: a line a strategy, of each task.

const BELOW_LOWEST = 0.03; // room on the axis below the lowest budget
const RIGHT_END = 1.02; // what costs more than dense is beyond the axis
const ALWAYS_DRAWN = new Set(["random_inside", "oracle"]);

class BudgetCurves {
  constructor(section, boards) {
    Object.assign(this, { section, boards, pressed: new Map(), chips: Curves.prototype.chips });
    const headings = ["task", "model", "strategy", "asked", "spent", "accuracy", "low", "high"];
    numbersOf(
      section,
      headings,
      boards.flatMap((board) =>
        board.curves.flatMap((curve) =>
          pointsOf(curve).map((point) => [
            board.task,
            board.model,
            curve.strategy,
            point.asked,
            ...[point.x, point.y, point.low, point.high].map(decimals),
          ]),
        ),
      ),
    );
  }

  draw() {
    const names = [...new Set(this.boards.flatMap(({ curves }) => curves.slice(1).map(({ strategy }) => strategy)))];
    const on = names.filter((name, k) => this.pressed.get(name) ?? (k < MOST_CURVES || ALWAYS_DRAWN.has(name)));
    const colour = new Map(names.map((name, k) => [name, d3.schemeTableau10[k % 10]]));
    this.chips([], names, on, colour);
    const parts = new Map(this.boards.map((board) => [partOf(board), board]));
    drawParts(this.section, parts, (board, name, width) => budgetPlot(width, board, name, on, colour));
  }
}

function pointsOf({ strategy, kind, budgets, spent, accuracy, low, high }) {
  return spent.map((x, k) => ({
    strategy,
    kind,
    asked: budgets[k],
    x,
    y: accuracy[k],
    low: low[k],
    high: high[k],
    title: `${clip(strategy)}\n${budgets[k]} of dense MACs asked, ${x.toFixed(3)} spent\naccuracy ${decimals(accuracy[k])}`,
  }));
}

function budgetPlot(width, board, part, names, colour) {
  const [dense, ...others] = board.curves;
  const [end] = pointsOf(dense);
  const domain = [Math.min(...board.budgets) - BELOW_LOWEST, RIGHT_END];
  const curves = others.filter(({ strategy }) => names.includes(strategy));
  const points = curves.flatMap(pointsOf).filter(({ x }) => x >= domain[0] && x <= domain[1]);
  const path = curves.flatMap((curve) => {
    const own = pointsOf(curve).filter(({ x }) => x < 1);
    return own.length ? [...own, { ...end, strategy: curve.strategy, kind: curve.kind }] : [];
  });
  const lines = (kinds, dashes) =>
    Plot.lineY(
      path.filter(({ kind }) => kinds.includes(kind)),
      { x: "x", y: "y", z: "strategy", stroke: "strategy", strokeWidth: 2, strokeDasharray: dashes, clip: true },
    );
  const shown = [...points, end];
  const best = curves.map((curve) => `${clip(curve.strategy)} ${decimals(curve.accuracy[0])}`).join(", ");
  return Plot.plot({
    className: "plot",
    width,
    height: 400,
    marginLeft: 48,
    marginBottom: 40,
    style: { fontSize: "12px" },
    color: { domain: names, range: names.map((name) => colour.get(name)) },
    x: { domain, label: "realised MACs, share of dense", labelAnchor: "center", labelArrow: "none", ticks: 7 },
    y: {
      label: "accuracy",
      grid: true,
      labelArrow: "none",
      nice: true,
      domain: ends(shown.flatMap(({ y, low, high }) => [low ?? y, high ?? y])),
    },
    ariaLabel: `Accuracy by realised MACs, ${clip(part, 80)}; dense ${decimals(end.y)}. With the fewest MACs: ${best}.`,
    marks: [
      Plot.ruleY([end.y], { stroke: "currentColor", strokeDasharray: "2 4", strokeOpacity: 0.6 }),
      lines(["deployable"], null),
      lines(["baseline"], "2 4"),
      lines(["oracle"], "7 4"),
      Plot.ruleX(
        points.filter(({ low }) => low !== null),
        { x: "x", y1: "low", y2: "high", stroke: "strategy", strokeOpacity: 0.5, strokeWidth: 1.5 },
      ),
      Plot.dot(points, { x: "x", y: "y", fill: "strategy", r: 4, stroke: "var(--page)", strokeWidth: 1 }),
      Plot.dot([end], { x: "x", y: "y", symbol: "star", r: 7, fill: "currentColor" }),
      Plot.tip(shown, Plot.pointer({ x: "x", y: "y", title: "title", fill: "var(--raised)", lineWidth: 30 })),
    ],
  });
}

(() => {
  const { budgets } = JSON.parse(document.getElementById("data").textContent);
  const curves = new BudgetCurves(document.getElementById("budgets"), budgets);
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (width !== (width = document.documentElement.clientWidth)) curves.draw();
  });
  curves.draw();
})();
