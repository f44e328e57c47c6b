"""Has room for two batches."""

from typing import ClassVar

from pydantic import PrivateAttr

import sparsebench


class ThirdBatch(sparsebench.Strategy):
    name: ClassVar[str] = "third_batch"
    _batches: list[int] = PrivateAttr(default_factory=list)

    def scores(self, view):
        self._batches.append(len(view.index))
        if len(self._batches) > 2:
            raise IndexError("no room for another batch")
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [ThirdBatch]
