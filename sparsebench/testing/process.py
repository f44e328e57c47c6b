"""The checks in a process of their own, so that a strategy that hangs or dies costs only its own report."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsebench import __version__
from sparsebench.errors import UserError, as_utf8, text_of
from sparsebench.plugin.content import file_revision
from sparsebench.records.cell import Origin
from sparsebench.runner.devices import variables
from sparsebench.runner.process import START, Line, Server, dump, how_it_left, kept_server, load
from sparsebench.strategy.spec import parse
from sparsebench.testing.reports import GROUPS, Group, Outcome, Report, Status

LIMIT = 60.0
"""Seconds for one check."""
PATIENCE = 10.0
"""Seconds that the process may take to leave once it has closed the line of its answers."""
MEMORY = 2 * 1024**3
"""Bytes of address space that checks may take, besides what Python and torch have taken before."""
Given = Mapping[str, Sequence[Mapping[str, Any]]]
LOADS = Outcome(check="loads", group="required", says="The plugin loads and brings legal strategies.")


class Request(BaseModel):
    """What is to be checked, see `parametrize.resolve`: of it the strategy of that number, from 0, by these groups."""

    target: str
    given: Given | None
    number: int
    groups: tuple[Group, ...] = GROUPS


class Message(BaseModel):
    """One line of the process. With nothing in it: nothing of the target has run so far.

    Attributes:
        report: of the next strategy, before any check.
        outcome: what the next check of the last report found.
        error: why the target is none.
        done: all is said.
        last: whether no other strategy comes after it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    report: Report | None = None
    outcome: Outcome | None = None
    error: str = ""
    done: bool = False
    last: bool = False


def check(
    target: str,
    limit: float = LIMIT,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    given: Given | None = None,
    groups: tuple[Group, ...] = GROUPS,
) -> list[Report]:
    """Return the report of each strategy that NAME or FILE.py, with parameters, stands for.

    Each has a process of its own: what one changes there no other meets.

    Args:
        target: what is to be checked, as `sparsebench run --plugin` takes it.
        limit: seconds for each check; a strategy that takes longer is ended.
        on_outcome: is called with each outcome as it comes.
        given: by name the strategies that are wanted of the target, with parameters, in place of those in its text.
        groups: of the checks that are run.

    Raises:
        UserError: there is no such strategy, file or parameter.
    """
    reports: list[Report] = []
    with tempfile.TemporaryDirectory() as folder, kept_server(variables()) as server:
        while True:
            request = Request(target=target, given=given, number=len(reports), groups=groups)
            child = _Child(request, limit, on_outcome, server, Path(folder) / "log")
            try:
                all_done = child.listen()
            finally:
                child.worker.end()
            reports += child.reports
            if all_done:
                return reports


def of_loading(name: str, origin: Origin) -> Report:
    """Return the report of a strategy that is not loaded yet."""
    return Report(strategy=name, origin=origin, versions={"sparsebench": __version__}, outcomes=(LOADS,))


class _Child:
    """One process, and the reports that it gave."""

    def __init__(
        self, request: Request, limit: float, on_outcome: Callable[[Outcome], None], server: Server, log: Path
    ):
        self.request, self.limit, self.on_outcome = request, limit, on_outcome
        self.reports: list[Report] = []
        self.left: list[Outcome] = []  # the check that runs, and those after it
        self.last = False
        try:
            self.worker = server.start("sparsebench.testing.process", {}, log)
        except EOFError:
            raise UserError("the checks did not start", got=log.read_text(encoding="utf-8")[-500:]) from None

    def listen(self) -> bool:
        """Take what the process says until it is done or has to be ended; return whether no strategy comes after."""
        limit = START
        while True:
            try:
                message = self.worker.answer(limit, Message)
            except EOFError:
                return self._lost("crashed", self._how_it_ended())
            except ValueError as error:
                return self._lost("crashed", f"its answer cannot be read: {error}")
            if message is None:
                return self._lost("timeout", f"it took more than {limit:g} s and was ended")
            self.last = self.last or message.last
            if message.done:
                return self.last
            self._take(message)
            limit = self.limit

    def _take(self, message: Message) -> None:
        if message.error:
            raise UserError(message.error)
        if message.report is not None:
            self.reports.append(message.report)
            self.left = list(message.report.outcomes)
        elif message.outcome is not None:
            self._keep(message.outcome)
            self.left = self.left[1:] or self.left
        else:
            self.left = [LOADS]
            self.worker.ask(dump(self.request).encode())

    def _keep(self, outcome: Outcome) -> None:
        self.reports[-1] = self.reports[-1].with_outcome(outcome)
        self.on_outcome(outcome)

    def _lost(self, status: Status, message: str) -> bool:
        """Note how the process was lost at what it was doing; return whether no strategy comes after."""
        if not self.left:
            raise UserError(f"the checks did not start: {message}")
        if (running := self.left[0]) == LOADS:
            target = as_utf8(self.request.target)
            revision = file_revision(Path(parse(self.request.target).name))
            self.reports.append(of_loading(target, Origin(plugin=target, revision=revision)))
        self._keep(running.after(status, message))
        return self.last or running == LOADS

    def _how_it_ended(self) -> str:
        how = f"it {how_it_left(self.worker.end(PATIENCE))}"
        words = self.worker.last_words().strip().splitlines()
        return f"{how}: {words[-1][:200]}" if words else how


def main(end: socket.socket) -> None:
    """Check what one line asks for, in a process of its own: load strategies, run the checks, say what they found."""
    line = Line(end)

    from sparsebench.plugin.registry import Registry
    from sparsebench.testing import informative, networks, run
    from sparsebench.testing.parametrize import PluginError, resolve

    for name in networks.NAMES:
        networks.cached(name)
    informative.deit_tiny()
    _limit_memory()
    line.say(Message())
    request = load(Request, line.asked.readline())
    last = True
    try:
        strategies = resolve(request.target, Registry(), request.given)
        last = request.number + 1 >= len(strategies)
        for strategy, origin in strategies[request.number : request.number + 1]:
            line.say(Message(report=(report := run.blank(strategy, origin, request.groups)), last=last))
            for outcome in run.outcomes(strategy, report):
                line.say(Message(outcome=outcome))
    except PluginError as error:
        line.say(Message(report=of_loading(error.name, error.origin)))
        line.say(Message(outcome=LOADS.after("failed", error.failure)))
    except UserError as error:
        line.say(Message(error=text_of(error)))
    line.say(Message(done=True, last=last))
    os._exit(0)  # threads that a strategy began are not waited for


def _limit_memory() -> None:
    """Let this process take so much more memory and no more, where the system says how much it has."""
    status = Path("/proc/self/statm")
    if status.exists():
        taken = int(status.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
