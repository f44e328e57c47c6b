from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer

from sparsebench.budget import Budget
from sparsebench.errors import StrategyError, UnsupportedError, UserError
from sparsebench.models.acting import Actor
from sparsebench.models.deep import DeepViT, named_vit, small_vit
from sparsebench.strategy import SITES, Keep, Merge, Mix

B, N = 3, 16
BLOCKS = (1, 3)


def vit(cls=VisionTransformer, **changes):
    """Return a small model whose every weight matters: 32 x 32 pixels, 4 x 4 patches, 4 blocks."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}
    model = cls(**(sizes | changes)).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.2)
    return model


class Gated(Attention):
    """timm's attention with its gate; the block's constructor has no switch for it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, gated=True, **kwargs)


ARCHITECTURES = {
    "plain": vit,
    "LayerScale and qk_norm": partial(vit, init_values=0.5, qk_norm=True),
    "4 registers": partial(vit, reg_tokens=4),
    "distilled": partial(vit, VisionTransformerDistilled),
    "average pool without class token": partial(vit, class_token=False, global_pool="avg"),
    "average pool with class token": partial(vit, global_pool="avg", pool_include_prefix=True),
    "norm before and in the attention": partial(vit, pre_norm=True, scale_attn_norm=True),
    "odd grid": partial(vit, img_size=(24, 40)),
}
architectures = pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
sites = pytest.mark.parametrize("site", SITES)


def images(network, n=B, seed=1):
    height, width = (side * patch for side, patch in zip(network.grid, network.patch, strict=True))
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


def begin(network, strategy, rate=0.5, *, n=B, training=False, relevance=None, blocks=BLOCKS):
    budget = Budget(keep_rate=rate, blocks=blocks)
    actor = Actor(strategy, budget, network.cost, network.grid, stream=7)
    return actor.begin(torch.arange(n), 0, relevance, tokens=network.cost.tokens, training=training)


def any_tokens(view, keep):
    """Keep some tokens, others in each sample and block, in rising order."""
    rng = torch.Generator().manual_seed(view.block)
    n = view.index.shape
    return Keep(torch.rand(n, generator=rng).argsort(dim=1)[:, :keep].sort(dim=1).values)


def matrix(plan, sizes, prefix):
    """Return the (B, P + M, P + N) matrix of a plan."""
    n, N = sizes.shape
    if isinstance(plan, Keep):
        rows = torch.eye(N)[plan.index]
        if plan.fuse is not None:
            left = plan.fuse.clone()
            for b in range(n):
                left[b, plan.index[b]] = 0
            rows = torch.cat([rows, left[:, None]], dim=1)
    elif isinstance(plan, Merge):
        groups = torch.stack([(plan.target == g) * sizes for g in range(int(plan.target.max()) + 1)], dim=1)
        rows = groups / groups.sum(dim=2, keepdim=True)
    else:
        rows = plan.weight
    return torch.stack([torch.block_diag(torch.eye(prefix), row) for row in rows])


@torch.no_grad()
def reference(network, pixels, site, plans):
    """Return the logits by the bare modules, with each plan's matrix at its place."""
    model, sizes = network.module, torch.ones(len(pixels), network.cost.tokens)

    def act(x, block):
        nonlocal sizes
        if block not in plans:
            return x
        P = network.prefix
        T = matrix(plans[block], sizes, P)
        sizes = ((T[:, P:, P:] > 0).float() @ sizes[:, :, None])[:, :, 0]
        return T @ x

    x = model._pos_embed(model.patch_embed((pixels - 0.5) / 0.5))
    x = model.norm_pre(act(x, 0) if site == "input" else x)
    for number, block in enumerate(model.blocks):
        x = act(x, number) if site == "block" else x
        x = x + block.ls1(block.attn(block.norm1(x)))
        x = act(x, number) if site == "attention" else x
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.forward_head(model.norm(x))


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


@architectures
@sites
@torch.no_grad()
def test_a_keep_rate_of_one_equals_the_bare_model(scripted, make, site):
    model = make()
    network = DeepViT(model)
    pixels = images(network)
    acting = begin(network, scripted(any_tokens, site=site, needs=()), rate=1.0)
    close(network(pixels, acting), model((pixels - 0.5) / 0.5), atol=1e-6)


@architectures
@pytest.mark.parametrize(
    ("site", "needs"),
    [
        ("input", ("tokens", "pixels")),
        ("block", ("tokens",)),
        ("attention", ()),
        ("attention", ("tokens", "queries", "keys", "values")),
        ("attention", ("attention",)),
    ],
)
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
    acting = begin(network, scripted(keep_all, site=site, needs=needs))
    close(network(pixels, acting), model((pixels - 0.5) / 0.5), atol=1e-6)
    assert asked == ([0] if site == "input" else list(BLOCKS))
    assert [step.tokens_out for step in acting.steps] == [network.cost.tokens] * 4


