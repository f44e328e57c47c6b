"""MACs made again from a record's token trajectory and its cell's parameters; and what trajectories there can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel, Step, VitCost
from sparsebench.measure.metrics import METRICS, unit_of
from sparsebench.models.base import Model
from sparsebench.models.vits import Timm
from sparsebench.publish.folder import plain
from sparsebench.publish.rescore import same
from sparsebench.records.record import Metric, Record, TokenStep
from sparsebench.tasks.base import Task

COUNTED = tuple(kind.name for kind in METRICS if kind.decided_by == "trajectory")
SCORINGS = ("", "class", "received", "mean")
ROUNDING = 1e-9
"""Tokens; counts are means over images."""
LARGEST_CANVAS, MOST_NETWORKS = 4096, 32
"""Of timm models, each of which is made, on torch's meta device, to be counted."""


class Networks:
    """The closed forms of the networks of a submission, each made once."""

    def __init__(self) -> None:
        self._timm: dict[tuple[str, Any, int], CostModel] = {}

    def cost(self, task: Task, model: Model, classes: int) -> CostModel:
        """Return the closed form, see `Model.cost`.

        Raises:
            UserError: it cannot be made, or the submission has too many networks of timm's, or too large ones.
        """
        if not isinstance(model, Timm):
            return model.cost(task, classes)
        canvas = getattr(task, "canvas", 0)
        key = model.arch, canvas, classes
        if key not in self._timm:
            if len(self._timm) >= MOST_NETWORKS or canvas > LARGEST_CANVAS:
                raise UserError(f"no more than {MOST_NETWORKS} timm models of {LARGEST_CANVAS} pixels are counted")
            self._timm[key] = model.cost(task, classes)
        return self._timm[key]


def differences(record: Record, labels: np.ndarray, task: Task, model: Model, networks: Networks) -> Iterator[str]:
    """Yield what in a record is not what its trajectory costs, or what no trajectory can be.

    Args:
        record: one that is ok.
        labels: of its test items.
        task, model: the cell's.
        networks: makes closed forms.

    Raises:
        UserError: what the network costs cannot be said.
    """
    costs = [networks.cost(task, model, classes) for classes in task.class_counts(labels)]
    if (blocks := len(costs[0].dense())) != len(record.trajectory):
        yield f"its trajectory has {len(record.trajectory)} blocks, and the model {blocks}"
        return
    if illegal := next(_illegal(record, costs[0]), None):
        yield illegal
        return
    yield from min((list(_compare(record, cost)) for cost in costs), key=len)


def _illegal(record: Record, cost: CostModel) -> Iterator[str]:
    """Yield what no trajectory can be."""
    steps = record.trajectory
    if len(steps) != cost.depth:
        yield f"its trajectory has {len(steps)} blocks, and the model {cost.depth}"
        return
    inside = [step.tokens_out < step.tokens_in - ROUNDING for step in steps]
    pairs = [(step.tokens_in + step.rested, step.tokens_out + step.rested) for step in steps]
    counts = [float(cost.tokens), *(count for pair in pairs for count in pair)]
    if any(after > before + ROUNDING for before, after in pairwise(counts)):
        yield f"its token counts do not fall from the model's {cost.tokens}"
    if any(min(step.tokens_in, step.tokens_out) < 1 for step in steps):
        yield "a token count is below 1"
    # One layer is acted on before it whatever the site, and says so by what comes in and goes out of it.
    if any(inside) or not isinstance(cost, VitCost):
        gaps = [float(cost.tokens), *(step.tokens_out for step in steps)]
        if any(abs(left - step.tokens_in) > ROUNDING for left, step in zip(gaps, steps, strict=False)):
            yield "tokens leave both inside blocks and between them"
    for number, step in enumerate(steps):
        if wrong := _odd(step, cost):
            yield f"block {number} {wrong}"
    if record.cell.where == "train" and list(steps) != [TokenStep(**vars(step)) for step in cost.dense()]:
        yield "tokens are removed in training only, and the test is not dense"


def _odd(step: TokenStep, cost: CostModel) -> str | None:
    if step.scoring not in SCORINGS or (step.scoring == "class" and isinstance(cost, VitCost) and not cost.class_rows):
        return f"has scoring '{plain(step.scoring, 20)}'"
    if step.projected != "".join(letter for letter in "qkv" if letter in step.projected):
        return f"has projections '{plain(step.projected, 20)}'"
    # Three covariances of counts up to N, each at most N^2 / 4; theories know no numbers of each sample's own.
    if abs(step.spread) > (cost.tokens**2 if isinstance(cost, VitCost) else 0):
        return "has a larger spread of token counts than can be"
    return None


def _compare(record: Record, cost: CostModel) -> Iterator[str]:
    dense, macs = cost.macs(cost.dense()), cost.macs(_steps(record.trajectory))
    made = {"macs": macs, "macs_dense": dense, "macs_ratio": macs / dense}
    if record.cell.where == "train" or record.cell.budget.macs == 1.0:
        made["macs_ratio_planned"] = 1.0  # of others only the strategy's code says what was planned
    n = 0 if record.outcomes is None else record.outcomes.n
    for name in COUNTED:
        reported = record.metrics.get(name)
        if reported is None:
            yield f"{name} is missing"
        elif reported != Metric(value=reported.value, unit=unit_of(name), n=n):
            yield f"{name} is in {plain(reported.unit, 20)} of {reported.n}, or has an interval"
        elif name in made and not same(reported.value, float(made[name])):
            yield f"{name} is {reported.value!r}, and its trajectory comes to {float(made[name])!r}"


def _steps(trajectory: Sequence[TokenStep]) -> list[Step]:
    return [Step(**step.model_dump()) for step in trajectory]
