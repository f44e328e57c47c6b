"""Pure functions that apply a plan to (B, N, C) tensors. P class or register tokens come first and always stay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Plan, Rest, Shift
from sparsebench.strategy.sorting import sort


@dataclass(frozen=True, eq=False)
class Padded(Keep):
    """A `Keep` with a different number of tokens in each image; shorter rows end with padding, position -1."""

    @classmethod
    def of(cls, mask: Mask) -> Padded:
        """Return the tokens that a boolean mask (B, N) keeps; the longest row has no padding."""
        first = sort(mask.keep, descending=True).indices
        count = mask.keep.sum(dim=1)
        M = int(count.max())
        stays = torch.arange(M, device=count.device) < count[:, None]
        return cls(first[:, :M].where(stays, -1), scores=mask.scores)


@dataclass(frozen=True, eq=False)
class Grouped(Merge):
    """A `Merge` with its groups sorted once for all functions that need them.

    Attributes:
        groups: M, the number of groups of a sample.
        order: (B * N,) the tokens of all samples, group by group; dropped tokens come last.
        first: (B * M + 1,) the position in `order` where each group begins.
    """

    groups: int = field(kw_only=True)
    order: Tensor = field(kw_only=True)
    first: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, plan: Merge, groups: int | None = None) -> Grouped:
        """Return the plan with this number of groups. Without `groups` their number is read, which waits for a GPU."""
        if isinstance(plan, Grouped):
            return plan
        target = plan.target
        M = int(plan.target.max()) + 1 if groups is None else groups
        rows = torch.arange(len(target) + 1, device=target.device)[:, None] * M
        group = torch.where(target < 0, rows[-1:], target + rows[:-1])
        group, order = sort(group.flatten())
        first = torch.searchsorted(group, torch.arange(len(target) * M + 1, device=target.device))
        return cls(target, plan.scores, plan.weight, plan.sizes, groups=M, order=order, first=first)


@dataclass(frozen=True, eq=False)
class Resting(Rest):
    """A `Rest` with `active` (B, M), the positions of the tokens that take part, in ascending order."""

    active: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, plan: Rest, tokens: int) -> Resting:
        """Return the plan for N = `tokens` tokens."""
        return cls(plan.index, plan.scores, active=others(plan.index, tokens))


def gather(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the rows index (B, M) of tokens (B, N, C) as (B, M, C).

    An embedding look-up on the flattened rows is several times faster than `torch.gather` with an expanded index.
    """
    B, N, C = tokens.shape
    rows = index + torch.arange(B, device=index.device)[:, None] * N
    return F.embedding(rows, tokens.reshape(B * N, C))


def with_prefix(index: Tensor, prefix: int) -> Tensor:
    """Return (B, P + M) row numbers: the first P rows, then the rows of the (B, M) index, shifted by P."""
    if prefix == 0:
        return index
    first = torch.arange(prefix, device=index.device).expand(index.shape[0], prefix)
    return torch.cat([first, index + prefix], dim=1)


def others(index: Tensor, tokens: int) -> Tensor:
    """Return the (B, N - M) positions, in ascending order, that are not in the (B, M) index, of N = `tokens`."""
    places = torch.arange(tokens, device=index.device).repeat(len(index), 1).scatter(1, index, tokens)
    return sort(places).values[:, : tokens - index.shape[1]]  # ONNX cannot sort booleans


def values_at(mask: Tensor, index: Tensor) -> Tensor:
    """Return the values of a (B, N) mask at index (B, M); 0 where index is -1."""
    return mask.gather(1, index.clamp(min=0)) * (index >= 0)


