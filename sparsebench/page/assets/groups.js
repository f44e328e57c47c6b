"use strict";
// Accuracy by group.

const MOST_BARS = 40;

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
    drawParts(this.section, d3.group(mine, partOf), (part, name, width) => groupPlot(width, part, name), 1100);
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
