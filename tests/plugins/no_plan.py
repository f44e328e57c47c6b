"""Returns positions where a plan is due."""

from typing import ClassVar

import sparsebench


class NoPlan(sparsebench.Strategy):
    name: ClassVar[str] = "no_plan"

    def plan(self, view, keep):
        return view.index[:, :keep]


@sparsebench.hookimpl
def sparsebench_strategies():
    return [NoPlan]
