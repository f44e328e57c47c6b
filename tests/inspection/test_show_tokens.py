import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import execute

from sparsebench.errors import UserError
from sparsebench.inspection.pictures import GREY, Trainer, figure, load_cell, matters, paint, rgb, show, spread
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import numbers_of
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.images import Composite, Spurious
from sparsebench.training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

TASK = "spurious:epochs=2,lr=0.003,test=40,pretrain_epochs=1,pretrain_samples=40"
VIT = "vit:dim=16,depth=3,heads=2"
FAILING_ORACLE = """
import sparsebench


class Seer(sparsebench.Strategy):
    name = "seer"
    kind = "oracle"
    needs = frozenset({"relevance"})

    def scores(self, view):
        raise ValueError("no mask today")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Seer]
"""


def request(*plugins: str, **options: Any) -> Request:
    given = {"suite": "quick-scratch", "tasks": (TASK,), "model": VIT, "n_train": (20, 40), "seeds": 1} | options
    return Request(plugins=plugins, **given)


def trainer(out: Path) -> Trainer:
    return Trainer(Files(), Execution("cpu", jobs=0, checkpoint=0.0), out)


def plan(out: Path, *plugins: str, **options: Any) -> tuple[planner.Plan, Registry]:
    registry = Registry()
    return trainer(out).plan(request(*plugins, **options), registry), registry


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> tuple[Path, planner.Plan, Registry]:
    """Return the folder of trained cells, which tests must not change, the plan before training, and the registry."""
    out = tmp_path_factory.mktemp("trained")
    planned, registry = plan(out, "attn_topk", str(samples / "raises.py"))
    execute(planned, registry, out)
    return out, planned, registry


def test_only_the_largest_number_of_samples_is_trained(trained: Any) -> None:
    """Only the largest number of samples is trained and all weights are kept."""
    _, planned, _ = trained
    start, *cells = planned.todo
    assert start.cell.task.name == "plain" and {job.after for job in cells} == {start.cell.id}
    labels = [job.label for job in cells]
    assert labels == ["attn_topk", "dense", "random", "oracle", "anti_oracle", "raises"], "other code comes last"
    assert all(job.keep_weights and job.cell.n_train == 40 and job.cell.repetition == 0 for job in cells)


def test_what_is_trained_is_not_trained_again_unless_its_weights_are_gone(trained: Any, tmp_path: Path) -> None:
    out, planned, _ = trained
    again, _ = plan(out, "attn_topk", planned.jobs[2].files[0])
    assert again.todo == [] and [job.cell.id for job in again.jobs] == [job.cell.id for job in planned.jobs]
    shutil.copytree(out / "records", tmp_path / "records")
    lost, _ = plan(tmp_path, "attn_topk", planned.jobs[2].files[0])
    labels = [job.label for job in lost.todo]
    assert labels == [
        "dense",
        "attn_topk",
        "dense",
        "random",
        "oracle",
        "anti_oracle",
    ]  # `raises` has a result, a failure


def test_what_is_shown_is_what_the_test_saw(trained: Any) -> None:
    out, planned, registry = trained
    context, records = Context(RunEnvironment(out=out, device="cpu")), store.read(out)
    seen = show(request("attn_topk", planned.jobs[2].files[0]), trainer(out), 8)
    assert seen.grid == (8, 8) and seen.pictures.shape == (8, 32, 32, 3)
    data = Spurious(test=40).draw(40, 0, {})
    rows = spread(data, 8)
    assert (seen.pictures == data.test.inputs[rows].transpose(0, 2, 3, 1)).all()
    assert seen.names == [data.group_names[k] for k in data.test.groups[rows]] and len(set(seen.names)) == 4
    assert [shown.label for shown in seen.shown] == [job.label for job in planned.jobs[1:]]
    for job, shown in zip(planned.jobs[1:], seen.shown, strict=True):
        record = records[job.cell.id]
        if job.label == "raises":
            assert "no idea which token matters" in shown.why and shown.stages == [] and len(shown.predicted) == 0
            continue
        assert record.outcomes is not None and not shown.why
        assert shown.predicted.tolist() == numbers_of(record.outcomes.predicted, 40)[rows].tolist()
        counts = sorted({step.tokens_out for step in record.trajectory} - {64}, reverse=True)
        assert [stage.count for stage in shown.stages] == counts
        cell = load_cell(job, registry, context)
        kept = evaluate(cell.network, cell.in_test, cell.test, cell.recipe).kept[rows]
        assert not shown.stages or ((shown.stages[-1].token >= 0) == kept).all()
    assert [stage.place for stage in seen.shown[0].stages] == ["block 1", "block 2"]
    assert [stage.place for stage in seen.shown[-1].stages] == ["the input"]
    for scene, more in ((seen, ["matters to the label"]), (replace(seen, matters=seen.matters & False), [])):
        (legend,) = figure(scene).legends
        assert [text.get_text() for text in legend.get_texts()] == ["removed", *more]


def test_where_nothing_has_a_result_there_is_nothing_to_draw(trained: Any) -> None:
    out, planned, _ = trained
    with pytest.raises(UserError, match=r"no strategy has a result; raises: .*no idea which token matters"):
        show(request(planned.jobs[2].files[0], alone=True), trainer(out), 4)


