"""The best badge that a record may get which was made another: it follows from what was changed, not from `verify`."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from sparsebench.publish.verify import BADGES, Badge

REPORTED, RESCORED = "reported", "rescored"
SCORED = ("accuracy", "accuracy_top5", "test_loss", "success", "success_loss", "average_test", "average_train",
          "worst_group_accuracy", "spurious_gap", "p_label")  # fmt: skip
SHOWN = "foreground"
"""Outcomes that not all records have; of one that is alone in its setting only the length is seen."""
COUNTED = ("macs", "macs_dense", "macs_ratio")


def lowest(*badges: Badge) -> Badge:
    """Return the lowest of some badges."""
    return BADGES[min(map(BADGES.index, badges))]


def deserved(before: Any, after: Any, at: tuple[Any, ...] = ()) -> Badge:
    """Return the best badge of a record that was made another; nothing is known of what no check can tell."""
    if before == after and isinstance(before, bool) == isinstance(after, bool):
        return "recounted"
    if at == ("outcomes",) and isinstance(after, dict):
        return _of_outcomes(before, after)
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        return lowest("recounted", *(deserved(before.get(key), after.get(key), (*at, key)) for key in keys))
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = (deserved(a, b, (*at, i)) for i, (a, b) in enumerate(zip(before, after, strict=True)))
        return lowest("recounted", *parts)
    if at[:1] in (("cell",), ("cell_id",)):
        return "rejected"
    if at[:1] == ("metrics",) and at[1:]:
        if at == ("metrics", "p_label") and after is None:  # as in older records
            return "recounted"
        if at[1] in SCORED or at[1].startswith(("accuracy: ", "train_samples: ")):
            return REPORTED
        return RESCORED if at[1] in COUNTED else "recounted"
    if at[:1] == ("trajectory",):
        return RESCORED if at[-1:] and at[-1] in ("tokens_in", "tokens_out", "own", "spread") else "recounted"
    return "recounted"


def _arrays(outcomes: Any) -> dict[str, np.ndarray]:
    kinds = {"predicted": "<u2", "label": "<u2", "group": "<u2", "rank": "<u2", "loss": "<f4"}
    kinds |= {SHOWN: "<u2"} if outcomes[SHOWN] else {}
    return {
        name: np.frombuffer(zlib.decompress(base64.b64decode(outcomes[name])), kind) for name, kind in kinds.items()
    }


def _of_outcomes(before: Any, after: Any) -> Badge:
    """Return the best badge of a record with other outcomes: what changes no number that is measured is not seen."""
    try:
        old, new = _arrays(before), _arrays(after)
    except (ValueError, TypeError, LookupError, zlib.error):
        return REPORTED
    if before["n"] != after.get("n") or any(one.shape != (before["n"],) for one in new.values()):
        return REPORTED
    if any((old[name] != new[name]).any() for name in ("label", "group")):
        return REPORTED
    hits = [each["predicted"] == each["label"] for each in (old, new)]
    classes = int(old["label"].max()) + 1
    seen = (
        (hits[0] != hits[1]).any()
        or (hits[1] != (new["rank"] == 0)).any()
        or max(new["predicted"].max(), new["rank"].max()) >= classes
        or (classes >= 10 and ((old["rank"] < 5) != (new["rank"] < 5)).any())
    )
    means = [each["loss"].mean(dtype=np.float64) for each in (old, new)]
    odd = not (np.isfinite(new["loss"]) & (new["loss"] >= 0)).all()
    return REPORTED if seen or odd or abs(means[0] - means[1]) > 1e-13 * max(1, means[0]) else "recounted"


def most_of(before: bytes, after: bytes) -> Badge:
    """Return the best badge of a line that was made another."""
    try:
        new = json.loads(after)
    except (ValueError, RecursionError):
        return "rejected"
    return deserved(json.loads(before), new) if isinstance(new, dict) else "rejected"
