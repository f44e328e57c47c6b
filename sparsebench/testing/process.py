"""The checks in a process of their own, so that a strategy that hangs or dies costs only its own report."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from sparsebench.engine.slots import THREADS
from sparsebench.errors import UserError
from sparsebench.records.origin import Origin
from sparsebench.records.report import Outcome, Report, Status
from sparsebench.records.store import content_hash
from sparsebench.spec import parse
from sparsebench.version import __version__

LIMIT = 60.0
"""Seconds for one check."""
START = 300.0
"""Seconds for Python to start and to import torch, before anything of a strategy runs."""
Given = Mapping[str, Sequence[Mapping[str, Any]]]
LOADS = Outcome(check="loads", group="required", says="The plugin loads and brings legal strategies.")


def check(
    target: str,
    limit: float = LIMIT,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    given: Given | None = None,
) -> list[Report]:
    """Return the report of each strategy that NAME or FILE.py, with parameters, stands for.

    Args:
        target: what is to be checked, as `sparsebench run --plugin` takes it.
        limit: seconds for each check; a strategy that takes longer is ended.
        on_outcome: is called with each outcome as it comes.
        given: by name the strategies that are wanted of the target, with parameters, in place of those in its text.

    Raises:
        UserError: there is no such strategy, file or parameter.
    """
    reports: list[Report] = []
    while True:
        child = _Child(target, given, len(reports), limit, on_outcome)
        try:
            all_done = child.listen()
        finally:
            child.end()
        reports += child.reports
        if all_done:
            return reports


class _Child:
    """One process, and the reports that it gave."""

    def __init__(
        self, target: str, given: Given | None, start: int, limit: float, on_outcome: Callable[[Outcome], None]
    ):
        self.target, self.limit, self.on_outcome = target, limit, on_outcome
        self.reports: list[Report] = []
        self.running: Outcome | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # until `end`
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "sparsebench.testing.child", target, json.dumps(given), str(start)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | THREADS | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        self.lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        assert self.process.stdout is not None
        threading.Thread(target=_read, args=(self.process.stdout, self.lines), daemon=True).start()

    def listen(self) -> bool:
        """Take what the process says until it is done or has to be ended; return whether all strategies are done."""
        limit, begun = START, time.monotonic()
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, limit - (time.monotonic() - begun)))
            except queue.Empty:
                return self._lost("timeout", f"it took more than {limit:g} s and was ended")
            if not line.endswith(b"\n"):
                return self._lost("crashed", self._how_it_ended())
            said: dict[str, Any] = json.loads(line)
            if "done" in said:
                return True
            self._take(said)
            limit, begun = self.limit, time.monotonic()

    def _take(self, said: dict[str, Any]) -> None:
        if "error" in said:
            raise UserError(said["error"])
        if "ready" in said:
            self.running = LOADS
        elif "unloaded" in said:
            self._unloaded(said["name"], Origin(**said["origin"]), LOADS.after("failed", said["unloaded"]))
        elif "report" in said:
            self.reports.append(Report.model_validate(said["report"]))
        elif "begins" in said:
            (self.running,) = (o for o in self.reports[-1].outcomes if o.check == said["begins"])
        else:
            self._found(Outcome.model_validate(said["outcome"]))

    def _found(self, outcome: Outcome) -> None:
        self.reports[-1] = self.reports[-1].with_outcome(outcome)
        self.on_outcome(outcome)

    def _unloaded(self, name: str, origin: Origin, outcome: Outcome) -> None:
        versions = {"sparsebench": __version__}
        self.reports.append(Report(strategy=name, origin=origin, versions=versions, outcomes=(outcome,)))
        self.on_outcome(outcome)

    def _lost(self, status: Status, message: str) -> bool:
        """Note how the process was lost at what it was doing; return whether no strategy can come after."""
        if self.running is None:
            raise UserError(f"the checks did not start: {message}")
        if self.running == LOADS:
            source = content_hash(Path(parse(self.target).name))
            self._unloaded(self.target, Origin(plugin=self.target, sha256=source), LOADS.after(status, message))
            return True
        self._found(self.running.after(status, message))
        return False

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        code = self.process.returncode
        if code is None:
            return "it closed the channel of the answers"
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it left the process with {code}"
        self.log.seek(0)
        words = self.log.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {words[-1][:200]}" if words else how

    def end(self) -> None:
        """End the process and all it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def _read(source: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    """Put each line into the queue, and an empty one at the end."""
    with source:
        for line in source:
            lines.put(line)
    lines.put(b"")
