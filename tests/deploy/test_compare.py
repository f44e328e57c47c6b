from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sparsebench_plugins.attn_topk import AttnTopK

from sparsebench.deploy.compare import Agreement, Comparison, compare, rows
from sparsebench.deploy.pictures import Trainer, trained_cell
from sparsebench.errors import UserError
from sparsebench.models.actor import Actor
from sparsebench.plan.request import Files, How, Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Cell, Part
from sparsebench.runner.prepare import Context
from sparsebench.runner.run import Callbacks
from sparsebench.strategy.budget import FULL, Budget
from sparsebench.tasks.base import relevant

TASK = "spurious:epochs=1,lr=0.003,test=40,pretrain_epochs=1,pretrain_samples=40"
VIT = "vit:dim=16,depth=3,heads=2"
TWIN = """
import sparsebench
from sparsebench_plugins.feature_norm import FeatureNorm

class Twin(FeatureNorm):
    "Scores as feature_norm does, on another scale."
    name = "twin"

    def scores(self, view):
        return super().scores(view).exp() + 1

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Twin]
"""
Compare = Any


def trainer(out: Path, done: list[Any], jobs: int = 0) -> Trainer:
    how, callbacks = How("cpu", jobs=jobs, checkpoint=0.0), Callbacks(on_plan=lambda plan, _: done.append(plan))
    return Trainer(Files(), how, out, callbacks)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Return a comparer of two plugins on one network, which is trained once."""
    out = tmp_path_factory.mktemp("compared")

    def of(a: str, b: str, pictures: int = 0, **options: Any) -> Comparison:
        given: dict[str, Any] = {"tasks": (TASK,), "model": VIT, "n_train": (20, 40), "seeds": 1, "keep": (0.5,)}
        return compare((a, b), Request(**({"suite": "quick-scratch"} | given | options)), trainer(out, []), pictures)

    of.__dict__["out"] = out
    return of


def test_only_the_network_without_a_strategy_is_trained_and_that_once(tmp_path: Path) -> None:
    done: list[Any] = []
    request = Request(suite="quick-scratch", tasks=(TASK,), model=VIT, n_train=(20, 40), seeds=1)
    for b in ("random", "feature_norm"):
        compare(("attn_topk", b), request, trainer(tmp_path, done), 0)
    first, again = done
    assert [(job.label, job.cell.task.name, job.cell.n_train) for job in first.todo] == [
        ("dense", "plain", 40), ("dense", "spurious", 40)
    ]  # fmt: skip
    assert again.todo == []
    assert {(r.label, r.status) for r in store.read(tmp_path).values()} == {("dense", "ok")}


def test_strategies_that_choose_alike_agree_wholly(compared: Compare, tmp_path: Path) -> None:
    (tmp_path / "twin.py").write_text(TWIN)
    found = compared("feature_norm", str(tmp_path / "twin.py"))
    assert [stage.block for stage in found.stages] == [1, 2]
    for stage in found.stages:
        assert (stage.iou == 1).all() and (stage.expected < 1).all()
        assert stage.correlation == pytest.approx(np.ones(40))
        assert stage.recall[0] == stage.recall[1]


@pytest.mark.parametrize("b", ["random:stratified=true", "random_inside", "random:keep_rate=0.3"])
def test_random_choices_are_independent_and_agree_as_expected(b: str, compared: Compare) -> None:
    last = compared("random", b).stages[-1]
    off, rho = last.iou - last.expected, last.correlation[~np.isnan(last.correlation)]
    assert 0.1 < last.expected.mean() < 0.5
    assert abs(off.mean()) < 4 * off.std() / 40**0.5 and abs(rho.mean()) < 4 * rho.std() / len(rho) ** 0.5


def test_agreement_is_that_of_what_each_strategy_keeps_alone(compared: Compare) -> None:
    found = compared("attn_topk", "oracle")
    registry = Registry()
    plan = trainer(compared.out, []).plan(
        Request(
            suite="quick-scratch", plugins=("dense",), alone=True, tasks=(TASK,), model=VIT, n_train=(40,), seeds=1
        ),
        registry,
    )
    cell = trained_cell(plan.jobs[-1], registry, Context(Setting(out=compared.out, device="cpu")))
    assert cell.cell == found.cell
    shares = cell.test.relevance.numpy()
    matter, by_oracle = relevant(shares, cell.data.test.mask), found.stages[0].kept[1]
    assert (np.where(by_oracle, shares, 9).min(axis=1) >= np.where(by_oracle, 0, shares).max(axis=1)).all()
    actor = Actor(AttnTopK(), Budget(keep_rate=0.5), cell.network.cost, cell.network.grid, stream=0)
    with torch.no_grad():
        _, acting = cell.test.forward(cell.network, actor, cell.test.items, visit=0, training=False)
    by_attention = [np.ones((40, 64), bool)]
    for decision in acting.decisions:
        by_attention.append(np.array([np.isin(np.arange(64), stays) for stays in decision.after]))
    # The oracle acts at the input, the other one in two blocks.
    assert [stage.block for stage in found.stages] == [0, 1, 2] and np.isnan(found.stages[0].correlation).all()
    assert [kept.sum(axis=1).tolist() for kept in by_attention] == [[64] * 40, [32] * 40, [16] * 40]
    for stage, attended in zip(found.stages, by_attention, strict=True):
        assert (stage.kept[0] == attended).all() and (stage.kept[1] == by_oracle).all()
        both, either = attended & by_oracle, attended | by_oracle
        assert stage.iou == pytest.approx(both.sum(axis=1) / either.sum(axis=1))
        found_by = [(kept & matter).sum(axis=1) / matter.sum(axis=1) for kept in (attended, by_oracle)]
        assert stage.recall == pytest.approx([share.mean() for share in found_by])


def test_merging_strategies_keep_what_tokens_are_named_after_and_give_no_scores(compared: Compare) -> None:
    last = compared("tome", "attn_topk").stages[-1]
    assert last.correlation is None and set(last.kept[0].sum(axis=1)) == {32}
    mixed = compared("downsample", "attn_topk").stages[-1]
    assert not mixed.kept[0].any() and (mixed.iou == 0).all()


@pytest.mark.parametrize(
    ("a", "b", "options", "says"),
    [
        ("attn_topk", "attn_topk", {}, "A and B are the same strategy at the same budget"),
        ("attn_topk", "attn_topk:keep_rate=0.5", {}, "A and B are the same strategy at the same budget"),
        ("attn_topk", "randum", {}, "unknown strategy; got 'randum'.*did you mean 'random'"),
        ("attn_topk:keep_rate=0.5,0.7", "random", {}, "each at one budget; got 'attn_topk:keep_rate=0.5,0.7'"),
        ("attn_topk", "random", {"keep": (0.5, 0.7)}, "each at one budget"),
        ("attn_topk", "random", {"keep": (1.5,)}, r"keep rate; got 1.5; allowed: \(0, 1\]"),
        ("attn_topk", "random", {"keep": (1.0,)}, "neither strategy removes a token; got budget keep 1"),
        ("attn_topk", "dense", {}, "strategy 'dense' chooses no tokens"),
        ("patch_dropout", "random", {}, "'patch_dropout' removes tokens in training only"),
        ("attn_topk", "random", {"tasks": ("composite:epochs=1,2",)}, "one task with one model"),
        ("raises.py", "random", {}, "strategy 'raises' has no result: ValueError: no idea which token matters"),
        ("wrong_shape.py", "random", {}, "strategy 'wrong_shape' has no result: .*must have shape"),
        ("import_error.py", "random", {}, r"plugin file .*import_error\.py: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    a: str, b: str, options: Any, says: str, compared: Compare, samples: Path
) -> None:
    with pytest.raises(UserError, match=says) as error:
        compared(str(samples / a) if a.endswith(".py") else a, b, **options)
    assert "\n" not in str(error.value)


def test_a_network_that_cannot_be_trained_is_said(tmp_path: Path) -> None:
    request = Request(
        suite="quick-scratch",
        tasks=("composite:epochs=2,lr=1e30,test=4,pretrain_epochs=0",),
        model=VIT,
        n_train=(8,),
        seeds=1,
    )
    with pytest.raises(UserError, match="the network without a strategy has no result: training diverged"):
        compare(("attn_topk", "random"), request, trainer(tmp_path, []), 0)


def test_what_is_learned_with_a_network_is_not_compared_on_another(compared: Compare) -> None:
    with pytest.raises(UserError, match="'dynamic_vit' learns with the network it acts on"):
        compared("attn_topk", "dynamic_vit")


FRUGAL = """
import sparsebench, torch

