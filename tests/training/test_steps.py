import copy
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sparsebench_plugins.dynamic_vit import DynamicViT

from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask
from sparsebench.tasks.images import Composite
from sparsebench.training.fit import modules_of
from sparsebench.training.loop import Training
from sparsebench.training.steps import (
    Augmentation,
    Autograd,
    Samples,
    losses,
    step_size,
)

TASK = Composite(canvas=16, foreground=10, test=2, epochs=2, batch=10, lr=0.01)
DATA = TASK.draw(23, 0, {})
RECIPE = TASK.recipe()


def vit():
    return Vit(dim=16, depth=2, heads=2, patch=4).build(DATA, 0)


def samples(augmentation=None):
    split = DATA.train
    parts = split.inputs, split.labels, split.relevance_on((4, 4))
    return Samples(*map(torch.from_numpy, parts), augmentation)


def augmentation(flip=True, shift=3):
    return Augmentation(5, flip, shift, torch.from_numpy(DATA.train.boxes), (4, 4))


def gradients(recipe, rows, given=None):
    network = vit()
    steps = Autograd(network, None, given or samples(), recipe)
    loss = steps._gradients(torch.from_numpy(rows), 0)
    return float(loss), torch.cat([p.grad.flatten() for p in network.module.parameters()])


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.module.parameters()])


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 5, 7, 100])
def test_the_parts_of_a_batch_give_the_gradients_of_the_whole(parts, moved):
    rows, given = np.arange(13), samples(augmentation() if moved else None)
    loss, whole = gradients(RECIPE, rows, given)
    cut_loss, cut = gradients(replace(RECIPE, accumulate=parts), rows, given)
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-4)
    assert torch.allclose(whole, gradients(RECIPE, rows)[1], atol=1e-4) != moved


@given(st.floats(0.01, 0.9), st.integers(10, 500))
def test_a_warm_up_rises_linearly_and_then_falls(warmup, total):
    """A warm up rises linearly to the largest step size and then falls to zero."""
    recipe = replace(RECIPE, warmup=warmup)
    sizes = np.array([step_size(recipe, step / total, total) for step in range(total)])
    rising = np.arange(total) / total < warmup
    assert (sizes > 0).all() and (sizes <= recipe.lr * (1 + 1e-9)).all()
    np.testing.assert_allclose(np.diff(sizes[rising]), recipe.lr / (warmup * total + 1), rtol=1e-6)
    assert (np.diff(sizes[~rising]) < 0).all()
    assert step_size(recipe, 1.0, total) == pytest.approx(0, abs=1e-12)
    assert step_size(recipe, warmup, total) == pytest.approx(recipe.lr)


def test_labels_are_smoothed_in_training_alone():
    recipe = replace(RECIPE, smoothing=0.3)
    logits, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 3])
    target = 0.7 * F.one_hot(labels, 4) + 0.3 / 4
    smooth = -(target * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(losses(recipe, logits, labels, training=True), smooth)
    torch.testing.assert_close(losses(recipe, logits, labels), F.cross_entropy(logits, labels, reduction="none"))
    told = gradients(recipe, np.arange(5))[0]
    network, given = vit(), samples()
    with torch.no_grad():
        outputs = network(given.inputs[:5])
    assert told == pytest.approx(float(losses(recipe, outputs, given.labels[:5], training=True).sum()), rel=1e-6)
    assert told != pytest.approx(float(losses(recipe, outputs, given.labels[:5]).sum()), rel=1e-3)


def test_a_strategy_sees_the_moved_pixels_with_the_moved_relevance(scripted):
    """Pictures are white where they are relevant, so the relevance of a patch is its brightness."""
    boxes = DATA.train.boxes
    white = np.zeros_like(DATA.train.inputs)
    for image, (top, left, height, width) in zip(white, boxes, strict=True):
        image[:, top : top + height, left : left + width] = 255
    seen = []

    def decide(view, keep):
        shown = view.pixels.mean(dim=(2, 3, 4))
        torch.testing.assert_close(view.relevance, shown, atol=1e-6, rtol=0)
        seen.append(view.relevance.clone())
        return Keep.top(view.relevance, keep)

    network = vit()
    strategy = scripted(decide, needs=("pixels", "relevance"), kind="oracle")
    actor = Actor(strategy, Budget(keep_rate=0.5), network.cost, network.grid, 3)
    given = Samples(torch.from_numpy(white), torch.from_numpy(DATA.train.labels), samples().relevance, augmentation())
    Training(network, actor, given, RECIPE, ("order",)).run()
    assert len(seen) == 6 and not torch.equal(torch.cat(seen[:3]).sort(0).values, torch.cat(seen[3:]).sort(0).values)
    given.forward(network, actor, given.items, visit=0, training=False)
    assert torch.equal(seen[-1], given.relevance)


class Small:
    """A network that runs out of memory with more than `most` samples."""

    def __init__(self, most):
        self.network, self.most = vit(), most
        self.module, self.grid, self.cost, self.sizes = self.network.module, self.network.grid, self.network.cost, []

    def __call__(self, inputs, acting=None):
        self.sizes.append(len(inputs))
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return self.network(inputs, acting)


@pytest.mark.parametrize("most", [1, 3, 10])
def test_a_step_that_does_not_fit_is_taken_in_parts(most):
    whole, small = vit(), Small(most)
    Training(whole, None, samples(), RECIPE, ("order",)).run()
    training = Training(small, None, samples(), RECIPE, ("order",))
    done, parts = training.run(), training.steps.parts
    assert math.isfinite(done["train_loss"]) and done["steps"] == 6
    torch.testing.assert_close(weights(small), weights(whole), atol=1e-4, rtol=1e-3)
    assert parts == {1: 16, 3: 4, 7: 2, 10: 1}[most]
    assert sum(size > most for size in small.sizes) == math.log2(parts)
    with pytest.raises(torch.OutOfMemoryError):  # not even one sample fits
        Training(Small(0), None, samples(), RECIPE, ("order",)).run()


SIDE, GRID = 12, (3, 3)


def pictures(n, side=SIDE):
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, (n, 3, side, side), dtype=np.uint8))


