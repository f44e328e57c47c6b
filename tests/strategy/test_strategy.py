from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError

from sparsebench.errors import StrategyError
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Strategy, complaint, default_reduction, reduction_of
from sparsebench.strategy.plans import Keep, Place
from sparsebench.strategy.view import NEEDS, TokenView


class Good(Strategy):
    name: ClassVar[str] = "good"
    power: float = 2.0

    def scores(self, view):
        return view.tokens.norm(dim=-1) ** self.power


def a_view(**fields):
    ones = torch.ones(2, 3)
    return TokenView(
        fields,
        index=torch.arange(3).expand(2, 3),
        sizes=ones,
        weights=ones,
        place=Place(4, 12, 3, 3, 8, 2, 4, 1, 3, 0.0),
        training=False,
        grid=(1, 3),
        random=lambda draw, width: ones * draw,
    )


def test_top_keeps_the_largest_scores_best_first():
    scores = torch.tensor([[0.1, 0.9, 0.5], [3.0, 1.0, 2.0]])
    plan = Keep.top(scores, 2)
    assert plan.index.tolist() == [[1, 2], [0, 2]]
    assert plan.scores is scores and plan.fuse is None


def test_equal_scores_keep_the_lowest_positions():
    assert Keep.top(torch.zeros(2, 500), 7).index.tolist() == [list(range(7))] * 2
    mixed = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0] * 40])
    assert Keep.top(mixed, 82).index[0].tolist() == [i for i in range(200) if i % 5 in (1, 3)] + [0, 2]


def test_scores_alone_make_a_plan_that_keeps_the_best():
    tokens = torch.tensor([[[1.0], [-3.0], [2.0]]]).repeat(2, 1, 1)
    assert Good().plan(a_view(tokens=lambda: tokens), 2).index.tolist() == [[1, 2]] * 2


def test_a_strategy_with_neither_scores_nor_plan_says_so_with_its_name():
    class Empty(Strategy):
        name: ClassVar[str] = "empty"

    with pytest.raises(StrategyError, match="'empty' has neither"):
        Empty().plan(a_view(), 1)


def test_parameters_are_checked_frozen_and_survive_json():
    strategy = Good(power=3)
    assert Good.model_validate_json(strategy.model_dump_json()) == strategy != Good()
    with pytest.raises(ValidationError, match="powr"):
        Good(powr=3)
    with pytest.raises(StrategyError, match=r"set self\.power"):
        strategy.power = 1.0


@pytest.mark.parametrize("field", sorted(NEEDS))
def test_every_field_of_the_view_is_given_if_declared_and_refused_if_not(field):
    value = torch.rand(2, 3)
    assert getattr(a_view(**{field: lambda: value}), field) is value
    with pytest.raises(StrategyError, match=rf"view\.{field} was read but not declared.*declared: nothing"):
        getattr(a_view(), field)


def test_a_field_is_computed_when_first_read_and_only_then():
    calls = []
    view = a_view(tokens=lambda: calls.append("tokens") or torch.ones(1), keys=lambda: calls.append("keys"))
    assert calls == []
    assert view.tokens is view.tokens
    assert calls == ["tokens"]


def test_the_view_has_its_position_and_one_random_stream_for_each_draw():
    view = a_view()
    assert (view.block, view.depth, view.training, view.grid) == (4, 12, False, (1, 3))
    assert float(view.random().sum()) == 0 and float(view.random(2).sum()) == 12


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "empty has neither scores(self, view) nor plan(self, view, keep); write one of them"),
        ({"score": lambda self, view: view.tokens}, "nor plan(self, view, keep); rename score"),
        ({"ratio": 1.0, "__annotations__": {"ratio": float}},
         "empty has parameters with names of budget options; rename them: ratio"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_a_strategy_is_refused(body, says):
    assert complaint(type("Empty", (Strategy,), {"name": "empty", "__module__": __name__, **body})).endswith(says)


def test_the_declared_disposal_of_every_strategy_is_that_of_its_plans() -> None:
    declared = {registered.cls.name: default_reduction(registered.cls) for registered in Registry().strategies()}
    known = {
        "dense": "-", "oracle": "truth", "anti_oracle": "truth", "attn_topk": "drop", "tps": "mix", "evit": "fuse",
        "ats": "drop", "dynamic_vit": "trained", "patch_merger": "trained", "tofu": "drop+merge",
    }  # fmt: skip
    assert {name: declared[name] for name in known} == known and all(declared.values())


@pytest.mark.parametrize(
    ("default", "params", "reduction"),
    [
        ("drop", {}, "drop"),
        ("drop", {"disposal": "squeeze"}, "mix"),
        ("drop", {"a": 1, "disposal": "merge", "b": 2}, "merge"),
        ("trained", {"disposal": "squeeze"}, "trained"),
    ],
)
def test_a_disposal_among_the_parameters_is_the_reduction(default: str, params: dict, reduction: str) -> None:
    assert reduction_of(default, params) == reduction
