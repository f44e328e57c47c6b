"use strict";
// What the reader does goes to the address; what stands there is shown.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const views = new Map(data.views.filter((view) => view.length).map((view) => [view.name, view]));
  const made = new Map(); // of views, when they are first shown
  const curves = new Curves(at("curves"), data.curves);
  const groups = new Groups(at("groups"), data.groups);
  const screen = new TableOnScreen(at("table"), at("scroll"), onSort);
  let view, shown, drawn;

  function viewNamed(name) {
    const known = views.has(name) ? name : "all";
    if (!made.has(known)) made.set(known, makeView(views.get(known) ?? data.views[0]));
    return made.get(known);
  }

  function onSort({ key, shown: kind, heading }, more) {
    const { sort } = readState();
    const now = sort.find(({ id }) => id === key);
    const first = kind === "text" || key.startsWith("sample_complexity") ? false : true; // numbers: the largest first
    const next = !now ? [{ id: key, desc: first }] : now.desc === first ? [{ id: key, desc: !first }] : [];
    writeState({ sort: [...(more ? sort.filter(({ id }) => id !== key) : []), ...next] });
    say(next.length ? `Sorted by ${heading}, ${next[0].desc ? "falling" : "rising"}.` : "In the board's own order.");
  }

  function show() {
    const state = readState();
    view = viewNamed(state.view);
    shown = select(view, state);
    controls(state);
    screen.show(view, shown, state.sort);
    const all = view.data.length,
      left = shown.rows.length;
    at("count").textContent =
      left === all ? counted(all, "row") : `${left.toLocaleString("en")} of ${counted(all, "row")}`;
    const charts = JSON.stringify([state.view, state.search, state.filters, state.cost]);
    if (charts !== drawn) later(charts);
  }

  /** Draw the charts after the table is on the screen; not again because it is sorted. */
  function later(charts) {
    drawn = charts;
    requestAnimationFrame(() => setTimeout(() => drawn === charts && draw()));
  }

  function draw() {
    drawCost(at("cost"), view, shown.filtered, readState().cost);
    curves.draw(shown.filtered);
    groups.draw(shown.filtered);
    document.documentElement.dataset.charts = "drawn";
  }

  function controls(state) {
    keepFocus(
      at("views"),
      [...views.values()].map(({ name, title }) => {
        const button = make(
          "button",
          { type: "button", id: `view-${name}`, "aria-pressed": String(name === view.name) },
          title,
        );
        button.addEventListener("click", () => writeState({ view: name, columns: null, sort: [] }));
        return button;
      }),
    );
    if (at("search").value !== state.search) at("search").value = state.search;
    keepFocus(at("facets"), facets(state));
    const legend = at("columns").querySelector("legend");
    keepFocus(at("columns"), [legend, ...view.columns.map((column) => pick(column, state))]);
    at("reset").hidden = !location.hash.replace(/^#(view=\w+)?$/, "");
  }

  function facets(state) {
    return view.columns
      .filter(({ key, shown: kind }) => kind === "text" && key !== "rank" && key !== "strategy")
      .flatMap((column) => {
        const values = [...new Set(view.data.map((row) => row.text[column.key]))].sort(natural.compare);
        if (values.length < 2) return [];
        const options = values.map((value) =>
          make("option", { value, selected: state.filters[column.key] === value }, clip(value)),
        );
        const select = make("select", { id: `facet-${column.key}` }, make("option", { value: "" }, "all"), ...options);
        select.addEventListener("change", () =>
          writeState({ filters: { ...readState().filters, [column.key]: select.value } }),
        );
        const label = make("label", { for: select.id }, column.heading);
        return [make("span", { class: state.filters[column.key] ? "facet on" : "facet" }, label, " ", select)];
      });
  }

  function pick({ key, heading, what }, state) {
    const box = make("input", { type: "checkbox", id: `column-${key}`, checked: state.columns?.includes(key) ?? true });
    box.addEventListener("change", () => {
      const there = new Set(readState().columns ?? view.columns.map((column) => column.key));
      there[box.checked ? "add" : "delete"](key);
      if (!there.size) return void (box.checked = true); // a table has a column
      const kept = view.columns.map((column) => column.key).filter((name) => there.has(name));
      writeState({ columns: kept.length === view.columns.length ? null : kept });
    });
    return make("label", { title: what }, box, " ", heading);
  }

  /** Replace what a place holds; what had the focus there has it still. */
  function keepFocus(place, children) {
    const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
    place.replaceChildren(...children);
    if (focused) at(focused)?.focus();
  }

  function theme() {
    const root = document.documentElement,
      button = at("theme"),
      system = matchMedia("(prefers-color-scheme: dark)");
    const remembered = (value) => {
      try {
        return value === undefined ? localStorage.getItem("theme") : localStorage.setItem("theme", value);
      } catch {
        return null; // a browser that keeps nothing for pages from files
      }
    };
    const set = () => {
      const chosen = remembered() ?? root.dataset.theme;
      if (chosen) root.dataset.theme = chosen;
      button.setAttribute("aria-pressed", String((chosen ?? (system.matches ? "dark" : "light")) === "dark"));
    };
    system.addEventListener("change", set);
    button.addEventListener("click", () => {
      root.dataset.theme = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
      remembered(root.dataset.theme);
      set();
    });
    set();
  }

  document.documentElement.classList.add("js");
  theme();
  at("search").addEventListener("input", () => writeState({ search: at("search").value }, { typing: true }));
  at("reset").addEventListener("click", () => {
    writeState({ search: "", sort: [], columns: null, filters: {} });
    at("search").focus();
  });
  at("cost-by").addEventListener("change", (event) => writeState({ cost: event.target.value }));
  document
    .querySelectorAll("[data-copy]")
    .forEach((button) => button.addEventListener("click", () => copy(button.dataset.copy, shown)));
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the state
    at("scroll").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && at("picker").open) {
      at("picker").open = false;
      at("picker").querySelector("summary").focus();
    }
  });
  document.addEventListener("click", (event) => {
    if (!at("picker").contains(event.target) && document.contains(event.target)) at("picker").open = false;
  });
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (width !== (width = document.documentElement.clientWidth)) later({});
  });
  addEventListener("hashchange", show);
  show();
})();
