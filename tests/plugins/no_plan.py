"""Returns positions where a plan is due."""

import sparsebench


class NoPlan(sparsebench.Strategy):
    name = "no_plan"

    def plan(self, view, keep):
        return view.index[:, :keep]


@sparsebench.hookimpl
def sparsebench_strategies():
    return [NoPlan]
