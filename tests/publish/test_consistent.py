"""What follows in a record from the rest of it is computed again: by verify, by merge, and of boards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from forge import Change, improve, put

from sparsebench.cli import main
from sparsebench.publish.verify import verify
from sparsebench.records.record import pack, unpack

Raw = dict[str, Any]
Tamper = Callable[..., Path]


def test_a_sound_submission_is_reported_whatever_losses_its_records_lack(sound: Path, tampered: Tamper) -> None:
    for folder in (sound, tampered(put("", "outcomes", "loss"), strategy=None)):
        verdict = verify(folder)
        assert (verdict.badge, verdict.wrong, verdict.why, verdict.records) == ("reported", False, [], 17)


@pytest.mark.parametrize(
    ("task", "path", "value", "said"),
    [
        ("theory", ("metrics", "accuracy", "value"), 0.999, "accuracy is 0.999"),
        ("theory", ("metrics", "accuracy", "low"), 0.5001, "accuracy is"),
        ("theory", ("metrics", "accuracy", "n"), 17, "accuracy is"),
        ("theory", ("metrics", "accuracy", "unit"), "loss", "accuracy is"),
        ("theory", ("metrics", "success", "value"), 0.5, "success is 0.5"),
        ("theory", ("metrics", "worst_group_accuracy", "value"), 0.99, "worst_group_accuracy is"),
        ("theory", ("metrics", "spurious_gap", "value"), -0.25, "spurious_gap is"),
        ("theory", ("metrics", "average_train", "value"), 0.123, "average_train is"),
        ("theory", ("metrics", "macs", "value"), 1.0, "macs is 1.0"),
        ("composite", ("metrics", "macs_dense", "value"), 1e9, "macs_dense is"),
        ("composite", ("metrics", "macs_ratio", "value"), 0.1, "macs_ratio is 0.1"),
        ("composite", ("metrics", "accuracy_top5", "value"), 0.999, "accuracy_top5 is"),
        ("composite", ("trajectory", 1, "tokens_out"), 1.0, "macs is"),
        ("composite", ("trajectory",), [], "0 blocks, and the model 2"),
        ("composite", ("trajectory", 0, "tokens_in"), 1e200, "macs is"),
    ],
)
def test_a_number_that_does_not_follow_is_named(
    tampered: Tamper, task: str, path: tuple[Any, ...], value: Any, said: str
) -> None:
    verdict = verify(tampered(put(value, *path), task=task))
    assert (verdict.badge, verdict.wrong) == ("rejected", True) and said in " ".join(verdict.why), verdict.why


@pytest.mark.parametrize("name", ["accuracy", "worst_group_accuracy", "macs", "success"])
def test_a_number_that_is_left_out_is_named(tampered: Tamper, name: str) -> None:
    assert f"{name} is missing" in " ".join(verify(tampered(lambda raw: raw["metrics"].pop(name))).why)


def test_a_group_that_there_is_not_is_named(tampered: Tamper) -> None:
    ghost = {"value": 1.0, "unit": "fraction", "n": 4, "low": None, "high": None, "method": ""}
    assert "accuracy: " in " ".join(verify(tampered(put(ghost, "metrics", "accuracy: ghost"))).why)
    assert "group without a name" in " ".join(
        verify(tampered(lambda raw: [raw["metrics"].pop(f"accuracy: {name}") for name in GROUPS], task="theory")).why
    )


GROUPS = ("-1 with spurious", "-1 without spurious", "+1 with spurious")


@pytest.mark.parametrize("name", ["predicted", "rank", "label", "group"])
def test_an_outcome_of_one_item_that_was_changed_is_found(tampered: Tamper, name: str) -> None:
    def flip(raw: Raw) -> None:
        numbers = unpack(raw["outcomes"][name], raw["outcomes"]["n"]).copy()
        numbers[0] ^= 1
        raw["outcomes"][name] = pack(numbers)

    assert verify(tampered(flip)).badge == "rejected"


def test_what_was_changed_in_step_is_reported_and_no_more(tampered: Tamper) -> None:
    """Nobody has run it, and the badge says so."""
    verdict = verify(tampered(lambda raw: improve(raw, 3)))
    assert (verdict.badge, verdict.why) == ("reported", []) and "nobody has run it again" in verdict.said


@pytest.mark.parametrize("change", [put(0.5, "metrics", "test_loss", "value"), put(2.0, "metrics", "steps", "value")])
def test_what_follows_from_nothing_is_taken_as_it_stands(tampered: Tamper, change: Change) -> None:
    assert verify(tampered(change)).badge == "reported"


def test_tasks_of_plugins_are_taken_as_they_stand_where_only_they_know(tampered: Tamper) -> None:
    def strange(raw: Raw) -> None:
        raw["cell"]["task"]["name"] = "of_a_plugin"
        raw["metrics"]["macs"]["value"] = 1.0

    verdict = verify(tampered(strange, strategy=None))
    assert not [why for why in verdict.why if "macs" in why]

    def worse(raw: Raw) -> None:
        strange(raw)
        raw["metrics"]["accuracy"]["value"] = 0.999

    assert "accuracy is 0.999" in " ".join(verify(tampered(worse, strategy="random")).why)


def test_merge_and_boards_name_what_contradicts_itself(tampered: Tamper, sound: Path, tmp_path: Path) -> None:
    forged = tampered(put(0.999, "metrics", "accuracy", "value"))
    made = CliRunner().invoke(main, ["merge", str(forged), "-o", str(tmp_path / "merged")])
    assert made.exit_code == 1 and "accuracy is 0.999" in made.stderr and "17 records" in made.stderr
    board = CliRunner().invoke(main, ["leaderboard", str(tmp_path / "merged"), "--update"])
    assert board.exit_code == 0, board.output
    board = CliRunner().invoke(main, ["leaderboard", str(tmp_path / "merged"), "--check"])
    assert board.exit_code == 1 and "accuracy is 0.999" in board.stdout
    made = CliRunner().invoke(main, ["merge", str(sound), "-o", str(tmp_path / "sound")])
    assert made.exit_code == 0 and len(made.stderr.splitlines()) == 1


def test_groups_are_told_by_their_items_whatever_they_are_called(tampered: Tamper) -> None:
    """All names are given to other groups: what stands there still follows from outcomes."""

    def rename(raw: Raw) -> None:
        metrics = raw["metrics"]
        for what in ("accuracy: ", "train_samples: "):
            names = sorted(name for name in metrics if name.startswith(what))
            values = np.roll(np.array([json.dumps(metrics[name]) for name in names]), 1)
            metrics |= {name: json.loads(str(value)) for name, value in zip(names, values, strict=True)}

    assert verify(tampered(rename)).badge == "reported"
