"use strict";
// The reader's choices are stored in the fragment of the page's address, so that a copied link shows the same view.

(() => {
  const { settings, papers: addresses } = JSON.parse(document.getElementById("data").textContent);
  const papers = new Map(Object.entries(addresses));
  const at = (id) => document.getElementById(id);
  for (const setting of settings)
    setting.rows = setting.rows.map((values) => Object.fromEntries(setting.keys.map((key, k) => [key, values[k]])));
  const wide = () => matchMedia("(min-width: 40rem)").matches;
  const fragment = () => new URLSearchParams(location.hash.slice(1));
  let address = fragment();
  let table, timer;

  function read() {
    const setting = settings[address.get("task")] ?? settings[0];
    const known = new Set(setting.rows.map((row) => row.strategy));
    const [sign, key] = /^(-?)(.*)$/.exec(address.get("sort") ?? "").slice(1);
    const column = setting.columns.find((column) => column.key === key);
    const first = setting.columns.find((column) => column.key === setting.sort);
    return {
      setting,
      budget: setting.budgets.find((budget) => String(budget) === address.get("budget")) ?? setting.middle,
      search: address.get("q") ?? "",
      sort: column ? { key, falling: sign === "-" } : { key: first?.key, falling: first?.falling },
      on: address.has("on") ? address.getAll("on").filter((name) => known.has(name)) : setting.named,
      axis: address.get("x"),
      every: address.has("every"),
    };
  }

  /** Change choices in the address; null removes a choice. */
  function write(changes) {
    for (const [key, value] of Object.entries(changes)) {
      address.delete(key);
      for (const item of [value].flat()) if (item !== null) address.append(key, item);
    }
    try {
      history.replaceState(null, "", `#${address}`);
    } catch {
      // The address of a frame with srcdoc, as in a notebook, cannot be changed.
    }
  }

  /** Show the sentences that are true: all words of their data-if are in a set. */
  function say(place, words) {
    for (const sentence of place.querySelectorAll("[data-if]"))
      sentence.hidden = !sentence.dataset.if.split(" ").every((word) => words.has(word));
  }

  function choices(select, options, chosen) {
    const toOption = ([value, text]) => make("option", { value: String(value), selected: value === chosen }, text);
    select.replaceChildren(...options.map(toOption));
    select.closest("label").hidden = options.length < 2;
  }

  function showTable(all = false) {
    const { setting, budget, search, sort, every } = read();
    const columns = setting.columns.filter((column) => column.first || every);
    const groups = select(setting, { budget, search, sort });
    table = { setting, groups, columns, sort, papers, onSort };
    const names = setting.rows.map((row) => row.strategy_name);
    say(at("about-table"), new Set([
      ...columns.map((column) => column.key),
      ...setting.rows.map((row) => row.kind),
      setting.budgets.length ? "curves" : "rows",
      names.some((name) => papers.has(name)) && "papers",
    ]));
    const count = groups.reduce((sum, { rows }) => sum + rows.length, 0);
    drawTable(at("table"), { ...table, all });
    fit();
    at("count").textContent = search && `${count.toLocaleString("en")} row${count === 1 ? "" : "s"}`;
    at("more").hidden = all || count <= AT_ONCE;
  }

  /** Keep the head of a table in sight if the table needs no horizontal scrolling; otherwise say that it needs it. */
  function fit() {
    for (const place of document.querySelectorAll(".scroll")) {
      const hidden = place.firstElementChild.offsetWidth - place.clientWidth;
      place.classList.toggle("fits", hidden <= 0);
      place.classList.toggle("cut", place.scrollLeft < hidden - 1);
      place.previousElementSibling.hidden = hidden <= 0;
    }
  }

  function onSort(key) {
    const { setting, sort } = read();
    const falling = key === sort.key ? !sort.falling : setting.columns.find((column) => column.key === key).falling;
    write({ sort: `${falling ? "-" : ""}${key}` });
    showTable();
  }

  function toggle(name) {
    const { on } = read();
    const next = on.includes(name) ? on.filter((other) => other !== name) : [...on, name].slice(0, MOST);
    write({ on: next.length ? next : "" });
    showChart();
  }

  function showChart() {
    const { setting, on, ...state } = read();
    const axes = setting.budgets.length ? Object.keys(AXES).filter((key) => linesOf(setting, key).length) : [];
    const axis = axes.includes(state.axis) ? state.axis : axes[0];
    const accuracy = setting.columns.find(({ key }) => key === "accuracy");
    at("chart").hidden = !axis && !accuracy;
    at("chart-title").textContent = axis ? "Accuracy over cost" : "Accuracy";
    at("choose").hidden = at("legend").hidden = !axis;
    choices(
      at("axis"),
      Object.entries(AXES).filter(([key]) => axes.includes(key)),
      axis,
    );
    if (!axis) return at("plot").replaceChildren(...(accuracy ? dots(setting, accuracy, wide()) : []));
    const lines = linesOf(setting, axis);
    const named = on.filter((name) => lines.some((line) => line.name === name)).slice(0, MOST);
    const describe = (row) => [row.strategy, ...valuesOf(setting, row)].join(", ");
    drawLines(at("plot"), { lines, on: named, axis, describe, onHover: (nearest) => tip(setting, nearest), toggle });
    const references = lines.filter(({ name }) => REFERENCES.has(name) && !named.includes(name));
    at("colours").textContent = address.has("on") ? "the chosen strategies" : setting.colours;
    say(at("legend"), new Set([
      ...references.map(({ name }) => name),
      named.length && "named",
      lines.length > named.length + references.length && "others",
    ]));
    const focused = document.activeElement?.dataset?.name;
    const short = shortNames(lines.map(({ name }) => name), 40);
    const boxes = lines.map(({ name }) => {
      const box = make("input", { type: "checkbox", checked: on.includes(name), "data-name": name });
      box.addEventListener("change", () => toggle(name));
      return make("label", {}, box, " ", short.get(name));
    });
    at("names").replaceChildren(...boxes);
    if (focused) [...at("names").querySelectorAll("input")].find((box) => box.dataset.name === focused)?.focus();
    const left = new Set(setting.rows.map((row) => row.strategy).filter((name) => name !== "dense"));
    for (const { name } of lines) left.delete(name);
    const costs = setting.rows.filter((row) => row.macs_ratio >= 1).map((row) => row.strategy);
    const [costly, unknown] = [
      [...left].filter((name) => costs.includes(name)),
      [...left].filter((name) => on.includes(name)),
    ];
    const sentence = (title, names) => (names.length ? `${title}: ${clip_(names.join(", "), 400)}. ` : "");
    at("costly").textContent =
      sentence("Not drawn because they cost more than dense", costly) + sentence("Not measured on this axis", unknown);
  }

  /** Return the values of a point of the chart as texts. */
  function valuesOf(setting, row) {
    const wanted = ["macs_ratio", "speed_up", "accuracy", "accuracy_delta", "random_delta"];
    const columns = setting.columns.filter(({ key }) => wanted.includes(key) && row[key] != null);
    return columns.map((column) => `${column.heading}: ${format(row, column)}`);
  }

  function tip(setting, nearest) {
    at("tip").hidden = !nearest;
    if (!nearest) return;
    const { row } = nearest.point;
    at("tip").replaceChildren(
      make("strong", {}, clip_(row.strategy, 40)),
      ...valuesOf(setting, row).map((text) => make("div", {}, text)),
    );
    const { clientWidth } = at("plot");
    const beside = nearest.left > clientWidth / 2 ? nearest.left - at("tip").offsetWidth - 14 : nearest.left + 14;
    at("tip").style.left = `${Math.max(0, Math.min(beside, clientWidth - at("tip").offsetWidth))}px`;
    at("tip").style.top = `${nearest.top + 14}px`;
  }

  /** Return the title of a setting, with the budget if all values of a column are at the same budget. */
  function titleOf({ title, rows }, { key }) {
    const measured = rows.filter((row) => row[key] != null && row.strategy !== "dense");
    const budgets = new Set(measured.map(({ budget }) => budget));
    return budgets.size === 1 && measured[0].budget ? `${title}, budget ${measured[0].budget}` : title;
  }

  /** Return a setting with the rows at its lowest budget, where most of the background can be removed, and dense. */
  function atLowestBudget(setting) {
    const lowest = Math.min(...setting.budgets);
    const rows = setting.rows.filter(({ at: budget }) => budget == null || budget === lowest);
    return { ...setting, rows, title: `${setting.title}, at ${lowest} of the MACs` };
  }

  /** Show IoU, spurious gap and sample complexity of each task that has them. */
  function showOthers() {
    for (const place of document.querySelectorAll("[data-dots]")) {
      place.hidden = true;
      for (const setting of settings) {
        const column = setting.columns.find(({ key }) => key === place.dataset.dots);
        if (!column) continue;
        const hasLowest = column.key === "aligned_gap_reduction" && setting.budgets.length > 1;
        const shown = hasLowest ? atLowestBudget(setting) : setting;
        place.append(make("h3", {}, titleOf(shown, column)), ...dots(shown, column, wide()));
        place.hidden = false;
      }
    }
  }

  function show() {
    const { setting, budget, search, every } = read();
    const titles = settings.map(({ title }, k) => [k, title]);
    choices(at("task"), titles, settings.indexOf(setting));
    const budgets = setting.budgets.map((budget) => [budget, String(budget)]);
    choices(at("budget"), budgets, budget);
    if (at("search").value !== search) at("search").value = search;
    at("every").checked = every;
    at("every").closest("label").hidden = setting.columns.every((column) => column.first);
    showChart(); // before the long table, as it measures its width
    showTable();
  }

  async function copy(form) {
    try {
      await navigator.clipboard.writeText(form === "BibTeX" ? at("bibtex").textContent : copied(form, table));
      at("copied").textContent = `Copied as ${form}.`;
    } catch {
      at("copied").textContent = "The browser does not let this page copy.";
    }
  }

  document.documentElement.classList.add("js");
  const on = (id, event, change, then) => at(id).addEventListener(event, () => (write(change(at(id))), then()));
  at("skip").addEventListener("click", () => at("scroll").focus());
  for (const place of document.querySelectorAll(".scroll")) place.addEventListener("scroll", fit);
  on("task", "change", ({ value }) => ({ task: value, budget: null, sort: null, on: null, x: null }), show);
  on("budget", "change", ({ value }) => ({ budget: value }), showTable);
  on("axis", "change", ({ value }) => ({ x: value }), showChart);
  on("every", "change", ({ checked }) => ({ every: checked ? "" : null }), showTable);
  on("search", "input", ({ value }) => ({ q: value || null }), showTable);
  on(
    "more",
    "click",
    () => ({}),
    () => showTable(true),
  );
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", () => copy(button.dataset.copy));
  addEventListener("hashchange", () => ((address = fragment()), show()));
  addEventListener("beforeprint", () => showTable(true));
  addEventListener("resize", () => (clearTimeout(timer), (timer = setTimeout(() => (showChart(), fit()), 100))));
  show();
  at("no-script").remove();
  requestAnimationFrame(() =>
    setTimeout(() => {
      showOthers(); // after the first screen
      document.documentElement.dataset.ready = "yes";
    }),
  );
})();
