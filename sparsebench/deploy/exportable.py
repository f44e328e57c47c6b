"""What is known of a strategy's files before any is written. Imports no torch."""

from __future__ import annotations

from sparsebench.strategy import Strategy

SHIPPED = "sparsebench_plugins."
"""How the modules of the strategies are named that come with sparsebench."""


def never_exported(cls: type[Strategy]) -> str:
    """Return why no network with a strategy can be written, by what is known of its class; "" where it may be."""
    if cls.kind == "oracle":
        return "it is told which patches matter"
    return "it keeps another number of tokens of each image" if cls.adaptive else ""


def exportable(cls: type[Strategy]) -> str:
    """Return "yes" or "no", or "?" of a strategy that only `sparsebench check` has the answer for."""
    if never_exported(cls):
        return "no"
    return "yes" if cls.__module__.startswith(SHIPPED) else "?"
