"""The token view: what a strategy may see at its site. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sparsebench.errors import StrategyError

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = frozenset(
    {"tokens", "branch", "queries", "keys", "values", "attention", "class_attention", "received_attention",
     "mean_query_attention", "attention_maps", "pixels", "relevance"}
)  # fmt: skip


class TokenView:
    """What a strategy may see at its site. Fields that it does not declare in `needs` are not computed.

    Attributes:
        index: (B, N) which patch of the input each token is (its position there).
        sizes: (B, N) how many patches each token stands for; 1 before any merging.
        grid: (rows, columns) of the patches, or None where tokens have no places.
        block: which block it is, from 0; `depth` how many there are.
        training: whether the network is being trained.
    """

    def __init__(
        self,
        given: Mapping[str, Callable[[], Tensor | None]],
        *,
        index: Tensor,
        sizes: Tensor,
        block: int,
        depth: int,
        training: bool,
        grid: tuple[int, int] | None,
        random: Callable[[int], Tensor],
    ):
        self._given, self._seen, self._random = given, {}, random  # type: ignore[var-annotated]
        self.index, self.sizes, self.grid = index, sizes, grid
        self.block, self.depth, self.training = block, depth, training

    def _get(self, field: str) -> Tensor:
        if field not in self._given:
            raise StrategyError(
                f"view.{field} was read but not declared: add it to `needs` (declared: "
                f"{', '.join(sorted(self._given)) or 'nothing'})"
            )
        if field not in self._seen:
            self._seen[field] = self._given[field]()
        return self._seen[field]

    @property
    def tokens(self) -> Tensor:
        """(B, N, C) the patch tokens; class and register tokens are not among them and always stay."""
        return self._get("tokens")

    @property
    def branch(self) -> Tensor:
        """(B, N, C) what this block's attention added to each token."""
        return self._get("branch")

    @property
    def queries(self) -> Tensor:
        """(B, H, N, C / H) queries of the patch tokens in this block's attention."""
        return self._get("queries")

    @property
    def keys(self) -> Tensor:
        """(B, H, N, C / H) keys of the patch tokens in this block's attention."""
        return self._get("keys")

    @property
    def values(self) -> Tensor:
        """(B, H, N, C / H) values of the patch tokens in this block's attention."""
        return self._get("values")

    @property
    def class_attention(self) -> Tensor:
        """(B, N) attention from the class token to each patch, mean over heads (and over a distillation token)."""
        return self._get("class_attention")

    @property
    def received_attention(self) -> Tensor:
        """(B, N) attention that each patch receives, mean over heads and queries."""
        return self._get("received_attention")

    @property
    def mean_query_attention(self) -> Tensor:
        """(B, N) attention from the mean of the patches' queries to each patch, mean over heads."""
        return self._get("mean_query_attention")

    @property
    def attention_maps(self) -> Tensor:
        """(B, H, P + N, P + N) the whole attention of this block, class and register tokens first."""
        return self._get("attention_maps")

    @property
    def attention(self) -> Tensor:
        """(B, N) `class_attention` where the model has a class token, else `received_attention`."""
        return self._get("attention")

    @property
    def pixels(self) -> Tensor | None:
        """(B, N, channels, height, width) of each patch in [0, 1], at the input site; None on inputs without pixels."""
        return self._get("pixels")

    @property
    def relevance(self) -> Tensor:
        """(B, N) the share of each patch that matters to the label, in [0, 1]. Only for oracles."""
        return self._get("relevance")

    def random(self, draw: int = 0) -> Tensor:
        """Return (B, N) uniform numbers in [0, 1): one stream a sample, the same in whatever batch it comes."""
        return self._random(draw)
