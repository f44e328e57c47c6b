"""What benchmarks/fuzz_submissions.py does, in a short form: every forgery has a verdict, and no badge too high."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import fuzz_submissions


@pytest.mark.slow
def test_hostile_submissions_have_a_verdict_and_no_badge_that_they_do_not_deserve(sound: Path) -> None:
    """In a process of its own, whose peak memory is measured too."""
    line = [sys.executable, "-W", "error", fuzz_submissions.__file__, "--cases", "200", "--seed", "1", "--sound", sound]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 submissions in" in done.stdout


def test_what_a_forgery_deserves_follows_from_what_was_changed() -> None:
    before = {"metrics": {"accuracy": {"value": 1.0}, "steps": {"value": 2.0}}, "cell": {"a": 1}, "seconds": 1.0}

    def deserved(*path: str) -> str:
        return fuzz_submissions.deserved(before, fuzz_submissions.changed(before, path, 5))

    assert deserved("metrics", "accuracy", "value") == "reported"
    assert deserved("metrics", "steps", "value") == deserved("seconds") == "recounted"
    assert deserved("cell", "a") == "rejected"