def test_an_oracle_of_a_file_that_fails_is_named(trained: Any, tmp_path: Path) -> None:
    """Only the oracles that the suite brings are left out silently."""
    out, _, _ = trained
    shutil.copytree(out, tmp_path / "out")
    file = tmp_path / "some_file.py"
    file.write_text(FAILING_ORACLE)
    seen = show(request(str(file)), trainer(tmp_path / "out"), 2)
    reasons = {shown.label: shown.why for shown in seen.shown}
    assert "no mask today" in reasons["seer"] and not reasons["dense"]
    with pytest.raises(UserError, match=r"no strategy has a result; seer: .*no mask today"):
        show(request(str(file), alone=True), trainer(tmp_path / "out"), 2)


def test_weights_that_cannot_be_read_are_trained_again(trained: Any, tmp_path: Path) -> None:
    out, planned, _ = trained
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    (random,) = (store.weights_path(tmp_path, job.cell.id) for job in planned.jobs if job.label == "random")
    whole = random.read_bytes()
    random.write_bytes(whole[:100])
    seen = show(request("random", "oracle", alone=True), trainer(tmp_path), 4)
    assert [(shown.label, shown.why) for shown in seen.shown] == [("random", ""), ("oracle", "")]
    assert random.read_bytes() == whole


def data_of(labels: list[int], groups: list[int], names: tuple[str, ...] = ("all",)) -> Data:
    split = Split(np.zeros((len(labels), 3, 4, 4), np.uint8), np.array(labels), np.array(groups))
    return Data(split, split, ("a", "b", "c"), names)


def test_the_pictures_are_spread_over_classes_or_groups() -> None:
    data = data_of([0, 0, 0, 2, 1, 2], [0] * 6)
    assert [spread(data, n).tolist() for n in (1, 3, 4, 5, 9)] == [
        [0], [0, 4, 3], [0, 1, 4, 3], [0, 1, 4, 3, 5], [0, 1, 2, 4, 3, 5]
    ]  # fmt: skip
    grouped = data_of([0, 0, 0, 2, 1, 2], [1, 1, 0, 0, 0, 1], ("x", "y"))
    assert spread(grouped, 4).tolist() == [2, 3, 0, 1]


def test_the_box_and_the_patches_that_show_it_matter() -> None:
    """What matters is the box and of permuted patches those that show some of it."""
    for permuted in (False, True):
        split = Composite(canvas=16, foreground=6, test=5, permuted=permuted).draw(5, 0, {}).test
        assert split.boxes is not None
        rows = np.array([3, 1])
        actual = matters(split, rows, split.relevance_on((4, 4))[rows] > 0, (4, 4))
        assert actual.shape == (2, 16, 16)
        for mask, (top, left, height, width) in zip(actual, split.boxes[rows], strict=True):
            if not permuted:
                assert mask[top : top + height, left : left + width].all() and mask.sum() == height * width
        if permuted:
            patches = actual.reshape(2, 4, 4, 4, 4).swapaxes(2, 3).reshape(2, 16, 16)
            assert (patches.all(axis=2) == (split.relevance_on((4, 4))[rows] > 0)).all()
            assert (patches.all(axis=2) == patches.any(axis=2)).all()


def test_patches_that_are_gone_are_greyed_and_others_are_as_they_were() -> None:
    small = np.random.default_rng(0).integers(0, 200, (16, 16, 3)).astype(np.uint8)
    token = np.full(16, -1)
    token[[0, 5, 15]] = [0, 1, 2]
    plain, large = (paint(small, np.zeros((16, 16), bool), *more) for more in ((), (token, (4, 4))))
    assert (plain[::16, ::16] == small).all() and plain.shape == (256, 256, 3)  # pictures of 16 pixels are enlarged
    now, before = (x.reshape(4, 64, 4, 64, 3).swapaxes(1, 2).reshape(16, -1, 3).astype(float) for x in (large, plain))
    assert (now[token >= 0] == before[token >= 0]).all() and np.abs(now[token < 0] - rgb(GREY)).max() < 256 / 8 + 1


BESIDE = {"random", "oracle", "anti_oracle"}


@pytest.mark.slow
def test_what_a_strategy_is_taught_by_is_shown_if_it_was_asked_for(tmp_path: Path) -> None:
    options: Any = {"tasks": (TASK.replace("epochs=2", "epochs=1"),), "n_train": (20,)}
    for alone in (True, False):
        planned, registry = plan(tmp_path, "dynamic_vit", alone=alone, **options)
        first, dense, *rest = planned.jobs
        assert [dense.label, first.cell.task.name] == ["dense", "plain"] and dense.requested is not alone
        assert all(job.keep_weights for job in planned.jobs)
        assert {job.label for job in planned.todo} == ({"dense", "dynamic_vit"} if alone else BESIDE)
        execute(planned, registry, tmp_path)
        seen = show(request("dynamic_vit", alone=alone, **options), trainer(tmp_path), 2)
        assert [shown.label for shown in seen.shown] == [job.label for job in planned.jobs if job.requested]
        assert not any(shown.why for shown in seen.shown) and len(seen.shown) == (1 if alone else 5)
    store.weights_path(tmp_path, dense.cell.id).unlink()
    store.weights_path(tmp_path, rest[-1].cell.id).unlink()
    todo = plan(tmp_path, "dynamic_vit", alone=True, **options)[0].todo
    assert [job.label for job in todo] == ["dense", "dynamic_vit"] and todo[0].cell.id == dense.cell.id
    todo = plan(tmp_path, "random", alone=True, **options)[0].todo
    assert todo == [], "nobody starts from the dense network then"
