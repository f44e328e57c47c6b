"""Stores as one sealed file: the same records always give the same bytes."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsebench.collector import without_collector
from sparsebench.errors import UserError
from sparsebench.records import store, table

log = logging.getLogger(__name__)


def merge(stores: Sequence[Path], out: Path) -> int:
    """Write the union of stores to a new folder, and return how many records it has.

    Of the records of a cell by the same revision of its strategy one stays, see `store.of_each_source`: so stores may
    be merged one after the other, in any order, and the folder reads as all of them would. What lies beside the records
    is taken from the folders `store.BESIDE`; weights and checkpoints are not.

    Raises:
        UserError: a store has no records, or some by a later sparsebench; `out` is there, or cannot be written.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is there and is not written over", next_step="give another -o")
    with without_collector():
        whole = store.counting(table.join([store.rows(each, newest=False) for each in stores]), _of_each_source)
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        table.write(part / "records" / "merged.parquet", whole, _beside(stores))
        os.replace(part, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(whole)


def _of_each_source(claims: Iterable[tuple[store.Claim, int]]) -> dict[tuple[str, str], int]:
    return {source: place for source, (_, place) in store.of_each_source(claims).items()}


def _beside(stores: Sequence[Path]) -> dict[str, str]:
    """Return what lies beside the records, by folder and name."""
    texts: dict[str, str] = {}
    for each in stores:
        for folder in store.BESIDE:
            for file, text in store.beside(each, folder).items():
                name = f"{folder}/{file}"
                if texts.get(name, text) != text:
                    log.warning("%s differs between the stores; one of them is taken", name)
                texts[name] = max(texts.get(name, ""), text)
    return texts
