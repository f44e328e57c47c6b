"""Rotary positions and attention pools: kept tokens keep their positions, merged tokens have the mean position."""

import math
from functools import partial

import pytest
import torch
from eva_vits import EVAS, KINDS, SIGLIPS, unfused
from fusing import fuse, merge, mix
from timm.layers import PatchDropoutWithIndices, apply_rot_embed_cat
from vits import any_tokens, begin, close, images, matrix, tokens_at, vit

from sparsebench.errors import UnsupportedError
from sparsebench.models import timm_parts
from sparsebench.models.attention import qkv
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.plans import Keep, Merge

SITES = ["input", "block", "attention"]


def pairs(view, keep):
    """Merge random pairs of tokens, different in each block and image."""
    B, N = view.index.shape
    rng = torch.Generator().manual_seed(view.block)
    place = torch.rand(B, N, generator=rng).argsort(dim=1)
    return Merge(place % keep)


def mean_places(plan, places, sizes):
    """Return the mean coordinates after a plan, from its matrix and (B, N, 2) coordinates."""
    if isinstance(plan, Keep) and plan.fuse is not None:
        plan = Keep(plan.index, fuse=sizes / (sizes.sum(1, keepdim=True) - sizes.gather(1, plan.index).sum(1)[:, None]))
    return matrix(plan, sizes, 0) @ places


@torch.no_grad()
def reference(network, pixels, site, plans):
    """Run the timm modules up to the last norm, with matrices of plans and rotations in between."""
    model, rope = network.module, network.module.rope
    x, _ = model._pos_embed(model.patch_embed((pixels - 0.5) / 0.5))
    B, P, N = len(x), network.prefix, network.cost.tokens
    sizes = torch.ones(B, N)
    places = None if rope is None else timm_parts.coordinates(rope, network.grid, x.device).expand(B, N, 2)

    def act(x, block):
        nonlocal sizes, places
        if block in plans:
            T = matrix(plans[block], sizes, P)
            x = T @ x
            places = None if places is None else mean_places(plans[block], places, sizes)
            sizes = ((T[:, P:, P:] > 0).float() @ sizes[:, :, None])[:, :, 0]
        return x

    x = model.norm_pre(act(x, 0) if site == "input" else x)
    for number, block in enumerate(model.blocks):
        x = act(x, number) if site == "block" else x
        turn = None if rope is None else timm_parts.rotations(rope, places, number)
        inside = site == "attention" and number in plans
        x = halves(block, act, number, x, turn) if inside else block(x, rope=turn)
    model.norm(x)


def halves(block, act, number, x, turn):
    """Return the output of a block for x, with `act` between attention and MLP."""
    if hasattr(block, "gamma_1"):
        first, second = (1.0 if gamma is None else gamma for gamma in (block.gamma_1, block.gamma_2))
        x = act(x + first * block.attn(block.norm1(x), rope=turn), number)
        return x + second * block.mlp(block.norm2(x))
    x = act(x + block.norm1(block.attn(x, rope=turn)), number)
    return x + block.norm2(block.mlp(x))


@pytest.mark.parametrize("kind", EVAS)
@torch.no_grad()
def test_places_give_timms_own_rotations(kind):
    model = EVAS[kind]()
    if model.rope is None:
        return
    grid = tuple(model.patch_embed.grid_size)
    places = timm_parts.coordinates(model.rope, grid, torch.device("cpu"))[None]
    for block, table in enumerate(timm_parts.Rotations(model, grid, model.rope.get_embed(shape=list(grid))).tables):
        close(timm_parts.rotations(model.rope, places, block)[0], table if table.ndim == 3 else table[None], atol=1e-6)


@pytest.mark.parametrize("half", [False, True])
def test_attention_between_rotated_tokens_hangs_on_their_difference_alone(half):
    """The score of two tokens depends only on the difference of their coordinates, also for mean coordinates."""
    rope = timm_parts.RotaryEmbeddingCat(8, in_pixels=False, feat_shape=[4, 4], rotate_half=half)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(a, b):
        turns = (timm_parts.rotations(rope, torch.tensor([[x]], dtype=torch.float64), 0) for x in (a, b))
        a, b = (apply_rot_embed_cat(x, turn, half=half) for x, turn in zip((q, k), turns, strict=True))
        return (a * b).sum().item()

    assert score([0.5, 2.0], [1.0, 0.25]) == pytest.approx(score([1.75, 3.0], [2.25, 1.25]), abs=1e-12)
    assert not math.isclose(score([0.5, 2.0], [1.0, 0.25]), score([0.5, 2.0], [1.0, 0.5]), abs_tol=1e-6)


