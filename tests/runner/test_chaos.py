"""What benchmarks/chaos.py does, in a short form: whatever is killed, the records are those of an undisturbed sweep."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import chaos


@pytest.mark.slow
def test_a_killed_sweep_ends_with_the_same_records(tmp_path: Path) -> None:
    """A sweep whose processes are killed ends with the records of an undisturbed one."""
    killed, wrong, rounds = chaos.chaos(tmp_path, cells=24, kills=8, seed=1)
    assert killed.total() == 8 and not wrong and rounds >= 1


@pytest.mark.slow
def test_whoever_is_killed_while_sealing_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    made, wrong = chaos.end_sealing(tmp_path, kills=20, seed=0)
    assert made.total() == 20 and not wrong


@pytest.mark.slow
def test_the_same_command_heals_killed_workers_to_the_undisturbed_board(tmp_path: Path) -> None:
    killed, wrong, sweeps, times = chaos.heal(tmp_path, cells=8, kills=3, seed=1)
    assert killed == 3 and not wrong and sweeps <= times
