"""Appends to the records of whatever results folder it finds where it is run."""

import glob
import os
from typing import ClassVar

import sparsebench


class WritesRecords(sparsebench.Strategy):
    name: ClassVar[str] = "writes_records"

    def scores(self, view):
        for path in glob.glob("*/records/*.jsonl"):
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(file, b"{}\n")
            os.close(file)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [WritesRecords]
