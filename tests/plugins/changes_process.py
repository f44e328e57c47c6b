"""Strategies that change what belongs to the whole process, while they choose."""

import os
from typing import ClassVar

import numpy as np
import torch

import sparsebench


class Precision(sparsebench.Strategy):
    """Has matrices multiplied less exactly."""

    name: ClassVar[str] = "precision"

    def change(self):
        torch.set_float32_matmul_precision("medium")

    def scores(self, view):
        self.change()
        return view.tokens.sum(dim=-1)


class Overflow(Precision):
    """Has NumPy say nothing of overflows."""

    name: ClassVar[str] = "overflow"

    def change(self):
        np.seterr(over="ignore")


class Directory(Precision):
    """Goes to another folder."""

    name: ClassVar[str] = "directory"

    def change(self):
        os.chdir("/")


class Variable(Precision):
    """Wants more threads."""

    name: ClassVar[str] = "variable"

    def change(self):
        os.environ["OMP_NUM_THREADS"] = "7"


class Anomalies(Precision):
    """Has gradients looked at."""

    name: ClassVar[str] = "anomalies"

    def change(self):
        torch.autograd.set_detect_anomaly(True)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Precision, Overflow, Directory, Variable, Anomalies]
