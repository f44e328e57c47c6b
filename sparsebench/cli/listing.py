"""sparsebench list."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from sparsebench.board.columns import Column
from sparsebench.board.fit import WIDTH, fit
from sparsebench.cli.guide import Guided
from sparsebench.cli.width import show, width
from sparsebench.errors import UserError

_KEYS = ("name", "kind", "site", "needs", "trained", "exports", "from", "what", "citation")
WHAT = ("plugins", "tasks", "models", "suites", "observers")


def first_line(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (thing.__doc__ or "").strip().partition("\n")[0]


@click.command("list", cls=Guided)
@click.argument("what", type=click.Choice(WHAT), default="plugins")
@click.option("--json", "as_json", is_flag=True, help="A list of objects with at least `name`.")
@click.option("--bibtex", is_flag=True, help="Where the listed strategies were published, as BibTeX.")
@click.option("--published", is_flag=True, help="The words that give the published methods, whole, and what they cost.")
@click.option(
    "--wide",
    is_flag=True,
    help=f"The whole table. [what fits the terminal, or {WIDTH} characters: citation, from and needs go first]",
)
def list_(what: str, as_json: bool, bibtex: bool, published: bool, wide: bool) -> None:
    """List the plugins (strategies), tasks, models, suites or observers that can be named."""
    if bibtex:
        if what != "plugins" or as_json:
            raise UserError("--bibtex lists what strategies cite", allowed="sparsebench list plugins --bibtex")
        click.echo("\n\n".join(sorted({row["bibtex"] for row in _rows("bibtex")} - {""})))
        return
    if published and what != "plugins":
        raise UserError("--published lists settings of strategies", allowed="sparsebench list plugins --published")
    rows = _rows("published" if published else what)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    show(f"{_table(rows, wide or published)}\n", "" if wide or published else "table")


def _rows(table: str) -> list[dict[str, Any]]:
    """Return a table of TABLES; plugins are loaded only where what they say is not known from before."""
    from sparsebench.plugin import catalog

    if table == "suites":
        return _suites(None)
    key = catalog.fingerprint()
    if (tables := catalog.load(key)) is None:
        from sparsebench.plugin.registry import Registry

        registry = Registry()
        tables = {name: make(registry) for name, make in TABLES.items()}
        if not registry.broken:  # what is missing today may be installed tomorrow
            catalog.save(key, tables)
    return tables.get(table, [])


def _table(rows: list[dict[str, Any]], wide: bool) -> str:
    """Return rows as a table, as much of it as a terminal has room for unless all is wanted."""
    from tabulate import tabulate

    if not wide and rows:
        columns = [Column(key, key, "text", "") for key in rows[0]]
        shown_rows, left = fit(rows, columns, width(), ("citation", "from", "needs"))
        rows = [{column.key: row[column.key] for column in left} for row in shown_rows]
    return tabulate(rows, headers="keys", tablefmt="simple")


def _plugins(registry: Any) -> list[dict[str, str]]:
    rows = [
        {
            "name": registered.cls.name,
            "kind": registered.cls.kind,
            "site": registered.cls.site,
            "needs": ", ".join(sorted(registered.cls.needs)),
            "trained": "yes" if registered.cls.trained else "fits" if registered.cls.fits() else "no",
            "exports": _exports(registered),
            "from": f"{registered.origin.distribution} {registered.origin.version}".strip(),
            "what": first_line(registered.cls),
            "citation": registered.cls.citation,
        }
        for registered in registry.strategies()
    ]
    broken = [
        {**dict.fromkeys(_KEYS, ""), "name": name, "kind": "broken", "what": reason}
        for name, reason in sorted(registry.broken.items())
    ]
    return rows + broken


def _exports(registered: Any) -> str:
    """Return "yes", "no", or "?" where neither its class nor a check says whether a strategy can be exported."""
    from sparsebench.deploy.exportable import exportable
    from sparsebench.plugin.catalog import exports

    said = exportable(registered.cls)
    found = exports(registered.cls.name, registered.origin) if said == "?" else None
    return said if found is None else "yes" if found else "no"


def _bibtex(registry: Any) -> list[dict[str, str]]:
    return [{"bibtex": registered.cls.bibtex} for registered in registry.strategies()]


def _published_methods(registry: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": registered.cls.name,
            "words": setting.words,
            "network": setting.network,
            "GMACs": setting.gmacs,
            "citation": registered.cls.citation,
        }
        for registered in registry.strategies()
        for setting in registered.cls.published
    ]


def _tasks(registry: Any) -> list[dict[str, str]]:
    return [
        {"name": cls.name, "inputs": cls.inputs, "model": cls.default_model, "what": first_line(cls)}
        for cls in registry.tasks()
    ]


def _models(registry: Any) -> list[dict[str, str]]:
    return [{"name": cls.name, "inputs": cls.inputs, "what": first_line(cls)} for cls in registry.models()]


def _observers(registry: Any) -> list[dict[str, str]]:
    return [{"name": cls.name, "what": first_line(cls)} for cls in registry.observers()]


def _suites(_registry: Any) -> list[dict[str, str]]:
    from sparsebench.planning.suite import load, names

    return [{"name": suite.name, "version": str(suite.version), "what": suite.title} for suite in map(load, names())]


TABLES: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "plugins": _plugins, "published": _published_methods, "bibtex": _bibtex, "tasks": _tasks, "models": _models,
    "observers": _observers,
}  # fmt: skip
"""What makes the rows of each table from a registry."""