@architectures
@sites
@pytest.mark.parametrize("needs", [(), ("tokens",)])
@torch.no_grad()
def test_dropping_tokens_equals_the_bare_modules_on_the_gathered_tokens(scripted, make, site, needs):
    plans = {}

    def decide(view, keep):
        plans[view.block] = any_tokens(view, keep)
        return plans[view.block]

    network = DeepViT(make())
    pixels = images(network)
    out = network(pixels, begin(network, scripted(decide, site=site, needs=needs)))
    assert sorted(plans) == ([0] if site == "input" else list(BLOCKS))
    close(out, reference(network, pixels, site, plans))


@architectures
@torch.no_grad()
def test_choosing_early_equals_choosing_after_the_attention(scripted, make):
    network = DeepViT(make())
    pixels = images(network)
    passes = [begin(network, scripted(any_tokens, site="attention", needs=needs)) for needs in ((), ("tokens",))]
    early, mid = (network(pixels, acting) for acting in passes)
    close(early, mid)
    assert [[step.early for step in acting.steps] for acting in passes] == [[False, True] * 2, [False] * 4]


@pytest.mark.parametrize("fused_attn", [True, False])
@torch.no_grad()
def test_both_attention_kernels_drop_alike(scripted, fused_attn):
    network = DeepViT(vit(qk_norm=True))
    pixels = images(network)
    strategy = scripted(any_tokens, site="attention", needs=("attention",))
    expected = network(pixels, begin(network, strategy))
    for block in network.module.blocks:
        block.attn.fused_attn = fused_attn
    close(network(pixels, begin(network, strategy)), expected)


def fuse(view, keep):
    weights = torch.rand(view.index.shape, generator=torch.Generator().manual_seed(9 + view.block))
    return Keep(any_tokens(view, keep - 1).index, fuse=weights)


def merge(view, keep):
    rng = torch.Generator().manual_seed(view.block)
    n, N = view.index.shape
    target = torch.randint(0, keep, (n, N), generator=rng)
    return Merge(target.scatter(1, torch.arange(keep).expand(n, keep), torch.arange(keep).expand(n, keep)))


def mix(view, keep):
    n, N = view.index.shape
    return Mix(torch.rand(n, keep, N, generator=torch.Generator().manual_seed(view.block)).softmax(dim=2))


@sites
@pytest.mark.parametrize("how", [fuse, merge, mix])
@pytest.mark.parametrize("needs", [(), ("tokens",)])
@pytest.mark.parametrize("make", [vit, ARCHITECTURES["distilled"], ARCHITECTURES["4 registers"]])
@torch.no_grad()
def test_fusing_merging_and_mixing_equal_their_matrices(scripted, make, how, site, needs):
    plans = {}

    def decide(view, keep):
        plans[view.block] = how(view, keep)
        return plans[view.block]

    network = DeepViT(make())
    pixels = images(network)
    acting = begin(network, scripted(decide, site=site, needs=needs))
    close(network(pixels, acting), reference(network, pixels, site, plans))
    assert not any(step.early for step in acting.steps)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("pool", ["avg", "avgmax"])
@torch.no_grad()
def test_average_pooling_weighs_merged_tokens_by_their_patches(scripted, pool, prefix):
    plans = {}

    def decide(view, keep):
        plans[view.block] = merge(view, keep)
        return plans[view.block]

    network = DeepViT(vit(global_pool=pool, pool_include_prefix=prefix))
    pixels = images(network)
    acting = begin(network, scripted(decide, site="block"))
    seen = []
    handle = network.module.fc_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    last = network.module.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    network(pixels, acting)
    handle.remove()
    last.remove()
    x, pooled = seen
    assert acting.sizes.unique().numel() > 1 and acting.sizes.sum(1).tolist() == [N] * B
    first = x[:, :1] if prefix else x[:, :0]
    parts = zip(first, x[:, 1:], acting.sizes.long(), strict=True)
    every = torch.stack([torch.cat([f, t.repeat_interleave(s, dim=0)]) for f, t, s in parts])
    expected = every.mean(1) if pool == "avg" else 0.5 * (every.mean(1) + every.amax(1))
    close(pooled, expected)


@sites
@torch.no_grad()
def test_the_order_in_which_tokens_are_kept_does_not_matter(scripted, site):
    network = DeepViT(vit(class_token=False, global_pool="avg"))
    pixels = images(network)
    out = [
        network(pixels, begin(network, scripted(decide, site=site)))
        for decide in (any_tokens, lambda view, keep: Keep(any_tokens(view, keep).index.flip(1)))
    ]
    assert torch.equal(*out)


