"""Removal of tokens, by share: Figures 5 and 8 of Li et al. (ICLR 2023), and a figure with a spurious pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Result, Trial, Verdict, interval, judge
from sparsebench.stats.intervals import Interval
from sparsebench_theory.panels import legend, verdicts_of
from sparsebench_theory.shallow import published
from sparsebench_theory.trials import columns, differences, ends, group_by, mean, values_of

LOSS = "test_loss"
WORST = "worst_group_accuracy"
NAMES = {LOSS: "test hinge loss", WORST: "worst-group accuracy", "accuracy": "accuracy", "spurious_gap": "spurious gap"}
CALLED = {"random": "random", "oracle": "irrelevant", "noise": "noisy", "attn_topk": "little attended"}
"""The tokens that a strategy removes, as named in the paper's figures."""
COLOUR = dict(zip(("little attended", "noisy", "irrelevant", "random"), COLOURS, strict=False))
UNKNOWN = "as Figure 5; no values known"
WHERE = {"both": "in training and test", "test": "in the test only", "train": "in training only"}

FLAT = 0.25
"""Relative changes of the loss below this count as none."""

verdict = verdicts_of(__package__, FLAT=FLAT)


class Removal:
    """A metric by kind and share of the removed tokens, paired with dense by repetition."""

    def __init__(self, trials: Sequence[Trial], metric: str = LOSS):
        self.metric = metric
        self.dense = [t for t in trials if t.strategy == "dense"]
        chosen = [t for t in trials if t.strategy != "dense"]
        self.groups = {
            CALLED.get(name, name): group_by(group, lambda t: t.removed)
            for name, group in group_by(chosen, lambda t: t.strategy).items()
        }

    def values(self, kind: str) -> dict[float, Interval]:
        """Return the mean with its interval for each removed share, including dense; NaN if all trials diverged."""
        groups = {0.0: self.dense, **self.groups[kind]}
        return {share: mean(values_of(group, self.metric)) for share, group in groups.items()}

    def change(self, kind: str, than: str | None = None) -> dict[float, Interval]:
        """Return the paired change from dense, or from another kind of removal with the same share."""
        other = self.groups[than] if than is not None else dict.fromkeys(self.groups[kind], self.dense)
        return {
            share: mean(differences(group, other.get(share, []), self.metric))
            for share, group in self.groups[kind].items()
        }

    def rows(self, **labels: Any) -> list[dict[str, Any]]:
        """Return a row with value and change for each kind and share; `trials` counts those with a value."""
        rows = []
        for kind, groups in self.groups.items():
            change = self.change(kind) | {0.0: (mean(differences(self.dense, self.dense, self.metric))[0], None, None)}
            for share, value in self.values(kind).items():
                n = len(values_of(groups.get(share, self.dense), self.metric))
                rows.append(
                    labels | {"metric": NAMES[self.metric], "removed": kind, "share": share, "trials": n,
                              **columns(value, "value"),
                              **columns(change[share], "change", "change_low", "change_high")}
                )  # fmt: skip
        return rows

    def draw(self, axis: Any, title: str, top: float | None = None) -> None:
        """Draw the curves with bands of 95 %."""
        for kind in self.groups:
            values, colour = self.values(kind), COLOUR.get(kind, COLOURS[-1])
            middle, low, high = (np.array([row[i] for row in values.values()], dtype=float) for i in range(3))
            axis.plot(list(values), middle, "o-", color=colour, markersize=3, label=kind)
            axis.fill_between(list(values), low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set(title=title, xlabel="share of the tokens removed", ylabel=NAMES[self.metric], ylim=(0, top))
        legend(axis)


def figure_5(trials: Sequence[Trial]) -> Result:
    """Removal in training and test, and in the test only, with the published curves."""
    panels: list[Panel] = [_draw_published]
    rows, verdicts = [], []
    dense = [t for t in trials if t.strategy == "dense"]
    for where, group in group_by([t for t in trials if t.strategy != "dense"], lambda t: t.where).items():
        removal = Removal([*dense, *group])
        rows += removal.rows(where=where)
        verdicts += _claims("5", removal, "" if where == "both" else f" ({WHERE[where]})")
        panels.append(partial(removal.draw, title=f"measured, {WHERE[where]}"))
    return Result("Figure 5: removing tokens (bands: 95 % intervals)", {"fig5": rows}, panels, verdicts)


def figure_8(trials: Sequence[Trial]) -> Result:
    """Figure 5 with more patterns."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for M, group in group_by(trials, lambda t: t.task.patterns).items():
        removal = Removal(group)
        rows += removal.rows(M=M)
        verdicts += _claims("8", removal, f" (M={M})")
        panels.append(partial(removal.draw, title=f"M = {M}"))
    title = "Figure 8: removing tokens, with M patterns (bands: 95 % intervals)"
    return Result(title, {"fig8": rows}, panels, verdicts)


def spurious(trials: Sequence[Trial]) -> Result:
    """Worst-group accuracy, accuracy and gap by removed share, if a pattern is correlated with a class in training.

    In the test half of each class have the pattern, as in Figure 6c of Li et al. (ICLR 2023), which uses pictures.
    """
    removals = [Removal(trials, metric) for metric in (WORST, "accuracy", "spurious_gap")]
    rows = [row for removal in removals for row in removal.rows()]
    panels: list[Panel] = [partial(removal.draw, title=NAMES[removal.metric], top=1.02) for removal in removals]
    rate = trials[0].task.spurious_rate
    title = f"A spurious pattern: in {rate:.0%} of one class, {1 - rate:.0%} of the other (bands: 95 % intervals)"
    if "irrelevant" not in removals[0].groups:
        return Result(title, {"spurious": rows}, panels, [])
    values, change = removals[0].values("irrelevant"), removals[0].change("irrelevant")
    steady = bool((np.diff([value for value, _, _ in values.values()]) >= -1e-9).all())  # equal means may be rounded
    changes = [ends(value) for value in change.values()]
    gains = bool(changes) and changes[-1][0] > 0
    text = f"worst group {_text_of(values)}; change {_text_of(change)}"
    word = judge([gains, gains and steady], [high < 0 for _, high in changes])
    return Result(title, {"spurious": rows}, panels, [verdict("frees", text, word)])


def _draw_published(axis: Any) -> None:
    curves = published.FIGURE_5
    for kind in ("noisy", "irrelevant", "random"):
        axis.plot(curves["removed"], curves[kind], "s-", color=COLOUR[kind], markersize=3, label=kind)
    axis.set(title="published (other shares of tokens)", xlabel="share of the tokens removed", ylim=(0, None))
    axis.set_ylabel("test hinge loss")
    legend(axis)


def _claims(figure: str, removal: Removal, where: str) -> list[Verdict]:
    """Return the verdicts on the claims whose curves have been measured."""
    better = "is better than removing random ones"
    falls = [
        ("irrelevant", None, "lowers the loss", "0.076 to 0.007"),
        ("noisy", None, "lowers the loss", "0.077 to 0.045"),
        ("irrelevant", "random", better, "at every share"),
        ("noisy", "random", better, "at every share"),
    ]
    verdicts = []
    for kind, than, does, says in falls:
        if kind in removal.groups and (than is None or than in removal.groups):
            change = removal.change(kind, than)
            changes = [ends(value) for value in change.values()]
            word = judge([high < 0 for _, high in changes], [low > 0 for low, _ in changes])
            claim, published_text = f"removing {kind} tokens {does}{where}", says if figure == "5" else UNKNOWN
            verdicts.append(
                verdict("falls", _text_of(change), word, figure=figure, claim=claim, published=published_text)
            )
    if "random" in removal.groups:
        change, edge = removal.change("random"), FLAT * removal.values("random")[0.0][0]
        changes = [ends(value) for value in change.values()]
        flat = [-edge < low and high < edge for low, high in changes]
        word = judge(flat, [low > 0 or high < 0 for low, high in changes])
        published_text = "0.077 to 0.074" if figure == "5" else UNKNOWN
        verdicts.append(verdict("flat", _text_of(change), word, figure=figure, where=where, published=published_text))
    return verdicts


def _text_of(change: Mapping[float, Interval]) -> str:
    return "; ".join(f"{share:.0%}: {interval(*triple)}" for share, triple in change.items())
