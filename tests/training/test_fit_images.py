"""`Strategy.fit`: its images, its results, and the errors of wrong ones."""

import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from vits import B, N, images, vit

from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.models.vits import Vit
from sparsebench.strategy.base import Strategy, complaint
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask, Shift
from sparsebench.strategy.view import Images
from sparsebench.tasks.base import Recipe
from sparsebench.tasks.images import Composite
from sparsebench.training import fit as module
from sparsebench.training.evaluation import evaluate
from sparsebench.training.fit import calibrate, fit, state_digest
from sparsebench.training.steps import Samples

RECIPE = Recipe("cross-entropy", "adamw", 1e-3, B, epochs=1, steps=1)


class Fits(Strategy):
    """Learns what `learn` returns: a number for each position before block 1, and a threshold before block 3."""

    name: ClassVar[str] = "fits"
    site: ClassVar[str] = "block"
    learn: ClassVar = staticmethod(lambda images, network: GOOD)

    def module(self, place):
        module = torch.nn.Module()
        shape = (place.patches,) if place.block == 1 else ()
        module.register_buffer("value", torch.zeros(shape))
        return module

    def fit(self, images, network):
        return type(self).learn(images, network)

    def scores(self, view):
        return view.tokens[:, :, 0] + view.learned.value


GOOD = {1: {"value": torch.arange(float(N))}, 3: {"value": torch.tensor(7.0, dtype=torch.float64)}}


def fits(learn, **declared):
    return type("Other", (Fits,), {"learn": staticmethod(learn), "__module__": __name__, **declared})()


def run(learn=Fits.learn, *, strategy=None, network=None, labels=None, relevance=None, seed=0):
    """Return the actor and the result of `fit`."""
    network = network or DeepViT(vit())
    actor = Actor(strategy or fits(learn), Budget(keep_rate=0.5, blocks=(1, 3)), network.cost, network.grid, stream=7)
    given = Images(images(network), torch.arange(B) + 10, labels)
    return actor, fit(network, actor, given, RECIPE, seed, relevance)


def test_what_it_returns_is_in_its_modules_and_is_not_trained():
    actor, result = run()
    assert list(result[0]) == ["1.value", "3.value"] and result[1] == 0
    assert actor.learned[1].value.tolist() == list(range(N))
    assert actor.learned[3].value.item() == 7.0 and actor.learned[3].value.dtype == torch.float32
    parameters = type("P", (Fits,), {"module": lambda self, place: torch.nn.ParameterDict({"value": torch.zeros(N)})})()
    network = DeepViT(vit())
    actor = Actor(parameters, Budget(keep_rate=0.5, blocks=(1,)), network.cost, network.grid, stream=7)
    assert not any(weight.requires_grad for weight in actor.learned[1].parameters())


def raises(images, network):
    return {}[5]


def returns(block, value):
    return lambda images, network: GOOD | {block: {"value": value}}


def reads_labels(images, network):
    return {1: {"value": images.labels.float()}}


