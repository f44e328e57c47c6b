"""Small Vision Transformers of every kind, with plans and a reference implementation for them."""

from functools import partial

import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Merge

B, N = 3, 16
BLOCKS = (1, 3)


def vit(cls=VisionTransformer, **changes):
    """Return a small model in which every weight changes the output: 32 x 32 pixels, 4 x 4 patches, 4 blocks."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            0
        )  # torch.manual_seed() would also store a traceback for each kind of device
        model = cls(**(sizes | changes)).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.2)
    return model


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


def images(network, n=B, seed=1):
    height, width = (side * patch for side, patch in zip(network.grid, network.patch, strict=True))
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


def begin(network, strategy, rate=0.5, *, n=B, training=False, relevance=None, blocks=BLOCKS):
    budget = Budget(keep_rate=rate, blocks=blocks)
    actor = Actor(strategy, budget, network.cost, network.grid, stream=7)
    return actor.begin(torch.arange(n), 0, relevance, training=training)


def any_tokens(view, keep):
    """Keep random tokens in ascending order, different ones in each sample and block."""
    rng = torch.Generator().manual_seed(view.block)
    n = view.index.shape
    return Keep(torch.rand(n, generator=rng).argsort(dim=1)[:, :keep].sort(dim=1).values)


def ordered(view, keep):
    """Keep the same tokens in descending order."""
    return Keep(any_tokens(view, keep).index.flip(1), ordered=True)


def noting(plans, how=any_tokens):
    """Return a function that decides like `how` and stores the plan of each block in `plans`."""

    def decide(view, keep):
        plans[view.block] = how(view, keep)
        return plans[view.block]

    return decide


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


def tokens_at(modules, network, acting, pixels):
    """Return the input of each module during a call."""
    tokens = []
    handles = [m.register_forward_pre_hook(lambda _, args: tokens.append(args[0].detach())) for m in modules]
    network(pixels, acting)
    for handle in handles:
        handle.remove()
    return tokens


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
    """Return the logits computed with the model's modules and the matrix of each plan."""
    model, sizes = network.module, torch.ones(len(pixels), network.cost.tokens)
    positions = model.pos_embed if hasattr(network, "order") else None

    def act(x, block):
        nonlocal sizes, positions
        if block not in plans:
            return x
        P = network.prefix
        T = matrix(plans[block], sizes, P)
        sizes = ((T[:, P:, P:] > 0).float() @ sizes[:, :, None])[:, :, 0]
        positions = None if positions is None else T @ positions
        return T @ x

    def attend(attn, x):
        if positions is None:
            return attn(x)
        rows = zip((positions, positions, x), attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), strict=True)
        q, k, v = (F.linear(*row).unflatten(2, (attn.num_heads, -1)).transpose(1, 2) for row in rows)
        A = torch.softmax(q @ k.mT / attn.head_dim**0.5, dim=-1)
        return attn.proj((A @ v).transpose(1, 2).flatten(2))

    x = model._pos_embed(model.patch_embed((pixels - 0.5) / 0.5))
    x = model.norm_pre(act(x, 0) if site == "input" else x)
    for number, block in enumerate(model.blocks):
        x = act(x, number) if site == "block" else x
        x = x + block.ls1(attend(block.attn, block.norm1(x)))
        x = act(x, number) if site == "attention" else x
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.forward_head(model.norm(x))
