"""A run's folder, its records or its segment are removed or replaced while the run is under way."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from running import execute, planned

from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record


def run(out: Path, workers: int, at_first: Callable[[], object]) -> list[Record]:
    """Run four cells and do something after the first; return the records that were stored."""
    new: list[Record] = []

    def on_record(record: Record) -> None:
        new.append(record)
        if len(new) == 1:
            at_first()

    store.check_writable(out)
    execute(planned(out), Registry(), out, workers, on_record)
    return new


@pytest.mark.parametrize(("what", "workers"), [("folder", 1), ("records", 0), ("segment", 0)])
def test_a_run_whose_records_are_removed_ends_at_the_next_record(tmp_path: Path, what: str, workers: int) -> None:
    out = tmp_path / "out"

    def remove() -> None:
        store.segments(out)[0].unlink() if what == "segment" else shutil.rmtree(
            out if what == "folder" else out / "records"
        )

    with pytest.raises(UserError, match="it was removed while the run was under way"):
        run(out, workers, remove)
    assert not store.read(out)


def test_a_folder_that_was_moved_with_a_link_to_it_is_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def move() -> None:
        out.rename(tmp_path / "moved")
        out.symlink_to(tmp_path / "moved")

    new = run(out, 1, move)
    assert store.read(out) == {record.cell_id: record for record in new} and len(new) == 4
