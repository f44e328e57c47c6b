"""Keeps positions that lie on another device."""

from typing import ClassVar

import sparsebench


class WrongDevice(sparsebench.Strategy):
    name: ClassVar[str] = "wrong_device"

    def plan(self, view, keep):
        return sparsebench.Keep(view.index[:, :keep].to("meta"))


@sparsebench.hookimpl
def sparsebench_strategies():
    return [WrongDevice]
