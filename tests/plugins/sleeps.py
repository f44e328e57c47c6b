"""Takes a minute for each pass, and says so."""

import time

import sparsebench


class Sleeps(sparsebench.Strategy):
    name = "sleeps"

    def scores(self, view):
        print("asleep", flush=True)  # noqa: T201
        time.sleep(60)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Sleeps]
