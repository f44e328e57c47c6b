import pytest
import torch
from vits import ARCHITECTURES, BLOCKS, any_tokens, begin, images, vit

from sparsebench.models.deep import DeepViT
from sparsebench.models.small_vit import PositionalDeepViT, small_vit
from sparsebench.strategy.base import SITES
from sparsebench.strategy.plans import Keep

architectures = pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
sites = pytest.mark.parametrize("site", SITES)


@architectures
@torch.no_grad()
def test_bfloat16_is_the_bare_model_by_autocast_with_float32_logits_and_weights(make):
    model = make()
    pixels = images(DeepViT(model))
    exact, rounded = (DeepViT(model, precision=precision)(pixels) for precision in ("float32", "bfloat16"))
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.autocast("cpu", torch.bfloat16):
        expected = model((pixels - 0.5) / 0.5).float()
    assert rounded.dtype == torch.float32 and torch.equal(rounded, expected)
    assert not torch.allclose(rounded, exact, rtol=1e-4)
    assert all(value.dtype == torch.float32 for value in model.parameters())


@architectures
@sites
@torch.no_grad()
def test_in_bfloat16_keeping_all_equals_calling_the_model(scripted, make, site):
    network = DeepViT(make(), precision="bfloat16")
    pixels = images(network)
    acting = begin(network, scripted(lambda view, keep: None, site=site))
    torch.testing.assert_close(network(pixels, acting), network(pixels), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [vit, ARCHITECTURES["LayerScale and qk_norm"]])
@torch.no_grad()
def test_in_bfloat16_a_strategy_sees_and_computes_in_float32(scripted, make):
    seen = []

    def decide(view, keep):
        fields = [view.tokens, view.queries, view.keys, view.values, view.attention, view.received_attention]
        seen.extend([*fields, view.tokens @ view.tokens.mT])
        return any_tokens(view, keep)

    needs = ("tokens", "queries", "keys", "values", "attention", "received_attention")
    network = DeepViT(make(), precision="bfloat16")
    network(images(network), begin(network, scripted(decide, site="attention", needs=needs)))
    assert len(seen) == 7 * len(BLOCKS) and all(x.dtype == torch.float32 for x in seen)
    for attention in seen[4::7]:
        assert len(attention.unique()) == attention.numel()  # not rounded to 8 bits, which makes ties


@torch.no_grad()
def test_in_bfloat16_on_a_cpu_attention_is_the_plain_one_for_the_time_of_a_call(scripted):
    network = DeepViT(vit(), precision="bfloat16")
    kernels = []

    def look(view, keep):
        kernels.extend(block.attn.fused_attn for block in network.module.blocks)
        return Keep.top(view.tokens[..., 0], keep)

    network(images(network), begin(network, scripted(look, site="block")))
    assert kernels and not any(kernels)
    assert all(block.attn.fused_attn for block in network.module.blocks)


def test_in_bfloat16_every_weight_learns_in_float32(scripted):
    network = DeepViT(vit(init_values=0.5, qk_norm=True), precision="bfloat16")
    network.module.train()
    acting = begin(network, scripted(any_tokens, site="attention", needs=()), training=True)
    network(images(network), acting).square().sum().backward()
    for name, weight in network.module.named_parameters():
        assert weight.grad is not None and weight.grad.dtype == torch.float32, name
        assert bool(weight.grad.abs().sum() > 0) and bool(weight.grad.isfinite().all()), name


@torch.no_grad()
def test_positional_attention_is_made_in_bfloat16_too(scripted):
    sizes = {"patch": 8, "dim": 32, "depth": 4, "heads": 4}
    network = PositionalDeepViT(small_vit(32, 5, attention="positional", **sizes), precision="bfloat16")
    logits = network(images(network), begin(network, scripted(any_tokens, site="attention", needs=())))
    assert logits.dtype == torch.float32 and network.module.training
