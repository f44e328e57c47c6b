import pytest
import torch
from vits import ARCHITECTURES, B, any_tokens, begin, images, vit

from sparsebench.models.deep import DeepViT
from sparsebench.models.small_vit import small_vit
from sparsebench.plans import Keep
from sparsebench.strategy import SITES

architectures = pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
sites = pytest.mark.parametrize("site", SITES)


@sites
@pytest.mark.parametrize("needs", [(), ("tokens",)])
def test_every_weight_learns_through_the_tokens_that_stay(scripted, site, needs):
    network = DeepViT(vit(init_values=0.5, qk_norm=True))
    network.module.train()
    acting = begin(network, scripted(any_tokens, site=site, needs=needs), training=True)
    network(images(network), acting).square().sum().backward()
    for name, weight in network.module.named_parameters():
        assert weight.grad is not None and bool(weight.grad.abs().sum() > 0), name
        assert bool(weight.grad.isfinite().all()), name


def test_a_token_dropped_at_the_input_teaches_nothing(scripted):
    network = DeepViT(vit())
    acting = begin(network, scripted(lambda view, keep: Keep(torch.arange(keep).expand(B, keep))), training=True)
    network(images(network), acting).square().sum().backward()
    taught = network.module.pos_embed.grad[0].abs().sum(dim=1) > 0
    assert taught.tolist() == [True] * 9 + [False] * 8


def test_training_with_tokens_dropped_lowers_the_loss(scripted):
    network = DeepViT(small_vit(32, 2, patch=8, dim=32, depth=2, heads=4))
    network.module.train()
    pixels = torch.cat([images(network, 8) * 0.4, images(network, 8) * 0.4 + 0.6])
    labels = torch.arange(16) // 8
    optimizer = torch.optim.SGD(network.module.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        acting = begin(network, scripted(any_tokens, site="attention"), n=16, training=True, blocks=(1,))
        loss = torch.nn.functional.cross_entropy(network(pixels, acting), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
