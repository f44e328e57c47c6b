import io
import re
from collections.abc import Callable
from functools import partial
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from sparsebench_theory.models import Shallow
from sparsebench_theory.panels import heat_map, legend
from sparsebench_theory.shallow.paper import PAPER
from sparsebench_theory.shallow.task import Theory

from sparsebench.paper import COLOURS, Result, Trial, as_csv, as_json
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry


def planned(figure: str, keep: Callable[[int, int], bool], diverged: Callable[[int], bool]) -> list[Trial]:
    """Return the trials of a figure of the quick suite that are kept, by repetition and place of N among the N tried.

    Those of some repetitions diverged.
    """
    jobs = expand(Request(suite="theory-quick", figures=(figure,)), Registry())
    sizes = sorted({job.cell.n_train for job in jobs})
    trials = []
    for job in jobs:
        cell, r = job.cell, job.cell.repetition
        if keep(r, sizes.index(cell.n_train)):
            values = {"success": float(cell.n_train >= 16), "steps": 10.0, "iterations": 50.0 + r, "test_loss": 0.1,
                      "accuracy": 0.9, "worst_group_accuracy": 0.7, "spurious_gap": 0.1}  # fmt: skip
            curves = {"watched_steps": (0.0, 10.0), "watched_attention_on_relevant": (0.55, 0.9)}
            curves |= {f"trained_singular_{name}": (2.0, 1.0 + r, 0.1) for name in ("W_Q", "W_K", "W_V")}
            curves |= {f"trained_loss_without_{what}": (0.1,) * 9 + (0.5 + r,) for what in ("short", "long")}
            trials.append(
                Trial(
                    task=Theory(**cell.task.params), model=Shallow(**cell.model.params), strategy=job.label,
                    removed=round(1 - (cell.budget.keep_rate or 1), 6), where=cell.where, n=cell.n_train, repetition=r,
                    values={} if diverged(r) else values, curves={} if diverged(r) else curves, diverged=diverged(r),
                )
            )  # fmt: skip
    return trials


FEW: dict[str, tuple[Callable[[int, int], bool], Callable[[int], bool], bool]] = {
    "one repetition": (lambda r, n: r == 0, lambda r: False, True),
    "all diverged": (lambda r, n: True, lambda r: True, True),
    "one repetition that diverged": (lambda r, n: r == 0, lambda r: True, True),
    "some diverged": (lambda r, n: True, lambda r: r % 2 == 0, False),
    "no complete repetition": (lambda r, n: (r + n) % 2 == 0, lambda r: False, False),
}


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("figure", PAPER.figures)
def test_few_trials_decide_nothing_and_break_nothing(figure: str, few: str) -> None:
    keep, diverged, nothing = FEW[few]
    result = PAPER.figures[figure](planned(figure, keep, diverged))
    assert result.panels and (any(result.tables.values()) or figure == "rank")  # which has no rows of no numbers
    if nothing or (few == "no complete repetition" and figure in ("1a", "1b", "3")):
        assert {v.verdict for v in result.verdicts} <= {"undecided"}
    texts = [as_json(result.verdicts, []), *map(as_csv, result.tables.values())]
    assert not any(re.search(r"\bnan\b", text, re.IGNORECASE) for text in texts)
    for panel in result.panels:
        panel(Figure().subplots())


# ---- pictures


@pytest.mark.parametrize("figure", ["1b", "5", "strategies"])
def test_pictures_of_trials_that_all_diverged_have_no_nan_in_them(figure: str) -> None:
    made = PAPER.figures[figure](planned(figure, *FEW["all diverged"][:2])).pictures()
    assert set(made) == {"png", "svg", "pdf"} and ElementTree.fromstring(made["svg"]).tag.endswith("svg")
    with Image.open(io.BytesIO(made["png"])) as picture:
        assert min(picture.size) > 300 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
    shown = re.findall(rb"<!-- (.*?) -->", made["svg"])  # the texts of the picture
    assert len(shown) > 5 and not any(b"nan" in text.lower() for text in shown)


def test_a_heat_map_shows_the_rates_that_there_are_and_has_the_same_bytes_again() -> None:
    rates = np.array([[0.25, np.nan], [1.0, 0.75]])
    panel = partial(heat_map, title="rates", x=np.array([4.0, 9.0]), sizes=np.array([8, 16]), rates=rates, label="x")
    made = Result("rates", {}, [panel], []).pictures()
    assert Result("rates", {}, [panel], []).pictures() == made
    shown = re.findall(rb"<!-- (.*?) -->", made["svg"])
    assert {b"0.25", b"0.75", b"1", b"4", b"9", b"8", b"16"} <= set(shown) and b"nan" not in shown


def test_series_differ_in_dashes_and_a_long_title_is_broken_into_lines() -> None:
    def panel(axis: Axes) -> None:
        for height, colour in enumerate(COLOURS[:2]):
            axis.plot([0, 1], [height, height], color=colour, label=f"series {height}")
        legend(axis)

    made = Result("a title of $\\alpha$ and so on " * 9, {}, [panel], []).pictures()["svg"]
    assert b"stroke-dasharray" in made
    lines = [text for text in re.findall(rb"<!-- (.*?) -->", made, re.DOTALL) if b"alpha" in text]
    assert len(lines) > 2 and b"".join(lines).count(b"$") == 18
