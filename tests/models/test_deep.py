from functools import partial
from types import SimpleNamespace

import pytest
import torch
from eva_vits import KINDS
from fusing import FUSING
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block
from vits import ARCHITECTURES, BLOCKS, B, any_tokens, begin, close, images, noting, ordered, reference, tokens_at, vit

from sparsebench.errors import StrategyError, UnsupportedError
from sparsebench.models import attention as fields_of
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.plans import Merge

architectures = pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
SITES = ("input", "block", "attention")
"""The sites whose plans are matrices between the modules of a block; `test_sites.py` has the others."""
sites = pytest.mark.parametrize("site", SITES)


@pytest.mark.parametrize(
    ("make", "site", "needs"),
    [
        (vit, "input", ("tokens", "pixels")),
        (vit, "block", ("tokens",)),
        (vit, "attention", ()),
        *(
            pytest.param(make, "attention", needs, id=f"{name}, {needs[-1]}")
            for name, make in (ARCHITECTURES | KINDS).items()
            for needs in (("tokens", "queries", "keys", "values"), ("attention",))
        ),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_strategy_that_keeps_all_equals_the_bare_model(scripted, make, site, needs):
    asked = []

    def keep_all(view, keep):
        asked.append(view.block)
        for field in needs:
            getattr(view, field)

    model = make()
    network = DeepViT(model)
    pixels = images(network)
    acting = begin(network, scripted(keep_all, site=site, needs=needs, budgeted=False))
    close(network(pixels, acting), model((pixels - 0.5) / 0.5), atol=1e-6)
    assert asked == ([0] if site == "input" else list(BLOCKS))
    assert [step.tokens_out for step in acting.steps] == [network.cost.tokens] * 4


@pytest.mark.parametrize(
    ("make", "site", "needs", "how"),
    [
        *((make, site, (), any_tokens) for make in ARCHITECTURES.values() for site in SITES),
        *((make, "attention", ("tokens",), any_tokens) for make in ARCHITECTURES.values()),
        *((ARCHITECTURES[name], site, ("tokens",), how) for name in ("plain", "distilled", "4 registers")
          for site in SITES for how in FUSING.values()),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_plan_equals_its_matrix_between_the_bare_modules(scripted, make, site, needs, how):
    plans, network = {}, DeepViT(make())
    pixels = images(network)
    acting = begin(network, scripted(noting(plans, how), site=site, needs=needs))
    out = network(pixels, acting)
    assert sorted(plans) == ([0] if site == "input" else list(BLOCKS))
    close(out, reference(network, pixels, site, plans))
    assert any(step.early for step in acting.steps) == (site == "attention" and not needs)


@pytest.mark.parametrize("how", FUSING.values(), ids=FUSING)
@torch.no_grad()
def test_combining_plans_must_read_the_tokens(scripted, how):
    """What is more than removal must read the tokens where its macs are others."""
    network = DeepViT(vit())
    with pytest.raises(StrategyError, match="add tokens to `needs`"):
        network(images(network), begin(network, scripted(how, site="attention", needs=())))


@sites
@torch.no_grad()
def test_hooks_on_the_model_and_its_blocks_are_called_once_a_pass(scripted, site):
    network, calls = DeepViT(vit()), []
    pixels, strategy = images(network), scripted(FUSING["merge"], site=site)
    plain = network(pixels, begin(network, strategy))
    for name, module in (("model", network.module), *enumerate(network.module.blocks)):
        module.register_forward_pre_hook(lambda _module, _args, name=name: calls.append(name))
        module.register_forward_hook(lambda _module, _args, out, name=name: calls.append((name, len(out))))
    assert torch.equal(network(pixels, begin(network, strategy)), plain)
    blocks = range(len(network.module.blocks))
    assert calls == ["model", *(call for k in blocks for call in (k, (k, B))), ("model", B)]


@sites
@pytest.mark.parametrize("needs", [(), ("tokens",)])
@pytest.mark.parametrize("prefix", [{}, {"class_token": False, "global_pool": "avg"}], ids=str)
@torch.no_grad()
def test_ordered_tokens_come_to_the_next_modules_in_the_order_asked_for(scripted, site, needs, prefix):
    network = DeepViT(vit(**prefix))
    pixels, after, P = images(network), [network.module.blocks[2].norm1], network.prefix
    passes = [begin(network, scripted(d, site=site, needs=needs), blocks=(1,)) for d in (any_tokens, ordered)]
    (one,), (other,) = (tokens_at(after, network, acting, pixels) for acting in passes)
    close(torch.cat([other[:, :P], other[:, P:].flip(1)], dim=1), one)
    assert torch.equal(passes[1].index, passes[0].index.flip(1))
    again = (begin(network, acting.actor.strategy, blocks=(1,)) for acting in passes)
    close(*(network(pixels, acting) for acting in again))


@torch.no_grad()
def test_the_pixels_of_a_patch_are_those_at_its_place(scripted):
    """The pixels of a patch are those at its place whether bytes or shares of one."""
    seen, network = [], DeepViT(vit(img_size=(24, 40)))
    whole = torch.randint(0, 256, (B, 3, 24, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    strategy = scripted(lambda view, keep: seen.append(view.pixels), needs=("pixels",), budgeted=False)
    assert torch.equal(*(network(pixels, begin(network, strategy)) for pixels in (whole, whole / 255)))
    patches, same = seen
    assert torch.equal(patches, same) and patches.shape == (B, 15, 3, 8, 8) and network.grid == (3, 5)
    for i in range(15):
        row, column = 8 * (i // 5), 8 * (i % 5)
        assert torch.equal(patches[:, i], whole[:, :, row : row + 8, column : column + 8] / 255)


class Parallel(Block):
    """A user's block with parallel attention and MLP."""

    def forward(self, x, attn_mask=None, is_causal=False):
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))


@torch.no_grad()
def test_a_block_with_a_forward_of_its_own_is_not_cut_open(scripted):
    network = DeepViT(vit(block_fn=Parallel))
    pixels = images(network)
    acting = begin(network, scripted(lambda view, keep: None, site="attention", budgeted=False))
    with pytest.raises(UnsupportedError, match="Parallel cannot be split"):
        network(pixels, acting)
    for site in ("input", "block"):
        close(
            network(pixels, begin(network, scripted(lambda v, k: None, site=site, budgeted=False))),
            network(pixels),
            atol=1e-6,
        )


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


TARGET = torch.cat([torch.arange(8) // 2, torch.arange(4, 12)])
FIELDS = ("class_attention", "received_attention", "attention_maps")


def network(**changes):
    """Return a network that ignores the positions of patches."""
    model = vit(**changes)
    with torch.no_grad():
        model.pos_embed.zero_()
    return DeepViT(model)


def pairs():
    """Return images of 4 x 4 patches of 8 pixels in which patches 2i and 2i + 1 are the same."""
    halves = torch.rand(3, 3, 4, 8, 2, 1, 8, generator=torch.Generator().manual_seed(1))
    return halves.expand(-1, -1, -1, -1, -1, 2, -1).reshape(3, 3, 32, 32)


def merge_pairs(scripted, seen=None, *, proportional=True, fields=()):
    """Return a strategy that merges half of the pairs in block 1 and appends the fields in block 3 to `seen`."""

    def decide(view, keep):
        if view.block == 3:
            seen.extend(getattr(view, field) for field in fields)
            return None
        return Merge(TARGET.expand(view.index.shape))

    strategy = scripted(decide, site="attention", needs=("tokens", *fields), budgeted=False)
    type(strategy).proportional = proportional
    return strategy


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_pool": "avg", "class_token": False},
        {"reg_tokens": 2},
        {"init_values": 0.5, "qk_norm": True},
        {"cls": VisionTransformerDistilled},
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_merging_copies_changes_no_logit_where_attention_weighs_sizes(scripted, changes, fused):
    vit_ = network(**changes)
    for block in vit_.module.blocks:
        block.attn.fused_attn = fused
    act = partial(begin, vit_, rate=0.75, blocks=(1,))
    close(vit_(pairs(), act(merge_pairs(scripted))), vit_(pairs()), atol=1e-5)
    plain = vit_(pairs(), act(merge_pairs(scripted, proportional=False)))
    assert (plain - vit_(pairs())).abs().max() > 1e-3


@torch.no_grad()
def test_the_attention_that_is_shown_weighs_sizes_too(scripted):
    vit_, merged, whole = network(), [], []
    vit_(pairs(), begin(vit_, merge_pairs(scripted, merged, fields=FIELDS), 0.75, blocks=(1, 3)))
    look = scripted(
        lambda view, keep: whole.extend(getattr(view, f) for f in FIELDS),
        site="attention",
        needs=("tokens", *FIELDS),
        budgeted=False,
    )
    vit_(pairs(), begin(vit_, look, blocks=(3,)))
    class_, received, maps = merged
    together = torch.nn.functional.one_hot(TARGET).float()  # (16, 12)
    close(class_, whole[0] @ together)
    close(maps[:, :, 0, 1:], whole[2][:, :, 0, 1:] @ together)
    close(maps[:, :, 1 + TARGET, 1:], whole[2][:, :, 1:, 1:] @ together)
    close(received, maps.mean(dim=(1, 2))[:, 1:])


@architectures
@torch.no_grad()
def test_bfloat16_is_autocast_with_float32_logits(make):
    """Bfloat16 is the bare model by autocast with float32 logits and weights."""
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
        assert len(attention.unique()) == attention.numel()  # not rounded to 8 bits, which would give ties


def full_attention(network, pixels, number):
    """Return the (B, H, T, T) attention of a block of the model, and its (B, H, T, C / H) q, k and v."""
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
    """Return the fields of the view in block 1, the first block in which a strategy acts."""
    seen = []
    strategy = scripted(
        lambda view, keep: seen.append([getattr(view, f) for f in fields]),
        site="attention",
        needs=fields,
        budgeted=False,
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
def test_received_attention_does_not_depend_on_chunks(weighed):
    """Attention received is that of whole maps however few images are made at a time."""
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


@pytest.mark.parametrize(
    ("site", "field", "changes", "gives"),
    [
        *(("attention", "class_attention", {"class_token": False, "reg_tokens": n, "global_pool": "avg"}, "received")
          for n in (0, 4)),
        ("input", "attention", {}, "site = 'attention' gives attention fields"),
        ("input", "keys", {}, "site = 'attention' gives attention fields"),
        ("block", "values", {}, "tokens.$"),
        ("attention", "pixels", {}, "received_attention"),
    ],
)  # fmt: skip
def test_a_field_that_a_site_or_a_network_cannot_give_is_unsupported(scripted, site, field, changes, gives):
    network = DeepViT(vit(**changes))
    assert (network.attention_source == "received") == bool(changes)
    with pytest.raises(UnsupportedError, match=rf"needs {field}, which .* at the {site} site .it gives .*{gives}"):
        network(images(network), begin(network, scripted(any_tokens, site=site, needs=(field,))))
