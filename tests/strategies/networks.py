"""A whole network by hand: float64, one image, tokens one by one, with rules for what happens to its patch tokens."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from merging import cosine, mean
from tiny import images

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget


class Token(NamedTuple):
    """A token: its numbers, how many patches it stands for, and which these are; a made one stands for none."""

    row: list[float]
    size: float = 1.0
    patches: tuple[int, ...] = ()


class Seen(NamedTuple):
    """What a rule reads of a block's attention, with P prefix tokens first.

    Attributes:
        block: which it is, of `depth`.
        prefix: P.
        A: (H, T, T) attention.
        keys: T lists, mean over heads.
        values: T lists, heads concatenated.
    """

    block: int
    depth: int
    prefix: int
    A: Any
    keys: list[list[float]]
    values: list[list[float]]

    def of_class(self):
        """Return the class token's attention to each patch, mean over heads."""
        return [sum(head[0][j] for head in self.A) / len(self.A) for j in range(self.prefix, len(self.keys))]

    def received(self):
        """Return the attention that each patch receives, mean over heads and queries."""
        count = len(self.A) * len(self.keys)
        return [sum(row[j] for head in self.A for row in head) / count for j in range(self.prefix, len(self.keys))]


Rule = Callable[[Seen, list[Token]], list[Token]]


def attended(block, x, sizes, proportional):
    """Return x + Attn(x) of one image (T, C), with (H, T, T) attention, and (H, T, d) keys and values."""
    H = block.attn.num_heads
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(1, (3, H, -1)).permute(1, 2, 0, 3)
    logits = q @ k.mT / k.shape[2] ** 0.5 + (torch.tensor(sizes, dtype=x.dtype).log() if proportional else 0)
    A = logits.softmax(dim=2)
    return x + block.attn.proj((A @ v).transpose(0, 1).flatten(1)), A, k, v


def rows_of(tokens):
    return torch.tensor([token.row for token in tokens], dtype=torch.float64)


@torch.no_grad()
def by_hand(network, image, rule: Rule, *, site="attention", prefix=1, proportional=False):
    """Return the logits of one image and the patch tokens at the end.

    Args:
        network: a network of `tiny.vit`.
        image: (3, height, width) in [0, 1].
        rule: what becomes of the patch tokens in each block, between attention and MLP or before the block (`site`).
        prefix: how many class and distillation tokens the network has.
        proportional: whether attention weighs tokens by their sizes.
    """
    model = copy.deepcopy(network.module).double()
    x = model._pos_embed(model.patch_embed((image[None].double() - 0.5) / 0.5))[0]
    first, tokens = x[:prefix], [Token(row, 1.0, (i,)) for i, row in enumerate(x[prefix:].tolist())]
    for number, block in enumerate(model.blocks):
        if site == "block":
            tokens = rule(Seen(number, len(model.blocks), prefix, None, [], []), tokens)
        sizes = [1.0] * prefix + [token.size for token in tokens]
        x, A, k, v = attended(block, torch.cat([first, rows_of(tokens)]), sizes, proportional)
        first, tokens = x[:prefix], [t._replace(row=row) for t, row in zip(tokens, x[prefix:].tolist(), strict=True)]
        if site == "attention":
            values = v.transpose(0, 1).flatten(1).tolist()
            seen = Seen(number, len(model.blocks), prefix, A.tolist(), k.mean(dim=0).tolist(), values)
            tokens = rule(seen, tokens)
        x = torch.cat([first, rows_of(tokens)])
        x = x + block.mlp(block.norm2(x))
        first, tokens = x[:prefix], [t._replace(row=row) for t, row in zip(tokens, x[prefix:].tolist(), strict=True)]
    x = model.norm(torch.cat([first, rows_of(tokens)]))
    if prefix:
        return model.forward_head(x[None])[0], tokens
    pooled = mean(x.tolist(), [token.size for token in tokens])
    return model.head(model.fc_norm(torch.tensor(pooled, dtype=torch.float64))), tokens


NETWORKS = {"class token": (1, {}), "no class token": (0, {"class_token": False, "global_pool": "avg"})}
"""Prefix tokens, and what makes such a network."""


@torch.no_grad()
def compare(strategy, network, rule_of, budget, *, sized=False, **how):
    """Check logits to 1e-5, and exactly which patches go on in which order, and how many; return the pass.

    Args:
        strategy, network: what is checked.
        rule_of: the rule, or what makes one of the modules that were learned.
        budget: of the strategy.
        sized: whether for how many each stands is checked too, as it is where attention is proportional.
        how: see `by_hand`.
    """
    actor = Actor(strategy, Budget(**budget), network.cost, network.grid, stream=5)
    rng = torch.Generator().manual_seed(3)
    for module in actor.learned.values():
        for weight in module.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=rng))
    pixels = images().to(next(network.module.parameters()).dtype)
    acting = actor.begin(torch.arange(len(pixels)), 0, None, training=False)
    out = network(pixels, acting)
    rule = rule_of(actor.learned) if actor.learned else rule_of
    for b, image in enumerate(pixels):
        logits, tokens = by_hand(network, image, rule, **how)
        torch.testing.assert_close(out[b].double(), logits, atol=1e-5, rtol=1e-5)
        index = [i for i in acting.index[b].tolist() if i >= 0 or not acting.ragged]
        assert index == [min(token.patches, default=-1) for token in tokens]
        if sized or how.get("proportional"):
            sizes = torch.tensor([token.size for token in tokens])
            torch.testing.assert_close(acting.sizes[b], sizes, atol=1e-5, rtol=1e-5)
    return acting


