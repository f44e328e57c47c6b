"""The records of a run's folder as a table, with what the folder says of their strategies."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pandas as pd

from sparsebench.board.entries import HOW, TRAINED, VERIFIED
from sparsebench.publish.folder import MANIFEST
from sparsebench.records import checks, flat, manifests
from sparsebench.records.badges import CHECKS, REMARK, UNCHECKED, Badges


def read(out: Path, metrics: Collection[str] | None = None) -> pd.DataFrame:
    """Return the rows of `flat.table` with badges, and whether and how each strategy is trained.

    Raises:
        UserError: as `flat.load`.
    """
    return describe(flat.table(out, metrics), out)


def describe(records: pd.DataFrame, out: Path) -> pd.DataFrame:
    """Return records with what a run's folder says of their strategies: badge, remarks, whether trained, and how."""
    badges, known = Badges(checks.read(out)), manifests.strategies(out)
    grouped = records.groupby(["strategy", "sha256"], observed=True, sort=False)
    said, (submitted, badge) = [], _verified(out)
    for label, sha256 in grouped.groups:
        name = label.partition("(")[0]
        about = known.get((name, sha256))
        trained = "" if about is None else "yes" if about.trained else "no"
        checked = badges.of(label, sha256) if badges else (UNCHECKED, "")
        how = "" if about is None else manifests.how_of_label(about.how, label)
        said.append((*checked, trained, badge if name == submitted else "", how))
    number = grouped.ngroup()
    named = zip((CHECKS, REMARK, TRAINED, VERIFIED, HOW), zip(*said, strict=True), strict=True)
    return records.assign(**{name: pd.Categorical(values).take(number) for name, values in named})


def _verified(out: Path) -> tuple[str, str]:
    """Return whose submission a folder is and its badge, as far as its own records bear it; "" of any other folder."""
    if not (out / MANIFEST).is_file():
        return "", ""
    from sparsebench.publish.verify import verify

    verdict = verify(out)
    return verdict.strategy, verdict.badge
