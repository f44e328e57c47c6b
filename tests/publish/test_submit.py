import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from flats import rows_in
from forge import PLUGIN, sealed

from sparsebench import api
from sparsebench.errors import UserError
from sparsebench.publish.folder import MANIFEST, RECORDS, Answered, version_of
from sparsebench.publish.submit import git_steps, submit
from sparsebench.publish.verify import verify
from sparsebench.records import manifests, store, table
from sparsebench.records.record import Failure, Record


def edited(
    out: Path, to: Path, records: Iterable[Record] | None = None, beside: Callable[[str], bool] = lambda name: True
) -> Path:
    """Write a run's folder with these records, and some of what lies beside them, to another one."""
    texts = {f"{name}/{file}": text for name in store.BESIDE for file, text in store.beside(out, name).items()}
    kept = store.read(out).values() if records is None else records
    rows = table.table_of((record, 0) for record in kept)
    table.write(to / "copy" / "records" / "all.parquet", rows, {n: text for n, text in texts.items() if beside(n)})
    return to / "copy"


def one_of(out: Path) -> Record:
    return next(record for record in store.read(out).values() if record.cell.strategy.name == "norm")


def append(out: Path, record: Record) -> None:
    writer = store.Writer(out)
    writer.append(record)
    writer.close()


def test_it_has_the_strategy_and_the_baselines_and_what_they_start_from(out: Path, sound: Path) -> None:
    records = store.read(sound)
    assert records == store.read(out)  # the run has no more
    assert {record.cell.strategy.name for record in records.values()} == {"norm", "dense", "random", "oracle"}
    assert {record.cell.task.name for record in records.values()} == {"theory", "composite", "plain"}
    assert manifests.suites(sound) == manifests.suites(out)
    assert manifests.strategies(sound).keys() == manifests.strategies(out).keys()
    manifest = json.loads((sound / MANIFEST).read_bytes())
    assert manifest["plugin"]["plugin"] == "file:good.py" and manifest["suite"]["version"] == 3
    assert sound.name == f"tiny-3-{manifest['plugin']['revision']}" and sound.parent.name == "norm"
    files = {path.relative_to(sound).as_posix() for path in sound.rglob("*") if path.is_file()}
    assert set(manifest["files"]) | {MANIFEST} == files
    assert manifest["file"] == "good.py" and (sound / "plugin" / "good.py").read_bytes() == PLUGIN.read_bytes()


def test_it_has_the_modules_that_the_file_imports_from_beside_it(suite: Path, tmp_path: Path) -> None:
    text = PLUGIN.read_text().replace("import sparsebench\n", "import sparsebench\nfrom far import sign\n")
    (tmp_path / "mine.py").write_text(text.replace("(1 if", "(sign if"))
    (tmp_path / "far.py").write_text("sign = 1\n")
    (tmp_path / "unused.py").write_text("")
    api.run(str(tmp_path / "mine.py"), suite=str(suite), tasks="theory", seeds=1, out=tmp_path / "out", jobs=0)
    for path in tmp_path.glob("*.py"):
        path.unlink()  # the run's folder has what was run
    made = submit(tmp_path / "out", tmp_path / "to")
    assert {path.name for path in (made.folder / "plugin").iterdir()} == {"mine.py", "far.py"}
    assert (made.manifest.file, made.verdict.badge) == ("mine.py", "reported")


def test_boards_can_be_made_of_it(sound: Path) -> None:
    assert len(rows_in(sound)) == len(store.read(sound))


def test_the_same_records_give_the_same_bytes(out: Path, sound: Path, tmp_path: Path) -> None:
    made = submit(edited(out, tmp_path, [*store.read(out).values()][::-1]), tmp_path / "to").folder
    for path in made.rglob("*"):
        assert path.is_dir() or path.read_bytes() == (sound / path.relative_to(made)).read_bytes()


def test_failed_cells_are_published_too(out: Path, tmp_path: Path) -> None:
    one = one_of(out)
    lost = {"status": "timeout", "failure": Failure(reason="long"), "metrics": {}, "outcomes": None, "trajectory": ()}
    records = store.read(out) | {one.cell_id: one.model_copy(update=lost)}
    made = submit(edited(out, tmp_path, records.values()), tmp_path / "to")
    assert store.read(made.folder)[one.cell_id].status == "timeout" and made.verdict.badge == "reported"


