"""The checks as pytest tests, and the checks of a strategy in a process of its own, with a time limit for each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from sparsebench import __version__
from sparsebench.errors import UnsupportedError, UserError, as_utf8, text_of
from sparsebench.plugin.content import file_revision
from sparsebench.records.record import Origin, Part
from sparsebench.records.reports import GROUPS, Group, Outcome, Report, Status
from sparsebench.runner.process import START_SECONDS, Line, Worker, exit_text, server, text_since, why_not
from sparsebench.strategy.spec import fill, parse

if TYPE_CHECKING:
    from sparsebench.plugin.registry import Registry
    from sparsebench.strategy.base import Strategy

    Target = str | Strategy | type[Strategy]

Request = tuple[str, Part | None, int, tuple[Group, ...]]
"""A target and a part, see `resolve`; the number, from 0, of the strategy among those of the target; the groups."""
LIMIT = 60.0
"""Seconds for one check."""
PATIENCE = 10.0
"""Seconds that the process may take to end after it has closed its connection."""
MEMORY = 2 * 1024**3
"""Bytes of address space for the checks, in addition to what Python and torch use before."""
LOADS = Outcome(check="loads", group="required", says="The plugin loads and brings legal strategies.")


def parametrize_with_strategies(
    strategies: Iterable[Target], *, groups: Sequence[Group] = ("required", "recommended")
) -> Callable[..., Any]:
    """Return a pytest decorator that runs the test for each strategy and each check, as `check(strategy)`.

    A check that the strategy declares in `expected_failures` may fail. A check that does not apply is skipped.

    Args:
        strategies: instances, classes, or "NAME" or "FILE.py" with ":param=value", as for `sparsebench check`.
        groups: the groups of checks.

    Raises:
        UserError: there is no such strategy, file, parameter or check.
    """
    import pytest

    from sparsebench.plugin.registry import Registry
    from sparsebench.testing.checks import CHECKS, expected_failures
    from sparsebench.testing.trial import Check

    def runs(check: Check) -> Callable[[Strategy], None]:
        def run(strategy: Strategy) -> None:
            try:
                check(strategy)
            except UnsupportedError as error:
                pytest.skip(str(error))

        run.__name__, run.__doc__ = check.name, check.says
        return run

    registry, cases = Registry(), []
    for target in strategies:
        for strategy, _ in resolve(target, registry):
            declared = expected_failures(strategy)
            for check in CHECKS.values():
                if check.group in groups:
                    reason = declared.get(check.name)
                    marks = () if reason is None else (pytest.mark.xfail(reason=reason, strict=False),)
                    cases.append(pytest.param(strategy, runs(check), marks=marks, id=f"{strategy.name}-{check.name}"))
    return pytest.mark.parametrize(("strategy", "check"), cases)


def resolve(target: Target, registry: Registry, part: Part | None = None) -> list[tuple[Strategy, Origin]]:
    """Return the strategies of a target, with all combinations of its parameters, and their origins.

    Args:
        target: as for `parametrize_with_strategies`.
        registry: finds the strategies.
        part: as in records: return only this strategy of the target, with these parameters.

    Raises:
        UserError: there is no such strategy, file or parameter.
        PluginError: the plugin does not load.
    """
    if not isinstance(target, str):
        return [(target() if isinstance(target, type) else target, Origin(plugin=""))]
    spec = parse(target)
    names = registry.load_file(Path(spec.name)) if spec.name.endswith(".py") else [spec.name]
    pairs = []
    for name in names if part is None else [part.name]:
        registered = registry.strategy(name)
        choices = spec.combinations() if part is None else [part.params]
        pairs += [(fill(registered.cls, params, f"strategy '{name}'"), registered.origin) for params in choices]
    if not pairs:
        raise UserError(f"{spec.name} brings no strategy to check")
    return pairs


class Message(BaseModel):
    """A message of the process. The first one is empty: the process has started, and no code of the target has run.

    Attributes:
        report: the report of the strategy so far.
        strategies: number of strategies of the target.
        ended: status and message of the last check, if the process has ended or the target does not load.
        error: why the target does not exist.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    report: Report | None = None
    strategies: int = 1
    ended: tuple[Status, str] | None = None
    error: str = ""


