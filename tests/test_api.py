import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from measured import TINY
from pandas.testing import assert_frame_equal

import sparsebench
from sparsebench import Strategy, TokenView
from sparsebench.board.columns import ALWAYS_SHOWN, BY_TASK, keys_of
from sparsebench.plugin.content import file_revision
from sparsebench.records import store
from sparsebench.records.record import Record

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

GOOD = str(Path(__file__).resolve().parent / "plugins" / "good.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, list[Record]]:
    """Return the folder of a run, its leaderboard, and the records passed to on_record. Tests only read the folder."""
    out = tmp_path_factory.mktemp("finished")
    seen: list[Record] = []
    table = sparsebench.run(
        ["attn_topk:keep_rate=0.5", GOOD], suite=TINY, n_train=[4], seeds=2, out=out, jobs=0,
        on_record=seen.append,
    )  # fmt: skip
    return out, table, seen


def test_a_run_returns_the_leaderboard(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    table = finished[1]
    assert list(table.columns)[: len(keys_of(ALWAYS_SHOWN))] == keys_of(ALWAYS_SHOWN)
    assert set(table["strategy"]) == {"dense", "random", "oracle", "anti_oracle", "attn_topk", "norm"}
    ranks = [rank for rank in table["rank"] if rank != "not ranked"]
    assert ranks == sorted(ranks) and list(table["kind"][-2:]) == ["oracle", "oracle"]


def test_load_records_has_a_row_for_each_cell_and_a_column_for_each_metric(
    finished: tuple[Path, pd.DataFrame, list[Record]],
) -> None:
    out, _, seen = finished
    records = sparsebench.load_records(out)
    assert len(records) == len(seen)
    assert set(records.columns) >= {"cell_id", "status", "strategy", "n_train", "repetition", "accuracy", "macs_ratio"}
    by_id = records.set_index("cell_id")
    for record in seen:
        assert by_id.loc[record.cell_id, "accuracy"] == record.metrics["accuracy"].value


def test_the_leaderboard_of_the_records_equals_the_one_returned_by_run(
    finished: tuple[Path, pd.DataFrame, list[Record]],
) -> None:
    out, table, _ = finished
    assert_frame_equal(sparsebench.leaderboard(sparsebench.load_records(out)), table, check_exact=True)


def test_records_of_tasks_with_different_metrics_share_a_table(
    finished: tuple[Path, pd.DataFrame, list[Record]], tmp_path: Path
) -> None:
    shutil.copytree(finished[0] / "records", tmp_path / "records")
    both = sparsebench.run(
        GOOD, suite=TINY, tasks=["composite", "spurious:epochs=1,test=8,pretrain_epochs=0"], n_train=[4], seeds=1,
        out=tmp_path, jobs=0,
    )  # fmt: skip
    assert both["spurious_gap"].notna().all()
    records = sparsebench.load_records(tmp_path)
    assert records.loc[records["task"] == "composite", "spurious_gap"].isna().all()
    table = sparsebench.leaderboard(records, by="task")
    expected = keys_of([*BY_TASK, *ALWAYS_SHOWN])
    assert list(table.columns)[: len(expected)] == expected and set(table["task"]) == {"composite", "spurious"}


def test_a_repeated_run_computes_nothing_and_returns_the_same_leaderboard(
    finished: tuple[Path, pd.DataFrame, list[Record]],
) -> None:
    out, table, _ = finished
    seen: list[Record] = []
    stored = {path: path.read_bytes() for path in (out / "records").iterdir()}
    options: dict[str, Any] = {"suite": TINY, "n_train": (4,), "seeds": 2, "out": str(out), "jobs": 0}
    again = sparsebench.run(("attn_topk:keep_rate=0.5", GOOD), on_record=seen.append, **options)
    assert seen == [] and {path: path.read_bytes() for path in (out / "records").iterdir()} == stored
    assert_frame_equal(again, table, check_exact=True)


def test_a_run_names_what_the_folder_has_beyond_its_board(
    finished: tuple[Path, pd.DataFrame, list[Record]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    options: dict[str, Any] = {"suite": TINY, "n_train": (4,), "seeds": 2, "out": str(out), "jobs": 0}
    table = sparsebench.run((GOOD,), **options)
    assert "attn_topk" not in set(table["strategy"])
    assert "also has results of attn_topk" in caplog.text
    caplog.clear()
    sparsebench.run(("attn_topk:keep_rate=0.5", GOOD), **options)
    assert "also has results" not in caplog.text


POWER = 2.0

OPTIONS: dict[str, Any] = {
    "suite": TINY, "n_train": 4, "seeds": 1,
}  # fmt: skip

SCRIPT = '''
import sparsebench, torch
from sparsebench import Strategy

def length(tokens):
    return torch.linalg.vector_norm(tokens, dim=2)

class Mine(Strategy):
    """Keeps long tokens."""
    name = "mine"
    def scores(self, view):
        return length(view.tokens)

if __name__ == "__main__":
    task = "composite:epochs=EPOCHS"
    table = sparsebench.run(Mine, out="out", jobs=2, suite=TINY, tasks=task, n_train=[4, 8], seeds=4)
    print(sorted(table["strategy"]))
'''


def length(tokens: torch.Tensor) -> torch.Tensor:
    """Return a power of each token's norm."""
    return tokens.norm(dim=2) ** POWER


class Mine(Strategy):
    """Keeps the longest or the shortest tokens."""

    name = "mine"

    sign: int = 1

    def scores(self, view: TokenView) -> torch.Tensor:
        return self.sign * length(view.tokens)


def test_classes_and_instances_are_identified_by_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def records() -> dict[str, Record]:
        stored = store.read(tmp_path).values()
        return {record.label: record for record in stored if record.cell.strategy.name == "mine"}

    table = sparsebench.run([Mine, Mine(sign=-1)], out=tmp_path, jobs=0, **OPTIONS)
    first = records()
    (source,) = tmp_path.glob("plugins/*/mine.py")
    assert set(first) == {"mine", "mine(sign=-1)"} <= set(table["strategy"])
    assert all(record.origin.plugin == "file:mine.py" and record.status == "ok" for record in first.values())
    assert "class Mine(Strategy)" in source.read_text() and "def length" in source.read_text()
    assert {record.origin.revision for record in first.values()} == {file_revision(source)}
    sparsebench.run(Mine, out=tmp_path, jobs=0, **OPTIONS)
    assert records() == first
    monkeypatch.setattr(sys.modules[__name__], "POWER", 3.0)
    sparsebench.run(Mine, out=tmp_path, jobs=0, **OPTIONS)
    again = records()
    revisions = {file_revision(path) for path in tmp_path.glob("plugins/*/mine.py")}
    assert revisions == {again["mine"].origin.revision, first.pop("mine").origin.revision} and len(revisions) == 2
    del again["mine"]
    assert again == first


def test_a_class_that_uses_an_open_file_is_refused(tmp_path: Path) -> None:
    class Holds(Strategy):
        """Uses an open file."""

        name = "holds"

        def scores(self, view: TokenView) -> torch.Tensor:
            return view.tokens if OPEN else view.keys

    with pytest.raises(sparsebench.UserError, match="uses 'OPEN', which cannot be stored"):
        sparsebench.run(Holds, out=tmp_path, **OPTIONS)


OPEN = sys.stderr


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_script_runs_on_two_workers_and_continues_after_it_was_killed(tmp_path: Path, killed: bool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("TINY", repr(TINY)).replace("EPOCHS", "2000" if killed else "1"))
    line = [sys.executable, "script.py"]
    before: dict[str, Any] = {}
    if killed:
        with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.DEVNULL) as first:
            while first.poll() is None and not any((tmp_path / "out" / "records").glob("*.jsonl")):
                time.sleep(0.1)
            os.kill(first.pid, signal.SIGKILL)
        before = {record.cell_id: record.started for record in store.read(tmp_path / "out").values()}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "'mine'" in done.stdout, done.stderr
    after = {record.cell_id: record.started for record in store.read(tmp_path / "out").values()}
    assert before.items() <= after.items() and len(after) == 40


@pytest.mark.usefixtures("no_early_start")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"seeds": "three"}, "seeds: .* integer.*; got 'three'"), ({"keep": "half"}, "keep: .*; got 'half'"),
     ({"n_train": [1.5]}, "n-train: .*; got 1.5"), ({"suite": 3}, "suite: .* string; got 3"),
     ({"jobs": 1.5}, "jobs: .*; got 1.5"), ({"download": "maybe"}, "download: .*; got 'maybe'"),
     ({"checkpoint": float("nan")}, "--checkpoint: .* 0; got nan"),
     ({"rerun": "never"}, "rerun: .*'missing'.*; got 'never'"), ({"plugins": 7}, "plugins; got 7"),
     ({"plugins": "atn_topk"}, "did you mean 'attn_topk'"), ({"device": "tpu"}, "--device"),
     ({"out": None}, "out; got None; allowed: the path of a folder")],
    ids=json.dumps,
)  # fmt: skip
def test_wrong_arguments_are_user_errors(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(sparsebench.UserError, match=says):
        sparsebench.run(**{"plugins": "noise", "out": tmp_path, **wrong})


def test_options_take_one_value_and_leaderboard_takes_a_folder(tmp_path: Path) -> None:
    table = sparsebench.run("noise", keep=0.5, out=tmp_path, jobs=0, **OPTIONS)
    assert "keep 0.5 power-floor" in " ".join(table["budget"])
    board = sparsebench.leaderboard(str(tmp_path))
    assert list(board["strategy"]) == list(table["strategy"]) and "MACs" in board.attrs["macs_ratio"]
    for wrong, says in ((tmp_path / "nowhere", "no records"), (3, "records; got int"), (board, "got DataFrame")):
        with pytest.raises(sparsebench.UserError, match=says):
            sparsebench.leaderboard(wrong)  # type: ignore[arg-type]


SMALL = {"suite": TINY, "n_train": [4], "seeds": 1, "jobs": 0}


def test_a_run_in_a_notebook_shows_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    records: list[Record] = []
    table = sparsebench.run(["dense"], out=tmp_path, on_record=records.append, **SMALL)
    assert len({record.cell_id for record in records}) == len(records) >= len(table) > 0
    assert "cells to run" in capsys.readouterr().err


def test_a_stopped_run_raises_keyboard_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run raises KeyboardInterrupt and progress false shows no bar."""

    def stop(_record: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with pytest.raises(KeyboardInterrupt):
        sparsebench.run(["dense"], out=tmp_path, progress=False, on_record=stop, **SMALL)
    assert "cells to run" not in capsys.readouterr().err
