"""sparsebench data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sparsebench.cli.guide import Guided


@click.command(cls=Guided)
@click.option("--data-root", default="data", show_default=True, type=click.Path(path_type=Path), help="Where to look.")
@click.option("--verify", is_flag=True, help="Read the files: checksums and tables, not only names and sizes.")
@click.option("--clear-cache", is_flag=True, help="Remove the decoded pictures that are kept; they are made again.")
@click.option("--json", "as_json", is_flag=True, help="An object with `sets` and `cache`.")
def data(data_root: Path, verify: bool, clear_cache: bool, as_json: bool) -> None:
    """Show which data sets are here, and where to get the others and put them.

    `--images`, `--backgrounds` and `--task` of sparsebench run take their names; `run --download` fetches some.
    """
    from sparsebench.errors import UserError
    from sparsebench.records.files import cache_folder
    from sparsebench.sources import cache

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
    click.echo(_table(sets))
    click.echo(f"\ncache of decoded pictures: {where or 'none'} ({files} files, {size / 1e6:.1f} MB)")


def _sets(root: Path, verify: bool) -> list[dict[str, Any]]:
    from sparsebench.errors import UserError
    from sparsebench.sources.files import Contents
    from sparsebench.sources.known import KNOWN
    from sparsebench.sources.labelled import DEFAULTS, read
    from sparsebench.sources.listing import names_in

    rows = []
    for known in KNOWN.values():
        state, note = known.look(root, verify)
        if verify and state == "there" and known.name in DEFAULTS:
            try:
                pictures = dict.fromkeys(names_in(root / known.folder), "")
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


def _table(sets: list[dict[str, Any]]) -> str:
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
