"""All checks in this process: which there are, and what each finds out about a strategy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import timm
import torch

from sparsebench import __version__
from sparsebench.errors import UnsupportedError, one_line, text_of, unknown
from sparsebench.records.record import Origin
from sparsebench.runner.run_cell import one_thread
from sparsebench.strategy.base import Strategy
from sparsebench.testing import recommended, required
from sparsebench.testing.reports import GROUPS, Group, Outcome, Report
from sparsebench.testing.trial import RuleError, put_back


@dataclass(frozen=True)
class Check:
    """A check; call it with a strategy. It returns a remark and raises RuleError or UnsupportedError."""

    function: Callable[[Strategy], str | None]
    group: Group

    @property
    def name(self) -> str:
        """What it is called."""
        return self.function.__name__

    @property
    def says(self) -> str:
        """What holds where it passes."""
        return (self.function.__doc__ or "").partition("\n")[0]

    def __call__(self, strategy: Strategy) -> str:
        """Run it as a cell is run: on one thread, without warnings; what it changes of the process is put back."""
        with put_back(), one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.function(strategy) or ""


CHECKS = (
    *(Check(function, "required") for function in required.CHECKS),
    *(Check(function, "recommended") for function in recommended.CHECKS),
    *(Check(function, "informative") for function in recommended.INFORMATIVE),
)


def expected_failures(strategy: Strategy | type[Strategy]) -> dict[str, str]:
    """Return the checks that the strategy declares to fail, with the reasons.

    Raises:
        UserError: there is no check of that name.
    """
    names = [check.name for check in CHECKS]
    for name in strategy.expected_failures:
        if name not in names:
            raise unknown(f"check in {strategy.name}.expected_failures", name, names)
    return dict(strategy.expected_failures)


def blank(strategy: Strategy, origin: Origin, groups: Collection[Group] = GROUPS) -> Report:
    """Return the report before any check of these groups was run."""
    return Report(
        strategy=strategy.name,
        params=strategy.model_dump(mode="json", exclude_defaults=True),
        kind=strategy.kind,
        site=strategy.site,
        origin=origin,
        versions={"sparsebench": __version__, "torch": torch.__version__, "timm": timm.__version__},
        outcomes=tuple(
            Outcome(check=check.name, group=check.group, says=check.says) for check in CHECKS if check.group in groups
        ),
    )


def outcomes(strategy: Strategy, report: Report) -> Iterator[Outcome]:
    """Run the checks of a report in their order and yield what each found."""
    failed: set[str] = set()
    declared = expected_failures(strategy)
    checks = {check.name: check for check in CHECKS}
    for outcome in report.outcomes:
        check = checks[outcome.check]
        begun = time.perf_counter()
        try:
            remark = check(strategy)
        except UnsupportedError as error:
            yield outcome.after("unsupported", text_of(error), time.perf_counter() - begun)
        except BaseException as error:  # a strategy is a stranger's code and may raise anything
            if isinstance(error, RuleError) and error.of in failed - {check.name}:
                yield outcome.after("not run", f"see {error.of}")
                continue
            failed.add(check.name)
            what = text_of(error) if isinstance(error, RuleError) else one_line(error)
            reason = declared.get(check.name)
            message = " ".join(what.split()) if reason is None else f"{reason} ({' '.join(what.split())})"
            yield outcome.after("failed" if reason is None else "expected", message, time.perf_counter() - begun)
        else:
            if check.name in declared:
                remark = f"it passes, though it is declared to fail; {remark}".rstrip("; ")
            yield outcome.after("passed", remark, time.perf_counter() - begun)