def check(
    target: str, limit: float = LIMIT, part: Part | None = None, groups: tuple[Group, ...] = GROUPS
) -> list[Report]:
    """Return the reports of the strategies of NAME or FILE.py, with parameters.

    Each strategy has its own process, so that changes of the process do not affect other strategies.

    Args:
        target: NAME or FILE.py with parameters, as for `sparsebench run --plugin`.
        limit: seconds for each check; a process that takes longer is ended.
        part: as in records: check only this strategy of the target, with these parameters.
        groups: the groups of checks.

    Raises:
        UserError: there is no such strategy, file or parameter.
    """
    reports, strategies = list[Report](), 1
    with tempfile.TemporaryDirectory() as folder:
        while len(reports) < strategies:
            request = target, part, len(reports), groups
            report, strategies = _check_one(request, limit, Path(folder) / "log")
            reports.append(report)
    return reports


def _check_one(request: Request, limit: float, log: Path) -> tuple[Report, int]:
    """Return the report of one strategy, checked in its own process, and the number of strategies of the target."""
    target, *_ = request
    name = as_utf8(target)
    origin = Origin(plugin=name, revision=file_revision(Path(parse(target).name)))
    report = Report(strategy=name, origin=origin, versions={"sparsebench": __version__}, outcomes=(LOADS,))
    strategies = 1
    try:
        worker = server().start("sparsebench.testing.process", {}, log)
    except EOFError:
        raise UserError(f"the process of the checks did not start: {why_not(log)}") from None
    try:
        _answer(worker, START_SECONDS)  # the process has started; if it has ended, the next answer says why
        worker.ask(request)
        while (outcome := report.undecided) is not None:
            message = _answer(worker, limit)
            if message.error:
                raise UserError(message.error)
            if message.report is None:
                status, reason = message.ended or ("crashed", "it gave no result of the check")
                return report.with_outcome(outcome.after(status, reason)), strategies
            report, strategies = message.report, message.strategies
    finally:
        worker.end()
    return report, strategies


def _answer(worker: Worker, limit: float) -> Message:
    """Return the next message of the process, or, if it has ended, a message with the reason."""
    try:
        if (message := worker.answer(limit, Message)) is not None:
            return message
    except EOFError:
        why = f"it {exit_text(worker.end(PATIENCE))}"
        lines = text_since(worker.log).strip().splitlines()
        if lines:
            why = f"{why}: {lines[-1][:200]}"
        return Message(ended=("crashed", why))
    except ValueError as error:
        return Message(ended=("crashed", f"its answer cannot be read: {error}"))
    return Message(ended=("timeout", f"it took more than {limit:g} s and was ended"))


def main(line: Line) -> None:
    """Run the checks in this process: load the requested strategy, and send the report after each check."""
    from sparsebench.plugin.registry import PluginError, Registry
    from sparsebench.testing import checks, networks

    for name in networks.NAMES:
        networks.cached(name)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource  # Windows has no such module

        used = int(statm.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    line.say(Message())
    target, part, number, groups = line.recv()
    try:
        strategies = resolve(target, Registry(), part)
        strategy, origin = strategies[number]
        report = checks.blank(strategy, origin, groups)
        line.say(Message(report=report, strategies=len(strategies)))
        for outcome in checks.outcomes(strategy, report):
            report = report.with_outcome(outcome)
            line.say(Message(report=report, strategies=len(strategies)))
    except PluginError as error:
        line.say(Message(ended=("failed", str(error))))
    except UserError as error:
        line.say(Message(error=text_of(error)))
    os._exit(0)  # without waiting for threads of the strategy
