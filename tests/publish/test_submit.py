import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sparsebench import api
from sparsebench.errors import UserError
from sparsebench.publish.folder import MANIFEST, RECORDS
from sparsebench.publish.submit import git_steps, submit
from sparsebench.records import flat, manifests, store
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
    assert sound.name == f"tiny-3-{manifest['plugin']['sha256'][:12]}" and sound.parent.name == "norm"
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


def test_records_of_several_sources_are_refused(out: Path, tmp_path: Path) -> None:
    again = copied(out, tmp_path)
    one = next(r for r in store.read(again).values() if r.cell.strategy.name == "norm")
    newer = {"origin": one.origin.model_copy(update={"sha256": "f" * 64}), "started": datetime.now(UTC).isoformat()}
    append(again, one.model_copy(update=newer))
    with pytest.raises(UserError, match="several versions of its source"):
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
