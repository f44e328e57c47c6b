"""Brings a task of tokens and a network for it."""

from token_sets import OneLayer, Sets

import sparsebench


@sparsebench.hookimpl
def sparsebench_tasks():
    return [Sets]


@sparsebench.hookimpl
def sparsebench_models():
    return [OneLayer]
