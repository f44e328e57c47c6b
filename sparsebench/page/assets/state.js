"use strict";
// The address is the state: whatever is chosen is written behind the #, and read from there and nowhere else.

const FILTER = "f.";

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const filters = {};
  for (const [key, value] of given) if (key.startsWith(FILTER)) filters[key.slice(FILTER.length)] = value;
  return {
    view: given.get("view") ?? "all",
    search: given.get("q") ?? "",
    sort: list(given.get("sort")).map((key) => ({ id: key.replace(/^-/, ""), desc: key.startsWith("-") })),
    columns: given.has("cols") ? list(given.get("cols")) : null, // null: all of them
    cost: given.get("cost") ?? "",
    filters,
  };
}

function list(text) {
  return text ? text.split(",") : [];
}

/** Write some of the state over what it was; typing takes the place of the last entry in the browser's history. */
function writeState(change, { typing = false } = {}) {
  const state = { ...readState(), ...change };
  const out = new URLSearchParams();
  if (state.view !== "all") out.set("view", state.view);
  if (state.search) out.set("q", state.search);
  if (state.sort.length) out.set("sort", state.sort.map(({ id, desc }) => (desc ? "-" : "") + id).join(","));
  if (state.columns) out.set("cols", state.columns.join(","));
  if (state.cost) out.set("cost", state.cost);
  for (const [key, value] of Object.entries(state.filters)) if (value) out.set(FILTER + key, value);
  const hash = "#" + String(out).replaceAll("%2C", ",");
  history[typing ? "replaceState" : "pushState"](null, "", hash);
  dispatchEvent(new HashChangeEvent("hashchange")); // at once, so that no key that is typed meanwhile is lost
}

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

function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  place.classList.remove("fresh");
  void place.offsetWidth; // starts the animation again
  place.classList.add("fresh");
}
