"""From a run's folder to a submission: what is in it, and what is refused."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forge
import pytest
from commands import call
from flats import rows_in
from forge import PLUGIN, Change, put
from running import run_without_board

from sparsebench.errors import UserError
from sparsebench.publish.clone import git_steps
from sparsebench.publish.submission import RECORDS, manifest_of, submit, verify
from sparsebench.records import manifests, store, table
from sparsebench.records.manifests import MANIFEST
from sparsebench.records.record import Cell, Record, canonical

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

Raw = dict[str, Any]


def edited(
    out: Path, to: Path, change: Change = lambda raw: None, kept: Callable[[Raw], bool] = lambda raw: True,
    beside: str = "",
) -> Path:  # fmt: skip
    """Write a run's folder to another one: the strategy's records changed, without some, or what lies beside them."""
    texts = store.sidecars(out, *(name for name in store.SIDECARS if name != beside))
    raws = [record.model_dump() for record in store.read(out).values()]
    for raw in raws:
        if raw["label"] == "norm":
            change(raw)
            raw["cell_id"] = Cell.model_validate(raw["cell"]).id
    rows = table.table_of((Record.model_validate(raw), 0) for raw in raws if kept(raw))
    table.write(to / "copy" / "records" / "all.parquet", rows, texts)
    return to / "copy"


def test_a_submission_has_the_baselines_and_their_starts(out: Path, sound: Path, tmp_path: Path) -> None:
    """It has the strategy and the baselines and what they start from."""
    records = store.read(sound)
    assert records == store.read(out)  # the run has no more
    assert len(rows_in(sound)) == len(records) and "norm" in call("leaderboard", sound).stdout
    assert {record.cell.strategy.name for record in records.values()} == {"norm", "dense", "random", "oracle"}
    assert {record.cell.task.name for record in records.values()} == {"spurious", "composite", "plain"}
    assert manifests.suites(sound) == manifests.suites(out)
    assert manifests.strategies(sound).keys() == manifests.strategies(out).keys()
    manifest = json.loads((sound / MANIFEST).read_bytes())
    assert manifest["plugin"]["plugin"] == "file:good.py"
    assert sound.name == f"tiny-3-{manifest['plugin']['revision']}" and sound.parent.name == "norm"
    files = {path.relative_to(sound).as_posix() for path in sound.rglob("*") if path.is_file()}
    assert files == {MANIFEST, RECORDS, "plugin/good.py"}
    assert manifest["file"] == "good.py" and (sound / "plugin" / "good.py").read_bytes() == PLUGIN.read_bytes()
    made = call("submit", edited(out, tmp_path), "--to", tmp_path / "to")
    assert (
        made.exit_code == 0 and "17 records, reported: complete and consistent; nobody has run it again" in made.stderr
    )
    assert "\ngit switch -c submit-norm-tiny-3-" in made.stdout and "pull request" in made.stdout
    for file in files:  # the same records give the same bytes
        assert (tmp_path / "to" / "norm" / sound.name / file).read_bytes() == (sound / file).read_bytes()
    (one,) = json.loads(call("verify", tmp_path / "to", "--json").stdout)
    assert (one["badge"], one["strategy"], one["notes"], one["why"]) == ("reported", "norm", [], [])
    found = call("verify", tmp_path / "to")
    assert found.exit_code == 0 and ": reported: complete and consistent; nobody has run it again\n" in found.stdout


def test_submit_opens_each_sealed_file_of_the_run_twice_at_most(
    out: Path, tmp_path: Path, open_counts: Counter[str]
) -> None:
    submit(out, tmp_path)
    sealed = store.sealed_files(out)
    assert sealed and {open_counts[str(path)] for path in sealed} <= {1, 2}


def test_it_has_the_modules_that_the_file_imports_from_beside_it(suite: Path, tmp_path: Path) -> None:
    text = PLUGIN.read_text().replace("import sparsebench\n", "import sparsebench\nfrom far import sign\n")
    (tmp_path / "mine.py").write_text(text.replace("(1 if", "(sign if"))
    (tmp_path / "far.py").write_text("sign = 1\n")
    (tmp_path / "unused.py").write_text("")
    run_without_board(str(tmp_path / "mine.py"), suite=str(suite), tasks="spurious", seeds=1, out=tmp_path / "out")
    for path in tmp_path.glob("*.py"):
        path.unlink()  # the run's folder has what was run
    made = submit(tmp_path / "out", tmp_path / "to")
    assert {path.name for path in Path(made.folder, "plugin").iterdir()} == {"mine.py", "far.py"}
    assert (manifest_of(Path(made.folder)).file, made.badge) == ("mine.py", "reported")


def test_a_table_of_the_plugin_is_the_same_with_other_line_endings(suite: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    (far / "signs.csv").write_text("name,sign\nnorm,1\n")
    (far / "__init__.py").write_text(
        "from pathlib import Path\n\n"
        "lines = Path(__file__).with_name('signs.csv').read_text().splitlines()\n"
        "sign = int(lines[1].split(',')[1])\n"
    )
    text = PLUGIN.read_text().replace("import sparsebench\n", "import sparsebench\nfrom far import sign\n")
    (tmp_path / "mine.py").write_text(text.replace("(1 if", "(sign if"))
    run_without_board(str(tmp_path / "mine.py"), suite=str(suite), tasks="spurious", seeds=1, out=tmp_path / "out")
    folder = Path(submit(tmp_path / "out", tmp_path / "to").folder)
    for path in (folder / "plugin").rglob("*.*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"\n", b"\r\n"))
    assert verify(folder).badge == "reported"
    table_of_signs = folder / "plugin" / "far" / "signs.csv"
    table_of_signs.write_bytes(table_of_signs.read_bytes().replace(b"1", b"2"))
    verdict = verify(folder)
    assert verdict.badge == "rejected" and "plugin/" in " ".join(verdict.why)


def lost(raw: Raw) -> None:
    raw |= {"status": "timeout", "failure": {"reason": "long"}, "metrics": {}, "outcomes": None, "trajectory": []}


def test_failed_cells_are_published_too(out: Path, tmp_path: Path) -> None:
    made = call("submit", edited(out, tmp_path, lambda raw: raw["cell"]["repetition"] and lost(raw)), "--to", tmp_path)
    assert ", reported: " in made.stderr
    assert "\n2 of 4 cells of 'norm' have no result, among them 2 timeout: long\n" in made.stderr
    records = store.read(next((tmp_path / "norm").iterdir())).values()
    assert [one.status for one in records if one.status != "ok"] == ["timeout"] * 2


def test_other_deployable_strategies_are_not_in_it_and_several_are_named(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_without_board("noise", "value_norm", suite=str(suite), tasks="spurious", seeds=1, out=out)
    with pytest.raises(UserError, match=r"strategies noise, value_norm; name a strategy"):
        submit(out, tmp_path / "to")
    with pytest.raises(UserError, match=r"did you mean 'noise'"):
        submit(out, tmp_path / "to", "nose")
    made = submit(out, tmp_path / "to", "noise")
    names = {record.cell.strategy.name for record in store.read(Path(made.folder)).values()}
    assert names == {"noise", "dense", "random", "oracle"}
    assert not Path(made.folder, "plugin").exists()  # it comes with sparsebench
    assert submit(out, tmp_path / "to", "dense").strategy == "dense"  # where it is asked for


def by_another(raw: Raw) -> None:
    raw["origin"]["revision"] = "0" if raw["cell"]["repetition"] else raw["origin"]["revision"]


AGAIN = ".* run the same command again"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer settings": ({"kept": lambda raw: raw["label"] != "norm" or raw["cell"]["task"]["name"] != "spurious"},
                       f"incomplete: it lacks 2 of the 4 settings of suite tiny 3;{AGAIN}"),
    "no suite": ({"beside": manifests.SUITES}, f"does not name its suite.*{AGAIN}"),
    "no strategy": ({"beside": manifests.STRATEGIES}, f"lacks the description of strategy{AGAIN}"),
    "no machine": ({"beside": manifests.ENVIRONMENTS}, f"has an unknown machine.*{AGAIN}"),
    "several sources": ({"change": by_another}, f"has another revision.*{AGAIN}"),
    "no revision": ({"change": put("", "origin", "revision")}, f"lacks the description of strategy{AGAIN}"),
    "baselines alone": ({"kept": lambda raw: raw["kind"] != "deployable"}, "baselines and oracles only; name"),
    "a higher accuracy": ({"change": put(0.999, "metrics", "accuracy", "value")},
                          "is incomplete or inconsistent: .*accuracy is 0.999"),
    "no results": ({"change": lost}, "no cell of 'norm' has a result; got 4 timeout: long; correct the cause"),
    "no records": ({"kept": lambda raw: False}, "no records in"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_no_submission_is_refused_and_nothing_is_left(out: Path, tmp_path: Path, name: str) -> None:
    how, said = REFUSED[name]
    folder = edited(out, tmp_path, **how)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(UserError, match=said):
        submit(folder, tmp_path / "to" / "deep")
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_what_is_there_is_not_written_over_and_a_file_is_no_folder(out: Path, sound: Path, tmp_path: Path) -> None:
    before = (sound / MANIFEST).stat().st_mtime_ns
    with pytest.raises(UserError, match="already exists"):
        submit(out, sound.parents[1])
    assert (sound / MANIFEST).stat().st_mtime_ns == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        submit(out, tmp_path / "file")


BRINGS_TASK = Path(__file__).resolve().parents[1] / "plugins" / "brings_task.py"


def run(out: Path, **options: Any) -> Path:
    run_without_board(str(PLUGIN), str(BRINGS_TASK), out=out, **{"suite": "smoke", "seeds": 1} | options)
    return out


@pytest.mark.slow
def test_a_whole_suite_in_a_folder_is_what_is_published(tmp_path: Path) -> None:
    """More of it is no other suite, and less of it, or another budget, is none."""
    few = run(tmp_path / "few", macs=0.6)
    assert submit(few, tmp_path / "to").version.startswith("no-suite-")
    run(few)
    again = submit(few, tmp_path / "again")
    assert again.version.startswith("smoke-1-") and again.suite == "smoke 1"
    assert {suite.name for suite in manifests.suites(few)} == {"no-suite", "smoke"}


def test_what_has_the_name_of_a_suite_without_its_cells_is_none_of_it(tmp_path: Path) -> None:
    """Also in folders of before such runs were told apart, and in what a forger writes."""
    strange = run(tmp_path / "strange", tasks="small", n_train=8, macs=0.6)
    (asked,) = manifests.suites(strange)
    older = edited(strange, tmp_path, beside=manifests.SUITES)
    named = asked.model_copy(update={"name": "smoke"})
    store.Store(older).keep(manifests.SUITES, named.model_dump(mode="json"))
    made = submit(older, tmp_path / "to")
    assert made.notes == ["cells of task 'small' cannot be replayed: a submission has no plugin but the strategy's"]
    replayed = call("verify", made.folder, "--replay", 1, "--yes")
    assert replayed.exit_code == 2 and f"Error: {made.notes[0]}; verify" in replayed.stderr
    path, verdict = Path(made.folder) / RECORDS, verify(Path(made.folder), placed=True)
    assert made.version.startswith("no-suite-") and "for suite" not in git_steps(made)
    assert (verdict.badge, verdict.suite, verdict.records) == ("reported", "", 3)

    beside = {name: text for name, text in table.sidecars(path).items() if not name.startswith(manifests.SUITES)}
    told = {f"{manifests.SUITES}/x.json": canonical(named.model_dump(mode="json"))}
    table.write(path, table.read(path), beside | told)
    forge.said(path.parents[1])
    forged = verify(path.parents[1])
    assert (forged.badge, forged.wrong) == ("rejected", True)
    assert "it lacks composite with 256 samples, repetition 0, macs 0.5" in forged.why[0]


def test_a_dry_run_says_that_the_place_is_taken(out: Path, tmp_path: Path) -> None:
    words = ("submit", out, "--to", tmp_path, "--author", "Ada One", "--dry-run")
    assert call(*words).exit_code == 0
    call(*words[:-1])
    taken = call(*words)
    assert taken.exit_code == 2 and "already exists" in taken.stderr


def test_what_appears_meanwhile_is_neither_replaced_nor_taken_for_the_submission(
    out: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "norm" / sound.name
    write = table.write

    def write_late(*args: Any) -> None:
        other.mkdir(parents=True)
        write(*args)

    monkeypatch.setattr(table, "write", write_late)
    with pytest.raises(UserError, match="already exists"):
        submit(out, tmp_path)
    assert list(other.iterdir()) == [] and list(other.parent.iterdir()) == [other]
