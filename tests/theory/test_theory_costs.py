"""The networks of the theories cost what they say and what is counted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sparsebench_theory.models import (
    OneQuery,
    Positional,
    PositionalCost,
    Shallow,
    ShallowCost,
    TwoLayer,
    TwoLayerCost,
)
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.spatial.task import Spatial
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.models.actor import Actor
from sparsebench.models.base import Model
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep
from sparsebench.tasks.base import Task

TOKENS: list[tuple[Task, Model]] = [
    (Theory(tokens=L, d=d, classes=classes, patterns=classes + 2, test=4), Shallow(m=m, heads=H, skip=skip))
    for L, d, m, classes, H, skip in ((20, 10, 8, 2, 1, False), (50, 16, 32, 2, 3, True), (31, 12, 5, 4, 2, False))
]
TOKENS += [
    (Overfitting(tokens=M, d=d, test=4), TwoLayer(d_h=d_h, d_v=d_v))
    for M, d, d_h, d_v in ((16, 64, 8, 12), (5, 20, 30, 7))
]
TOKENS += [(Spatial(tokens=D, group=2, d=d, test=4), Positional()) for D, d in ((12, 8), (36, 64))]
TOKENS += [(SparseTokens(tokens=L, d=d, test=4), OneQuery()) for L, d in ((8, 3), (64, 16))]


@pytest.mark.parametrize(("task", "model"), TOKENS, ids=lambda part: part.name)
def test_the_theories_networks_cost_what_they_say(task: Task, model: Model) -> None:
    data = task.draw(4, 0, {})
    assert model.cost(task, len(data.classes)) == model.build(data, 0).cost


@pytest.mark.parametrize("variant", [{}, {"heads": 3}, {"skip": True}, {"heads": 2, "skip": True, "outputs": 2}])
@pytest.mark.parametrize(("needs", "rate"), [((), 1.0), ((), 0.4), (("tokens",), 0.4), (("attention",), 0.4)])
def test_the_closed_form_of_the_shallow_model_is_what_the_counter_counts(scripted, needs, rate, variant):
    def decide(view, keep):
        for field in needs:
            getattr(view, field)
        return Keep(torch.arange(keep).expand(len(view.index), keep))

    L, m = 20, 32
    network = ShallowViT(
        np.random.default_rng(0), np.eye(8)[:, :4], L, m=m, first=FirstWeights(0.1, 0.2, 0.1), **variant
    )
    actor = Actor(scripted(decide, needs=needs), Budget(keep_rate=rate), network.cost, None, 0)
    acting = actor.begin(torch.arange(1), 0, None, tokens=L, training=False)
    # The read-out is a sum of products by element, which the counter does not see.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.rand(1, L, 8), acting)
    found = counter.get_total_flops() / 2 + round(rate * L) * m * variant.get("outputs", 1)
    assert network.cost.macs(acting.steps) == found
    assert acting.steps == actor.planned


@pytest.mark.parametrize(
    ("needs", "scoring", "letters"),
    [
        ({"tokens"}, "", ""), ({"keys"}, "", "k"), ({"queries", "values"}, "", "qv"),
        ({"keys", "attention"}, "received", ""), ({"values", "attention"}, "received", "v"),
    ],
)  # fmt: skip
def test_what_is_projected_only_to_score_is_counted_once(needs: set[str], scoring: Any, letters: str) -> None:
    """Queries and keys that the scoring attention makes are counted with it."""
    L, d, m, d_h, d_v = 16, 10, 7, 5, 3
    for cost, widths in (
        (ShallowCost(L, d, d, d, m), {"q": d, "k": d, "v": d}),
        (TwoLayerCost(L, d, d_h, d_v), {"q": d_h, "k": d_h, "v": d_v}),
    ):
        (step,) = cost.steps(Traits("input", needs), (0,), (8,))
        assert (step.scoring, step.projected) == (scoring, letters)
        bare = cost.macs([replace(step, projected="")])
        assert cost.macs([step]) - bare == L * d * sum(widths[letter] for letter in letters)
        (whole,) = cost.steps(Traits("input", needs), (0,), (L,))
        assert (whole.scoring, whole.projected) == ("", "")
    values = PositionalCost(L, d)
    assert values.macs(values.steps(Traits("input", {"values"}), (0,), (8,))) == 8 * (d + 8) + L * d
