"""Whether a submission is complete and consistent, which its files say alone: by verify, by merge, and on boards."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forge
import pytest
from commands import call
from forge import Change, changed, improve, kinds, put, rewritten

from sparsebench.publish.submission import MANIFEST, RECORDS, read_records, verify
from sparsebench.records.record import Record, bytes_of, numbers_of

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

Raw = dict[str, Any]
FORGED = put(0.999, "metrics", "accuracy", "value")
GHOST = {"value": 1.0, "unit": "fraction", "n": 4, "low": None, "high": None, "method": ""}
GROUPS = ("3 on flower", "3 on china", "8 on flower")


@pytest.mark.parametrize("kind", ["pipe", "link", "large"])
def test_a_manifest_that_is_no_file_of_its_own_is_not_read(few: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(few, tmp_path / few.parent.name / few.name))
    path = folder / MANIFEST
    text = path.read_text()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere.json").write_text(text)
        path.symlink_to(tmp_path / "elsewhere.json")
    else:
        path.write_text(text + " " * 2_000_000)
    made = call("verify", tmp_path)
    assert made.exit_code == 1 and "rejected" in made.stdout and f"{MANIFEST}: it is" in made.stdout


def flip(name: str) -> Change:
    """Return what changes one test item."""

    def change(raw: Raw) -> None:
        numbers = numbers_of(raw["outcomes"][name], raw["outcomes"]["n"])
        numbers[0] ^= 1
        raw["outcomes"][name] = bytes_of(numbers)

    return change


def left_out(*names: str) -> Change:
    return lambda raw: [raw["metrics"].pop(name) for name in names]


def of_plugin(raw: Raw) -> None:
    """Give the task of a record to a plugin, which alone knows what it costs."""
    raw["cell"]["task"]["name"] = "of_a_plugin"
    raw["metrics"]["macs"]["value"] = 1.0


WRONG: list[tuple[str, str, Change, str]] = [
    *((task, "norm", put(value, "metrics", name, key), f"{name} is")
      for task, name, key, value in (
          ("spurious", "accuracy", "low", 0.5001), ("spurious", "accuracy", "high", 0.9),
          ("spurious", "accuracy", "n", 17),
          ("spurious", "accuracy", "unit", "loss"), ("spurious", "worst_group_accuracy", "value", 0.99),
          ("spurious", "spurious_gap", "value", -0.25), ("spurious", "average_train", "value", 0.123),
          ("composite", "macs_dense", "value", 1e9), ("composite", "accuracy_top5", "value", 0.999))),
    ("spurious", "norm", FORGED, "accuracy is 0.999"),
    ("spurious", "norm", put(1.0, "metrics", "macs", "value"), "macs is 1.0"),
    ("composite", "norm", put(0.1, "metrics", "macs_ratio", "value"), "macs_ratio is 0.1"),
    ("composite", "norm", put(1.0, "trajectory", 1, "tokens_out"), "macs is"),
    ("composite", "norm", put([], "trajectory"), "0 blocks, but the model has 2"),
    ("composite", "norm", put(1e200, "trajectory", 0, "tokens_in"), "finite number"),
    *(("spurious", "norm", left_out(name), f"{name} is missing")
      for name in ("accuracy", "worst_group_accuracy", "macs")),
    ("spurious", "norm", put(GHOST, "metrics", "accuracy: ghost"), "accuracy: "),
    ("spurious", "norm", left_out(*(f"accuracy: {name}" for name in GROUPS)), "group without a name"),
    ("spurious", "norm", put(None, "outcomes"), "it has no outcomes"),
    *(("spurious", "norm", flip(name), said) for name, said in (
        ("predicted", "rank and its predicted class disagree"), ("rank", "rank and its predicted class disagree"),
        ("label", "rank and its predicted class disagree"), ("group", "accuracy: "))),
    ("spurious", "random", lambda raw: (of_plugin(raw), FORGED(raw)), "accuracy is 0.999"),
    ("spurious", "norm", put("0" * 64, "origin", "revision"), "has another revision"),
    ("spurious", "norm", put("baseline", "kind"), "another kind"),
    ("spurious", "norm", put("dense", "label"), "has strategy 'norm'"),
    ("spurious", "norm", put("<img src=x>", "cell", "strategy", "name"), "incomplete: it lacks 2 of the 4 settings"),
    ("spurious", "norm", put("0" * 16, "environment"), "has an unknown machine"),
    ("spurious", "norm", put(7, "cell", "repetition"), "is not part of the suite"),
    ("spurious", "random", put("deployable", "kind"), "has another deployable strategy"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "strategy", "change", "said"), WRONG, ids=map(str, range(len(WRONG))))
def test_what_does_not_follow_or_does_not_belong_is_named(
    sound: Path, tmp_path: Path, task: str, strategy: str, change: Change, said: str
) -> None:
    folder = changed(sound, tmp_path, lambda raw: raw["cell"]["task"]["name"] == task and change(raw), strategy)
    verdict = verify(folder)
    assert (verdict.badge, verdict.wrong) == ("rejected", True) and said in " ".join(verdict.why), verdict.why


def renamed(raw: Raw) -> None:
    """Give all names of groups to other groups: what stands there still follows from outcomes."""
    for what in ("accuracy: ", "train_samples: "):
        names = sorted(name for name in raw["metrics"] if name.startswith(what))
        values = [raw["metrics"][name] for name in names]
        raw["metrics"] |= dict(zip(names, values[1:] + values[:1], strict=True))


@pytest.mark.parametrize(
    "change",
    [lambda raw: None, renamed, lambda raw: improve(raw, 3), put(0.5, "metrics", "test_loss", "value"),
     put(2.0, "metrics", "steps", "value")],
    ids=["sound", "groups of other names", "changed in step", "a loss", "of no outcome"],
)  # fmt: skip
def test_what_follows_from_itself_or_from_nothing_is_reported(sound: Path, tmp_path: Path, change: Change) -> None:
    verdict = verify(changed(sound, tmp_path, lambda raw: raw["cell"]["task"]["name"] == "spurious" and change(raw)))
    assert (verdict.badge, verdict.wrong, verdict.why, verdict.records) == ("reported", False, [], 17)
    assert "nobody has run it again" in verdict.meaning


def test_costs_of_a_plugins_task_are_taken_as_they_stand(sound: Path, tmp_path: Path) -> None:
    assert "macs" not in " ".join(verify(changed(sound, tmp_path, of_plugin, None)).why)


def flipped(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        half = len(content) // 2
        (folder / name).write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])

    return change


def with_records(change: Callable[[Record], list[Record]]) -> Callable[[Path], Any]:
    return lambda folder: rewritten(folder, [one for record in read_records(folder) for one in change(record)])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a changed byte": (flipped(RECORDS), f"SHA-256 of '{RECORDS}' differs from {MANIFEST}"),
    "another plugin": (flipped("plugin/good.py"), "'plugin/good.py' is not the file"),
    "no plugin": (lambda folder: (folder / "plugin" / "good.py").unlink(), "'plugin/good.py' is not the file"),
    "torn records": (lambda folder: os.truncate(folder / RECORDS, 5000), "is damaged"),
    "no records": (lambda folder: (folder / RECORDS).unlink(), "must describe one suite"),
    "an empty manifest": (lambda folder: (folder / MANIFEST).write_text("{}"), f"{MANIFEST}: "),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), f"there is no {MANIFEST}"),
    "a folder as manifest": (
        lambda folder: ((folder / MANIFEST).unlink(), (folder / MANIFEST).mkdir()), "it cannot be read"),
    "records twice": (with_records(lambda record: [record, record]), "has two records"),
    "fewer records": (
        with_records(lambda record: [record][record.label == "norm" and record.cell.task.name == "spurious" :]),
        "incomplete: it lacks 2 of the 4 settings of suite tiny 3"),
    "another strategy": (lambda folder: forge.said(folder, strategy="other"), "must describe one suite"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_is_not_whole_is_rejected(sound: Path, tmp_path: Path, name: str) -> None:
    folder, (damage, said) = changed(sound, tmp_path, lambda raw: None), DAMAGE[name]
    damage(folder)
    verdict = verify(folder)
    assert verdict.badge == "rejected" and said in verdict.why[0], verdict.why


def test_each_kind_of_forgery_has_no_better_badge_than_is_true(few: Path, tmp_path: Path) -> None:
    for kind, (best, folder) in kinds(few, tmp_path).items():
        assert (kind, verify(folder, placed=True).badge) == (kind, best)


def test_submissions_are_found_below_a_folder(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "submissions"
    copy, other = (Path(shutil.copytree(sound, root / name / sound.name)) for name in ("norm", "attn_topk"))
    (root / "README.md").write_text("about")
    (root / "mine" / "c").mkdir(parents=True)
    found = json.loads(call("verify", root, "--json").stdout)
    badges = {str(other): "rejected", str(root / "mine" / "c"): "rejected", str(copy): "reported"}
    assert {one["folder"]: one["badge"] for one in found} == badges
    for path in (copy, copy.parent):
        assert [one["folder"] for one in json.loads(call("verify", path, "--json").stdout)] == [str(copy)]
    result = call("verify", root)
    assert result.exit_code == 1 and f"its folder must be norm/{sound.name}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("verify NONE", "NONE is not a folder"), ("verify FILE", "FILE is not a folder"),
        ("verify EMPTY", "no submissions in EMPTY; submissions are folders <strategy>/<version>"),
        ("verify TWO --replay 1", "--replay needs one submission; got 2 submissions; name one"),
        ("submit NONE --to TO", "no records in NONE; run `sparsebench run --out` with this folder first"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    tmp_path: Path, sound: Path, arguments: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        shutil.copytree(sound, tmp_path / "TWO" / "norm" / name)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    result = call(*arguments.split())
    assert (result.exit_code, result.stderr) == (2, f"Error: {said}\n")


@pytest.mark.integration
def test_verifying_imports_no_torch_and_no_plugin(sound: Path) -> None:
    code = (
        "import sys; from sparsebench.cli import main; main(['verify', sys.argv[1], '--json'], standalone_mode=False); "
        "odd = {'torch', 'timm', 'torchvision', 'matplotlib', 'sparsebench_plugins'} & set(sys.modules); "
        "sys.exit(str(odd) if odd or any(name.startswith('sparsebench_local') for name in sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, sound], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)[0]["badge"] == "reported", done.stderr


def test_boards_and_merges_name_what_contradicts_itself(sound: Path, out: Path, tmp_path: Path) -> None:
    def badges(folder: Path) -> dict[str, Any]:
        rows = json.loads(call("leaderboard", folder, "--format", "json").stdout)
        return {row["strategy"]: row.get("badge") for row in rows}

    assert badges(sound) == {"norm": "reported", "dense": "", "random": "", "oracle": ""}
    assert badges(out)["norm"] is None  # no submission, no column
    forged = changed(sound, tmp_path, lambda raw: (put("norm(\x1b[2J\r\n)", "label")(raw), FORGED(raw)))
    merged, found = tmp_path / "merged", call("verify", forged)
    assert found.exit_code == 1 and ": rejected: " in found.stdout and "accuracy is 0.999" in found.stdout
    assert "\x1b" not in found.stdout and "norm(\N{REPLACEMENT CHARACTER}[2J" in found.stdout
    assert "rejected" in badges(forged).values()
    made = call("merge", forged, "-o", merged)
    assert made.exit_code == 1 and "accuracy is 0.999" in made.stderr and "17 records" in made.stderr
    assert call("leaderboard", merged, "--update").exit_code == 0
    board = call("leaderboard", merged, "--check")
    assert board.exit_code == 1 and "accuracy is 0.999" in board.stdout
    made = call("merge", sound, "-o", tmp_path / "sound")
    assert made.exit_code == 0 and made.stderr.count("\n") == 1
