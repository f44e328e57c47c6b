"""Commands that look things up: list, show, data and env."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from sparsebench import __version__
from sparsebench.board.columns import Column
from sparsebench.board.tables import WIDTH, fit
from sparsebench.cli.terminal import PATH, width, write
from sparsebench.errors import UserError, unknown
from sparsebench.files import cache_folder, files_in, write_whole
from sparsebench.measure.cost import plain_vit_cost
from sparsebench.measure.schedule import TokenSchedule, counts_text, only_schedule
from sparsebench.plan import suite as suites
from sparsebench.plan.contenders import BUDGET_KEYS
from sparsebench.plugin.registry import Registry, distribution, entries, files_of, is_shipped
from sparsebench.records.record import digest
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.sources import cache

_KEYS = ("name", "kind", "site", "needs", "trained", "exports", "variant", "from", "what", "citation")
WHAT = ("plugins", "tasks", "models", "suites", "observers")


def first_line(cls: Any) -> str:
    """Return the first line of the docstring of a class."""
    return (cls.__doc__ or "").strip().partition("\n")[0]


@click.command("list")
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
    if bibtex:
        if what != "plugins" or as_json:
            raise UserError("--bibtex lists only strategies", allowed="sparsebench list plugins --bibtex")
        click.echo("\n\n".join(row["bibtex"] for row in _rows("bibtex")))
        return
    if published and what != "plugins":
        raise UserError("--published lists only strategies", allowed="sparsebench list plugins --published")
    rows = _rows("published" if published else what)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    fits = not wide and not published
    if fits and rows:
        columns = [Column(key, key, "text", "") for key in rows[0]]
        shown_rows, visible = fit(rows, columns, width(), ("citation", "from", "needs"))
        rows = [{column.key: row[column.key] for column in visible} for row in shown_rows]
    write(f"{tabulate(rows, headers='keys', tablefmt='simple')}\n", "table" if fits else "")


def _plugins(registry: Registry) -> list[dict[str, str]]:
    from sparsebench.deploy.export import exportable

    rows = []
    for entry in registry.strategies():
        cls = entry.cls
        trained = "fits" if cls.fits() else "no"
        values = (
            cls.name,
            cls.kind,
            cls.site,
            ", ".join(sorted(cls.needs)),
            "yes" if cls.trained else trained,
            exportable(cls),
            "variant" if cls.variant else "",
            f"{entry.origin.distribution} {entry.origin.version}".strip(),
            first_line(cls),
            cls.citation,
        )
        rows.append(dict(zip(_KEYS, values, strict=True)))
    broken = sorted(registry.broken.items())
    return rows + [dict.fromkeys(_KEYS, "") | {"name": name, "kind": "broken", "what": why} for name, why in broken]


def _class_rows(classes: Iterable[Any], **columns: str) -> list[dict[str, str]]:
    """Return a row for each class: its name, the attributes named by `columns`, and the first line of its docstring."""
    rows = []
    for cls in classes:
        row = {"name": cls.name}
        for key, attribute in columns.items():
            row[key] = getattr(cls, attribute)
        row["what"] = first_line(cls)
        rows.append(row)
    return rows


def _published(registry: Registry) -> list[dict[str, Any]]:
    """Return a row for each published setting of a strategy."""
    rows = []
    for entry in registry.strategies():
        cls = entry.cls
        for item in cls.published:
            row = {"name": cls.name, "words": item.words, "network": item.network, "GMACs": item.gmacs}
            rows.append(row | {"citation": cls.citation})
    return rows


def _bibtex(registry: Registry) -> list[dict[str, str]]:
    """Return the citations of strategies in BibTeX, each once."""
    texts = {entry.cls.bibtex for entry in registry.strategies()}
    return [{"bibtex": text} for text in sorted(texts) if text]


def _suites(_registry: Registry) -> list[dict[str, str]]:
    """Return a row for each suite."""
    loaded = map(suites.load, suites.names())
    return [{"name": suite.name, "version": str(suite.version), "what": suite.title} for suite in loaded]


TABLES: dict[str, Callable[[Registry], list[dict[str, Any]]]] = {
    "plugins": _plugins,
    "published": _published,
    "bibtex": _bibtex,
    "tasks": lambda registry: _class_rows(registry.tasks(), inputs="inputs", model="default_model"),
    "models": lambda registry: _class_rows(registry.models(), inputs="inputs"),
    "observers": lambda registry: _class_rows(registry.observers()),
    "suites": _suites,
}
"""The functions that make the rows of each table from a registry."""


def _rows(what: str) -> list[dict[str, Any]]:
    """Return the rows of a table. With third-party plugins they are cached, because an import may take seconds.

    The cache holds until a distribution or a file of a plugin's package changes. A broken plugin is tried each time.
    """
    points = entries()
    strangers = [entry for entry in points.values() if not is_shipped(entry)]
    if not strangers:
        return TABLES[what](Registry())
    about = [(entry.name, entry.value, *distribution(entry.dist)) for entry in points.values()]
    files = [path for entry in points.values() for path in files_of(entry) if path.is_file()]
    stats = [(str(path), stat.st_mtime_ns, stat.st_size) for path in sorted(set(files)) for stat in [path.stat()]]
    path = cache_folder() / f"list-{what}-{digest([__version__, about, stats])[:16]}.json"
    with suppress(OSError, ValueError):
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())
        return rows
    registry = Registry()
    rows = TABLES[what](registry)
    if not registry.broken:
        with suppress(UserError):
            for older in files_in(path.parent, ".json"):
                if older.name.startswith(f"list-{what}-"):
                    older.unlink(missing_ok=True)
            write_whole(path, json.dumps(rows).encode())
    return rows


@click.command()
@click.argument("name")
@click.option("--bibtex", is_flag=True, help="Print only the BibTeX entry of the strategy.")
def show(name: str, bibtex: bool) -> None:
    """Describe a strategy, task, model, observer or suite.

    NAME may also be a FILE.py, for the strategies, tasks, models and observers in it.
    """
    shown = _brought_by(Path(name)) if name.endswith(".py") else _named(name)
    if not bibtex:
        write("\n".join(_about(kind, cls) for kind, cls in shown) or suites.text(name))
    elif citations := [cls.bibtex for kind, cls in shown if kind == "strategy" and cls.bibtex]:
        click.echo("\n".join(citations))
    else:
        raise UserError(f"'{name}' has no BibTeX entry", next_step="sparsebench list --bibtex")


def _brought_by(file: Path) -> list[tuple[str, Any]]:
    """Return the kinds and classes of a plugin file."""
    if shown := [(kind, item.cls) for kind, item in Registry().brought_by(file)]:
        return shown
    raise UserError(f"plugin file {file} brings no strategy, task, model or observer to show")


def _named(name: str) -> list[tuple[str, Any]]:
    """Return the kinds and classes of a name; none if it names a suite."""
    registry = Registry()
    classes = {
        "strategy": [entry.cls for entry in registry.strategies()],
        "task": registry.tasks(),
        "model": registry.models(),
        "observer": registry.observers(),
    }
    catalogue = [(kind, cls) for kind, of_kind in classes.items() for cls in of_kind]
    shown = [(kind, cls) for kind, cls in catalogue if cls.name == name]
    names = {*suites.names(), *(cls.name for _, cls in catalogue)}
    if name in registry.broken:
        raise UserError(f"plugin '{name}' does not load: {registry.broken[name]}")
    if not shown and name not in names:
        word = name.partition(":")[0]
        raise unknown("strategy, task, model, observer or suite", name, names, meant=word if word in names else None)
    return shown


def _about(category: str, cls: Any) -> str:
    """Return the description of a strategy, task, model or observer: docstring, traits and parameters."""
    from sparsebench.strategy.plans import DOES

    lines = [f"{category} {cls.name}", ""]
    if category == "strategy":
        differs = cls.differs or ("nothing known" if cls.citation or cls.published else "no method is published")
        lines += [f"published: {setting}" for setting in cls.published or ("no known setting",)]
        mark = "a variant of the published method" if cls.variant else "differs from the published method"
        lines += [f"{mark}: {differs}", ""]
    lines += [inspect.cleandoc(cls.__doc__ or ""), ""]
    if category == "strategy":
        lines += _traits(cls)
    for key, info in cls.model_fields.items():
        if key == "disposal" and len(cls.allowed_disposals()) == 1:
            continue
        kind = str(info.annotation) if not isinstance(info.annotation, type) else info.annotation.__name__
        if isinstance(info.annotation, type) and issubclass(info.annotation, Enum):
            kind = " | ".join(repr(member.value) for member in info.annotation)
        if key == "disposal":
            kind = f"Literal{list(cls.allowed_disposals())}"
        value = info.default.value if isinstance(info.default, Enum) else info.default
        default = "required" if info.is_required() else repr(value)
        about = f"  {info.description}" if info.description else ""
        lines.append(f"  {key} = {default}  ({kind.replace('typing.', '')}){about}")
        if key == "disposal":
            lines += [f"    {disposal}: {DOES[disposal]}" for disposal in cls.allowed_disposals()]
    return "".join(f"{line}\n" for line in lines)


def _traits(cls: Any) -> list[str]:
    """Return lines about a strategy: kind, site, needs, training, export, citation and budget options."""
    from sparsebench.deploy.export import export_obstacle, exportable

    trained = "yes" if cls.trained else "no"
    if cls.fits():
        trained = f"no; it reads {cls.fit_images} training images first{', with labels' * cls.fit_labels}"
    why = export_obstacle(cls) or "its choices depend on numbers read from tensors"
    exports = {"yes": "yes", "no": f"no: {why}", "?": "unknown until `sparsebench check`"}[exportable(cls)]
    lines = [f"kind: {cls.kind}", f"site: {cls.site}", f"needs: {', '.join(sorted(cls.needs)) or 'nothing'}"]
    lines += [f"trained: {trained}", f"exports: {exports}", f"citation: {cls.citation or '-'}", ""]
    if cls.budgeted:
        lines += [f"budget options: {', '.join(BUDGET_KEYS)}", *_default_schedule(cls), ""]
    return lines


def _default_schedule(cls: Any) -> list[str]:
    """Return a line with the token counts of a strategy's default schedule on an ordinary network."""
    if any(field.is_required() for field in cls.model_fields.values()):
        return []
    strategy = cls()
    network = plain_vit_cost(384, 12, 6, tokens=196, embed=3 * 16**2 * 384, classes=1000)
    counts = counts_text(strategy, TokenSchedule(Budget(macs=0.5), strategy.traits(), network))
    why = only_schedule(strategy)
    others = f"its only one, as {why}" if why else f"`sparsebench schedules {cls.name}` compares others"
    return [f"schedule at 0.5 of the MACs of DeiT-S: {counts}; {others}"]


