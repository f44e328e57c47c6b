"""A process in which a stranger's strategies are checked: it loads them, runs the checks, and says so line by line."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from sparsebench.collector import without_collector
from sparsebench.contain.keeper import descendants, end_with_parent
from sparsebench.contain.messages import Line, load
from sparsebench.errors import UserError, text_of
from sparsebench.plugin.registry import Registry
from sparsebench.records.checks import Report
from sparsebench.strategy import Strategy
from sparsebench.testing.process import LOADS, Message, Request, of_loading

MEMORY = 2 * 1024**3
"""Bytes of address space that checks may take, besides what Python and torch have taken before."""


def main() -> None:
    """Check what one line asks for, and leave."""
    end_with_parent()
    line = Line()

    with without_collector():
        from sparsebench.testing import audit, informative, networks, run
        from sparsebench.testing.parametrize import PluginError, resolve

    for name in networks.NAMES:
        networks.cached(name)
    informative.deit_tiny()
    _limit_memory()
    line.say(Message())
    request = load(Request, line.jobs.readline())
    processes, last = _Processes(), True
    try:
        with audit.watch() as audit.AT_LOAD:
            strategies = resolve(request.target, Registry(rehearses=False), request.given)
        last = request.number + 1 >= len(strategies)
        for strategy, origin in strategies[request.number : request.number + 1]:
            line.say(Message(report=(report := run.blank(strategy, origin, request.groups)), last=last))
            _check(strategy, report, line, processes)
    except PluginError as error:
        line.say(Message(report=of_loading(error.name, error.origin)))
        line.say(Message(outcome=LOADS.after("failed", error.failure)))
    except UserError as error:
        line.say(Message(error=text_of(error)))
    line.say(Message(done=True, last=last))
    os._exit(0)  # threads that a strategy began are not waited for


class _Processes:
    """The processes that a strategy starts: those that are not there yet."""

    def __init__(self) -> None:
        self.keeper = os.getppid()
        self.before = set(descendants(self.keeper))

    def end(self) -> bool:
        """End those that go on, wherever they have gone, and say whether there were any (on Linux only)."""
        pids = set(descendants(self.keeper)) - self.before
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)


def _check(strategy: Strategy, report: Report, line: Line, processes: _Processes) -> None:
    """Say what each check found; that the machine is left alone holds only if it was so in all of them."""
    from sparsebench.testing import run

    left = ""
    for outcome in run.outcomes(strategy, report, lambda name: line.say(Message(begins=name))):
        if processes.end():
            left = left or f"it left a process running [{outcome.check}]"
        report = report.with_outcome(outcome)
        line.say(Message(outcome=outcome))
    (machine,) = (outcome for outcome in report.outcomes if outcome.check == "machine_is_left_alone")
    if left and machine.status in ("passed", "unsupported", "not run"):
        line.say(Message(outcome=machine.after("failed", left, machine.seconds)))


def _limit_memory() -> None:
    """Let this process take so much more memory and no more, where the system says how much it has."""
    status = Path("/proc/self/statm")
    if status.exists():
        taken = int(status.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))


if __name__ == "__main__":
    main()