@pytest.mark.parametrize("kind", ["DINOv3", "PE", "odd grid"])
@torch.no_grad()
def test_dropping_before_the_first_block_is_timms_own_patch_dropout(scripted, kind, monkeypatch):
    model = EVAS[kind]()
    network, pixels = DeepViT(model), images(DeepViT(model))
    acting = begin(network, scripted(any_tokens, site="input"), blocks=None)
    logits = network(pixels, acting)
    index = acting.decisions[0].after

    class Told(PatchDropoutWithIndices):
        def forward(self, x):
            x, prefix = x[:, network.prefix :], x[:, : network.prefix]
            return torch.cat([prefix, x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))], dim=1), index

    model.patch_drop = Told()
    close(logits, model(network.normalise(pixels)), atol=1e-6)
    assert not torch.allclose(logits, EVAS[kind]()(network.normalise(pixels)), atol=1e-3)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(
    ("kind", "decide"),
    [
        *((kind, pairs) for kind in EVAS),
        *(("EVA-02", decide) for decide in (any_tokens, fuse, mix)),
    ],
)
@torch.no_grad()
def test_each_plan_equals_its_matrix_and_its_mean_places(scripted, kind, decide, site):
    model = EVAS[kind]()
    network, seen = DeepViT(model), []
    pixels = images(network)
    # The input of the pool is compared, because the pool weights by sizes, see below.
    model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    acting = begin(network, scripted(decide, site=site, needs=("tokens",)), blocks=None if site == "input" else (1, 3))
    network(pixels, acting)
    reference(network, pixels, site, {d.block: d.plan for d in acting.decisions})
    close(*seen, atol=2e-5)


POOLS = [partial(vit, global_pool=pool, pool_include_prefix=prefix) for pool in ("avg", "avgmax") for prefix in (0, 1)]
ATTENDING = [KINDS[kind] for kind in (*SIGLIPS, "PE")]


@pytest.mark.parametrize("decide", [pairs, merge])
@pytest.mark.parametrize("make", [*POOLS, *ATTENDING, *(lambda make=make: unfused(make()) for make in ATTENDING)])
@torch.no_grad()
def test_a_pool_counts_a_merged_token_as_often_as_it_has_patches(scripted, make, decide):
    """The pool of merged equal tokens is the same as the pool of the repeated tokens."""
    network = DeepViT(make())
    model, P = network.module, network.prefix
    acting = begin(network, scripted(decide, site="block", needs=("tokens",)), rate=0.5, blocks=(3,))
    x, pooled = tokens_at([model.norm, model.fc_norm], network, acting, images(network))
    many = zip(model.norm(x), acting.sizes.int(), strict=True)
    rows = (torch.cat([row[:P], row[P:].repeat_interleave(n, dim=0)]) for row, n in many)
    close(pooled, torch.cat([type(model).pool(model, row[None]) for row in rows]), atol=1e-5)


@torch.no_grad()
def test_what_a_strategy_sees_is_what_attention_multiplies(scripted):
    network, seen = DeepViT(EVAS["DINOv3"]()), {}

    def look(view, keep):
        seen.update(keys=view.keys, maps=view.attention_maps)
        return any_tokens(view, keep)

    acting = begin(network, scripted(look, site="attention", needs=("keys", "attention_maps")), blocks=(0,))
    network(images(network), acting)
    model, block = network.module, network.module.blocks[0]
    x, table = model._pos_embed(model.patch_embed(network.normalise(images(network))))
    q, k, _ = qkv(block.attn, block.norm1(x), table)
    close(seen["keys"], k[:, :, 5:], atol=1e-6)
    close(seen["maps"], (q @ k.transpose(-2, -1) * block.attn.scale).softmax(-1), atol=1e-6)


def test_places_that_move_in_training_are_no_places_of_merged_tokens(scripted):
    network = DeepViT(EVAS["DINOv3"](rope_jitter_coords=2.0).train())
    network(images(network), begin(network, scripted(any_tokens, site="block"), training=True))
    with pytest.raises(UnsupportedError, match="perturbs its rotary positions in training"):
        network(images(network), begin(network, scripted(pairs, site="block", needs=("tokens",)), training=True))
