from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sparsebench_plugins.attn_topk import AttnTopK

from sparsebench.errors import UserError
from sparsebench.inspection.compare import BOTH, INKS, Comparison, compare, figure, rows
from sparsebench.inspection.pictures import BESIDE, GREY, Scene, Trainer, load_cell, rgb
from sparsebench.measure.selection import expected_iou, iou, rank_correlation
from sparsebench.models.actor import Actor
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, Part
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context
from sparsebench.strategy.budget import FULL, Budget
from sparsebench.tasks.base import relevant
from sparsebench.training.evaluation import Choice

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

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


def trainer(out: Path) -> Trainer:
    return Trainer(Files(), Execution("cpu", jobs=0, checkpoint=0.0), out)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Return a function that compares two plugins on a network that is trained once."""
    out = tmp_path_factory.mktemp("compared")

    def of(a: str, b: str, pictures: int = 0, **options: Any) -> Comparison:
        given: dict[str, Any] = {"tasks": (TASK,), "model": VIT, "n_train": (20, 40), "seeds": 1, "keep": (0.5,)}
        return compare((a, b), Request(**({"suite": "quick-scratch"} | given | options)), trainer(out), pictures)

    of.__dict__["out"] = out
    return of


def test_strategies_that_choose_alike_agree_wholly(compared: Compare, tmp_path: Path) -> None:
    (tmp_path / "twin.py").write_text(TWIN)
    actual = compared("feature_norm", str(tmp_path / "twin.py"))
    assert list(actual.stages) == [1, 2]
    for (a, b), row in zip(actual.stages.values(), rows(actual), strict=True):
        assert (a.kept == b.kept).all() and row["iou"] == 1 > row["iou_expected"]
        assert row["rank_correlation"] == pytest.approx(1) and row["rank_correlation_n"] == 40
        assert row["relevant_kept_a"] == row["relevant_kept_b"]


@pytest.mark.parametrize("b", ["random:stratified=true", "random_inside", "random:keep_rate=0.3"])
def test_random_choices_are_independent_and_agree_as_expected(b: str, compared: Compare) -> None:
    *_, (one, other) = compared("random", b).stages.values()
    expected, rho = expected_iou(one.kept, other.kept), rank_correlation(one.scores, other.scores)
    off, rho = iou(one.kept, other.kept) - expected, rho[~np.isnan(rho)]
    assert 0.1 < expected.mean() < 0.5
    assert abs(off.mean()) < 4 * off.std() / 40**0.5 and abs(rho.mean()) < 4 * rho.std() / len(rho) ** 0.5


def test_agreement_is_that_of_what_each_strategy_keeps_alone(compared: Compare) -> None:
    actual = compared("attn_topk", "oracle")
    registry = Registry()
    options: Any = {"tasks": (TASK,), "model": VIT, "n_train": (40,), "seeds": 1}
    dense = Request(suite="quick-scratch", plugins=("dense",), alone=True, **options)
    plan = trainer(compared.out).plan(dense, registry)
    cell = load_cell(plan.jobs[-1], registry, Context(RunEnvironment(out=compared.out, device="cpu")))
    assert cell.cell == actual.cell
    shares = cell.test.relevance.numpy()
    matter, by_oracle = relevant(shares, cell.data.test.mask), actual.stages[0][1].kept
    assert (np.where(by_oracle, shares, 9).min(axis=1) >= np.where(by_oracle, 0, shares).max(axis=1)).all()
    actor = Actor(AttnTopK(), Budget(keep_rate=0.5), cell.network.cost, cell.network.grid, stream=0)
    with torch.no_grad():
        _, acting = cell.test.forward(cell.network, actor, cell.test.items, visit=0, training=False)
    by_attention = [np.ones((40, 64), bool)]
    for decision in acting.decisions:
        by_attention.append(np.array([np.isin(np.arange(64), stays) for stays in decision.after]))
    # The oracle acts at the input, the other strategy in two blocks.
    made = rows(actual)
    assert list(actual.stages) == [0, 1, 2] and made[0]["rank_correlation"] is None
    assert [kept.sum(axis=1).tolist() for kept in by_attention] == [[64] * 40, [32] * 40, [16] * 40]
    for (a, b), row, attended in zip(actual.stages.values(), made, by_attention, strict=True):
        assert (a.kept == attended).all() and (b.kept == by_oracle).all()
        both, either = attended & by_oracle, attended | by_oracle
        assert row["iou"] == pytest.approx((both.sum(axis=1) / either.sum(axis=1)).mean())
        found_by = [(kept & matter).sum(axis=1) / matter.sum(axis=1) for kept in (attended, by_oracle)]
        assert [row["relevant_kept_a"], row["relevant_kept_b"]] == pytest.approx([share.mean() for share in found_by])


def test_merging_strategies_keep_the_named_tokens(compared: Compare) -> None:
    """Merging strategies keep what tokens are named after and give no scores."""
    merged = compared("tome", "attn_topk")
    assert rows(merged)[-1]["rank_correlation_n"] == 0 and set(merged.stages[2][0].kept.sum(axis=1)) == {32}
    mixed = compared("downsample", "attn_topk")
    assert not mixed.stages[2][0].kept.any() and rows(mixed)[-1]["iou"] == 0


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
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
        ("attn_topk", "dynamic_vit", {}, "'dynamic_vit' is trained together with its network"),
        ("attn_topk", "random", {"tasks": ("composite:epochs=1,2",)}, "one task with one model"),
        ("raises.py", "random", {}, "strategy 'raises' has no result: ValueError: no idea which token matters"),
        ("wrong_shape.py", "random", {}, "strategy 'wrong_shape' has no result: .*must have shape"),
        ("import_error.py", "random", {}, r"plugin file .*import_error\.py: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    a: str, b: str, options: Any, message: str, compared: Compare, samples: Path
) -> None:
    with pytest.raises(UserError, match=message) as error:
        compared(str(samples / a) if a.endswith(".py") else a, b, **options)
    assert "\n" not in str(error.value)


def test_a_network_that_cannot_be_trained_is_said(compared: Compare) -> None:
    with pytest.raises(UserError, match="the network without a strategy has no result: training diverged"):
        compared("attn_topk", "random", tasks=("composite:epochs=2,lr=1e30,test=4,pretrain_epochs=0",), n_train=(8,))


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


def test_an_adaptive_strategy_is_compared_at_its_test_counts(compared: Compare, tmp_path: Path) -> None:
    """An adaptive strategy is compared at the counts it would be tested with."""
    (tmp_path / "frugal.py").write_text(FRUGAL)
    (row,) = rows(compared("random", str(tmp_path / "frugal.py")))
    assert row["kept_a"] == 32 and row["kept_b"] == pytest.approx(32, abs=1)


CELL = Cell(
    task=Part(name="composite"), model=Part(name="vit"), strategy=Part(name="dense"), budget=FULL, n_train=600,
    repetition=0,
)  # fmt: skip


def test_a_row_has_means_and_intervals_over_the_samples_that_have_a_value() -> None:
    def choice(block: int, *counts: int, scores: Any = None) -> Choice:
        kept = np.arange(16) < np.array(counts)[:, None]
        return Choice(block, kept, np.full((3, 16), np.nan) if scores is None else scores, scored=True)

    rising, flat = np.tile(np.arange(16.0), (3, 1)), np.zeros(16)
    turned = np.stack([rising[0], -rising[0], flat])
    a, before, last = choice(0, 8, 8, 0, scores=rising), choice(-1, 16, 16, 16), choice(2, 4, 8, 0, scores=turned)
    matter = np.arange(16) < np.array([8, 16, 1])[:, None]
    sides = (("attn_topk", "macs 0.5"), ("tome(x=1)", "keep 0.5"))
    actual = Comparison(CELL, sides, {0: (a, before), 2: (a, last)}, matter, np.arange(0), None)
    first, end = rows(actual)
    assert (first["block"], first["end"], end["block"], end["end"]) == (0, False, 2, True)
    assert (end["kept_a"], end["kept_b"]) == pytest.approx((16 / 3, 4))
    half = (
        12.706204736432095 * 0.25
    )  # Student's t of 0.5 and 1, one degree of freedom; the third sample has no kept patches
    assert [end["iou"], end["iou_low"], end["iou_high"]] == pytest.approx([0.75, 0.75 - half, 0.75 + half])
    chance = expected_iou(a.kept, last.kept)
    assert end["iou_expected"] == pytest.approx(chance[:2].mean()) and np.isnan(chance[2])
    assert (end["rank_correlation"], end["rank_correlation_n"]) == (pytest.approx(0), 2)
    assert (first["rank_correlation"], first["rank_correlation_n"]) == (None, 0)
    assert (end["relevant_kept_a"], end["relevant_kept_b"]) == pytest.approx((0.5, 1 / 3))


A, B = [0, 1, 2, 7], [1, 2, 3, 4]


def patch(large: np.ndarray, number: int, inset: int = 6) -> np.ndarray:
    """Return the pixels of a patch without its border."""
    side = large.shape[0] // 4
    top, left = side * (number // 4), side * (number % 4)
    return large[top + inset : top + side - inset, left + inset : left + side - inset].astype(float)


def masks(patches: list[int], n: int = 5) -> np.ndarray:
    return np.tile(np.isin(np.arange(16), patches), (n, 1))


def panel(axes: int, column: int) -> np.ndarray:
    """Return the first picture of a column of a comparison: axes 0 has the plain pictures, axes 1 has A and B."""
    kept, rows = (masks(A), masks(B)), np.array([0, 2, 4])
    kept[0][4], kept[1][4] = False, False
    a, b = (Choice(0, one, one, scored=False) for one in kept)
    pictures = np.random.default_rng(0).integers(0, 200, (3, 16, 16, 3)).astype(np.uint8)
    nothing = np.zeros((3, 16, 16), bool)
    scene = Scene("composite, vit", (4, 4), pictures, nothing, ["a cat"] * 3, np.zeros(3, int), ("cat",))
    sides = (("attn_topk", "macs 0.5"), ("random", "macs 0.5"))
    made = figure(Comparison(CELL, sides, {0: (a, b)}, None, rows, scene))
    return np.asarray(made.axes[axes].images[0].get_array())[:256, column * int(256 * (1 + BESIDE)) :][:, :256]


@pytest.mark.parametrize(("own", "other", "side"), [(A, B, 0), (B, A, 1)])
def test_patches_are_coloured_by_who_keeps_them(own: list[int], other: list[int], side: int) -> None:
    plain, large = panel(0, 0), panel(1, side)
    for number in range(16):
        was, now = patch(plain, number), patch(large, number)
        if number not in own:
            assert np.abs(now - rgb(GREY)).max() < 256 / 8 + 1
            continue
        ink = INKS[BOTH if number in other else side]
        assert np.abs(now - (1 - ink.strength) * was - ink.strength * rgb(ink.colour)).max() <= 1
    rim = large[0, large.shape[1] // 8 + 16 * 4]  # on the outline of patch 1, which both keep
    assert (rim == rgb(INKS[BOTH].colour)).all()
