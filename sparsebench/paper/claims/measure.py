"""The accuracy of one row, measured again with somebody's weights and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsebench.errors import UserError
from sparsebench.paper.claims.recount import setting_of
from sparsebench.paper.claims.rows import Claim
from sparsebench.plan.locate import files_of
from sparsebench.plan.request import Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.stats.intervals import wilson

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Measured:
    """What came out of a row.

    Attributes:
        top1: accuracy in percent, and `low` and `high` its 95 % interval.
        n: number of images.
        dense: accuracy in percent of the same weights without the strategy.
        holds: whether the claimed number, as it is rounded, lies in the interval.
    """

    claim: Claim
    top1: float
    low: float
    high: float
    n: int
    dense: float | None
    holds: bool

    def __str__(self) -> str:
        beside = "" if self.dense is None else f"; dense {self.dense:.2f} %"
        measured = f"measured {self.top1:.2f} % [{self.low:.2f}, {self.high:.2f}] on {self.n} images"
        said = "the claim lies in the interval" if self.holds else "the claim lies outside the interval"
        return f"{self.claim.id}: claimed {self.claim.top1} %; {measured}{beside}: {said}"


def request_of(claim: Claim, weights: Path, images: Path, registry: Registry) -> tuple[Request, Files]:
    """Return what is to be run for a row: its strategy and the dense network, with those weights, on those pictures.

    Raises:
        UserError: the row names no accuracy, or settings that cannot be tested so.
    """
    strategy, _ = setting_of(claim, registry)
    if claim.top1 is None:
        raise UserError(f"row {claim.id} claims no accuracy", next_step="name another row")
    if strategy.trained:
        raise UserError(
            f"row {claim.id}: '{strategy.name}' is learned with the network, and a file of weights does not hold it",
            next_step="name a row whose strategy is not learned",
        )
    if len(files := files_of((weights,))) > 1:
        raise UserError(f"row {claim.id} was tested with one network", got=f"{len(files)} files in {weights}")
    task = f"folder:canvas={claim.canvas}" if claim.canvas else "folder"
    plugins = tuple(dict.fromkeys(("dense", claim.plugin)))
    request = Request(plugins, "folder", (task,), claim.model, alone=True)
    return request, Files((f"folder:{images}",), weights=(weights,))


def result_of(claim: Claim, records: pd.DataFrame) -> Measured:
    """Return what the records of `request_of` come to.

    Raises:
        UserError: the strategy has no result.
    """
    name = claim.plugin.partition(":")[0]
    row = records[records["strategy"].str.partition("(")[0] == name].iloc[0]
    if row["status"] != "ok":
        raise UserError(f"row {claim.id}: '{name}' is {row['status']}: {row['reason']}")
    n, share = int(row["test_items"]), float(row["accuracy"])
    low, high = (float(end) for end in wilson(np.array(share), np.array(n)))
    dense = records[(records["strategy"] == "dense") & (records["status"] == "ok")]["accuracy"]
    assert claim.top1 is not None
    exponent = claim.top1.as_tuple().exponent
    assert isinstance(exponent, int)
    rounding, said = 0.5 * 10.0**exponent, float(claim.top1)
    holds = 100 * low - rounding <= said <= 100 * high + rounding
    beside = 100 * float(dense.iloc[0]) if len(dense) and name != "dense" else None
    return Measured(claim, 100 * share, 100 * low, 100 * high, n, beside, holds)