@click.command()
@click.option("--data-root", default="data", show_default=True, type=PATH, help="Folder with the data sets.")
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
    if clear_cache:
        files, size = cache.clear()
        click.echo(f"removed: {files} files, {size / 1e6:.1f} MB", err=True)
    sets = _sets(data_root, verify)
    files, size = cache.size()
    if as_json:
        kept = {"place": str(cache_folder()), "files": files, "bytes": size}
        click.echo(json.dumps({"sets": sets, "cache": kept}, indent=1))
        return
    columns = ("name", "for", "state", "pictures", "place")
    cells = []
    for row in sets:
        place = ", ".join(row["place"]) or "scikit-learn"
        cells.append([row["name"], ", ".join(row["for"]), row["state"], row["pictures"], place])
    click.echo(tabulate(cells, headers=columns, tablefmt="simple"))
    for row in (row for row in sets if row["state"] != "there"):
        hint = " or give --download to sparsebench run" if row["fetched"] else ""
        click.echo(f"\n{row['name']}: {row['note']}; get it from {row['source']}{hint}", nl=False)
    click.echo(f"\n\ncache of decoded pictures: {cache_folder()} ({files} files, {size / 1e6:.1f} MB)")


def _sets(root: Path, verify: bool) -> list[dict[str, Any]]:
    from sparsebench.tasks.sources.files import listing
    from sparsebench.tasks.sources.known import SETS, read

    rows = []
    for entry in SETS.values():
        state, note = entry.look(root, verify)
        if verify and state == "there" and entry.columns:
            try:
                read(entry.name, entry.columns, listing(root / entry.folder))
            except UserError as error:
                state, note = "corrupt", str(error)
        place = [str(root / place) for place in entry.places]
        fetched = entry.megabytes > 0
        rows.append(
            {
                "name": entry.name,
                "for": list(entry.uses),
                "state": state,
                "note": note,
                "pictures": entry.pictures,
                "place": place,
                "source": entry.source,
                "fetched": fetched,
                "licence": entry.licence,
                "citation": entry.citation,
            }
        )
    return rows


@click.command()
def env() -> None:
    """Show the machine and the libraries, as stored with records."""
    import torch

    from sparsebench.runner.devices import machine

    about = machine()
    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    rows = [*about.items(), ("CUDA devices", ", ".join(gpus) or "none"), ("hash", digest(about))]
    click.echo(tabulate(rows, tablefmt="plain"))