def test_other_deployable_strategies_are_not_in_it_and_several_are_named(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.run(("noise", "value_norm"), suite=str(suite), tasks="theory", out=out, jobs=0, device="cpu")
    with pytest.raises(UserError, match=r"strategies noise, value_norm; name one with --strategy"):
        submit(out, tmp_path / "to")
    with pytest.raises(UserError, match=r"did you mean 'noise'"):
        submit(out, tmp_path / "to", "nose")
    made = submit(out, tmp_path / "to", "noise")
    names = {record.cell.strategy.name for record in store.read(made.folder).values()}
    assert names == {"noise", "dense", "random", "oracle"}
    assert made.manifest.file == "" and not (made.folder / "plugin").exists()  # it comes with sparsebench
    assert submit(out, tmp_path / "to", "dense").manifest.strategy == "dense"  # where it is asked for
    spaced = replace(made, folder=tmp_path / "a b; c")
    assert f"git add '{spaced.folder}'\n" in git_steps(spaced)
    steps = git_steps(made)
    assert f"git add {made.folder}\n" in steps and "push" in steps and "pull request" in steps


def test_what_lacks_settings_of_its_suite_is_refused(out: Path, tmp_path: Path) -> None:
    left = [one for one in store.read(out).values() if one.label != "norm" or one.cell.task.name != "theory"]
    again = edited(out, tmp_path, left)
    with pytest.raises(UserError, match="incomplete: records of 2 of the 4 settings of suite tiny 3"):
        submit(again, tmp_path / "to")


@pytest.mark.parametrize("folder", [manifests.SUITES, manifests.STRATEGIES])
def test_a_folder_that_does_not_say_what_it_is_about_is_refused(out: Path, tmp_path: Path, folder: str) -> None:
    again = edited(out, tmp_path, beside=lambda name: not name.startswith(folder))
    with pytest.raises(UserError, match=r"does not say .* give the command of the run again"):
        submit(again, tmp_path / "to")


def test_records_of_several_sources_are_refused(out: Path, tmp_path: Path) -> None:
    again, one = edited(out, tmp_path), one_of(out)
    newer = {"origin": one.origin.model_copy(update={"revision": "f" * 64}), "started": datetime.now(UTC).isoformat()}
    append(again, one.model_copy(update=newer))
    with pytest.raises(UserError, match="of several revisions"):
        submit(again, tmp_path / "to")


def test_what_would_not_verify_is_refused_and_nothing_is_left(out: Path, tmp_path: Path) -> None:
    again, one = edited(out, tmp_path), one_of(out)
    better = one.metrics | {"accuracy": one.metrics["accuracy"].model_copy(update={"value": 0.999})}
    append(again, one.model_copy(update={"metrics": better, "started": datetime.now(UTC).isoformat()}))
    with pytest.raises(UserError, match=r"is not whole or not consistent: .*accuracy is 0.999"):
        submit(again, tmp_path / "to")
    assert not [path for path in (tmp_path / "to").rglob("*") if path.is_file()]


def test_what_is_there_is_not_written_over(out: Path, sound: Path) -> None:
    before = (sound / RECORDS).read_bytes()
    with pytest.raises(UserError, match="is there and is not written over"):
        submit(out, sound.parents[1])
    assert (sound / RECORDS).read_bytes() == before


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records in"):
        submit(tmp_path, tmp_path / "to")


BRINGS_TASK = Path(__file__).resolve().parents[1] / "plugins" / "brings_task.py"


def run(out: Path, **options: Any) -> Path:
    plugins = (str(PLUGIN), str(BRINGS_TASK))
    api.run(plugins, **{"suite": "smoke", "seeds": 1, "out": out, "jobs": 0, "device": "cpu"} | options)
    return out


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a stranger's task alone."""
    return run(tmp_path_factory.mktemp("strange"), tasks="small_theory", n_train=8, macs=0.6)


def test_cells_that_are_not_those_of_the_suite_are_published_as_ones_own(strange: Path, tmp_path: Path) -> None:
    made = submit(strange, tmp_path / "to")
    assert made.folder.name.startswith("no-suite-") and "for suite" not in git_steps(made)
    assert (made.verdict.badge, made.verdict.suite, made.verdict.records) == ("reported", "", 3)
    assert verify(made.folder, placed=True).badge == "reported"
    assert "Suite" not in (strange / "leaderboard.html").read_text()


def test_a_whole_suite_in_a_folder_is_what_is_published(strange: Path, tmp_path: Path) -> None:
    """More of it is no other suite, and less of it, or another budget, is none."""
    few = run(tmp_path / "few", macs=0.6)
    assert submit(few, tmp_path / "to").folder.name.startswith("no-suite-")
    run(few)
    again = submit(few, tmp_path / "again")
    assert again.folder.name.startswith("smoke-1-") and again.verdict.suite == "smoke 1"
    assert {suite.name for suite in manifests.suites(few)} == {"no-suite", "smoke"}


def test_what_has_the_name_of_a_suite_without_its_cells_is_none_of_it(strange: Path, tmp_path: Path) -> None:
    """Also in folders of before such runs were told apart, and in what a forger writes."""
    (asked,) = manifests.suites(strange)
    older = edited(strange, tmp_path, beside=lambda name: not name.startswith(manifests.SUITES))
    named = asked.model_copy(update={"name": "smoke"})
    store.keep(older / manifests.SUITES, named.model_dump(mode="json"))
    made = submit(older, tmp_path / "to")
    assert made.folder.name.startswith("no-suite-")

    store.keep(made.folder / manifests.SUITES, named.model_dump(mode="json"))
    answered = Answered(name="smoke", version=1, sha256=named.sha256)
    forged = verify(sealed(made.folder, suite=answered, version=version_of(answered, made.manifest.plugin)))
    assert (forged.badge, forged.wrong) == ("rejected", True)
    assert "of suite smoke 1 it lacks composite with 256 samples, repetition 0, macs 0.5" in forged.why[0]
