"""The recounted ledger as a table, and which of it a page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sparsebench.board import tables
from sparsebench.board.columns import Column
from sparsebench.claims.recount import TOLERANCE, Recount

COLUMNS = (
    Column("row", "row", "text", "its name in the ledger"),
    Column("claimed", "claimed G", "text", "10^9 that the source says an image costs, as it is written there"),
    Column("recounted", "recounted G", "text", "10^9 MACs that the settings come to here"),
    Column("verdict", "verdict", "text", "agrees, other convention, cannot be, nothing claimed, not recounted"),
    Column("flags", "flags", "text", "what to ask about"),
    Column("speedup", "speed-up", "text", "images/s over those of the dense network, both as claimed"),
    Column("macs_ratio", "MACs ratio", "text", "dense MACs over its own; as claimed where both are, else recounted"),
    Column("why", "why", "text", "the convention, or the reason of the verdict"),
    Column("method", "method", "text", "as the source calls it"),
    Column("model", "model", "text", "to be typed after --model; @ and the side of the images where it is not its own"),
    Column("plugin", "plugin", "text", "to be typed after --plugin"),
    Column("top1", "top-1 %", "text", "accuracy on ImageNet-1k as claimed"),
    Column("weights", "weights", "text", "whether the network was trained with the method"),
    Column("hardware", "hardware", "text", "of the speed"),
    Column("source", "source", "text", "where the numbers were read"),
    Column("difference", "difference", "ratio", "claimed over recounted, less 1", tables=False),
    Column("images_per_s", "images/s", "text", "as claimed", tables=False),
    Column("paper", "paper", "text", "of the method, or of the comparison", tables=False),
    Column("note", "note", "text", "what to know of the settings", tables=False),
)
LEGEND = (
    f"Agrees: within {TOLERANCE:.0%}, or as the source rounds it. G: 10^9, which most sources call FLOPs and count as "
    "MACs. Cannot be: no way of counting that is known here gives the number from the settings as read."
)


def rows_of(recounts: Sequence[Recount]) -> list[dict[str, Any]]:
    """Return a row for each recount, with the keys of `COLUMNS`."""
    return [_row(one) for one in recounts]


def render(recounts: Sequence[Recount], form: str) -> str:
    """Return the table in one of `columns.FORMATS`, whole.

    Raises:
        UserError: another format.
    """
    return tables.render(rows_of(recounts), form, summary(recounts), columns_of(form), LEGEND)


def columns_of(form: str) -> list[Column]:
    """Return the columns that a form has: files have all."""
    return [column for column in COLUMNS if column.tables or form in ("csv", "json")]


def summary(recounts: Sequence[Recount]) -> list[str]:
    """Return how many rows there are of each verdict, and a line for each that is flagged."""
    verdicts = Counter(one.verdict for one in recounts)
    counted = ", ".join(f"{word} {n}" for word, n in sorted(verdicts.items()))
    flagged = [f"{one.claim.id}: {'; '.join(one.flags)}{_reason(one)}" for one in recounts if one.flags]
    return [f"{len(recounts)} rows: {counted}" if recounts else "no rows", *flagged]


def _reason(one: Recount) -> str:
    return f" ({one.why})" if one.verdict == "cannot be" else ""


def _row(one: Recount) -> dict[str, Any]:
    claim = one.claim
    speed = None if claim.speed is None else str(claim.speed)
    return {
        "row": claim.id, "claimed": _text(claim.gmacs), "recounted": _number(one.gmacs, 3), "verdict": one.verdict,
        "flags": "; ".join(one.flags), "speedup": _number(claim.claimed_speedup, 2),
        "macs_ratio": _number(one.macs_ratio, 2), "why": one.why, "method": claim.method,
        "model": claim.model + (f" @{claim.canvas}" if claim.canvas else ""), "plugin": claim.plugin,
        "top1": _text(claim.top1), "weights": claim.weights, "hardware": claim.hardware, "source": claim.source,
        "difference": one.difference, "images_per_s": speed, "paper": claim.paper, "note": claim.note,
    }  # fmt: skip


def _text(number: object) -> str:
    return "" if number is None else str(number)


def _number(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"
