"use strict";
// What the charts share: Observable Plot draws them, in colours that follow the theme.

const KINDS = [
  ["baseline", "circle"],
  ["deployable", "square"],
  ["oracle", "diamond"],
];
const COLOUR = { domain: KINDS.map(([kind]) => kind), range: KINDS.map(([kind]) => `var(--${kind})`) };
const SYMBOL = { domain: KINDS.map(([kind]) => kind), range: KINDS.map(([, symbol]) => symbol) };
const MOST_PLOTS = 12;
const GAP = 28; // pixels between plots
const CLIP = 40; // characters of a name in a chart

function clip(text, most = CLIP) {
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}

/** Draw each part of something into a section, several beside each other and with headings. */
function drawParts(section, parts, draw, most = 860) {
  const place = section.querySelector(".plots");
  const several = parts.size > 1;
  section.classList.toggle("several", several);
  const room = place.clientWidth;
  const beside = several ? Math.max(1, Math.min(parts.size, Math.floor(room / 440))) : 1;
  const width = Math.max(260, Math.min(most, room / beside - (beside > 1 ? GAP : 0)));
  place.style.setProperty("--beside", beside);
  const made = [...parts].slice(0, MOST_PLOTS).map(([name, items]) => {
    const svg = draw(items, name, width);
    svg.setAttribute("role", "img");
    // A picture has one label, and not one for each of its parts.
    for (const mark of svg.querySelectorAll("g[aria-label]")) {
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
