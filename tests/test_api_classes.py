"""Strategies that are classes in the program that runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import TINY

import sparsebench
from sparsebench import Strategy, TokenView
from sparsebench.plugin.content import file_revision
from sparsebench.records import store

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
    """Keeps long tokens, or short ones."""

    name = "mine"

    sign: int = 1

    def scores(self, view: TokenView) -> torch.Tensor:
        return self.sign * length(view.tokens)


def test_classes_and_instances_run_and_their_records_name_their_source(tmp_path: Path) -> None:
    table = sparsebench.run([Mine, Mine(sign=-1)], out=tmp_path, jobs=0, **OPTIONS)
    assert {"mine", "mine(sign=-1)"} <= set(table["strategy"])
    source = tmp_path / "plugins" / "mine.py"
    records = [one for one in store.read(tmp_path).values() if one.cell.strategy.name == "mine"]
    assert len(records) == 2 and all(one.origin.plugin == "file:mine.py" and one.status == "ok" for one in records)
    assert "class Mine(Strategy)" in source.read_text() and "def length" in source.read_text()
    assert {one.origin.revision for one in records} == {file_revision(source)}


def test_what_a_file_cannot_hold_is_refused(tmp_path: Path) -> None:
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
def test_a_script_runs_on_two_workers_and_goes_on_after_it_was_killed(tmp_path: Path, killed: bool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("TINY", repr(TINY)).replace("EPOCHS", "2000" if killed else "1"))
    line = [sys.executable, "script.py"]
    before: dict[str, Any] = {}
    if killed:
        with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.DEVNULL) as first:
            while first.poll() is None and not any((tmp_path / "out" / "records").glob("*.jsonl")):
                time.sleep(0.1)
            os.kill(first.pid, signal.SIGKILL)
        before = {one.cell_id: one.started for one in store.read(tmp_path / "out").values()}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "'mine'" in done.stdout, done.stderr
    after = {one.cell_id: one.started for one in store.read(tmp_path / "out").values()}
    assert before.items() <= after.items() and len(after) == 40


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"seeds": "3"}, "seeds; got '3'; allowed: a whole number"), ({"keep": "half"}, "keep; got 'half'"),
     ({"n_train": [1.5]}, "n_train; got 1.5"), ({"suite": 3}, "suite; got 3; allowed: a text"),
     ({"jobs": 1.0}, "jobs; got 1.0"), ({"download": "yes"}, "download; got 'yes'"),
     ({"seeds": True}, "seeds; got True"),
     ({"plugins": 7}, "plugins; got 7")],
    ids=json.dumps,
)  # fmt: skip
def test_wrong_arguments_are_user_errors(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(sparsebench.UserError, match=says.replace("(", r"\(")):
        sparsebench.run(**{"plugins": "noise", "out": tmp_path, **wrong})


def test_one_number_will_do_for_several_and_a_folder_for_its_records(tmp_path: Path) -> None:
    table = sparsebench.run("noise", keep=0.5, out=tmp_path, jobs=0, **OPTIONS)
    assert "keep 0.5 power-floor" in " ".join(table["budget"])
    board = sparsebench.leaderboard(str(tmp_path))
    assert list(board["strategy"]) == list(table["strategy"]) and "MACs" in board.attrs["macs_ratio"]
    for wrong in (tmp_path / "nowhere", 3, board):
        with pytest.raises(sparsebench.UserError):
            sparsebench.leaderboard(wrong)  # type: ignore[arg-type]
