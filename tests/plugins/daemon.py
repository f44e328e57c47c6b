"""Leaves a process behind in its first choice, in a session of its own and with no parent."""

import functools
import os
import time

import sparsebench


@functools.cache
def start():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


class Daemon(sparsebench.Strategy):
    """Keeps the largest sums."""

    name = "daemon"

    def scores(self, view):
        start()
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Daemon]
