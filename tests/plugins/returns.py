"""Strategies whose scores are not what they must be."""

from typing import Any

from sparsebench import Strategy, TokenView, hookimpl


class Listed(Strategy):
    """Returns a list."""

    name = "listed"

    def scores(self, view: TokenView) -> Any:
        return view.tokens.norm(dim=2).tolist()


class Flat(Strategy):
    """Returns (B,)."""

    name = "flat"
    along: int = 1

    def scores(self, view: TokenView) -> Any:
        return view.tokens.norm(dim=2).sum(dim=self.along)


class Strange(Strategy):
    """Returns complex numbers."""

    name = "strange"

    def scores(self, view: TokenView) -> Any:
        return view.tokens.norm(dim=2) * 1j


class Misread(Strategy):
    """Reads what is no field."""

    name = "misread"

    def scores(self, view: TokenView) -> Any:
        return view.token.norm(dim=2)  # type: ignore[attr-defined]


class Remembers(Strategy):
    """Sets an attribute."""

    name = "remembers"

    def scores(self, view: TokenView) -> Any:
        self.last = view.tokens
        return view.tokens.norm(dim=2)


class Peeks(Strategy):
    """Reads what only oracles may."""

    name = "peeks"

    def scores(self, view: TokenView) -> Any:
        return view.relevance


@hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    return [Listed, Flat, Strange, Misread, Remembers, Peeks]
