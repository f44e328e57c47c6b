"use strict";
// What the table shows - filtered, sorted, with the columns that are picked - as text for elsewhere.

const LATEX = {
  "\\": "\\textbackslash{}",
  "~": "\\textasciitilde{}",
  "^": "\\textasciicircum{}",
  "<": "\\textless{}",
  ">": "\\textgreater{}",
};

const FORMATS = {
  md: {
    name: "Markdown",
    of({ columns, rows }) {
      const line = (cells) => `| ${cells.map((cell) => oneLine(cell).replaceAll("|", "\\|")).join(" | ")} |`;
      const rule = `|${columns.map((column) => (column.shown === "text" ? ":---" : "---:")).join("|")}|`;
      const body = rows.map((row) => line(columns.map((column) => row.text[column.key])));
      return [line(columns.map((column) => column.heading)), rule, ...body].join("\n") + "\n";
    },
  },
  latex: {
    name: "LaTeX",
    of({ columns, rows }) {
      const clean = (cell) => oneLine(cell).replace(/[\\~^<>&%$#_{}]/g, (c) => LATEX[c] ?? `\\${c}`);
      const line = (cells) => `${cells.map(clean).join(" & ")} \\\\`;
      const alignment = columns.map((column) => (column.shown === "text" ? "l" : "r")).join("");
      return [
        `\\begin{tabular}{${alignment}}`,
        "\\toprule",
        line(columns.map((column) => column.heading)),
        "\\midrule",
        ...rows.map((row) => line(columns.map((column) => row.text[column.key]))),
        "\\bottomrule",
        "\\end{tabular}",
        "",
      ].join("\n");
    },
  },
  csv: {
    name: "CSV",
    of({ columns, rows }) {
      const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
      const keys = columns.flatMap((column) => column.keys);
      const body = rows.map((row) => keys.map((key) => quoted(String(row.value[key] ?? ""))).join(","));
      return [keys.join(","), ...body].join("\n") + "\n";
    },
  },
};

function oneLine(text) {
  return text.replace(/\s+/g, " ");
}

async function copy(form, table) {
  const bibtex = form === "bibtex";
  const text = bibtex ? document.getElementById("bibtex").textContent + "\n" : FORMATS[form].of(table);
  const what = bibtex
    ? "the entries as BibTeX"
    : `${counted(table.rows.length, "row")}, ${counted(table.columns.length, "column")} as ${FORMATS[form].name}`;
  say((await toClipboard(text)) ? `Copied ${what}.` : "The browser does not let this page copy.");
}

function counted(n, word) {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const area = make("textarea", { class: "hidden", "aria-label": "to be copied" });
    document.body.append(area);
    area.value = text;
    area.select();
    const done = document.execCommand("copy"); // all that there is where a page from a file may not use the clipboard
    area.remove();
    focused?.focus();
    return done;
  }
}
