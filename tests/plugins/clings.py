"""Hangs in C with the interpreter's lock held, after it has started processes that are hard to find and to end."""

import ctypes
import os
import signal
import time

import sparsebench


class Clings(sparsebench.Strategy):
    name = "clings"

    def scores(self, view):
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        print("asleep", flush=True)  # noqa: T201
        ctypes.PyDLL(None).sleep(600)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Clings]
