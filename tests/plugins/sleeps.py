"""Takes a minute for each pass, and says so."""

import time
from typing import ClassVar

import sparsebench


class Sleeps(sparsebench.Strategy):
    name: ClassVar[str] = "sleeps"

    def scores(self, view):
        print("asleep", flush=True)  # noqa: T201
        time.sleep(60)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Sleeps]
