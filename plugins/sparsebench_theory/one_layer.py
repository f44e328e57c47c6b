"""What the networks of the theories have in common: one attention layer, before which a strategy acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from sparsebench.measure.cost import OneLayerCost
from sparsebench.models.actor import Pass, SplitPass, finite, in_chunks, kept_only
from sparsebench.strategy.tokens import gather

Fields = dict[str, Callable[[], Tensor]]


class OneLayer(nn.Module):
    """A network that is called with tokens (B, N, d), S of which stay where a strategy acts.

    Attributes:
        cost: the closed form of its MACs.
        because: why it cannot read tokens that are fused, merged or mixed.
    """

    grid = None
    attention_source = "received"
    because: ClassVar[str]
    cost: OneLayerCost

    @property
    def module(self) -> Self:
        """The torch module that holds the weights: itself."""
        return self

    def fields(self, X: Tensor) -> Fields:
        """Return how to compute what a strategy may see beside the tokens; "attention", (B, N), is received."""
        raise NotImplementedError

    def choose(self, acting: Pass, X: Tensor, fields: Fields | None = None) -> Tensor | None:
        """Return the (B, M) positions in S, or None where all tokens stay.

        `fields` are those of X, if they have been computed.
        """
        X = X.to(next(self.parameters()).dtype)
        checked = {name: _checked(find) for name, find in (fields or self.fields(X)).items()}
        view_fields: dict[str, Callable[[], Any]] = {
            **checked,
            "received_attention": checked["attention"],
            "tokens": lambda: X,
            "pixels": lambda: None,
            "outputs": lambda: in_chunks(lambda tokens, _: finite(self(tokens)), len(X)),
        }
        return kept_only(acting, self.cost, X.shape[1], view_fields, self.because)

    def keep(self, acting: Pass | None, X: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens in S (B, M, d), in the precision of the weights, and their positions; see `choose`."""
        index = None if acting is None else self.choose(acting, X)
        return (X if index is None else gather(X, index)).to(next(self.parameters()).dtype), index

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """See `Network`; nothing where what is observed says all."""
        return {}


def _checked(find: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: finite(find())
