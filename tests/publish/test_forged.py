"""Kinds of forged submissions, each with the best badge that is true of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import PLUGIN, put, sealed

from sparsebench import api
from sparsebench.measure.scores import scores
from sparsebench.planning.request import Files
from sparsebench.publish import rescore
from sparsebench.publish.folder import RECORDS
from sparsebench.publish.lines import record_of
from sparsebench.publish.replay import Here, replay
from sparsebench.publish.submit import submit
from sparsebench.publish.verify import BADGES, Badge, Verdict, verify
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import pack, pack_reals

Raw = dict[str, Any]
GROUPS = ["-1 without spurious", "-1 with spurious", "+1 without spurious", "+1 with spurious"]


def judged(folder: Path, plugin: Path = PLUGIN) -> Verdict:
    verdict = verify(folder, placed=True)
    replay(folder, verdict, None, Here(plugin, Files(), "cpu"))
    return verdict


@pytest.fixture(scope="module")
def honest(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("honest")
    api.run(str(PLUGIN), suite=str(suite), tasks="theory", seeds=1, out=out / "out", jobs=0, device="cpu")
    return submit(out / "out", out / "submissions").folder


def all_right(raw: Raw) -> None:
    """Say that each test item was classed right, without loss, and all that follows."""
    items = rescore.items_of(record_of(canonical(raw).encode())[0])
    assert items is not None
    n = len(items.labels)
    zeros, losses = np.zeros(n, dtype=int), np.zeros(n, np.float32)
    raw["outcomes"] |= {"predicted": pack(items.labels), "rank": pack(zeros), "loss": pack_reals(losses)}
    made = replace(items, predicted=items.labels, ranks=zeros, losses=losses)
    sizes = [int(raw["metrics"][f"train_samples: {name}"]["value"]) for name in GROUPS]
    for name, *of in scores(made, 2, GROUPS, sizes):
        raw["metrics"][name] = dict(zip(("value", "unit", "n", "low", "high", "method"), of, strict=True))
    for name in rescore.SUCCESSES:
        raw["metrics"][name]["value"] = 1.0


def fewer(raw: Raw) -> None:
    """Leave test items out that were classed wrong."""
    items = rescore.items_of(record_of(canonical(raw).encode())[0])
    assert items is not None
    keep = np.arange(len(items.labels) // 2)
    for name, values in (("predicted", items.predicted), ("label", items.labels), ("group", items.groups)):
        raw["outcomes"][name] = pack(values[keep])
    raw["outcomes"] |= {"rank": pack(items.ranks[keep]), "loss": pack_reals(items.losses[keep]), "n": len(keep)}


FORGED: dict[str, tuple[Badge, str | None, Callable[[Raw], object]]] = {
    "outcomes that nobody had": ("recounted", "norm", all_right),
    "fewer test items": ("reported", None, fewer),
    "a name with HTML": ("rejected", "norm", put("<img src=x>", "cell", "strategy", "name")),
    "a label of another": ("rejected", "norm", put("norm(power=2)", "label")),
    "a time that never comes": ("rejected", "norm", put("zzz", "started")),
    "the last of all times": ("rejected", "norm", put("9999-12-31T23:59:59.999999+00:00", "started")),
    "another kind": ("rejected", "norm", put("oracle", "kind")),
    "a baseline that is an oracle": ("rejected", "random", put("oracle", "kind")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORGED)
def test_no_forgery_has_a_badge_above_what_is_true(honest: Path, tmp_path: Path, kind: str) -> None:
    most, strategy, change = FORGED[kind]
    verdict = judged(forged(honest, tmp_path, strategy, change))
    assert BADGES.index(verdict.badge) <= BADGES.index(most) and verdict.wrong, verdict


def forged(honest: Path, to: Path, strategy: str | None, change: Callable[[Raw], object]) -> Path:
    """Return a copy of a submission with changed records."""
    folder = shutil.copytree(honest, to / honest.parent.name / honest.name)
    lines = [json.loads(line) for line in (folder / RECORDS).read_bytes().splitlines()]
    for raw in lines:
        if strategy in (None, raw["cell"]["strategy"]["name"]):
            change(raw)
            raw["cell_id"] = digest(raw["cell"])
    lines.sort(key=lambda raw: raw["cell_id"])
    (folder / RECORDS).write_bytes(b"".join(canonical(raw).encode() + b"\n" for raw in lines))
    return sealed(folder)


def elsewhere(folder: Path, change: Callable[[Raw], object] = lambda raw: None) -> Path:
    """Return a copy that claims another machine."""
    old = next((folder / "environments").iterdir())
    machine = canonical(json.loads(old.read_bytes()) | {"processor": "of somebody else"})
    key = digest(json.loads(machine))

    def move(raw: Raw) -> None:
        if raw["cell"]["strategy"]["name"] == "norm":
            change(raw)
        raw["environment"] = key

    copy = forged(folder, folder.parents[1] / f"moved {len(list(folder.parents[1].iterdir()))}", None, move)
    (copy / "environments" / old.name).unlink()
    (copy / "environments" / f"{key}.json").write_text(machine)
    return sealed(copy)


@pytest.mark.slow
def test_another_machine_buys_no_points(honest: Path) -> None:
    verdict = judged(elsewhere(honest, all_right))
    assert (verdict.badge, verdict.wrong) == ("recounted", True)
    assert "the mean test loss is 0 there" in verdict.why[0] and "succeed there and not here" in verdict.why[1]


@pytest.mark.slow
def test_honest_submissions_verify_on_the_same_machine_and_elsewhere(honest: Path) -> None:
    assert judged(honest).badge == "replayed"
    verdict = judged(elsewhere(honest))
    assert (verdict.badge, verdict.points, verdict.wrong) == ("replayed (elsewhere)", 0.0, False)


@pytest.mark.slow
def test_code_that_reads_the_answers_is_not_replayed(honest: Path, tmp_path: Path) -> None:
    """All its numbers are what its source gives."""
    plugin = PLUGIN.parent / "peeks_at_frames.py"
    import hashlib

    from sparsebench.publish import replay as module

    folder = shutil.copytree(honest, tmp_path / honest.parent.name / honest.name)
    manifest = module.folders.manifest_of(folder)
    name = plugin.stem
    records = [record_of(line)[0] for line in (folder / RECORDS).read_bytes().splitlines()][:1]
    own = [r.model_copy(update={"cell": r.cell.model_copy(update={"strategy": r.cell.strategy.model_copy(
        update={"name": name, "params": {}})})}) for r in records]  # fmt: skip
    assert hashlib.sha256(plugin.read_bytes()).hexdigest()
    why = module._unfair(manifest.model_copy(update={"strategy": name}), own, plugin)
    assert why and "does not conform: check " in why[0]