class Frugal(sparsebench.Strategy):
    "Keeps half as many tokens as it may."
    name, adaptive = "frugal", True

    def plan(self, view, keep):
        return sparsebench.Mask(torch.arange(view.index.shape[1]).expand(view.index.shape) < max(1, keep // 2))

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Frugal]
"""


def test_an_adaptive_strategy_is_compared_at_the_counts_it_would_be_tested_with(
    compared: Compare, tmp_path: Path
) -> None:
    (tmp_path / "frugal.py").write_text(FRUGAL)
    (stage,) = compared("random", str(tmp_path / "frugal.py")).stages
    random, frugal = (float(kept.sum(axis=1).mean()) for kept in stage.kept)
    assert random == 32 and frugal == pytest.approx(random, abs=1)


CELL = Cell(
    task=Part(name="composite"), model=Part(name="vit"), strategy=Part(name="dense"), budget=FULL, n_train=600,
    repetition=0,
)  # fmt: skip
NAN = float("nan")


def kept(*counts: int) -> np.ndarray:
    return np.arange(16) < np.array(counts)[:, None]


def comparison(**last: Any) -> Comparison:
    given: dict[str, Any] = {
        "kept": (kept(8, 8, 8), kept(4, 4, 5)), "iou": np.array([0.2, 0.4, NAN]), "expected": np.array([0.1, 0.3, NAN]),
        "correlation": np.array([0.5, 0.5, NAN]), "recall": (0.25, 0.125),
    }  # fmt: skip
    first = Agreement(
        0, (kept(8, 8, 8), kept(16, 16, 16)), np.full(3, 0.5), np.full(3, 0.5), np.full(3, NAN), (0.25, 1)
    )
    sides = (("attn_topk", "macs 0.5"), ("tome(x=1)", "keep 0.5"))
    return Comparison(CELL, sides, [first, Agreement(2, **given | last)], np.arange(0), None)


def test_a_row_has_means_and_intervals_over_the_samples_that_have_a_value() -> None:
    first, last = rows(comparison())
    assert (first["block"], first["end"], last["block"], last["end"]) == (0, False, 2, True)
    assert last["kept_a"] == 8 and last["kept_b"] == pytest.approx(13 / 3)
    half = 12.706204736432095 * 0.1 * 2**0.5 / 2**0.5  # Student t, one degree of freedom; s = 0.1 sqrt(2)
    assert [last["iou"], last["iou_low"], last["iou_high"]] == pytest.approx([0.3, 0.3 - half, 0.3 + half])
    assert last["iou_expected"] == pytest.approx(0.2)
    assert (last["rank_correlation"], last["rank_correlation_n"]) == (0.5, 2)
    assert (first["rank_correlation"], first["rank_correlation_n"]) == (None, 0)
    assert (last["relevant_kept_a"], last["relevant_kept_b"]) == (0.25, 0.125)
