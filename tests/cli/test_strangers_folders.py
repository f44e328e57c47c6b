"""What benchmarks/fuzz_folders.py does, in a short form: no command ends otherwise than it may on a hostile folder."""

import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import fuzz_folders
import hostile_folders
from fuzz_submissions import sound_submission


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a sound submission; the log's handlers are put back."""
    before = list(logging.getLogger().handlers)
    yield sound_submission(tmp_path_factory.mktemp("sound"))
    logging.getLogger().handlers = before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of numbers that no cell has come to
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_no_hostile_folder_ends_a_command_otherwise_than_it_may(sound: Path, seed: int) -> None:
    _, _, wrong = fuzz_folders.fuzz(sound, [0], seed, commands=2, through=0)
    assert not wrong


def test_the_fuzzer_sees_what_acts() -> None:
    assert fuzz_folders.acts("x.csv", "a,=1+1\n") and not fuzz_folders.acts("x.csv", "a,'=1+1,-0.5,-\n")
    assert fuzz_folders.acts("x.md", "a [x](http:y)\n") and fuzz_folders.acts("x.md", "<b>") is not None
    assert not fuzz_folders.acts("x.md", "0.9 [0.8, 1.0] \\[x\\](y) \\<b>\n")
    assert fuzz_folders.acts("output.text", "a\x1b[31m") and fuzz_folders.acts("output.text", "a\rb")


@pytest.mark.slow
def test_a_case_is_the_same_whenever_it_is_drawn(sound: Path) -> None:
    draw = [hostile_folders.Stranger(sound).case(random.Random(5))[:2] for _ in range(2)]
    for kind, files in draw:
        files.pop("underway/here-1.json", None), files.pop("manifest.json", None)
        assert kind
    assert draw[0] == draw[1]