def tokens_at(modules, network, acting, pixels):
    """Return what comes into each of the modules during a call."""
    seen = []
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())) for m in modules]
    network(pixels, acting)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("needs", [(), ("tokens",)])
@pytest.mark.parametrize(
    ("site", "attended", "fed"),
    [
        ("input", [8, 8, 8, 8], [8, 8, 8, 8]),
        ("block", [16, 8, 8, 4], [16, 8, 8, 4]),
        ("attention", [16, 16, 8, 8], [16, 8, 8, 4]),
    ],
)
def test_the_modules_really_get_fewer_tokens(scripted, site, attended, fed, needs, training):
    network = DeepViT(vit())
    network.module.train(training)
    acting = begin(network, scripted(any_tokens, site=site, needs=needs), training=training)
    modules = [part for block in network.module.blocks for part in (block.norm1, block.mlp)]
    counts = [x.shape[1] - 1 for x in tokens_at(modules, network, acting, images(network))]
    assert counts[::2] == attended and counts[1::2] == fed
    assert [(step.tokens_in, step.tokens_out) for step in acting.steps] == list(zip(attended, fed, strict=True))


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (ARCHITECTURES["average pool without class token"], 0),
        (vit, 1),
        (ARCHITECTURES["distilled"], 2),
        (ARCHITECTURES["4 registers"], 5),
    ],
)
@torch.no_grad()
def test_prefix_tokens_are_neither_seen_nor_dropped(scripted, make, prefix):
    def last_one(view, keep):
        assert view.tokens.shape[1] == view.index.shape[1] == N
        return Keep(torch.full((B, 1), N - 1))

    network = DeepViT(make())
    pixels = images(network)
    first = network.module.blocks[0].norm1
    (bare,) = tokens_at([first], network, None, pixels)
    (x,) = tokens_at([first], network, begin(network, scripted(last_one), rate=1 / N), pixels)
    assert network.prefix == prefix
    assert torch.equal(x, torch.cat([bare[:, :prefix], bare[:, -1:]], dim=1))


