"""Commands for authors of strategies: new and check."""

from __future__ import annotations

import importlib.util
import json
import keyword
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsebench import __version__
from sparsebench.cli.terminal import PATH
from sparsebench.errors import UserError
from sparsebench.files import write_whole
from sparsebench.plugin.hooks import PROJECT
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record

if TYPE_CHECKING:
    from sparsebench.records.reports import Report

FILES = {"strategy.py.jinja": "{name}.py", "test.py.jinja": "test_{name}.py"}
PACKAGE = {
    "strategy.py.jinja": "{name}/src/{name}/strategy.py",
    "init.py.jinja": "{name}/src/{name}/__init__.py",
    "package_test.py.jinja": "{name}/tests/test_{name}.py",
    "pyproject.toml.jinja": "{name}/pyproject.toml",
    "README.md.jinja": "{name}/README.md",
    "workflow.yml.jinja": "{name}/.github/workflows/test.yml",
}
"""The file made from each template. The first is the strategy's."""


def write(name: str, folder: Path, registry: Registry, *, package: bool = False) -> list[Path]:
    """Write a template of a strategy with its test, or of a package; return the files, the strategy's first.

    Raises:
        UserError: if the name is invalid or taken, a file already exists, or the folder cannot be written.
    """
    places = {template: folder / place.format(name=name) for template, place in (PACKAGE if package else FILES).items()}
    if not (name.isascii() and name.isidentifier() and name[0].isalpha()) or keyword.iskeyword(name):
        raise UserError("the name of a strategy", got=f"'{name}'", allowed="a Python name of letters, digits and _")
    for path in (folder / name, *places.values()) if package else places.values():
        if path.exists():
            raise UserError(f"{path} already exists", next_step="choose another name, or --dir")
    names = {*registry.entries, *(registered.cls.name for registered in registry.strategies())}
    if name in names or importlib.util.find_spec(name) is not None:
        raise UserError(f"a strategy or a Python module '{name}' already exists", next_step="choose another name")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("sparsebench.plugin"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    words = {
        "name": name,
        "cls": "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name,
        "module": f"{name}.strategy" if package else name,
        "distribution": "sparsebench-" + name.strip("_").replace("_", "-"),
        "version": __version__,
        "requirement": f"{PROJECT}>={__version__}",
    }
    texts = {path: templates.get_template(template).render(words) for template, path in places.items()}
    for path, text in texts.items():
        write_whole(path, text.encode())
    return list(texts)


def reports_of(
    targets: Sequence[str], records: Sequence[Record], limit: float, left_out: list[str]
) -> Iterator[Report]:
    """Yield the reports of each NAME or FILE.py; without parameters, with those of its records.

    Without targets, check all strategies of the records, and append those that cannot be checked to `left_out`.

    Raises:
        UserError: if a target does not exist.
    """
    from sparsebench.plugin.content import file_revision
    from sparsebench.testing import process

    plugins = {record.cell.strategy.name: record.origin.plugin for record in records}
    for target in targets or sorted(plugins):
        revision = file_revision(Path(target)) if target.endswith(".py") else ""
        parts = {
            record.label: record.cell.strategy
            for record in sorted(records, key=lambda record: record.label)
            if (record.origin.revision == revision if revision else record.cell.strategy.name == target)
        }
        try:
            if not targets and (path := plugins[target]).startswith("file:"):  # records lack the folder of the file
                raise UserError(f"it comes from the file {path.removeprefix('file:')}", next_step="name the file too")
            for part in parts.values() or (None,):
                yield from process.check(target, limit, part)
        except UserError as error:
            if targets:
                raise
            left_out.append(f"{target}: {error}")


@click.command()
@click.argument("name")
@click.option("--package", is_flag=True, help="Write a package that can be published, instead of two files.")
@click.option(
    "--dir",
    "folder",
    type=PATH,
    default=Path(),
    metavar="DIR",
    help="Folder to write to.  [default: the current folder]",
)
def new(name: str, package: bool, folder: Path) -> None:
    """Write a working template of a strategy.

    The files are NAME.py and its test; both run without changes. Existing files are not overwritten.
    """
    files = write(name, folder, Registry(), package=package)
    for path in files:
        click.echo(f"written: {path}")
    where = folder / name if package else folder
    click.echo(f"\nsparsebench check {files[0]}\nsparsebench run --plugin {files[0]}\npytest {where}")


@click.command()
@click.argument("targets", metavar="[NAME|FILE.py[:PARAM=VALUE...]]...", nargs=-1)
@click.option(
    "--results",
    type=PATH,
    metavar="DIR",
    help="Store the reports in this folder of a run, for its board. Without names, check all its strategies.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of reports, one per strategy.")
@click.option("--markdown", is_flag=True, help="Print a table for a page or a pull request.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each check.",
)
def check(targets: tuple[str, ...], results: Path | None, as_json: bool, markdown: bool, time_limit: float) -> None:
    """Test strategies on tiny networks, each in its own process.

    Every strategy must pass the required checks and should pass the recommended checks; informative checks say what
    else it can do. Checks that the strategy declares in `expected_failures` are shown as expected and do not count as
    failed. The exit code is 0 if all required checks pass, 1 if not, 2 if the command is wrong.

    With --results the reports are also stored. The board of the folder shows them until the strategy's revision
    changes. The exit code is then also 1 if a strategy of the folder could not be checked.
    """
    from sparsebench.api import refresh
    from sparsebench.records import reports

    if not targets and results is None:
        raise click.UsageError("name a strategy or a file, or a results folder with --results")
    records: list[Record] = []
    if results is not None:
        records = sorted(store.read(results, needed=True).values(), key=lambda record: record.started)
        store.check_writable(results)
    all_reports: list[Report] = []
    left_out: list[str] = []
    for report in reports_of(targets, records, time_limit, left_out):
        all_reports.append(report)
        if results is not None:
            reports.write(report, results)
        if not as_json:
            click.echo(reports.markdown(report) if markdown else reports.text(report, whole=bool(targets)))
    if as_json:
        click.echo(json.dumps([{**r.model_dump(mode="json"), "conforms": r.conforms} for r in all_reports], indent=1))
    if results is not None:
        for line in left_out:
            click.echo(f"not checked: {line}", err=True)
        board = f"; written: {results}/leaderboard.md, .csv, .json, .png, .html" if refresh(results) else ""
        click.echo(f"stored: {results}/checks{board}", err=True)
    sys.exit(int(bool(left_out) or not all(report.conforms for report in all_reports)))
