"""How much of a training is done, for people who wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from sparsebench.training.loop import Course

EVERY = 1.0
"""Seconds between two reports."""
OnStep = Callable[[int], None]


class Share:
    """Called after each step, reports every second the share of the steps that is done.

    Args:
        course: of the training.
        report: called with the share, in (0, 1].
    """

    def __init__(self, course: Course, report: Callable[[float], None]):
        self.course, self.report = course, report
        self.due = time.monotonic() + EVERY

    @property
    def certain(self) -> bool:
        """Whether the training has as many steps as its recipe says, and does not end when something is reached."""
        recipe = self.course.recipe
        return not (recipe.stop_at_zero_loss or recipe.stop_below or recipe.patience)

    def __call__(self, step: int) -> None:
        """Report, if it is time to."""
        if step and time.monotonic() >= self.due:
            self.report(step / self.course.total)
            self.due = time.monotonic() + EVERY


def each(*calls: OnStep | None) -> OnStep | None:
    """Return what calls each of them that there is; None where there is none."""
    present = [call for call in calls if call is not None]
    if len(present) < 2:
        return present[0] if present else None

    def call(step: int) -> None:
        for one in present:
            one(step)

    return call