BAD = {
    "raises": (raises, "fit raised KeyError: 5", "sparsebench check tries it"),
    "exits": (lambda images, network: exit(3), "fit raised SystemExit: 3", "sparsebench check"),
    "nothing": (lambda images, network: None, "something else than its module has", "allowed: .* numbers for 1.value"),
    "flat": (lambda images, network: {"value": torch.zeros(N)}, "something else", "no attribute 'items'"),
    "a block less": (lambda images, network: {1: GOOD[1]}, "something else", "Missing key.* \"3.value\""),
    "a list": (returns(1, [0.0] * N), "something else", "1.value.* received <class 'list'>"),
    "another shape": (returns(1, torch.zeros(N + 1)), "something else", "size mismatch for 1.value"),
    "nan": (returns(3, torch.tensor(float("nan"))), "something else", "NaN in 3.value"),
    "labels": (reads_labels, "images.labels was read but not declared", "add fit_labels = True"),
    "removes": (
        lambda images, network: network(images, lambda view: Keep(view.index[:, :3])), "look returned Keep",
        "returns Shift, Mask or None",
    ),
    "another view": (
        lambda images, network: network(images, lambda view: view.relevance), "view.relevance was read but not",
        "only kind = 'oracle'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_it_does_wrong_is_said_with_the_line(name):
    learn, what, more = BAD[name]
    with pytest.raises(UserError, match=f"(?s)^'fits': .*{what}.*{more}") as caught:
        run(learn)
    assert re.search(rf"\({Path(__file__).name}:\d+\)", str(caught.value)), caught.value


def test_a_refusal_by_memory_is_not_the_strategys_fault():
    """What the memory or the network refuses is no mistake of the strategy."""

    def unsupported(images, network):
        raise UnsupportedError("not here")

    def large(images, network):
        raise MemoryError

    with pytest.raises(UnsupportedError, match="not here"):
        run(unsupported)
    with pytest.raises(MemoryError):
        run(large)


def test_the_network_of_a_fit_is_frozen():
    """The network is frozen and as in a test and gradients reach what is added."""
    network = DeepViT(vit(drop_path_rate=0.5, proj_drop_rate=0.5))
    network.module.train()
    seen, before = [], state_digest(network.module.state_dict())

    def learn(given, frozen):
        by, added = torch.zeros(B, N, 32, requires_grad=True), []

        def look(view):
            added.append((view.block, view.training, tuple(view.tokens.shape)))
            return Shift(by) if view.block == 1 else None

        first, second = frozen(given, look), frozen(given)
        assert torch.equal(first, second) and torch.is_grad_enabled()
        frozen.losses(first, torch.zeros(B, dtype=torch.int64)).sum().backward()
        assert bool(by.grad.any()) and network.module.head.weight.grad is None
        frozen._network.module.head.weight.data.add_(1.0)
        seen.extend(added)
        return GOOD

    with torch.no_grad():
        _, result = run(learn, network=network)
    assert seen == [(1, True, (B, N, 32)), (3, True, (B, N, 32))] and result[1] == 2 * B
    assert all(part.training for part in network.module.modules())
    assert all(weight.requires_grad for weight in network.module.parameters())
    assert state_digest(network.module.state_dict()) == before


def test_images_come_in_parts_with_their_labels():
    labels = torch.tensor([4, 0, 2])
    parts = []

    def learn(given, frozen):
        parts.extend((len(part), part.items.tolist(), part.labels.tolist()) for part in given.split(2))
        assert torch.equal(torch.cat([part.inputs for part in given.split(2)]), given.inputs)
        return GOOD

    run(learn, labels=labels)
    assert parts == [(2, [10, 11], [4, 0]), (1, [12], [2])]


def test_random_numbers_are_the_cells_and_afterwards_as_before():
    def learn(images, network):
        return {1: {"value": torch.rand(N)}, 3: GOOD[3]}

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, third = (run(learn, seed=seed)[1][0] for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert state_digest(first) == state_digest(second) != state_digest(third)


@pytest.mark.parametrize("kind", ["oracle", "deployable"])
def test_only_an_oracle_finds_out_which_tokens_matter(kind):
    relevance, result = torch.rand(20, N), []

    def learn(given, network):
        network(given, lambda view: result.append(view.relevance))
        return GOOD

    oracle = fits(learn, kind="oracle", needs=frozenset({"tokens", "relevance"}))
    if kind == "oracle":
        run(strategy=oracle, relevance=relevance)
        assert torch.equal(result[0], relevance[10 : 10 + B])
        return
    with pytest.raises(UserError, match="only kind = 'oracle' may declare it"):
        run(learn, relevance=relevance)
    run(lambda images, network: result.append(network._relevance) or GOOD, relevance=relevance)
    assert result == [None]
    with pytest.raises(StrategyError, match="oracle"):
        run(strategy=fits(learn, needs=frozenset({"tokens", "relevance"})), relevance=relevance)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"module": Strategy.module}, "has a fit and no module: write module"),
        ({"trained": True}, "has a fit and is trained: it is one or the other"),
        ({"fit_images": 0}, r"fit_images must be a number of images, 1 or more, got 0"),
        ({"fit_images": True}, "got True"),
        ({}, None),
    ],
)
def test_a_class_that_cannot_fit_is_refused(changes, says):
    said = complaint(type("Other", (Fits,), {"__module__": __name__, **changes}))
    assert said is None if says is None else re.search(says, said), said


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
    """Return a strategy that keeps the first tokens of image i: a share of the count, plus i."""

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
    taken, ratio, images = calibrate(network, actor, samples())
    assert before < 0.97 * asked and ratio == pytest.approx(asked, rel=0.02)
    assert spent(network, actor) == pytest.approx(ratio, rel=1e-9) and images == 60
    assert taken.macs > asked - 1e-9 and actor.planned is planned


def test_what_cannot_be_reached_is_told_as_it_is(network, scripted):
    actor = Actor(bounded(scripted, 0.1), Budget(macs=0.95), network.cost, network.grid, 3)
    _, ratio, _ = calibrate(network, actor, samples())
    assert ratio < 0.7 and spent(network, actor) == pytest.approx(ratio, rel=1e-9)


def test_only_the_first_images_calibrate_the_budget(network, scripted, monkeypatch):
    """The shape of the budget stays and only the first images are looked at and no label."""
    monkeypatch.setattr(module, "IMAGES", 7)
    given = samples()
    given.labels.fill_(99)
    budget = Budget(macs=0.6, schedule="late", gamma=1.0, convention="compound-ceil")
    actor = Actor(bounded(scripted, 0.7), budget, network.cost, network.grid, 3)
    result, _, looked_at = calibrate(network, actor, given)
    assert (result.schedule, result.gamma, result.convention, looked_at) == ("late", 1.0, "compound-ceil", 7)
