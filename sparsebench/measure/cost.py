"""Multiply-accumulates (MACs) in closed form, from the actual token counts of a network.

They include all matrix products, the patch embedding, the head, the attention computed only for scores, and the
strategy's own products, but no norms, softmax, activations and sorting. They are half of the number of FLOPs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, with_config

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.strategy.base import Traits
from sparsebench.strategy.plans import Place
from sparsebench.strategy.view import RESULTS

Scoring = Literal["", "class", "received", "mean"]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False, revalidate_instances="always"))  # as records hold it
@dataclass(frozen=True)
class Step:
    """One block's token counts for one image, class and register tokens not included.

    Attributes:
        tokens_in: tokens that enter attention as keys.
        tokens_out: tokens that leave attention and enter the MLP.
        early: whether only the remaining tokens were queries (tokens were selected before attention).
        scoring: attention computed only to score tokens: row of the class token, attention received by each token, row
            of the mean query, or none.
        projected: projections of all tokens computed only to score them: some of "qkv" (queries, keys, values).
        own: MACs of the strategy's own products.
        spread: correction for images with different token counts: mean of the product of queries and keys minus the
            product of their means: 2 cov(queries, keys), and var(keys) if each key is scored by all.
        rested: tokens that skipped the block and are present again after it, see `Rest`.
        fused: whether tokens left between the attention matrices and their product with the values: all tokens have
            queries and keys, and only the remaining tokens have values and outputs.
    """

    tokens_in: float
    tokens_out: float
    early: bool = False
    scoring: Scoring = ""
    projected: str = ""
    own: float = 0.0
    spread: float = 0.0
    rested: float = 0.0
    fused: bool = False


def mean_step(parts: Sequence[tuple[int, Step]]) -> Step:
    """Return the mean of one block's steps over images; its MACs are the mean of the images' MACs.

    Args:
        parts: pairs of a number n of images and their step; if the images differ, its numbers are (n,) arrays.
    """
    first = parts[0][1]

    def over_images(name: str) -> np.ndarray:
        return np.concatenate([np.broadcast_to(np.asarray(getattr(step, name), float), n) for n, step in parts])

    keys, out, own_macs = (over_images(name) for name in ("tokens_in", "tokens_out", "own"))
    spread = 2 * _cov(out if first.early else keys, keys) + (_cov(keys, keys) if first.scoring == "received" else 0.0)
    means = float(keys.mean()), float(out.mean()), float(own_macs.mean())
    return Step(*means[:2], first.early, first.scoring, first.projected, means[2], spread, first.rested, first.fused)


def _cov(a: np.ndarray, b: np.ndarray) -> float:
    """Return the covariance, exactly 0 if a or b is constant."""
    if (a == a[0]).all() or (b == b[0]).all():
        return 0.0
    return float((a * b).mean() - a.mean() * b.mean())


class CostModel:
    """The MACs of one network in closed form. Subclasses define `steps`, `place` and `macs`.

    Attributes:
        tokens: patch tokens at the input.
        class_rows: class and distillation tokens; if there are none, "attention" is that received by each token.
        embed: MACs of the embedding per patch.
        alike: whether the network is of a theory, whose training does not support trained or adaptive strategies.
        reads_patches: whether the head reads patch tokens, not only class tokens.
    """

    tokens: int
    class_rows: int
    embed: int
    reads_patches: bool
    alike: ClassVar[bool] = False

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return 1

    def scoring(self, needs: Collection[str]) -> Scoring:
        """Return the attention that is computed only to score tokens, for a strategy with these needs."""
        if {"received_attention", "attention_maps"} & set(needs) or ("attention" in needs and not self.class_rows):
            return "received"
        if {"class_attention", "attention"} & set(needs):
            return "class"
        return "mean" if "mean_query_attention" in needs else ""

    def place(self, block: int, tokens: float, keep: float) -> Place:
        """Return the sizes at this block, on which the MACs of a strategy's own products depend."""
        raise NotImplementedError

    def steps(self, traits: Traits, blocks: Sequence[int], counts: Sequence[int]) -> list[Step]:
        """Return the steps of a schedule: `counts` tokens remain at the `blocks`; the site "input" has one count."""
        raise NotImplementedError

    def dense(self) -> list[Step]:
        """Return the steps if all tokens stay."""
        return [Step(self.tokens, self.tokens)] * self.depth

    @cached_property
    def _answer(self) -> float:
        """MACs of one row of `TokenView.outputs`, without the embedding."""
        return self.macs(self.dense()) - self.embed * self.tokens

    def macs(self, steps: Sequence[Step]) -> float:
        """Return the MACs of one image."""
        raise NotImplementedError


def block_of_return(returns: int, depth: int) -> int:
    """Return the block before which tokens come back, see `Strategy.returns`.

    Raises:
        UserError: no token can have left before this block.
        UnsupportedError: the network has one block.
    """
    if depth == 1:
        raise UnsupportedError("no token can come back in a network of one block")
    block = returns if returns >= 0 else depth + returns
    if not 1 <= block < depth:
        raise UserError(
            "the block before which tokens come back (returns)",
            got=returns,
            allowed=f"1 to {depth - 1} for this model, or -1 to {1 - depth} from the end",
        )
    return block


def projections_for(needs: Collection[str], scoring: Scoring) -> str:
    """Return the projections that are computed only for these needs, not already for the scoring attention."""
    letters = {"q": "queries", "k": "keys", "v": "values"}
    return "".join(letter for letter, need in letters.items() if need in needs and not (scoring and letter in "qk"))


