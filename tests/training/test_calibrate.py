"""Counts with which an adaptive strategy spends what was asked for."""

import pytest
import torch

from sparsebench.models.actor import Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Mask
from sparsebench.tasks.images import Composite
from sparsebench.training import fit as module
from sparsebench.training.fit import calibrate
from sparsebench.training.loop import evaluate
from sparsebench.training.steps import Samples

TASK = Composite(canvas=16, foreground=10, test=2)
DATA = TASK.draw(60, 0, {})


@pytest.fixture
def network():
    return Vit(dim=16, depth=4, heads=2, patch=2).build(DATA, 0)


def samples():
    return Samples(torch.from_numpy(DATA.train.inputs), torch.from_numpy(DATA.train.labels), None)


def spent(network, actor):
    evaluation = evaluate(network, actor, samples(), TASK.recipe())
    return network.cost.macs(evaluation.steps) / network.cost.macs(network.cost.dense())


def bounded(scripted, share):
    """Return a strategy that keeps of image i some of the first tokens: a share of the count, and i more."""

    def decide(view, keep):
        extra = torch.arange(len(view.index))[:, None] % 5
        stays = torch.arange(view.index.shape[1]).expand(view.index.shape) < max(1, int(share * keep)) + extra
        return Mask(stays & view.there)

    strategy = scripted(decide, site="block")
    type(strategy).adaptive = True
    return strategy


@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"macs": 0.4}, {"keep_rate": 0.8}], ids=str)
def test_the_mean_cost_becomes_the_one_that_was_asked_for(network, scripted, budget):
    actor = Actor(bounded(scripted, 0.7), Budget(**budget), network.cost, network.grid, 3)
    asked = network.cost.macs(actor.planned) / network.cost.macs(network.cost.dense())
    before, planned = spent(network, actor), actor.planned
    found = calibrate(network, actor, samples())
    assert before < 0.97 * asked and found.ratio == pytest.approx(asked, rel=0.02)
    assert spent(network, actor) == pytest.approx(found.ratio, rel=1e-9) and found.images == 60
    assert found.budget.macs > asked - 1e-9 and actor.planned is planned


def test_what_cannot_be_reached_is_told_as_it_is(network, scripted):
    actor = Actor(bounded(scripted, 0.1), Budget(macs=0.95), network.cost, network.grid, 3)
    found = calibrate(network, actor, samples())
    assert found.ratio < 0.7 and spent(network, actor) == pytest.approx(found.ratio, rel=1e-9)


def test_the_shape_of_the_budget_stays(network, scripted):
    budget = Budget(macs=0.6, schedule="late", gamma=1.0, convention="compound-ceil")
    actor = Actor(bounded(scripted, 0.7), budget, network.cost, network.grid, 3)
    found = calibrate(network, actor, samples()).budget
    assert (found.schedule, found.gamma, found.convention) == ("late", 1.0, "compound-ceil")


def test_only_the_first_images_are_looked_at_and_no_label(network, scripted, monkeypatch):
    monkeypatch.setattr(module, "IMAGES", 7)
    given = samples()
    given.labels.fill_(99)
    actor = Actor(bounded(scripted, 0.7), Budget(macs=0.6), network.cost, network.grid, 3)
    assert calibrate(network, actor, given).images == 7
