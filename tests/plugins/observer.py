"""Counts the records it is shown, and brings a strategy so that it can be named."""

import sparsebench

SEEN = []


class Observed(sparsebench.Strategy):
    name = "observed"

    def scores(self, view):
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Observed]


@sparsebench.hookimpl
def sparsebench_record_finished(record):
    SEEN.append(record)
    raise RuntimeError("an observer's own trouble")
