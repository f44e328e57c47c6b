"""Commands that say what there is: list, show, data and env."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.board.columns import Column
from sparsebench.board.tables import WIDTH, fit
from sparsebench.cli.terminal import Guided, width, write
from sparsebench.errors import UserError, unknown

if TYPE_CHECKING:
    from sparsebench.plugin.registry import Registry

_KEYS = ("name", "kind", "site", "needs", "trained", "exports", "from", "what", "citation")
WHAT = ("plugins", "tasks", "models", "suites", "observers")


def first_line(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (thing.__doc__ or "").strip().partition("\n")[0]


@click.command("list", cls=Guided)
@click.argument("what", type=click.Choice(WHAT), default="plugins")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects with at least `name`.")
@click.option("--bibtex", is_flag=True, help="Print the BibTeX entries of the listed strategies.")
@click.option("--published", is_flag=True, help="List published settings, as values for --plugin, with their GMACs.")
@click.option(
    "--wide",
    is_flag=True,
    help=f"All columns. [those that fit the terminal, or {WIDTH} characters; citation is left out first]",
)
def list_(what: str, as_json: bool, bibtex: bool, published: bool, wide: bool) -> None:
    """List strategies, tasks, models, suites or observers."""
    from sparsebench.plugin.registry import Registry

    if bibtex:
        if what != "plugins" or as_json:
            raise UserError("--bibtex lists what strategies cite", allowed="sparsebench list plugins --bibtex")
        click.echo("\n\n".join(sorted({registered.cls.bibtex for registered in Registry().strategies()} - {""})))
        return
    if published and what != "plugins":
        raise UserError("--published lists settings of strategies", allowed="sparsebench list plugins --published")
    rows = TABLES["published" if published else what](Registry())
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    write(f"{_table(rows, wide or published)}\n", "" if wide or published else "table")


def _table(rows: list[dict[str, Any]], wide: bool) -> str:
    """Return rows as a table, as much of it as a terminal has room for unless all is wanted."""
    from tabulate import tabulate

    if not wide and rows:
        columns = [Column(key, key, "text", "") for key in rows[0]]
        shown_rows, left = fit(rows, columns, width(), ("citation", "from", "needs"))
        rows = [{column.key: row[column.key] for column in left} for row in shown_rows]
    return tabulate(rows, headers="keys", tablefmt="simple")


def _plugins(registry: Registry) -> list[dict[str, str]]:
    from sparsebench.deploy.export import exportable

    rows = [
        {
            "name": registered.cls.name,
            "kind": registered.cls.kind,
            "site": registered.cls.site,
            "needs": ", ".join(sorted(registered.cls.needs)),
            "trained": "yes" if registered.cls.trained else "fits" if registered.cls.fits() else "no",
            "exports": exportable(registered.cls),
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


def _published_methods(registry: Registry) -> list[dict[str, Any]]:
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


def _named(classes: Iterable[Any], **columns: str) -> list[dict[str, str]]:
    """Return a row for each class: its name, the attributes that columns show, and what it is."""
    return [
        {"name": cls.name} | {key: getattr(cls, of) for key, of in columns.items()} | {"what": first_line(cls)}
        for cls in classes
    ]


def _suites(_registry: Registry) -> list[dict[str, str]]:
    from sparsebench.plan.request import load, names

    return [{"name": suite.name, "version": str(suite.version), "what": suite.title} for suite in map(load, names())]


TABLES: dict[str, Callable[[Registry], list[dict[str, Any]]]] = {
    "plugins": _plugins,
    "published": _published_methods,
    "tasks": lambda registry: _named(registry.tasks(), inputs="inputs", model="default_model"),
    "models": lambda registry: _named(registry.models(), inputs="inputs"),
    "observers": lambda registry: _named(registry.observers()),
    "suites": _suites,
}
"""What makes the rows of each table from a registry."""


@click.command(cls=Guided)
@click.argument("name")
@click.option("--bibtex", is_flag=True, help="Print only the BibTeX entry of the strategy.")
def show(name: str, bibtex: bool) -> None:
    """Describe a strategy, task, model, observer or suite.

    NAME may also be a FILE.py, for the strategies in it.
    """
    from sparsebench.plan import request as suites
    from sparsebench.plugin.registry import Registry

    registry = Registry()
    if name.endswith(".py"):
        for strategy in registry.load_file(Path(name)):
            _class("strategy", registry.strategy(strategy).cls, bibtex)
        return
    known = _classes_of(registry)
    if name in registry.broken:
        raise UserError(f"plugin '{name}' does not load: {registry.broken[name]}")
    if name in known:
        _class(*known[name], bibtex)
    elif bibtex and name in suites.names():
        raise UserError("only strategies have a BibTeX entry", got=f"suite '{name}'")
    elif name in suites.names():
        write(suites.text(name))
    else:
        bare = name.partition(":")[0]
        names = {*known, *suites.names()}
        raise unknown("strategy, task, model, observer or suite", name, names, meant=bare if bare in names else None)


def _classes_of(registry: Registry) -> dict[str, tuple[str, Any]]:
    """Return, by their names, what a registry has and of which kind it is."""
    classes: dict[str, list[Any]] = {
        "strategy": [registered.cls for registered in registry.strategies()],
        "task": registry.tasks(),
        "model": registry.models(),
        "observer": registry.observers(),
    }
    return {cls.name: (what, cls) for what, several in classes.items() for cls in several}


def _say(text: str) -> None:
    write(f"{text}\n")


def _class(what: str, cls: Any, bibtex: bool) -> None:
    from sparsebench.strategy.plans import DOES

    if bibtex:
        if not (entry := getattr(cls, "bibtex", "")):
            raise UserError(f"{what} '{cls.name}' has no BibTeX entry", next_step="sparsebench list --bibtex")
        click.echo(entry)
        return
    _say(f"{what} {cls.name}\n")
    if what == "strategy":
        _say("\n".join(f"published: {setting}" for setting in cls.published or ("no setting is known here",)))
        differs = cls.differs or ("nothing known" if cls.citation or cls.published else "none is published")
        _say(f"differs from the published method: {differs}\n")
    _say(f"{inspect.cleandoc(cls.__doc__ or '')}\n")
    if what == "strategy":
        _say(f"kind: {cls.kind}\nsite: {cls.site}\nneeds: {', '.join(sorted(cls.needs)) or 'nothing'}")
        _say(f"trained: {_training(cls)}\nexports: {_how_exports(cls)}\ncitation: {cls.citation or '-'}\n")
    if what == "strategy" and cls.budgeted:
        from sparsebench.plan.contenders import BUDGET_KEYS  # NumPy

        _say(f"budget options: {', '.join(BUDGET_KEYS)}\n")
    for key, info in cls.model_fields.items():
        if key == "disposal" and len(cls.allowed_disposals()) == 1:
            continue
        kind = str(info.annotation) if not isinstance(info.annotation, type) else info.annotation.__name__
        if key == "disposal":
            kind = f"Literal{list(cls.allowed_disposals())}"
        default = "required" if info.is_required() else repr(info.default)
        about = f"  {info.description}" if info.description else ""
        _say(f"  {key} = {default}  ({kind.replace('typing.', '')}){about}")
        if key == "disposal":
            _say("\n".join(f"    {disposal}: {DOES[disposal]}" for disposal in cls.allowed_disposals()))


def _training(cls: Any) -> str:
    """Return whether a strategy is trained, or what it looks at before the test."""
    if not cls.fits():
        return "yes" if cls.trained else "no"
    return f"no; it looks at {cls.fit_images} training images first" + (", with labels" if cls.fit_labels else "")


def _how_exports(cls: Any) -> str:
    """Return whether a network with a strategy can be written as a file, and who knows where nobody said."""
    from sparsebench.deploy.export import exportable, never_exported

    why = never_exported(cls) or "its choices read numbers from tensors"
    return {"yes": "yes", "no": f"no: {why}", "?": "sparsebench check says"}[exportable(cls)]


@click.command(cls=Guided)
@click.option(
    "--data-root", default="data", show_default=True, type=click.Path(path_type=Path), help="Folder with the data sets."
)
@click.option(
    "--verify", is_flag=True, help="Check the contents of the files (checksums and tables), not only their names."
)
@click.option(
    "--clear-cache", is_flag=True, help="Delete the decoded pictures in the cache; later runs decode them again."
)
@click.option("--json", "as_json", is_flag=True, help="Print an object with `sets` and `cache`.")
def data(data_root: Path, verify: bool, clear_cache: bool, as_json: bool) -> None:
    """Show which data sets are on this machine.

    For missing data sets, the command says where to get them and where to put them. The names of data sets are values
    for `--images`, `--backgrounds` and `--task` of sparsebench run. `run --download` downloads some of them.
    """
    from sparsebench.errors import UserError
    from sparsebench.files import cache_folder
    from sparsebench.tasks.sources import cache

    if clear_cache:
        try:
            files, size = cache.clear()
        except OSError as error:
            raise UserError(f"the cache cannot be emptied: {error}") from error
        click.echo(f"removed: {files} files, {size / 1e6:.1f} MB", err=True)
    sets = _sets(data_root, verify)
    files, size = cache.size()
    where = cache_folder()
    if as_json:
        kept = {"place": None if where is None else str(where), "files": files, "bytes": size}
        click.echo(json.dumps({"sets": sets, "cache": kept}, indent=1))
        return
    click.echo(_data_table(sets))
    click.echo(f"\ncache of decoded pictures: {where or 'none'} ({files} files, {size / 1e6:.1f} MB)")


def _sets(root: Path, verify: bool) -> list[dict[str, Any]]:
    from sparsebench.errors import UserError
    from sparsebench.tasks.sources.files import Contents, listing
    from sparsebench.tasks.sources.known import DEFAULTS, KNOWN, read

    rows = []
    for known in KNOWN.values():
        state, note = known.look(root, verify)
        if verify and state == "there" and known.name in DEFAULTS:
            try:
                pictures = dict.fromkeys(listing(root / known.folder).names, "")
                read(root / known.folder, known.name, DEFAULTS[known.name], Contents(pictures))
            except UserError as error:
                state, note = "corrupt", str(error)
        rows.append(
            {
                "name": known.name,
                "for": list(known.uses),
                "state": state,
                "note": note,
                "pictures": known.pictures,
                "place": [str(root / place) for place in known.places],
                "source": known.source,
                "fetched": known.megabytes > 0,
                "licence": known.licence,
                "citation": known.citation,
            }
        )
    return rows


def _data_table(sets: list[dict[str, Any]]) -> str:
    """Return what there is as a table, and below it how to get what is not."""
    from tabulate import tabulate

    columns = ("name", "for", "state", "pictures", "place")
    shown = [[", ".join(row[key]) if isinstance(row[key], list) else row[key] for key in columns] for row in sets]
    lines = [tabulate([[*row[:4], row[4] or "scikit-learn"] for row in shown], headers=columns, tablefmt="simple")]
    for row in sets:
        if row["state"] != "there":
            how = " or give --download to sparsebench run" if row["fetched"] else ""
            lines.append(f"{row['name']}: {row['note']}; get it from {row['source']}{how}")
    return "\n".join([lines[0], "", *lines[1:]] if len(lines) > 1 else lines)


@click.command(cls=Guided)
def env() -> None:
    """Show the machine and the libraries, as stored with records."""
    import torch
    from tabulate import tabulate

    from sparsebench.records.record import digest
    from sparsebench.runner.devices import environment

    machine, gpus = environment(), map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    rows = [*machine.items(), ("CUDA devices", ", ".join(gpus) or "none"), ("hash", digest(machine))]
    click.echo(tabulate(rows, tablefmt="plain"))
