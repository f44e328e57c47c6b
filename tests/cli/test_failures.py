"""What an author reads of a strategy that does not work."""

from pathlib import Path

import pytest
from click.testing import Result
from commands import call
from measured import COMPOSITE, TINY, VIT

FILE = Path(__file__).resolve().parents[1] / "plugins" / "returns.py"
SMALL = ["--suite", TINY, "--n-train", "4", "--seeds", "1"]
SAYS = {
    "listed": "scores must have shape (4, 16), got list; wanted is a tensor, (B, N) (returns.py:",
    "flat": "scores must have shape (4, 16), got (4,); wanted is a tensor, (B, N) (returns.py:",
    "strange": "scores must be real numbers, got torch.complex",
    "misread": "unknown field of the view; got 'token'; allowed: ",
    "remembers": "'remembers' set self.last: it keeps nothing between calls; use view.memory in a pass (returns.py:",
    "peeks": "view.relevance was read but not declared: only kind = 'oracle' may declare it (declared: tokens) (ret",
}

BY_KEYS = """
import sparsebench

class ByKeys(sparsebench.Strategy):
    name = "by_keys"
    needs = frozenset({"keys"})

    def scores(self, view):
        return view.keys.norm(dim=3).mean(dim=1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [ByKeys]
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("failed")
    return out, call("run", FILE, *SMALL, "--out", out, "--jobs", 0)


@pytest.mark.parametrize("name", SAYS)
def test_what_is_wrong_is_said_at_once_with_file_and_line(failed: tuple[Path, Result], name: str) -> None:
    (line,) = [line for line in failed[1].stderr.splitlines() if line.startswith(f"failed: {name} on composite: ")]
    assert SAYS[name] in line
    source = FILE.read_text().splitlines()
    number = int(line.partition("(returns.py:")[2].partition(")")[0])
    begins = next(i for i, text in enumerate(source) if f'name = "{name}"' in text)
    assert begins < number <= begins + 5


def test_nothing_is_a_traceback_or_done(failed: tuple[Path, Result]) -> None:
    assert failed[1].exit_code == 1 and "Traceback" not in failed[1].output
    assert "listed on composite done" not in failed[1].stderr
    assert "6 failed" in failed[1].stderr and "--rerun failed" in failed[1].stderr


def test_a_strategy_that_no_model_here_fits_is_told_what_it_lacks_and_not_to_try_others(tmp_path: Path) -> None:
    file = tmp_path / "by_keys.py"
    file.write_text(BY_KEYS)
    done = call("run", file, "--suite", "quick-scratch", "--task", COMPOSITE, "--model", VIT, "--n-train", 20,
                "--seeds", 1, "--out", tmp_path / "out", "--jobs", 0)  # fmt: skip
    assert (
        done.exit_code == 0 and "unsupported: needs keys, which this model cannot give at the input site" in done.stdout
    )
    assert done.stderr.splitlines()[-1] == (
        "next: give the strategy what the note above says that it lacks, and run the same command"
    )


def test_the_same_command_again_names_what_runs_the_failed_again(failed: tuple[Path, Result]) -> None:
    again = call("run", FILE, *SMALL, "--out", failed[0], "--jobs", 0)
    assert "cells are in the store; 6 of them failed, --rerun failed tries them again" in again.stderr


def test_a_parameter_without_a_type_is_named_with_what_to_write(tmp_path: Path) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text(FILE.read_text().replace('    name = "listed"\n', '    name = "listed"\n    power = 2.0\n'))
    assert "non-annotated attribute was detected: `power = 2.0`" in call("show", bare).stderr
