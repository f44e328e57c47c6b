"""The records of a run's folder as a table, with what the folder says of their strategies."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

import pandas as pd

from sparsebench.board.entries import BADGE, DECLARED, HOW, TRAINED
from sparsebench.publish.folder import MANIFEST
from sparsebench.records import checks, manifests, store, table
from sparsebench.records.checks import CHECKS, REMARK, UNCHECKED, Badges
from sparsebench.text import plain


def read(out: Path, metrics: Container[str] | None = None) -> pd.DataFrame:
    """Return the records of a run's folder as a table, with badges, and whether and how each strategy is trained.

    It has the plain columns of `table`, those of outcomes, and the metrics: `metrics` or all, and those that tasks
    declare, of which the table's attributes say what they are. Predictions are read as they are looked at.

    Raises:
        UserError: as `store.rows`.
    """
    import pyarrow as pa

    kinds = manifests.metrics(out)
    declared = {kind.name for kind in kinds}

    def wanted(name: str) -> bool:
        if not table.is_metric(name):
            return name not in (*table.PARTS, table.RANKS, "memory", table.CHECKSUM)
        return metrics is None or name in metrics or name in declared

    rows = store.rows(out, wanted).drop_columns([table.CHECKSUM]).sort_by("cell_id")
    kept = {pa.string(), pa.binary()}
    records = rows.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if kind in kept else None)
    records = describe(records, out)
    records.attrs[DECLARED] = kinds
    return records


def describe(records: pd.DataFrame, out: Path) -> pd.DataFrame:
    """Return records with what a run's folder says of their strategies: badge, remarks, whether trained, and how."""
    badges, known = Badges(checks.read(out)), manifests.strategies(out)
    grouped = records.groupby(["strategy", "revision"], observed=True, sort=False)
    said, (submitted, badge) = [], _badge_of(out)
    for label, revision in grouped.groups:
        name = label.partition("(")[0]
        about = known.get((name, revision))
        trained = "" if about is None else "yes" if about.trained else "no"
        checked = badges.of(label, revision) if badges else (UNCHECKED, "")
        how = "" if about is None else manifests.how_of_label(about.how, label)
        said.append((*checked, trained, badge if name == submitted else "", plain(how)))
    number = grouped.ngroup()
    named = zip((CHECKS, REMARK, TRAINED, BADGE, HOW), zip(*said, strict=True), strict=True)
    return records.assign(**{name: pd.Categorical(values).take(number) for name, values in named})


def _badge_of(out: Path) -> tuple[str, str]:
    """Return whose submission a folder is and its badge, as far as its own records bear it; "" of any other folder."""
    if not os.path.lexists(out / MANIFEST):
        return "", ""
    from sparsebench.publish.verify import verify

    verdict = verify(out)
    return verdict.strategy, verdict.badge
