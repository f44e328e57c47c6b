import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fusing import FUSING
from running import inline
from vits import BLOCKS, B, N, any_tokens, begin, close, noting, ordered, reference

from sparsebench.errors import UnsupportedError
from sparsebench.measure.selection import neighbour_agreement
from sparsebench.models.deep import DeepViT, PositionalDeepViT, small_vit
from sparsebench.models.vits import Vit
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.tasks.images import Plain

HEADS = 4
PIXELS = torch.rand(B, 3, 32, 32, generator=torch.Generator().manual_seed(1))
sites = pytest.mark.parametrize("site", ["input", "block", "attention"])


def build(attention: str = "positional", **changes: int) -> torch.nn.Module:
    """Return a small model in which every weight has an effect: 32 x 32 pixels, 4 x 4 patches, 4 blocks."""
    sizes = {"patch": 8, "dim": 32, "depth": 4, "heads": HEADS} | changes
    model = small_vit(32, 5, attention=attention, **sizes).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.2)
        model.pos_embed.mul_(3)
    return model


@sites
@pytest.mark.parametrize("needs", [(), ("tokens",)])
@torch.no_grad()
def test_removal_equals_positional_attention_written_out(scripted, site, needs):
    """Removing tokens equals positional attention written out for those that stay."""
    network = PositionalDeepViT(build())
    plans = {}
    out = network(PIXELS, begin(network, scripted(noting(plans), site=site, needs=needs)))
    assert sorted(plans) == ([0] if site == "input" else list(BLOCKS))
    close(out, reference(network, PIXELS, site, plans), atol=2e-5)


@sites
@pytest.mark.parametrize("needs", [(), ("tokens",)])
@torch.no_grad()
def test_tokens_in_another_order_keep_their_positions(scripted, site, needs):
    network = PositionalDeepViT(build())
    strategies = (scripted(decide, site=site, needs=needs) for decide in (any_tokens, ordered))
    close(*(network(PIXELS, begin(network, strategy, blocks=(1,))) for strategy in strategies))


@sites
@pytest.mark.parametrize("how", FUSING.values(), ids=FUSING)
@torch.no_grad()
def test_a_token_without_one_position_is_refused(scripted, how, site):
    """A token without one position is refused and the model left as it was."""
    network = PositionalDeepViT(build())
    bare = network(PIXELS)
    with pytest.raises(UnsupportedError, match="kept or removed, not fused, merged or mixed"):
        network(PIXELS, begin(network, scripted(how, site=site)))
    assert torch.equal(network(PIXELS), bare)


@torch.no_grad()
def test_masks_are_refused():
    with pytest.raises(UnsupportedError, match="takes no mask"):
        build()(PIXELS, is_causal=True)


DATA = Plain(test=16).draw(8, 0, {})


def test_content_attention_is_timms_own_model():
    """Content attention is timm's own model with the weights it always had."""
    network = Vit(dim=16, heads=2).build(DATA, 0)
    pixels = torch.from_numpy(DATA.test.inputs)
    assert type(network) is DeepViT and not hasattr(network, "observe")
    assert torch.equal(network(pixels), network.module((pixels.float() / 255 - 0.5) / 0.5))
    # From a version that had only content attention.
    first = network.module.pos_embed.flatten()[:3].tolist()
    assert first == pytest.approx((-0.00195128855, 0.00867464673, 0.02029774524), rel=1e-6)


def test_a_watched_cell_tells_of_neighbours_and_trains_alike(tmp_path):
    task, model = (
        "plain:canvas=16,foreground=16,epochs=2,lr=0.006,batch=8,test=100",
        "vit:dim=32,depth=2,heads=2,patch=4",
    )
    tasks, model = (task, f"{task},watch=4"), f"{model},attention=positional"
    request = Request(plugins=("dense",), tasks=tasks, n_train=(40,), seeds=1, model=model, alone=True)
    plain, watched = inline(expand(request, Registry()), Registry(), tmp_path)
    assert watched.status == "ok", watched.failure
    assert watched.outcomes == plain.outcomes and watched.metrics["test_loss"] == plain.metrics["test_loss"]
    looks = len(watched.samples["watched_steps"])
    assert watched.samples["watched_steps"] == (0, 4, 8, 10)
    for name in ("neighbour_agreement", "neighbour_agreement_shuffled"):
        assert len(watched.samples[f"watched_{name}"]) == looks
        assert watched.metrics[name].value == watched.samples[f"watched_{name}"][-1]
        assert watched.metrics[name].unit == "fraction"
    similarity = np.reshape(watched.samples["trained_similarity"], (16, 16))
    assert watched.metrics["neighbour_agreement"].value == neighbour_agreement(similarity, (4, 4))
    assert "watched_steps" not in plain.samples and "neighbour_agreement" not in plain.metrics


def test_permuted_patches_with_permuted_positions_are_the_same():
    """Positions have no built-in neighbourhood, so only training can distinguish the orders."""
    task = Plain(test=16, permuted=True, patch=8)
    shuffled = task.draw(8, 0, {})
    model = Vit(dim=16, heads=2, patch=8, attention="positional")
    network, other = model.build(shuffled, 0), model.build(DATA, 0)
    order = torch.from_numpy(shuffled.train.order)
    with torch.no_grad():
        other.module.pos_embed[:, 1 + order] = network.module.pos_embed[:, 1:]
        found, expected = (
            net(torch.from_numpy(data.test.inputs)) for net, data in ((network, shuffled), (other, DATA))
        )
    close(found, expected, atol=1e-6)
    assert network.order.tolist() == order.tolist() and other.order.tolist() == list(range(16))


def test_a_network_shows_the_agreement_of_its_first_block():
    order = np.random.default_rng(2).permutation(N)
    network = PositionalDeepViT(build(), order)
    with torch.no_grad():
        P = network.module.pos_embed[0].double()
        qkv = network.module.blocks[0].attn.qkv.double()
        q, k = F.linear(P, qkv.weight, qkv.bias)[1:, :64].split(32, dim=1)
        expected = (q @ k.T / HEADS / 8**0.5).numpy()
        network.module.float()
    np.testing.assert_allclose(network.similarity(), expected, atol=1e-4)
    seen = network.observe(None, None)
    assert set(seen) == set(PositionalDeepViT.shows)
    assert seen["neighbour_agreement"] == neighbour_agreement(network.similarity(), (4, 4), order)
    assert seen["neighbour_agreement_shuffled"] == pytest.approx(3 / 15, abs=0.06)
    assert seen == network.observe(None, None)
    trained_values = network.trained_values({}, None)
    np.testing.assert_allclose(np.reshape(trained_values["similarity"], (N, N)), network.similarity())
