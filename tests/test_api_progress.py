"""Runs from Python: the bar, and who else is told of records."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from measured import TINY

import sparsebench

SMALL = {"suite": TINY, "n_train": [4], "seeds": 1, "jobs": 0}


@pytest.mark.parametrize(
    ("progress", "notebook", "bar"), [(None, False, 0), (None, True, 1), (True, False, 1), (False, True, 0)]
)
def test_a_run_shows_a_bar_where_it_is_asked_for_and_in_notebooks(
    progress: bool | None, notebook: bool, bar: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    records: list[str] = []
    table = sparsebench.run(
        ["dense"], out=tmp_path, progress=progress, on_record=lambda record: records.append(record.cell_id), **SMALL
    )
    assert len(records) == len(set(records)) >= len(table) > 0
    assert ("cells to run" in capsys.readouterr().err) == bool(bar)


def test_a_stopped_run_raises_and_does_not_end_the_program(tmp_path: Path) -> None:
    def stop(_record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sparsebench.run(["dense"], out=tmp_path, progress=True, on_record=stop, **SMALL)
