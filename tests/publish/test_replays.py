"""Kept replays: what counts as one, what boards show of it, and what counts for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import forge
import pytest
from commands import call
from forge import kinds_of_replays, replayed

from sparsebench.publish.submission import verify

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


def test_a_replay_that_fits_gives_the_badge_and_boards_show_by_whom_and_when(sound: Path, tmp_path: Path) -> None:
    folder = replayed(sound, tmp_path / "submissions", by="Zoë | <b>Lab</b>")
    verdict = verify(folder, placed=True)
    assert (verdict.badge, verdict.wrong, verdict.why) == ("replayed", False, [])
    (day,) = {json.loads(path.read_bytes())["date"] for path in (folder / "replays").iterdir()}
    shown = call("verify", folder)
    assert shown.exit_code == 0 and f"replayed by Zoë | <b>Lab</b> on {day}: all cells" in shown.stdout
    (row,) = [
        row
        for row in json.loads(call("leaderboard", tmp_path / "submissions", "--format", "json").stdout)
        if row["strategy"] == "norm"
    ]
    assert row["badge"] == "replayed" and row["replayed"] == f"Zoë | <b>Lab</b>, {day}"
    (alone,) = [
        row for row in json.loads(call("leaderboard", folder, "--format", "json").stdout) if row["strategy"] == "norm"
    ]
    assert alone["badge"] == "replayed"


def test_no_forged_replay_gives_a_badge(few: Path, tmp_path: Path) -> None:
    for kind, folder in kinds_of_replays(few, tmp_path).items():
        verdict = verify(folder)
        assert (kind, verdict.badge, verdict.wrong) == (kind, "reported", True), verdict
        assert all(line.isprintable() for line in verdict.why)


def test_one_file_that_does_not_fit_is_enough(few: Path, tmp_path: Path) -> None:
    folder = replayed(few, tmp_path)
    (folder / "replays" / "2.json").symlink_to(folder / "replays" / "1.json")
    assert verify(folder).wrong and verify(folder).badge == "reported"


def test_a_replay_is_kept_only_by_name_and_not_by_an_author(few: Path, tmp_path: Path) -> None:
    folder = forge.changed(few, tmp_path, lambda raw: None)
    assert "--by needs a replay" in call("verify", folder, "--by", "Bo").stderr
    forge.said(folder, about=forge.About(authors=("Ada",)))
    for name in ("ada", "\U0001d400da", "A D A.", "A\u034fda", "\x1b[2J", " ", "\u3164"):
        made = call("verify", folder, "--replay", 1, "--yes", "--by", name)
        assert made.exit_code == 2 and made.stderr.count("\n") == 1
    assert not (folder / "replays").exists()


@pytest.mark.slow
def test_a_real_replay_is_written_and_read_again(few: Path, tmp_path: Path) -> None:
    folder = forge.changed(few, tmp_path, lambda raw: None)
    made = call("verify", folder, "--replay", 2, "--yes", "--device", "cpu", "--by", "Bo")
    assert made.exit_code == 0 and "written: " in made.stdout, made.output
    verdict = verify(folder, placed=True)
    assert verdict.badge == "replayed" and verdict.replays[0].startswith("Bo, ")
