"""Figures 5 and 8 of Li et al. (ICLR 2023): the test loss as tokens are removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.board.statistics import mean_interval
from sparsebench.reproduce import published
from sparsebench.reproduce.result import COLOURS, Panel, Result
from sparsebench.reproduce.trials import Trial, grouped, paired
from sparsebench.reproduce.verdicts import Verdict, interval, judge

LOSS = "test_loss"
CALLED = {"random": "random", "oracle": "irrelevant", "noise": "noisy", "attn_topk": "little attended"}
"""What the paper's curves, and ours, remove."""
WHERE = {"both": "in training and test", "test": "in the test only", "train": "in training only"}

FLAT = 0.25
"""A change of the loss by less than this share of it is none."""

Interval = tuple[float, float | None, float | None]


class Removal:
    """Losses by what is removed and how much of it, each beside dense on the same repetition."""

    def __init__(self, trials: Sequence[Trial]):
        self.dense = [t for t in trials if t.strategy == "dense"]
        chosen = [t for t in trials if t.strategy != "dense"]
        self.groups = {
            CALLED.get(name, name): grouped(some, lambda t: t.removed)
            for name, some in grouped(chosen, lambda t: t.strategy).items()
        }

    def losses(self, what: str) -> dict[float, Interval]:
        """Return the mean test loss with its interval for each share removed, dense included."""
        groups = {0.0: self.dense, **self.groups[what]}
        return {
            share: mean_interval([t.values[LOSS] or 0.0 for t in some if not t.diverged])
            for share, some in groups.items()
        }

    def change(self, what: str, than: str | None = None) -> dict[float, Interval]:
        """Return the paired change of the loss against dense, or against another removal of the same share."""
        return {
            share: mean_interval(paired(some, self.dense if than is None else self.groups[than][share], LOSS))
            for share, some in self.groups[what].items()
        }

    def rows(self, **labels: Any) -> list[dict[str, Any]]:
        """Return losses and changes, a row a removal and share."""
        rows = []
        for what in self.groups:
            change = self.change(what) | {0.0: (0.0, None, None)}
            for share, (mean, low, high) in self.losses(what).items():
                n = len(self.dense if share == 0 else self.groups[what][share])
                rows.append(
                    labels | {"removed": what, "share": share, "trials": n, "test loss": mean, "low": low, "high": high,
                              "change": change[share][0], "change_low": change[share][1],
                              "change_high": change[share][2]}
                )  # fmt: skip
        return rows

    def draw(self, axis: Any, title: str) -> None:
        """Draw the curves with bands of 95 %."""
        for what, colour in zip(self.groups, COLOURS, strict=False):
            losses = self.losses(what)
            mean, low, high = (np.array([row[i] for row in losses.values()], dtype=float) for i in range(3))
            axis.plot(list(losses), mean, "o-", color=colour, markersize=3, label=what)
            axis.fill_between(list(losses), low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set(title=title, xlabel="share of the tokens removed", ylabel="test hinge loss", ylim=(0, None))
        axis.legend(frameon=False)


def figure_5(trials: Sequence[Trial]) -> Result:
    """Removal in training and test, and in the test only, beside the published curves."""
    panels: list[Panel] = [_published]
    rows, verdicts = [], []
    dense = [t for t in trials if t.strategy == "dense"]
    for where, some in grouped([t for t in trials if t.strategy != "dense"], lambda t: t.where).items():
        removal = Removal([*dense, *some])
        rows += removal.rows(where=where)
        verdicts += _claims("5", removal, "" if where == "both" else f" ({WHERE[where]})")
        panels.append(partial(removal.draw, title=f"measured, {WHERE[where]}"))
    return Result("Figure 5: removing tokens", {"fig5": rows}, panels, verdicts)


def figure_8(trials: Sequence[Trial]) -> Result:
    """Figure 5 with more patterns."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for M, some in grouped(trials, lambda t: t.task.patterns).items():
        removal = Removal(some)
        rows += removal.rows(M=M)
        verdicts += _claims("8", removal, f" (M={M})")
        panels.append(partial(removal.draw, title=f"M = {M}"))
    return Result("Figure 8: removing tokens, with M patterns", {"fig8": rows}, panels, verdicts)


def _published(axis: Any) -> None:
    shown = published.FIGURE_5
    for what, colour in zip(("noisy", "irrelevant", "random"), (COLOURS[1], COLOURS[2], COLOURS[3]), strict=True):
        axis.plot(shown["removed"], shown[what], "s-", color=colour, markersize=3, label=what)
    axis.set(title="published (other shares of tokens)", xlabel="share of the tokens removed", ylim=(0, None))
    axis.set_ylabel("test hinge loss")
    axis.legend(frameon=False)


def _claims(figure: str, removal: Removal, where: str) -> list[Verdict]:
    """Return the verdict on each claim whose curves are there."""
    better = "is better than removing random ones"
    falls = [
        ("irrelevant", None, "lowers the loss", "0.076 to 0.007"),
        ("noisy", None, "lowers the loss", "0.077 to 0.045"),
        ("irrelevant", "random", better, "at every share"),
        ("noisy", "random", better, "at every share"),
    ]
    verdicts = [
        _falls(figure, f"removing {what} tokens {does}{where}", says, removal.change(what, than))
        for what, than, does, says in falls
        if what in removal.groups and (than is None or than in removal.groups)
    ]
    return verdicts + ([_flat(figure, removal, where)] if "random" in removal.groups else [])


def _known(change: Mapping[float, Interval]) -> list[tuple[float, float]]:
    return [(low, high) for _, low, high in change.values() if low is not None and high is not None]


def _shown(change: Mapping[float, Interval]) -> str:
    return "; ".join(f"{share:.0%}: {interval(*triple)}" for share, triple in change.items())


def _falls(figure: str, claim: str, says: str, change: Mapping[float, Interval]) -> Verdict:
    known = _known(change)
    word = judge([high < 0 for _, high in known], [low > 0 for low, _ in known])
    rule = "reproduced: the interval of the paired change lies below 0 at every share; partly: at some; not: above 0"
    return Verdict(figure, claim, says, _shown(change), "", word, rule)


def _flat(figure: str, removal: Removal, where: str) -> Verdict:
    change = removal.change("random")
    edge = FLAT * removal.losses("random")[0.0][0]
    known = _known(change)
    word = judge([-edge < low and high < edge for low, high in known], [low > 0 or high < 0 for low, high in known])
    rule = (
        f"reproduced: the interval of the paired change lies within {FLAT:.0%} of dense at every share; partly: at "
        "some; not: it excludes 0"
    )
    claim = f"removing random tokens leaves the loss as it is{where}"
    return Verdict(figure, claim, "0.077 to 0.074", _shown(change), "", word, rule)
