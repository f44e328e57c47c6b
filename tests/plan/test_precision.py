"""Tests of trained networks in bfloat16, and in batches of a size that is asked for: from the request to the board."""

from pathlib import Path
from typing import Any

import pytest
from coded import write_noise, write_random_weights

import sparsebench
from sparsebench.board.settings import about, frame_of, settings_of
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Files, How, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner import run as runs

ARCH, TASK = "test_vit", "folder:canvas=32"
MODEL = f"timm:{ARCH}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return a folder of 21 pictures of noise in three classes of ImageNet, and weights for them."""
    root = write_noise(tmp_path_factory.mktemp("pictures"), ("n01440764", "n01443537", "n01484850"))
    write_random_weights(root / "own.safetensors", ARCH)
    return Files((f"folder:{root}",), weights=(root / "own.safetensors",))


def run(files: Files, out: Path, how: How | None = None, **options: Any) -> dict[str, Record]:
    """Return what a run adds to the records of a folder, by strategy."""
    before = set(store.read(out)) if out.exists() else set()
    given: dict[str, Any] = {"suite": "folder", "tasks": (TASK,), "model": MODEL} | options
    runs.run(Request(**given), files, how or How("cpu", jobs=0), Registry(), out)
    new = [record for cell_id, record in store.read(out).items() if cell_id not in before]
    assert all(record.status == "ok" for record in new), [record.failure for record in new]
    return {record.cell.strategy.name: record for record in new}


@pytest.fixture(scope="module")
def both(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record], dict[str, Record]]:
    """Return a folder with the records of both precisions, and these."""
    out = tmp_path_factory.mktemp("both")
    named = {"plugins": ("attn_topk",)}
    return out, run(files, out, **named), run(files, out, precision="bfloat16", **named)


def test_a_test_in_bfloat16_is_another_cell_with_other_losses(both: Any, files: Files, tmp_path: Path) -> None:
    _, single, halved = both
    as_model = run(
        files, tmp_path, model=f"{MODEL},precision=bfloat16".replace(":", ":arch=", 1), plugins=("attn_topk",)
    )
    for name, record in single.items():
        assert record.cell_id != halved[name].cell_id and halved[name].cell.precision == "bfloat16"
        loss, other = (one.metrics["test_loss"].value for one in (record, halved[name]))
        assert loss != other and loss == pytest.approx(other, rel=0.05)
        assert other == as_model[name].metrics["test_loss"].value


def test_no_board_mixes_two_precisions(both: Any) -> None:
    out, single, halved = both
    shown = dict(sparsebench.leaderboard(out)[["strategy", "accuracy"]].itertuples(index=False))
    of = [{name: one.metrics["accuracy"].value for name, one in records.items()} for records in (single, halved)]
    assert shown in of
    rows = sparsebench.leaderboard(out, by="task")
    assert len(rows) == 2 * len(shown) and sum("precision=bfloat16" in name for name in set(rows["model"])) == 1
    said = sorted(about(one) for one in settings_of(frame_of(sparsebench.load_records(out))))
    assert ["in bfloat16" in line for line in said].count(True) == 1 == len(said) - 1


def test_networks_of_a_suite_are_tested_in_bfloat16_and_trained_as_ever(tmp_path: Path) -> None:
    def cells(**options: Any) -> list[Any]:
        request = Request(suite="embedded", tasks=("composite",), seeds=1, **options)
        return [job.cell for job in planner.plan(request, Files(), Registry(), tmp_path, "missing").jobs]

    single, halved = cells(), cells(precision="bfloat16")
    assert {cell.precision for cell in single} == {"float32"} and {cell.precision for cell in halved} == {"bfloat16"}
    assert {cell.init.id for cell in single} == {cell.init.id for cell in halved}
    assert not {cell.id for cell in single} & {cell.id for cell in halved}


def test_a_precision_is_not_said_twice(files: Files, tmp_path: Path) -> None:
    given: dict[str, Any] = {"suite": "folder", "tasks": (TASK,), "model": f"timm:arch={ARCH},precision=bfloat16"}
    with pytest.raises(UserError, match="model 'timm' has a precision; got --precision float32"):
        planner.plan(Request(precision="float32", **given), files, Registry(), tmp_path, "missing")


def test_a_batch_that_is_asked_for_is_tried_and_said(both: Any, files: Files, tmp_path: Path) -> None:
    _, single, _ = both
    asked = run(files, tmp_path, How("cpu", jobs=0, batch=8), plugins=("attn_topk",))
    for name, record in asked.items():
        assert record.cell_id == single[name].cell_id and record.notes["test_batch"] == "8"
        assert record.outcomes == single[name].outcomes
        assert "test_batch" not in single[name].notes


HUNGRY = """
import torch
from sparsebench import Keep, Strategy, hookimpl

class Hungry(Strategy):
    name = "hungry"
    site = "attention"
    needs = frozenset({"tokens"})

    def plan(self, view, keep):
        if len(view.index) > 6:
            raise torch.OutOfMemoryError("too many")
        return Keep.top(view.tokens[..., 0], keep)

@hookimpl
def sparsebench_strategies():
    return [Hungry]
"""


def test_a_batch_for_which_there_is_no_memory_is_halved_and_said(files: Files, tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    named = {"plugins": (str(tmp_path / "hungry.py"),)}
    found = run(files, tmp_path / "out", How("cpu", jobs=0, batch=20), **named)
    assert found["hungry"].notes["test_batch"] == "5; the device had no memory for 20"
    assert found["dense"].notes["test_batch"] == "20"