@dataclass(frozen=True)
class BlockCost:
    """MACs of one block: `qkv`, `proj` and `mlp` per token; `width` is the attention's total head dimension."""

    qkv: int
    proj: int
    mlp: int
    width: int

    def macs(self, step: Step, prefix: int, class_rows: int) -> float:
        """Return 3ND^2 + 2QND + QD^2 + 8MD^2 for a plain block: N keys, Q queries, M tokens after it."""
        keys, out = prefix + step.tokens_in, prefix + step.tokens_out
        if step.fused:
            projections = self.qkv * (2 * keys + out) / 3
            return projections + (keys**2 + out**2) * self.width + (self.proj + self.mlp) * out + step.own
        queries = out if step.early else keys
        rows = {"": 0.0, "class": class_rows, "received": keys, "mean": 1}[step.scoring]
        products = 2 * queries * keys + rows * keys + step.spread
        return self.qkv * keys + products * self.width + self.proj * queries + self.mlp * out + step.own


@dataclass(frozen=True)
class VitCost(CostModel):
    """A Vision Transformer: `embed` MACs per patch, `head` MACs per image, P = `prefix` class and register tokens.

    `channels` is the width of a token. `plain` says whether queries can be computed for only the remaining tokens.
    `pooled` is the MACs of an attention pool for each remaining patch token. `classes` is the number of classes.
    """

    tokens: int
    prefix: int
    class_rows: int
    embed: int
    head: int
    blocks: tuple[BlockCost, ...]
    channels: int = 1
    heads: int = 1
    plain: bool = True
    pooled: int = 0
    reads_patches: bool = False
    classes: int = 0

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def place(self, block: int, tokens: float, keep: float) -> Place:
        """See `CostModel.place`."""
        return Place(
            block=block,
            depth=self.depth,
            tokens=tokens,
            keep=keep,
            width=self.channels,
            heads=self.heads,
            head_width=self.blocks[block].width // self.heads,
            prefix=self.prefix,
            patches=self.tokens,
            outputs=self._answer,
            classes=self.classes,
        )

    def steps(self, traits: Traits, blocks: Sequence[int], counts: Sequence[int]) -> list[Step]:
        """See `CostModel.steps`."""
        scoring = "" if traits.changes_maps or traits.site == "maps" else self.scoring(traits.needs)
        early = self.plain and not RESULTS & set(traits.needs)
        returns = None if traits.returns is None else block_of_return(traits.returns, self.depth)
        before = self.scoring(["attention"]) if "previous_attention" in traits.needs else ""
        by_block = dict(zip(blocks, counts, strict=True))
        steps: list[Step] = []
        n = self.tokens
        for block in range(self.depth):
            if block == returns:
                n = self.tokens
            out = min(n, by_block.get(block, n))
            came = self.tokens if traits.rests else n
            acts = out < came or block in traits.scaled
            own_macs = traits.own_macs(self.place(block, came, out)) if acts else 0.0
            if acts and before and steps:
                steps[-1] = replace(steps[-1], scoring=before)
            if acts and traits.site in ("attention", "maps", "mlp"):
                steps.append(_step_inside(traits.site, n, out, own_macs, early=early, scoring=scoring))
            else:
                steps.append(Step(out, out, own=own_macs, rested=came - out if traits.rests else 0.0))
            n = out
        return steps

    def macs(self, steps: Sequence[Step]) -> float:
        """See `CostModel.macs`."""
        inside = sum(b.macs(s, self.prefix, self.class_rows) for b, s in zip(self.blocks, steps, strict=True))
        return self.embed * self.tokens + inside + self.head + self.pooled * (steps[-1].tokens_out + steps[-1].rested)


def _step_inside(
    site: str, tokens_in: float, tokens_out: float, own_macs: float, *, early: bool, scoring: Scoring
) -> Step:
    """Return the step of a block inside which a strategy acts, at the site "attention", "maps" or "mlp"."""
    if site == "attention":
        return Step(tokens_in, tokens_out, early, scoring, own=own_macs)
    if site == "maps":
        return Step(tokens_in, tokens_out, own=own_macs, fused=True)
    return Step(tokens_in, tokens_in, scoring=scoring, own=own_macs)


def plain_vit_cost(channels: int, depth: int, heads: int, *, tokens: int, embed: int, classes: int) -> VitCost:
    """Return the cost model of a plain Vision Transformer with a class token and an MLP of ratio 4.

    Args:
        channels, depth, heads: of the network.
        tokens: number of patches.
        embed: MACs of the embedding per patch.
        classes: outputs of the head.
    """
    square = channels * channels
    block = BlockCost(qkv=3 * square, proj=square, mlp=8 * square, width=channels)
    head = channels * classes
    return VitCost(tokens, 1, 1, embed, head, (block,) * depth, channels, heads, classes=classes)


@dataclass(frozen=True)
class OneLayerCost(CostModel):
    """A network of one attention layer; every strategy acts before this layer, whatever its `site`.

    Attributes:
        tokens: L, the number of tokens.
        d: the width of a token.
    """

    tokens: int
    d: int
    alike: ClassVar[bool] = True
    class_rows = embed = 0
    reads_patches = True

    def place(self, block: int, tokens: float, keep: float) -> Place:
        """See `CostModel.place`."""
        heads = getattr(self, "heads", 1)
        return Place(block, self.depth, tokens, keep, self.d, heads, self.head_width, 0, self.tokens, self._answer)

    @property
    def head_width(self) -> int:
        """Width of the queries and keys of one head."""
        return self.d

    def steps(self, traits: Traits, blocks: Sequence[int], counts: Sequence[int]) -> list[Step]:
        """See `CostModel.steps`."""
        if counts[0] >= self.tokens:
            return self.dense()
        scoring = self.scoring(traits.needs)
        own_macs = traits.own_macs(self.place(0, self.tokens, counts[0]))
        return [Step(self.tokens, counts[0], True, scoring, projections_for(traits.needs, scoring), own_macs)]