def joined(group, weights=None, sizes=None):
    """Return one token of some, their sizes or weights its weights."""
    own = [token.size for token in group]
    row = mean([token.row for token in group], own if weights is None else weights)
    return Token(row, sum(own if sizes is None else sizes), tuple(p for token in group for p in token.patches))


def order_of(scores):
    """Return the positions from the largest score down."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def at(counts, act) -> Rule:
    """Return the rule act(seen, tokens, K) in the blocks of {block: K}."""
    return lambda seen, tokens: act(seen, tokens, counts[seen.block]) if seen.block in counts else tokens


def bipartite(keys, r, prefix):
    """Return the order in which all tokens go on, the prefix first, and where each of the r that leave goes (ToMe)."""
    A, B = range(0, len(keys), 2), range(1, len(keys), 2)

    def score(i, j):
        return -math.inf if (i < prefix or j < prefix) else cosine(keys[i], keys[j])

    best = {i: max(B, key=lambda j: score(i, j)) for i in A}
    ranked = sorted(A, key=lambda i: -score(i, best[i]))
    unmerged = sorted(ranked[r:]) if prefix else ranked[r:]
    order = [*range(prefix), *(i for i in [*unmerged, *B] if i >= prefix)]
    return order, {i: best[i] for i in ranked[:r]}


def tome(seen, tokens, K):
    P = seen.prefix
    order, goes = bipartite(seen.keys, len(tokens) - K, P)
    return [joined([tokens[i - P] for i in [j, *(i for i in goes if goes[i] == j)]]) for j in order[P:]]


def mlerp(length):
    """Return what makes one token of a group, its first member that of B (ToFu).

    That is the plain mean times the length of the longest member, over the length of the member of B as in the known
    implementation, or over that of the mean as in the paper.
    """

    def one(group):
        token = joined(group, weights=[1.0] * len(group))
        longest = max(math.hypot(*member.row) for member in group)
        divisor = math.hypot(*(group[0] if length == "released" else token).row)
        return token._replace(row=[c * longest / divisor for c in token.row])

    return one


def tofu(seen, tokens, K, length="released", merge_from=7 / 12):
    P, one = seen.prefix, mlerp(length)
    order, goes = bipartite(seen.keys, len(tokens) - K, P)
    if seen.block < round(merge_from * seen.depth):
        return [tokens[j - P] for j in order[P:]]
    return [one([tokens[i - P] for i in [j, *(i for i in goes if goes[i] == j)]]) for j in order[P:]]


def top_k(seen, tokens, K):
    return [tokens[i] for i in sorted(order_of(seen.of_class())[:K])]


def evit(seen, tokens, K):
    """K tokens stay, and the others are one more."""
    a = seen.of_class()
    kept, left = order_of(a)[:K], order_of(a)[K:]
    fused = [sum(a[i] * tokens[i].row[c] for i in left) for c in range(len(tokens[0].row))]
    return [*(tokens[i] for i in sorted(kept)), Token(fused)] if left else tokens


def squeezed(tokens, scores, K):
    """Each token without a place among the K best scores is added to the kept one of the largest cosine (TPS)."""
    kept = sorted(order_of(scores)[:K])
    like = {q: {h: cosine(tokens[q].row, tokens[h].row) for h in kept} for q in range(len(tokens)) if q not in kept}
    out = []
    for h in kept:
        into = [q for q in like if max(kept, key=like[q].get) == h]
        weights = [math.e, *(math.exp(like[q][h]) for q in into)]
        out.append(Token(mean([tokens[i].row for i in [h, *into]], weights)))
    return out


def tps(seen, tokens, K):
    return squeezed(tokens, seen.of_class(), K)


def mixing(weights):
    """Return the rule of a strategy whose weights(learned, x) give (K, N) weights and (N, C) values."""

    def of(learned) -> Rule:
        def rule(seen, tokens):
            if seen.block not in learned:
                return tokens
            W, values = weights(copy.deepcopy(learned[seen.block]).double(), rows_of(tokens))
            return [Token(row) for row in (W @ values).tolist()]

        return rule

    return of


@mixing
def patch_merger(learned, x):
    values = learned["norm"](x)
    return (learned["queries"].weight @ values.T).softmax(dim=1), values
