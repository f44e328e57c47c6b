from types import SimpleNamespace

import pytest
import torch
from vits import ARCHITECTURES, Gated, any_tokens, begin, close, images, reference, tokens_at, vit

from sparsebench.errors import UnsupportedError
from sparsebench.models import attention_fields as fields_of
from sparsebench.models.deep import DeepViT

architectures = pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)


def full_attention(network, pixels, number):
    """Return the (B, H, T, T) attention of a block of the bare model, and its q, k, v of (B, H, T, C / H)."""
    model = network.module
    (x,) = tokens_at([model.blocks[number].norm1], network, None, pixels)
    attn = model.blocks[number].attn
    q, k, v = (
        part.unflatten(2, (attn.num_heads, attn.head_dim)).transpose(1, 2)
        for part in attn.qkv(model.blocks[number].norm1(x)).chunk(3, dim=2)
    )
    q, k = attn.q_norm(q), attn.k_norm(k)
    return torch.softmax(torch.einsum("bhqc,bhkc->bhqk", q, k) / attn.head_dim**0.5, dim=-1), q, k, v


SHOWN = ("attention", "received_attention", "queries", "keys", "values")


def shown(scripted, network, pixels, fields):
    """Return what a strategy is shown of each field in block 1, the first that acts."""
    seen = []
    strategy = scripted(
        lambda view, keep: seen.append([getattr(view, f) for f in fields]), site="attention", needs=fields
    )
    network(pixels, begin(network, strategy))
    return seen[0]


@architectures
@torch.no_grad()
def test_attention_and_its_parts_are_shown_as_a_full_product_gives_them(scripted, make):
    network = DeepViT(make())
    pixels, P, rows = images(network), network.prefix, network.class_rows
    attention, received, *parts = shown(scripted, network, pixels, SHOWN)
    full, *expected = full_attention(network, pixels, 1)
    close(received, full.mean(dim=(1, 2))[:, P:])
    close(attention, full[:, :, :rows].mean(dim=(1, 2))[:, P:] if rows else received)
    assert network.attention_source == ("received", "class", "class+distillation")[rows]
    if rows:
        close(shown(scripted, network, pixels, ("class_attention",))[0], attention)
    for part, whole in zip(parts, expected, strict=True):
        close(part, whole[:, :, P:])


@pytest.mark.parametrize("weighed", [False, True])
def test_attention_received_is_that_of_whole_maps_however_few_images_are_made_at_a_time(weighed):
    shape, P = (5, 6, 130, 8), 1
    assert 1 < fields_of.IN_CACHE // (6 * 130**2) < 5
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=rng).transpose(1, 2).contiguous().transpose(1, 2) for _ in "qk")
    bias = torch.rand(5, 1, 1, 130, generator=rng) if weighed else None
    attn = SimpleNamespace(scale=8**-0.5)
    fields = fields_of.fields_of(attn, q.requires_grad_(), k.requires_grad_(), None, P, 1, bias)
    expected = torch.einsum("bhqc,bhkc->bhqk", q.double(), k.double()) * attn.scale + (bias if weighed else 0.0)
    expected = torch.softmax(expected, dim=-1)
    received, maps = fields["received_attention"](), fields["attention_maps"]()
    torch.testing.assert_close(received, expected.mean(dim=(1, 2))[:, P:].float(), atol=1e-8, rtol=1e-5)
    torch.testing.assert_close(maps, expected.float(), atol=1e-7, rtol=1e-5)
    one, other = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (received, expected.mean(dim=(1, 2))[:, P:]))
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("prefix", [0, 4])
def test_a_model_without_class_token_has_received_attention_only(scripted, prefix):
    network = DeepViT(vit(class_token=False, reg_tokens=prefix, global_pool="avg"))
    assert network.attention_source == "received"
    with pytest.raises(UnsupportedError, match=r"'scripted' needs class_attention.*received_attention"):
        shown(scripted, network, images(network), ("class_attention",))


@pytest.mark.parametrize(
    ("site", "field"), [("input", "attention"), ("input", "keys"), ("block", "values"), ("attention", "pixels")]
)
def test_a_field_that_a_site_cannot_give_is_unsupported(scripted, site, field):
    network = DeepViT(vit())
    with pytest.raises(
        UnsupportedError, match=f"needs {field}, which this model cannot give at the {site} site"
    ) as error:
        network(images(network), begin(network, scripted(any_tokens, site=site, needs=(field,))))
    assert ("site = 'attention' gives what attention makes" in str(error.value)) == (site == "input")


@torch.no_grad()
def test_gated_attention_shows_its_maps_and_is_dropped_after_it_ran(scripted):
    network = DeepViT(vit(attn_layer=Gated))
    pixels = images(network)
    attention, received = shown(scripted, network, pixels, SHOWN[:2])
    full = full_attention(network, pixels, 1)[0]
    close(attention, full[:, :, 0, 1:].mean(dim=1))
    close(received, full.mean(dim=(1, 2))[:, 1:])
    plans = {}
    strategy = scripted(lambda v, keep: plans.setdefault(v.block, any_tokens(v, keep)), site="attention", needs=())
    acting = begin(network, strategy)
    close(network(pixels, acting), reference(network, pixels, "attention", plans))
    assert not any(step.early for step in acting.steps)