def moved_by_hand(image, down, right, mirrored):
    """Return the (channels, height, width) picture shifted pixel by pixel, padded with zeros, then flipped."""
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                if 0 <= y - down < height and 0 <= x - right < width:
                    out[c, y, x] = image[c, y - down, x - right]
    return out[:, :, ::-1] if mirrored else out


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shift", [0, 5])
def test_images_are_shifted_and_then_mirrored_by_uniform_moves(flip, shift):
    images, augmentation = pictures(60), Augmentation(3, flip, shift, None, GRID)
    moves = [column.tolist() for column in augmentation.moves(torch.arange(60), 1)]
    moved, relevance = augmentation(images, torch.arange(60), 1)
    assert relevance is None and any(moves[2]) == flip and any(moves[0]) == any(moves[1]) == bool(shift)
    for image, result, *how in zip(images.numpy(), moved.numpy(), *moves, strict=True):
        np.testing.assert_array_equal(result, moved_by_hand(image, *how))
    down, right, mirrored = (column.numpy() for column in augmentation.moves(torch.arange(20000), 0))
    edges = np.arange(-shift, shift + 2)
    table = np.histogram2d(down, right, bins=[edges, edges])[0]
    np.testing.assert_allclose(table / 20000, 1 / (2 * shift + 1) ** 2, atol=0.008)
    assert mirrored.mean() == pytest.approx(0.5 * flip, abs=0.015)


def test_a_sample_looks_the_same_whatever_its_batch_and_new_in_every_pass():
    images, n = pictures(40), 40
    boxes = torch.tensor([[2, 3, 5, 4]]).repeat(n, 1)
    augmentation = Augmentation(7, True, 3, boxes, GRID)
    whole = augmentation(images, torch.arange(n), 2)
    rows = torch.tensor([31, 4, 17])
    for all_, some in zip(whole, augmentation(images[rows], rows, 2), strict=True):
        assert torch.equal(all_[rows], some)
    assert not torch.equal(augmentation(images, torch.arange(n), 3)[0], whole[0])
    other = Augmentation(8, True, 3, boxes, GRID)
    assert not torch.equal(other(images, torch.arange(n), 2)[0], whole[0])


WARM = replace(RECIPE, weight_decay=0.3, warmup=0.2, batch=8, epochs=4)
STEPS = 12  # three per pass


class Gate(Strategy):
    """Weights tokens by its own linear layer."""

    name: ClassVar[str] = "gate"
    site: ClassVar[str] = "block"
    trained: ClassVar[bool] = True

    def module(self, place):
        return torch.nn.Linear(place.width, 1)

    def plan(self, view, keep):
        weights = view.learned(view.tokens)[:, :, 0].sigmoid()
        return Mask(weights) if view.training else Keep.top(weights, keep)


class Slow(Gate):
    """Freezes the network first, and then trains it slowly."""

    name: ClassVar[str] = "slow"

    def network_rate(self, done):
        return 0.0 if done < 0.25 else 0.1


def begun(strategy):
    network = vit()
    actor = Actor(strategy, Budget(keep_rate=0.5), network.cost, network.grid, 3)
    network.module.add_module(LEARNED, modules_of(actor))
    return Autograd(network, actor, samples(), WARM)


def by_hand(steps, taken, rate):
    """Return the weights after some steps of torch's AdamW; `rate` returns the step size of a weight by name."""
    other = copy.deepcopy(steps)
    named = dict(other.network.module.named_parameters())
    groups = [{"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in named.values()]
    opt = torch.optim.AdamW(groups, lr=WARM.lr)
    for step in range(taken):
        other._gradients(torch.arange(7) + 7 * (step % 3), 0)
        for (name, p), group in zip(named.items(), opt.param_groups, strict=True):
            group["lr"] = rate(name, step)
            p.grad = None if group["lr"] == 0 else p.grad
        opt.step()
    return {name: p.detach() for name, p in named.items()}


def rate_of(strategy, name, step):
    size = step_size(WARM, step / STEPS, STEPS)
    return size if name.startswith("strategy.") else size * strategy.network_rate(step / STEPS)


@pytest.mark.parametrize("strategy", [Gate(), Slow()], ids=lambda s: s.name)
def test_each_weight_has_its_step_size_to_the_bit(strategy):
    steps = begun(strategy)
    expected = by_hand(steps, STEPS, lambda name, step: rate_of(strategy, name, step))
    for step in range(STEPS):
        steps.step(np.arange(7) + 7 * (step % 3), 0, step / STEPS)
    result = steps.network.module.state_dict()
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_dynamic_vit_freezes_a_sixth_and_then_has_a_hundredth():
    rates = [DynamicViT().network_rate(epoch / 30) for epoch in range(30)]
    assert rates == [0.0] * 5 + [0.01] * 25
    assert DynamicViT(frozen=0, backbone_rate=1).network_rate(0.0) == 1
    assert {Gate().network_rate(done) for done in (0.0, 0.5)} == {1.0}
