import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from forging import PLUGIN, sealed

from sparsebench import api
from sparsebench.errors import UserError
from sparsebench.publish.folder import MANIFEST, RECORDS
from sparsebench.publish.submit import git_steps, submit
from sparsebench.publish.verify import verify
from sparsebench.records import flat, manifests, store
from sparsebench.records.cell import digest
from sparsebench.records.record import Failure, Record

Raw = dict[str, object]


def copied(out: Path, tmp_path: Path) -> Path:
    shutil.copytree(out, tmp_path / "copy")
    return tmp_path / "copy"


def append(out: Path, record: Record) -> None:
    writer = store.Writer(out)
    writer.append(record)
    writer.close()


def test_it_has_the_strategy_and_the_baselines_and_what_they_start_from(out: Path, sound: Path) -> None:
    records = store.read(sound)
    assert records == store.read(out)  # the run has no more
    assert {record.cell.strategy.name for record in records.values()} == {"norm", "dense", "random", "oracle"}
    assert {record.cell.task.name for record in records.values()} == {"theory", "composite", "plain"}
    assert manifests.suites(sound) == manifests.suites(out) and manifests.strategies(sound) == manifests.strategies(out)
    manifest = json.loads((sound / MANIFEST).read_bytes())
    assert manifest["plugin"]["plugin"] == "file:good.py" and manifest["suite"]["version"] == 3
    assert sound.name == f"tiny-3-{manifest['plugin']['revision']}" and sound.parent.name == "norm"
    assert set(manifest["files"]) | {MANIFEST} == {p.relative_to(sound).as_posix() for p in sound.rglob("*.json*")}


def test_boards_can_be_made_of_it(sound: Path) -> None:
    assert len(list(flat.load(sound))) == len(store.read(sound))


def test_the_same_records_give_the_same_bytes(out: Path, sound: Path, tmp_path: Path) -> None:
    again = copied(out, tmp_path)
    (segment,) = store.segments(again)
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[::-1]))
    made = submit(again, tmp_path / "to").folder
    assert {p.name: p.read_bytes() for p in made.rglob("*.json*")} == {
        p.name: p.read_bytes() for p in sound.rglob("*.json*")
    }


def test_failed_cells_are_published_too(out: Path, tmp_path: Path) -> None:
    again = copied(out, tmp_path)
    one = next(r for r in store.read(again).values() if r.cell.strategy.name == "norm")
    for path in store.segments(again):
        kept = [line for line in path.read_bytes().splitlines(keepends=True) if one.cell_id.encode() not in line]
        path.write_bytes(b"".join(kept))
    lost = {"status": "timeout", "failure": Failure(reason="long"), "metrics": {}, "outcomes": None, "trajectory": ()}
    append(again, one.model_copy(update=lost))
    made = submit(again, tmp_path / "to")
    assert store.read(made.folder)[one.cell_id].status == "timeout" and made.verdict.badge == "recounted"


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
    assert submit(out, tmp_path / "to", "dense").manifest.strategy == "dense"  # where it is asked for
    spaced = replace(made, folder=tmp_path / "a b; c")
    assert f"git add '{spaced.folder}'\n" in git_steps(spaced)
    steps = git_steps(made)
    assert f"git add {made.folder}\n" in steps and "push" in steps and "pull request" in steps


def test_what_lacks_settings_of_its_suite_is_refused(out: Path, tmp_path: Path) -> None:
    again = copied(out, tmp_path)
    (segment,) = store.segments(again)
    lines = segment.read_bytes().splitlines(keepends=True)
    kept = [
        line for line in lines if not {b'"norm"', b'"theory"'} <= {w for w in (b'"norm"', b'"theory"') if w in line}
    ]
    segment.write_bytes(b"".join(kept))
    with pytest.raises(UserError, match="incomplete: records of 2 of the 4 settings of suite tiny 3"):
        submit(again, tmp_path / "to")


@pytest.mark.parametrize("folder", [manifests.SUITES, manifests.STRATEGIES])
def test_a_folder_that_does_not_say_what_it_is_about_is_refused(out: Path, tmp_path: Path, folder: str) -> None:
    again = copied(out, tmp_path)
    shutil.rmtree(again / folder)
    with pytest.raises(UserError, match=r"does not say .* give the command of the run again"):
        submit(again, tmp_path / "to")


def test_records_of_several_revisions_are_refused(out: Path, tmp_path: Path) -> None:
    again = copied(out, tmp_path)
    one = next(r for r in store.read(again).values() if r.cell.strategy.name == "norm")
    newer = {"origin": one.origin.model_copy(update={"revision": "f" * 64}), "started": datetime.now(UTC).isoformat()}
    append(again, one.model_copy(update=newer))
    with pytest.raises(UserError, match="several revisions"):
        submit(again, tmp_path / "to")


def test_what_would_not_verify_is_refused_and_nothing_is_left(out: Path, tmp_path: Path) -> None:
    again = copied(out, tmp_path)
    one = next(r for r in store.read(again).values() if r.cell.strategy.name == "norm")
    better = one.metrics | {"accuracy": one.metrics["accuracy"].model_copy(update={"value": 0.999})}
    append(again, one.model_copy(update={"metrics": better, "started": datetime.now(UTC).isoformat()}))
    with pytest.raises(UserError, match=r"would not be verified: .*accuracy is 0.999"):
        submit(again, tmp_path / "to")
    assert not list((tmp_path / "to").rglob("*.json*"))


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
    older = copied(strange, tmp_path)
    (path,) = (older / manifests.SUITES).iterdir()
    asked = json.loads(path.read_bytes()) | {"name": "smoke"}
    path.unlink()
    store.keep(older / manifests.SUITES, asked)
    made = submit(older, tmp_path / "to")
    assert made.folder.name.startswith("no-suite-")

    shutil.rmtree(made.folder / manifests.SUITES)
    store.keep(made.folder / manifests.SUITES, asked)
    manifest = json.loads((made.folder / MANIFEST).read_bytes())
    manifest["suite"] = {"name": "smoke", "version": 1, "sha256": digest(asked)}
    manifest["version"] = f"smoke-1-{manifest['plugin']['revision']}"
    (made.folder / MANIFEST).write_text(json.dumps(manifest))
    forged = verify(sealed(made.folder))
    assert (forged.badge, forged.wrong) == ("rejected", True)
    assert "lacks a cell, such as composite with 256 samples, repetition 0, macs 0.5" in forged.why[0]
