"""The recounted ledger as a table, and which of it a page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparsebench.board import tables
from sparsebench.board.columns import Column
from sparsebench.board.judge import Ranking
from sparsebench.board.tables import ALL, Choice, Report, Table
from sparsebench.errors import UserError
from sparsebench.paper.claims.recount import TOLERANCE, Recount
from sparsebench.paper.claims.rows import Claim, load
from sparsebench.plan.contenders import settings_of
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.spec import label

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
    f"Agrees: within {TOLERANCE:.0%}, or as the source rounds it.",
    "G: 10^9, which most sources call FLOPs and count as MACs.",
    "Cannot be: no way of counting that is known here gives the number from the settings as read.",
)


def render(recounts: Sequence[Recount], form: str, choice: Choice = ALL) -> str:
    """Return the table in one of `tables.FORMATS`.

    Raises:
        UserError: another format, or a column that there is not.
    """
    table = Table([_row(one) for one in recounts], COLUMNS, legend=LEGEND)
    return tables.render(Report([table], table, summary(recounts)), form, choice)


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


PUBLISHED = Column(
    "published", "published, %", "percent", "top-1 on ImageNet-1k that a source states for these settings, untrained"
)


def with_published(report: Report, rankings: Sequence[Ranking]) -> Report:
    """Return the tables of a paper with what the ledger has of the same settings, where it has some.

    These are the architecture, the side of the images, ImageNet's classes, all of which a test may answer with, the
    strategy with its parameters, and the budget; and weights as they are, not trained with the strategy.
    """
    found = [_beside(table, one) for table, one in zip(report.tables, rankings, strict=False)]
    columns = next((table.columns for table in found if PUBLISHED in table.columns), report.data.columns)
    data = Table([row for table in found for row in table.rows], columns)
    return replace(report, tables=found or report.tables, data=data)


def _beside(table: Table, one: Ranking) -> Table:
    task, model = one.setting.params
    registry, known = Registry(), dict[tuple[str, str], float]()
    whole = task.get("labels") == "imagenet" and task.get("among", "head") == "head"
    for claim in load() if whole else ():
        same = claim.model == f"timm:{model.get('arch')}" and claim.canvas in (0, task.get("canvas"))
        if same and claim.top1 and claim.plugin and claim.weights == "off the shelf":
            known.setdefault(_key(claim, registry), float(claim.top1) / 100)
    keys = [(row["strategy"], "" if row["strategy"] == "dense" else row["budget"]) for row in table.rows]
    if not known.keys() & set(keys):
        return table
    rows = [{**row, PUBLISHED.key: known.get(key)} for row, key in zip(table.rows, keys, strict=True)]
    return replace(table, rows=rows, columns=(*table.columns, PUBLISHED))


def _key(claim: Claim, registry: Registry) -> tuple[str, str]:
    """Return what a board calls the strategy and the budget of a row; nothing it has of one that is not here."""
    try:
        made, budget = settings_of(claim.plugin, registry)[0]
    except UserError:
        return "", ""
    said = label(made.name, made.model_dump(mode="json", exclude_defaults=True))
    return said, budget.label if budget else ""
