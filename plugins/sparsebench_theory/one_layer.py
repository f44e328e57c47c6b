"""The base class of the theories' networks: one attention layer, before which a strategy acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from sparsebench.measure.cost import OneLayerCost
from sparsebench.models.actor import Pass, SplitPass, finite, in_chunks, kept_only
from sparsebench.strategy.tokens import gather

Fields = dict[str, Callable[[], Tensor]]


class OneLayer(nn.Module):
    """A network of tokens (B, N, d). S is the set of tokens that a strategy keeps.

    Attributes:
        cost: the closed form of its MACs.
        because: why it does not support fused, merged or mixed tokens.
    """

    grid = None
    attention_source = "received"
    because: ClassVar[str]
    cost: OneLayerCost

    @property
    def module(self) -> Self:
        """The torch module with the weights: the network itself."""
        return self

    def fields(self, X: Tensor) -> Fields:
        """Return functions that compute the view's fields; "attention" is the received attention, (B, N)."""
        raise NotImplementedError

    def choose(self, acting: Pass, X: Tensor, fields: Fields | None = None) -> Tensor | None:
        """Return the (B, M) positions in S, or None if all tokens stay; `fields` are those of X, if computed before."""
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
        """Return the tokens in S, (B, M, d), with the weights' dtype, and their positions, see `choose`."""
        index = None if acting is None else self.choose(acting, X)
        return (X if index is None else gather(X, index)).to(next(self.parameters()).dtype), index

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """See `Network`; by default nothing."""
        return {}


def _checked(find: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: finite(find())
