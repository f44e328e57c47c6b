"""Stores as one: their records in one order and one spelling, so that the same records always give the same bytes."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sparsebench.collector import without_collector
from sparsebench.errors import UserError
from sparsebench.records import environment, files, manifests, store
from sparsebench.records.cell import canonical
from sparsebench.records.record import Record

log = logging.getLogger(__name__)

BESIDE = (
    environment.FOLDER, "checks", manifests.STRATEGIES, manifests.SUITES, manifests.METRICS, manifests.FILES,
    manifests.STRAYS, manifests.PICTURES,
)  # fmt: skip
"""Folders whose .json files belong to records and are named after what they say."""
_NAMED = re.compile(r"[\w-]{1,64}\.json", re.ASCII)


class Place(NamedTuple):
    """Where a record stands."""

    path: Path
    offset: int
    length: int


def merge(stores: Sequence[Path], out: Path) -> int:
    """Write the union of stores to a new folder, and return how many records it has.

    Of the records of a cell by the same source of its strategy one stays, see `store.of_each_source`: so stores may be
    merged one after the other, in any order, and the folder reads as all of them would. What lies beside the records is
    copied from the folders `BESIDE`; weights and checkpoints are not.

    Raises:
        UserError: a store has no records, or some by a later sparsebench; `out` is there, or cannot be written.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is there and is not written over", next_step="give another -o")
    with without_collector():
        claims = ((stored.claim, Place(*stored[1:4])) for each in stores for stored in _records(each))
        best = store.of_each_source(claims)
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        for path, content in _beside(stores):
            files.write_whole(part / path, content)
        with files.whole_file(part / "records" / "merged.jsonl") as file:
            file.writelines(lines(best[key][1] for key in sorted(best)))
        os.replace(part, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(best)


def _records(folder: Path) -> Iterator[store.Found[Record]]:
    present = False
    for stored in store.scan_all(folder, Record):
        present = True
        yield stored
    if not present:
        raise UserError(f"no records in {folder}")


def lines(places: Iterable[Place]) -> Iterator[bytes]:
    """Yield the records at some places, each as a line of canonical JSON."""
    for path, offset, length in places:
        try:
            with files.open_file(path, files.MOST_BYTES) as file:
                file.seek(offset)
                line = file.read(length)
            record = store.parse(line, Record)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} was changed while it was read: {error}") from error
        respelled = (canonical(record.model_dump(mode="json")) + "\n").encode()
        yield respelled if record.cell.id == record.cell_id else line


def _beside(stores: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of what lies beside the records."""
    contents: dict[str, bytes] = {}
    every = (one for each in stores for folder in BESIDE for one in files.contents_in(each / folder))
    for path, content in every:
        name = f"{path.parent.name}/{path.name}"
        if not _NAMED.fullmatch(path.name):
            files.leave_out(path, ValueError("its name is of another form"))
            continue
        if contents.get(name, content) != content:
            log.warning("%s differs between the stores; one of them is taken", name)
        contents[name] = max(contents.get(name, b""), content)
    yield from sorted(contents.items())
