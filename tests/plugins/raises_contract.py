"""Raises the error that sparsebench has for strategies, with two lines."""

import sparsebench


class RaisesContract(sparsebench.Strategy):
    name = "raises_contract"

    def scores(self, view):
        raise sparsebench.StrategyError("no idea which token\nmatters")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [RaisesContract]
