"""The checks as pytest tests of the author's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.testing.reports import Group

if TYPE_CHECKING:
    from sparsebench.plugin.registry import Registry
    from sparsebench.records.cell import Origin
    from sparsebench.strategy.base import Strategy

    Named = str | Strategy | type[Strategy]
    Given = Mapping[str, Sequence[Mapping[str, Any]]]


def parametrize_with_strategies(
    strategies: Iterable[Named], *, groups: Sequence[Group] = ("required", "recommended")
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
    from sparsebench.testing.run import CHECKS, Check, expected_failures

    def runs(check: Check) -> Callable[[Strategy], None]:
        def run(strategy: Strategy) -> None:
            try:
                check(strategy)
            except UnsupportedError as error:
                pytest.skip(str(error))

        run.__name__, run.__doc__ = check.name, check.says
        return run

    registry, cases = Registry(), []
    for named in strategies:
        for strategy, _ in resolve(named, registry):
            declared = expected_failures(strategy)
            for check in CHECKS:
                if check.group in groups:
                    reason = declared.get(check.name)
                    marks = () if reason is None else (pytest.mark.xfail(reason=reason, strict=False),)
                    cases.append(pytest.param(strategy, runs(check), marks=marks, id=f"{strategy.name}-{check.name}"))
    return pytest.mark.parametrize(("strategy", "check"), cases)


def resolve(named: Named, registry: Registry, given: Given | None = None) -> list[tuple[Strategy, Origin]]:
    """Return the strategies that are meant, with all combinations of the parameters given, and where they come from.

    Args:
        named: as `parametrize_with_strategies` takes them.
        registry: where they are looked for.
        given: the strategies that are wanted of a name or file, each with its parameters as records have them, instead
            of those in the text.

    Raises:
        UserError: there is none.
        PluginError: it does not load.
    """
    from sparsebench.records.cell import Origin
    from sparsebench.strategy.spec import fill, parse

    if not isinstance(named, str):
        return [(named() if isinstance(named, type) else named, Origin(plugin=""))]
    spec = parse(named)
    names = registry.load_file(Path(spec.name)) if spec.name.endswith(".py") else [spec.name]
    made = []
    for name in names:
        registered = registry.strategy(name)
        what = f"strategy '{name}'"
        wanted = spec.combinations() if given is None else given.get(name, ())
        made += [(fill(registered.cls, params, what), registered.origin) for params in wanted]
    if not made:
        raise UserError(f"{spec.name} brings no strategy to check")
    return made
