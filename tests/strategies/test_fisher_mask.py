"""The information of each position against differences of losses in float64, image by image and token by token."""

import copy

import pytest
import torch
from sparsebench_plugins import fisher_mask
from sparsebench_plugins.fisher_mask import FisherMask
from timm.models.deit import VisionTransformerDistilled
from tiny import B, N, act, chosen, images, vit

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.view import Images
from sparsebench.tasks.base import Recipe
from sparsebench.training.fit import fit

RECIPE = Recipe("cross-entropy", "adamw", 1e-3, B, epochs=1, steps=1, smoothing=0.1)
LABELS = torch.tensor([0, 3, 1, 3])
NETWORKS = {
    "class token": {},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 3},
    "distilled": {"cls": VisionTransformerDistilled},
}


def fitted(network, inputs=None, labels=LABELS):
    inputs = images() if inputs is None else inputs
    actor = Actor(FisherMask(), Budget(keep_rate=0.5), network.cost, network.grid, stream=5)
    return actor, fit(network, actor, Images(inputs, torch.arange(len(inputs)), labels), RECIPE, 0)


@torch.no_grad()
def by_hand(network, inputs, labels, step=1e-5):
    """Return the N mean squares of (L(1 + step) - L(1 - step)) / 2 step, one token of one image scaled at a time."""
    model, information = copy.deepcopy(network.module).double(), [0.0] * N
    P = network.prefix

    def loss(x, label):
        for block in model.blocks:
            x = block(x)
        logits = model.forward_head(model.norm(x))[0]
        return float(logits.logsumexp(0) - logits[label])

    for image, label in zip(inputs, labels.tolist(), strict=True):
        x = model._pos_embed(model.patch_embed((image[None].double() - 0.5) / 0.5))
        for token in range(N):
            ends = []
            for factor in (1 + step, 1 - step):
                scaled = x.clone()
                scaled[0, P + token] *= factor
                ends.append(loss(scaled, label))
            information[token] += ((ends[0] - ends[1]) / (2 * step)) ** 2 / len(inputs)
    return information


@pytest.mark.parametrize("name", NETWORKS)
def test_the_information_is_a_mean_square(name, monkeypatch):
    """The information is the mean square of what a factor on the token changes."""
    network = vit(**NETWORKS[name])
    wanted = torch.tensor(by_hand(network, images(), LABELS), dtype=torch.float64)
    for batch in (1, 3, 32):
        monkeypatch.setattr(fisher_mask, "BATCH", batch)
        actor, (learned, images_seen) = fitted(network)
        information = learned["0.information"]
        torch.testing.assert_close(information.double(), wanted, rtol=1e-3, atol=1e-6 * wanted.max())
        assert images_seen == B and torch.equal(actor.learned[0]["information"], information)


def test_every_image_keeps_the_most_informative_positions():
    """Every image keeps the same positions and they are those with the most information."""
    network = vit()
    actor, _ = fitted(network)
    best = chosen(by_hand(network, images(), LABELS), 8)
    acting = actor.begin(torch.arange(7), 0, None, training=False)
    network(torch.rand(7, 3, 32, 32), acting)
    assert acting.index.tolist() == [best] * 7
    assert best != list(range(8))


def test_before_it_has_seen_images_it_knows_nothing():
    acting, _ = act(FisherMask(), vit(), images())
    assert acting.index.tolist() == [list(range(8))] * B
