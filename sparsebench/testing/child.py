"""A process in which a stranger's strategies are checked: it loads them, runs the checks, and says so line by line."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry

MEMORY = 2 * 1024**3
"""Bytes of address space that checks may take, besides what Python and torch have taken before."""


def main(target: str, given: Any, start: int) -> None:
    """Check what is named, see `resolve`, from the strategy of that number on; answers are JSON objects, one a line.

    "ready": nothing of the target has run so far. "report": a strategy, before any check. "begins": the check that is
    run next. "outcome": what it found. "error": the target is no good. "done": all is said.
    """
    # Whatever a strategy prints must not come among the answers, which have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    from sparsebench.testing import audit, informative, networks, run
    from sparsebench.testing.parametrize import PluginError, resolve

    for name in networks.NAMES:
        networks.cached(name)
    informative.deit_tiny()
    _limit_memory()
    say(ready=True)
    try:
        with audit.watched() as audit.AT_LOAD:
            strategies = resolve(target, Registry(), given)
        for strategy, origin in strategies[start:]:
            report = run.blank(strategy, origin)
            say(report=report.model_dump(mode="json"))
            for outcome in run.outcomes(strategy, report, lambda name: say(begins=name)):
                say(outcome=outcome.model_dump(mode="json"))
    except PluginError as error:
        say(unloaded=error.failure, name=error.name, origin=error.origin.model_dump(mode="json"))
    except UserError as error:
        say(error=str(error))
    say(done=True)
    os._exit(0)  # threads that a strategy began are not waited for


def _limit_memory() -> None:
    """Let this process take so much more memory and no more, where the system says how much it has."""
    status = Path("/proc/self/statm")
    if status.exists():
        taken = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
