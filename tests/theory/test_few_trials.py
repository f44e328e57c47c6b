"""Each figure of each paper with few or diverged trials, and a picture of each kind."""

import re
from functools import partial

import numpy as np
import pytest
from sparsebench_theory.overfitting import figures as overfitting
from sparsebench_theory.panels import heat_map
from sparsebench_theory.shallow import images
from sparsebench_theory.shallow import paper as theory
from sparsebench_theory.sparse_tokens import figures as sparse_tokens
from sparsebench_theory.spatial import figures as spatial

from sparsebench.paper import Result

PAPERS = {one.name: one for one in (theory.PAPER, overfitting.PAPER, spatial.PAPER, sparse_tokens.PAPER, images.PAPER)}
VALUES = {
    "steps": 10.0, "test_loss": 0.1, "accuracy": 0.9, "worst_group_accuracy": 0.7, "spurious_gap": 0.1, "fitted": 1.0,
    "association": 1.0, "alignment": 0.97, "in_group_lead": 0.2, "in_group_mass": 0.4, "neighbour_agreement": 0.6,
    "neighbour_agreement_shuffled": 0.2, "average_train": 0.95,
}  # fmt: skip
WATCHED = (
    "attention_on_relevant", "attention_on_noise", "test_loss", "test_accuracy", "train_loss_then", "value_of_signal",
    "value_of_noise", "score_of_signal", "score_of_noise", "association", "in_group_mass", "in_group_lead", "alignment",
)  # fmt: skip


def well(job):
    """Return metrics and curves of a successful trial of any task."""
    cell, r = job.cell, job.cell.repetition
    params = cell.task.params
    values = VALUES | {"success": float(cell.n_train >= 16), "iterations": 50.0 + r}
    if cell.task.name == "overfitting":
        values["test_loss"] = 200 / cell.n_train / overfitting.Overfitting(**params).snr ** 2
    if cell.task.name == "sparse_tokens":
        values["accuracy"] -= sparse_tokens.least_error(params["theta"], params["relevant"], params["tokens"])
    curves = {"watched_steps": (0.0, 10.0, 20.0)} | {f"watched_{name}": (0.7, 0.2, 0.04) for name in WATCHED}
    curves |= {f"trained_singular_{name}": (2.0, 1.0 + r, 0.1) for name in ("W_Q", "W_K", "W_V")}
    curves |= {f"trained_loss_without_{what}": (0.1,) * 9 + (0.5 + r,) for what in ("short", "long")}
    places = params["tokens"] if "tokens" in params else (params["canvas"] // params["patch"]) ** 2
    if cell.task.name == "spatial" or "canvas" in params:
        curves["trained_scores"] = curves["trained_similarity"] = (
            tuple(np.random.default_rng(r).random(places**2))
        )  # fmt: skip
    return values, curves


def unfitted(job):
    return well(job)[0] | {"fitted": 0.0}, well(job)[1]


FEW = {
    "as planned": (well, lambda r: True),
    "one repetition": (well, lambda r: r == 0),
    "all diverged": (lambda job: None, lambda r: True),
    "no complete repetition": (
        lambda job: well(job) if (job.cell.repetition + job.cell.n_train) % 8 else None, lambda r: True,
    ),
    "never fitted": (unfitted, lambda r: True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("paper", "figure", "few"),
    [
        (paper, figure, few)
        for paper in PAPERS for figure in PAPERS[paper].figures for few in FEW
        if few != "never fitted" or paper == "overfitting"
    ],
)  # fmt: skip
def test_few_trials_break_nothing_and_decide_nothing(planned, sound, paper, figure, few):
    made = PAPERS[paper]
    result = made.figures[figure](planned(made.suites["quick"], figure, *FEW[few]))
    sound(result)
    words = {v.verdict for v in result.verdicts}
    if few == "all diverged" or (few == "one repetition" and paper == "theory"):
        nowhere = paper == "overfitting" and figure == "strategies"  # no run has a boundary in the map
        assert words <= {"undecided", *["not reproduced"] * nowhere}


@pytest.mark.parametrize(
    ("paper", "figure", "few"),
    [pytest.param("theory", "strategies", "all diverged", marks=pytest.mark.slow), ("overfitting", "1", "as planned")],
)
def test_pictures_are_whole(planned, drawn, paper, figure, few):
    made = PAPERS[paper]
    drawn(made.figures[figure](planned(made.suites["quick"], figure, *FEW[few])))


def test_a_heat_map_has_the_same_bytes_again():
    """A heat map shows the rates that there are and has the same bytes again."""
    rates = np.array([[0.25, np.nan], [1.0, 0.75]])
    panel = partial(heat_map, title="rates", x=np.array([4.0, 9.0]), sizes=np.array([8, 16]), rates=rates, label="x")
    made = Result("rates", {}, [panel], []).pictures()
    assert Result("rates", {}, [panel], []).pictures() == made
    shown = re.findall(rb"<!-- (.*?) -->", made["svg"])
    assert {b"0.25", b"0.75", b"1", b"4", b"9", b"8", b"16"} <= set(shown) and b"nan" not in shown