def put_back(tokens: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """Return the (B, N, C) tokens with the rows index (B, M) replaced by `new` (B, M, C)."""
    return tokens.to(new.dtype).scatter(1, index[:, :, None].expand_as(new), new)


def rows_of(plan: Keep, prefix: int) -> Tensor:
    """Return (B, P + M) row numbers of the tokens that stay, including the first P; padding has the first patch's."""
    return with_prefix(plan.index.clamp(min=0) if isinstance(plan, Padded) else plan.index, prefix)


def apply(plan: Plan, tokens: Tensor, sizes: Tensor, prefix: int = 0) -> Tensor:
    """Return the (B, P + M, C) tokens after the plan, from (B, P + N, C) tokens with sizes (B, N).

    >>> tokens, sizes = torch.tensor([[[2.0], [4.0], [9.0]]]), torch.ones(1, 3)
    >>> apply(Merge.into(torch.tensor([[0, 0, 2]])), tokens, sizes).tolist()
    [[[3.0], [9.0]]]
    """
    if isinstance(plan, Keep):
        return _keep(plan, tokens, prefix)
    first, patches = tokens[:, :prefix], tokens[:, prefix:]
    if isinstance(plan, Merge):
        plan = Grouped.of(plan)
        weight = shares_of(plan, sizes, _sums(plan, sizes)) if plan.weight is None else plan.weight
        new = _by_group(plan, patches, weight)
    elif isinstance(plan, Mix):
        values = patches if plan.values is None else plan.values.to(patches.dtype)
        new = plan.weight.to(patches.dtype) @ values
    elif isinstance(plan, Shift):
        first = first if plan.prefix is None else first + plan.prefix.to(first.dtype)
        new = patches + plan.by.to(patches.dtype)
    elif isinstance(plan, Mask) and plan.values is not None:
        new = plan.values.to(patches.dtype)
    else:
        return tokens
    return torch.cat([first, new], dim=1)


def _keep(plan: Keep, tokens: Tensor, prefix: int) -> Tensor:
    """Return the kept tokens: unchanged, with what the plan adds to them, or followed by the fused token."""
    if plan.fuse is not None:
        first, patches = tokens[:, :prefix], tokens[:, prefix:]
        weight = plan.fuse.scatter(1, plan.index, 0.0).to(patches.dtype)
        fused = weight[:, None, :] @ patches
        return torch.cat([first, gather(patches, plan.index), fused], dim=1)
    kept = gather(tokens, rows_of(plan, prefix))
    if plan.add is None:
        return kept
    return torch.cat([kept[:, :prefix], kept[:, prefix:] + plan.add.to(kept.dtype)], dim=1)


def without_features(plan: Plan) -> Plan:
    """Return the plan without the features that a `Keep` adds to its tokens, to `apply` it to other values of them."""
    return replace(plan, add=None) if isinstance(plan, Keep) else plan


def shares_of(plan: Merge, sizes: Tensor, sums: Tensor) -> Tensor:
    """Return (B, N), the share of each token in its group's sum of sizes; `sums` (B, M) are these sums."""
    return sizes / sums.gather(1, plan.target.clamp(min=0))


def _sums(plan: Grouped, sizes: Tensor) -> Tensor:
    """Return (B, M), the sum of the sizes of each group."""
    return _by_group(plan, sizes[..., None])[..., 0]


def _by_group(plan: Grouped, values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return (B, M, C), the sums over groups of the (B, N, C) values times (B, N) weights; dropped tokens are in none.

    `embedding_bag` adds in the same order on every run. A product with a (B, M, N) matrix costs 30 times as much, and
    `scatter_add` on a GPU adds in any order.
    """
    if torch.compiler.is_exporting():  # other runtimes have no embedding_bag
        member = (plan.target[:, None] == torch.arange(plan.groups, device=values.device)[:, None]).to(values.dtype)
        return (member if weight is None else member * weight[:, None].to(values.dtype)) @ values
    factor = None if weight is None else weight.flatten()[plan.order].to(values.dtype)
    rows = values.flatten(0, 1)
    bags = F.embedding_bag(plan.order, rows, plan.first, mode="sum", per_sample_weights=factor)
    return bags[:-1].unflatten(0, (len(values), plan.groups))


def sizes_after(plan: Plan, sizes: Tensor) -> Tensor:
    """Return (B, M), the number of patches that each new token represents."""
    if isinstance(plan, Merge):
        added = sizes if plan.sizes is None else plan.sizes.to(sizes.dtype)
        return _sums(Grouped.of(plan), added)
    if isinstance(plan, Mix):
        return sizes.new_ones(plan.weight.shape[:2])
    if isinstance(plan, Padded):
        return sizes.gather(1, plan.index.clamp(min=0)) * (plan.index >= 0)
    if isinstance(plan, Keep | Mask | Shift) and plan.sizes is not None:
        return plan.sizes.to(sizes.dtype)
    if isinstance(plan, Mask | Shift | Rest):
        return sizes
    kept = sizes.gather(1, plan.index)
    if plan.fuse is None:
        return kept
    return torch.cat([kept, sizes.sum(1, keepdim=True) - kept.sum(1, keepdim=True)], dim=1)


def index_after(plan: Plan, index: Tensor) -> Tensor:
    """Return (B, M), the input patch that identifies each new token: its own, or that of its group's first member.

    It is -1 for padding, and for a fused or mixed token, which represents no single patch.
    """
    if isinstance(plan, Mask | Shift | Rest):
        return index
    if isinstance(plan, Mix):
        return index.new_full(plan.weight.shape[:2], -1)
    if isinstance(plan, Padded):
        return index.gather(1, plan.index.clamp(min=0)).where(plan.index >= 0, -1)
    if isinstance(plan, Merge):
        M, far = Grouped.of(plan).groups, torch.iinfo(index.dtype).max
        rows = torch.where(plan.target < 0, M, plan.target)
        return index.new_full((index.shape[0], M + 1), far).scatter_reduce(1, rows, index, "amin")[:, :M]
    kept = index.gather(1, plan.index)
    if plan.fuse is None:
        return kept
    return torch.cat([kept, index.new_full((index.shape[0], 1), -1)], dim=1)


def membership_after(plan: Keep | Merge, token: Tensor, count: int) -> Tensor:
    """Return (B, N), the new token that contains each input patch; -1 for none.

    Args:
        plan: what happens to the old tokens.
        token: (B, N), the old token that contains each input patch; -1 for none.
        count: number of the old tokens.
    """
    if isinstance(plan, Merge):
        new = plan.target
    else:
        B, M = plan.index.shape
        new = plan.index.new_full((B, count + 1), -1 if plan.fuse is None else M)
        # Padding is written into a column that is cut off again.
        new = new.scatter(1, plan.index % (count + 1), torch.arange(M, device=new.device).expand(B, M))[:, :count]
    none = new.new_full((len(new), 1), -1)
    return torch.cat([new, none], dim=1).gather(1, token % (count + 1))


def patch_weights_after(plan: Plan, weights: Tensor, sizes: Tensor) -> Tensor:
    """Return (B, M, K), the weights of the K input patches in each new token. Rows sum to 1, those of padding to 0.

    They are the absolute weights with which the plan combines the tokens. What a `Keep` adds to its tokens has none.

    Args:
        plan: what happens to the old tokens; neither a `Mix` nor a `Mask` with new values.
        weights: (B, N, K), the weights of the input patches in each old token.
        sizes: (B, N), the sizes of the old tokens.
    """
    if isinstance(plan, Mask | Shift | Rest):
        return weights
    if isinstance(plan, Merge) and plan.weight is not None:
        plan = replace(plan, weight=plan.weight.abs())
    if isinstance(plan, Keep) and plan.fuse is not None:
        plan = replace(plan, fuse=plan.fuse.abs())
    new = apply(without_features(plan), weights, sizes)
    if isinstance(plan, Padded):
        new = new * (plan.index >= 0)[:, :, None]
    return new / new.sum(dim=2, keepdim=True).clamp(min=torch.finfo(new.dtype).tiny)
