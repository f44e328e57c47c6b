"""Trained strategies: modules, losses and their inputs, and the input of the head."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn
from vits import B, N, begin, close, images, vit

from sparsebench.errors import StrategyError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask


class Gate(Strategy):
    """Weights tokens by a linear layer; the loss moves their mean weight to the share of the budget."""

    name: ClassVar[str] = "gate"
    site: ClassVar[str] = "block"
    trained: ClassVar[bool] = True
    distils: ClassVar[bool] = True
    lessons: ClassVar[list] = []

    def module(self, place):
        return nn.Linear(place.width, 1)

    def plan(self, view, keep):
        weights = view.learned(view.tokens)[:, :, 0].sigmoid()
        view.memory.setdefault("weights", []).append(weights)
        return Mask(weights) if view.training else Keep.top(weights, keep)

    def loss(self, lesson):
        self.lessons.append(lesson)
        return sum(
            (w.mean() - s).square() for w, s in zip(lesson.memory["weights"], lesson.shares.values(), strict=True)
        )


class ReadsFirst(Strategy):
    """Gives the head the class token from the block in which the strategy first acts."""

    name: ClassVar[str] = "reads_first"
    site: ClassVar[str] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "prefix"})

    def plan(self, view, keep):
        view.memory.setdefault("prefix", view.prefix)
        return Keep(torch.arange(keep).expand(len(view.index), keep))

    def read_out(self, memory, prefix, tokens):
        assert prefix.shape == memory["prefix"].shape
        memory["last"] = torch.cat([prefix, tokens], dim=1)
        return memory["prefix"]


@pytest.fixture
def network():
    return DeepViT(vit(reg_tokens=2))


@pytest.fixture(autouse=True)
def no_lessons():
    Gate.lessons.clear()


def test_a_module_is_made_for_each_block_it_acts_in_from_seeded_numbers(network):
    budget = Budget(keep_rate=0.5, blocks=(1, 3))
    torch.manual_seed(1)
    one = Actor(Gate(), budget, network.cost, network.grid, stream=7)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    two = Actor(Gate(), budget, network.cost, network.grid, stream=7)
    other = Actor(Gate(), budget, network.cost, network.grid, stream=8)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(one.learned) == [1, 3]
    assert torch.equal(one.learned[1].weight, two.learned[1].weight)
    assert not torch.equal(one.learned[1].weight, one.learned[3].weight)
    assert not torch.equal(one.learned[1].weight, other.learned[1].weight)


def test_the_loss_reaches_the_modules_only_in_training(network):
    """Its loss sees what came out and reaches its modules in training alone."""
    acting, seen = begin(network, Gate(), training=True), []
    hook = network.module.norm.register_forward_hook(lambda m, a, out: seen.append(out))
    logits = network(images(network), acting)
    hook.remove()
    (acting.loss() + 0.0 * logits.sum()).backward()
    (lesson,) = Gate.lessons
    assert lesson.student.logits is logits and torch.equal(lesson.student.tokens, seen[0][:, network.prefix :])
    assert lesson.student.tokens.shape == (B, N, 32)
    assert lesson.shares == {1: 0.5, 3: 0.25} and lesson.teacher is None
    planned = network.cost.macs(acting.actor.planned) / network.cost.macs(network.cost.dense())
    assert lesson.macs == pytest.approx(planned)
    close(lesson.weights, acting.weights())
    assert all(bool(module.weight.grad.any()) for module in acting.actor.learned.values())
    test = begin(network, Gate())
    network(images(network), test)
    assert not test.learns and test.student is None and test.index.shape == (B, N // 4)


def test_a_teacher_tells_what_the_bare_network_says_without_gradients(network):
    told = network.tell(images(network))
    x = network.module.forward_features(network.normalise(images(network)))
    assert torch.equal(told.logits, network(images(network))) and torch.equal(told.tokens, x[:, network.prefix :])
    assert not told.logits.requires_grad and not told.tokens.requires_grad


def test_what_a_strategy_reads_out_is_what_the_head_reads(network):
    seen = []
    hook = network.module.blocks[1].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    network(images(network))
    hook.remove()
    with torch.no_grad():
        acting, last = begin(network, ReadsFirst()), []
        hook = network.module.blocks[-1].register_forward_hook(lambda m, args, out: last.append(out))
        logits = network(images(network), acting)
        hook.remove()
        first = seen[0].clone()
        expected = network.module.forward_head(network.module.norm(first))
    close(logits, expected)
    assert torch.equal(acting.memory["last"], last[0])
    model = copy.deepcopy(network.module)
    assert not model.norm._forward_pre_hooks and not model.norm._forward_hooks


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("training_blocks", (4,), r"training_blocks must be 0 to 3, got \(4,\)"),
        ("training_blocks", (-1, 1), r"training_blocks must be 0 to 3, got \(-1, 1\)"),
        ("ramp", 2.0, r"ramp must lie in \[0, 1\], got 2.0"),
    ],
)
def test_what_a_strategy_says_of_its_training_must_be_possible(scripted, network, method, answer, message):
    strategy = scripted(lambda view, keep: None)
    setattr(type(strategy), method, lambda self, _: answer)
    with pytest.raises(StrategyError, match=message):
        begin(network, strategy, training=True)