@torch.no_grad()
def test_the_pixels_of_a_patch_are_those_at_its_place(scripted):
    seen = []
    network = DeepViT(vit(img_size=(24, 40)))
    pixels = images(network)
    network(pixels, begin(network, scripted(lambda view, keep: seen.append(view.pixels), needs=("pixels",))))
    (patches,) = seen
    assert patches.shape == (B, 15, 3, 8, 8) and network.grid == (3, 5)
    for i in range(15):
        row, column = 8 * (i // 5), 8 * (i % 5)
        assert torch.equal(patches[:, i], pixels[:, :, row : row + 8, column : column + 8])


@torch.no_grad()
def test_bytes_and_shares_of_one_are_the_same_images(scripted):
    seen = []
    network = DeepViT(vit())
    whole = torch.randint(0, 256, (B, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    strategy = scripted(lambda view, keep: seen.append(view.pixels), needs=("pixels",))
    out = [network(pixels, begin(network, strategy)) for pixels in (whole, whole / 255)]
    assert torch.equal(*out) and torch.equal(*seen)
    assert float(seen[0].max()) == 1


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
    for part, whole in zip(parts, expected, strict=True):
        close(part, whole[:, :, P:])


@torch.no_grad()
def test_class_attention_is_the_class_row_and_not_the_registers(scripted):
    network = DeepViT(vit(reg_tokens=4))
    pixels = images(network)
    (attention,) = shown(scripted, network, pixels, ("class_attention",))
    close(attention, full_attention(network, pixels, 1)[0][:, :, 0, 5:].mean(dim=1))
    assert network.attention_source == "class"


@torch.no_grad()
def test_a_distilled_model_shows_the_mean_of_its_two_rows(scripted):
    network = DeepViT(ARCHITECTURES["distilled"]())
    pixels = images(network)
    (attention,) = shown(scripted, network, pixels, ("class_attention",))
    full = full_attention(network, pixels, 1)[0]
    close(attention, (full[:, :, 0, 2:] + full[:, :, 1, 2:]).mean(dim=1) / 2)
    assert network.attention_source == "class+distillation"


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
    with pytest.raises(UnsupportedError, match=f"needs {field}, which this model cannot give at the {site} site"):
        network(images(network), begin(network, scripted(any_tokens, site=site, needs=(field,))))


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


def leftovers(model):
    """Return what a call might leave behind: hooks, and instance attributes in place of methods."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return hooks, [name for m in model.modules() for name in ("forward", "pool") if name in m.__dict__]


def state(model):
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def fail(view, keep):
    raise RuntimeError("a stranger's mistake")


@sites
@pytest.mark.parametrize(
    ("decide", "error"),
    [(any_tokens, None), (fail, RuntimeError), (lambda view, keep: "nonsense", StrategyError)],
    ids=["well", "raising", "illegal"],
)
@pytest.mark.parametrize("attn_layer", [Attention, Gated])
def test_nothing_of_the_model_is_changed_whatever_the_strategy_does(scripted, site, decide, error, attn_layer):
    model = vit(class_token=False, global_pool="avg", attn_layer=attn_layer)
    network = DeepViT(model)
    before, bare = state(model), network(images(network))
    acting = begin(network, scripted(decide, site=site))
    if error is None:
        network(images(network), acting)
    else:
        with pytest.raises(error):
            network(images(network), acting)
    assert state(model) == before and list(model.state_dict()) == list(before)
    hooks, replaced = leftovers(model)
    assert not any(hooks) and not replaced
    assert torch.equal(network(images(network)), bare)


@sites
def test_the_same_pass_again_gives_the_same_bits(scripted, site):
    network = DeepViT(vit())
    strategy = scripted(lambda view, keep: Keep.top(view.random(), keep), site=site, needs=())
    first, again = (network(images(network), begin(network, strategy)) for _ in range(2))
    assert torch.equal(first, again)


@sites
@torch.no_grad()
def test_a_sample_is_judged_alike_alone_and_in_a_batch(scripted, site):
    network = DeepViT(vit())
    pixels = images(network)
    strategy = scripted(lambda view, keep: Keep.top(view.random(), keep), site=site, needs=())
    together = begin(network, strategy)
    logits = network(pixels, together)
    for i in range(B):
        alone = together.actor.begin(torch.tensor([i]), 0, None, tokens=N, training=False)
        close(network(pixels[i : i + 1], alone), logits[i : i + 1])
        assert torch.equal(alone.index, together.index[i : i + 1])


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


def with_rope():
    model = vit()
    model.rope = torch.nn.Identity()
    return model


def with_checkpointing():
    model = vit()
    model.set_grad_checkpointing(True)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_checkpointing, "gradient checkpointing is on"),
        (with_rope, "rotary position embeddings"),
        (partial(timm.create_model, "eva02_tiny_patch14_224"), "Eva is no timm VisionTransformer"),
        (partial(timm.create_model, "resnet18"), "ResNet is no timm VisionTransformer"),
        (partial(vit, dynamic_img_size=True), "dynamic_img_size is on"),
        (partial(vit, patch_drop_rate=0.25), "drops patches on its own"),
        (partial(timm.create_model, "vit_tiny_r_s16_p8_224", img_size=64), "patches"),
        (partial(vit, img_size=36), "patches"),
        (partial(vit, attn_layer="diff"), "DiffAttention"),
    ],
    ids=["checkpointing", "rope", "eva", "resnet", "dynamic size", "patch dropout", "stem", "pixels left over", "diff"],
)
def test_a_model_in_which_dropping_goes_wrong_is_refused_with_the_reason(make, reason):
    with torch.device("meta"):
        model = make()
    with pytest.raises(UnsupportedError, match=reason):
        DeepViT(model)


class Parallel(Block):
    """A block of the user's own: attention and MLP side by side."""

    def forward(self, x, attn_mask=None, is_causal=False):
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))


@torch.no_grad()
def test_a_block_with_a_forward_of_its_own_is_not_cut_open(scripted):
    network = DeepViT(vit(block_fn=Parallel))
    pixels = images(network)
    acting = begin(network, scripted(lambda view, keep: None, site="attention"))
    with pytest.raises(UnsupportedError, match="Parallel cannot be cut"):
        network(pixels, acting)
    for site in ("input", "block"):
        close(network(pixels, begin(network, scripted(lambda v, k: None, site=site))), network(pixels), atol=1e-6)


def test_a_model_is_made_by_name_and_a_wrong_name_gets_a_hint():
    model = named_vit("deit_tiny_patch16_224", 64, 3)
    assert DeepViT(model).grid == (4, 4) and model.num_classes == 3
    with pytest.raises(UserError, match="did you mean 'vit_tiny_patch16_224'"):
        named_vit("vit_tiny_patch16_225", 64, 3)


def test_relevance_follows_the_tokens_from_stage_to_stage(scripted):
    mask = torch.from_numpy(np.random.default_rng(0).random((B, N)))
    seen = []

    def decide(view, keep):
        seen.append((view.index, view.relevance))
        return any_tokens(view, keep)

    network = DeepViT(vit())
    strategy = scripted(decide, site="attention", needs=("relevance",), kind="oracle")
    network(images(network), begin(network, strategy, relevance=mask))
    assert [index.shape[1] for index, _ in seen] == [16, 8]
    for index, relevance in seen:
        assert torch.equal(relevance, mask.gather(1, index))
