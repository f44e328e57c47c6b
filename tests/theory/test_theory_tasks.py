"""What the tasks of the theories have in common: samples that depend on their law alone, recipes, success, refusals."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.spatial.task import Spatial

from sparsebench.errors import UserError
from sparsebench.tasks.base import Task

THEORY = {"tokens": 12, "relevant": 0.3, "confusion": 0.1, "test": 9}
TASKS: list[Task] = [
    Theory(**THEORY), Theory(**THEORY, labels="iid"), Theory(**THEORY, positions="fixed"),
    Theory(**THEORY, noisy_share=0.3), Theory(**THEORY, set_size=3, set_diameter=0.3), Theory(**THEORY, spurious=0.2),
    Theory(**THEORY, classes=4, labels="iid", noisy_share=0.5, set_size=2, set_diameter=1),
    Theory(**THEORY, labels="iid", positions="fixed", noisy_share=0.5, set_size=3, set_diameter=0.3, spurious=0.1),
    *(Overfitting(tokens=6, d=40, signal=3, noise=0.5, strong=10, test=9, projected=p) for p in (False, True)),
    *(Spatial(tokens=12, group=3, d=16, test=9, permuted=p, feature=f) for p, f in ((False, 0), (True, 0), (True, 3))),
    SparseTokens(tokens=9, d=5, relevant=3, theta=2.5, test=9),
]  # fmt: skip
FIELDS = ("inputs", "labels", "groups", "relevance")


@given(st.sampled_from(TASKS), st.integers(0, 10**6), st.integers(2, 30), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_smaller_set_begins_the_larger_and_the_test_set_is_the_same(
    task: Task, repetition: int, n: int, more: int
) -> None:
    longer = task.model_copy(update={"test": 9 + more})
    small, large = task.draw(n, repetition, {}), longer.draw(n + more, repetition, {})
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(small.train, field), getattr(large.train, field)[:n])
        np.testing.assert_array_equal(getattr(small.test, field), getattr(large.test, field)[:9])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_repetition_is_the_same_again_and_unlike_the_next(task: Task) -> None:
    first, again, other = (task.draw(9, repetition, {}) for repetition in (0, 0, 1))
    for part in ("train", "test"):
        mine, same, next_ = (getattr(data, part) for data in (first, again, other))
        assert all(np.array_equal(getattr(mine, field), getattr(same, field)) for field in FIELDS)
        noise = mine.relevance + next_.relevance == 0
        assert not np.isclose(mine.inputs, next_.inputs).all(axis=2)[noise].any()
    assert not np.isclose(first.train.inputs, first.test.inputs).all(axis=2).all(axis=1).any()


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        (TASKS[0], {"lr": 0.1, "batch": 3, "steps": 7, "threshold": 0.5, "test": 20, "watch": 3}),
        (TASKS[0], {"criterion": "error", "error": 0.05}),
        (TASKS[8], {"lr": 7.0, "steps": 3, "fitted": 0.5, "threshold": 0.9, "watch": 2}),
        (TASKS[10], {"lr": 1, "lr_attention": 2, "steps": 3, "threshold": 0.5, "watch": 1, "start": "pretrained"}),
        (TASKS[13], {"lr": 7.0, "steps": 3, "error": 0.3, "watch": 2}),
    ],
    ids=lambda part: part.name if isinstance(part, Task) else "",
)
def test_how_a_network_is_trained_and_judged_does_not_change_the_data(task: Task, changes: dict[str, Any]) -> None:
    plain, tuned = task.draw(6, 0, {}), task.model_copy(update=changes).draw(6, 0, {})
    np.testing.assert_array_equal(plain.train.inputs, tuned.train.inputs)
    np.testing.assert_array_equal(plain.test.inputs, tuned.test.inputs[:9])


DESCENT = {"loss": "logistic", "optimizer": "sgd", "batch": 0, "fixed_selection": True, "stop_at_zero_loss": False}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Theory(batch=7, steps=9), {"loss": "hinge", "optimizer": "sgd", "batch": 7, "steps": 9, "lr": 1.0,
                                    "stop_at_zero_loss": True, "fixed_selection": True}),
        (Theory(tokens=100), {"lr": 2.0}), (Theory(tokens=100, lr=0.3), {"lr": 0.3}),
        (Overfitting(lr=0.3, steps=77, fitted=0.02, watch=5),
         DESCENT | {"lr": 0.3, "steps": 77, "epochs": 77, "stop_below": 0.02, "watch": 5, "rates": {}}),
        (Overfitting(), {"stop_below": 0.01, "lr": 0.1}),
        (Spatial(lr=0.3, steps=77, watch=5),
         DESCENT | {"lr": 0.3, "steps": 77, "epochs": 77, "stop_below": 0, "watch": 5, "rates": {}}),
        (Spatial(lr_attention=20), {"rates": {"A": 20}}),
        (SparseTokens(lr=0.7, steps=77, watch=5),
         DESCENT | {"lr": 0.7, "steps": 77, "epochs": 77, "stop_below": 0, "watch": 5, "rates": {}}),
    ],
    ids=lambda part: part.name if isinstance(part, Task) else "",
)  # fmt: skip
def test_the_recipe_is_that_of_the_paper(task: Task, expected: dict[str, Any]) -> None:
    assert {name: getattr(task.recipe(), name) for name in expected} == expected


@pytest.mark.parametrize(
    ("task", "loss", "accuracy", "succeeds"),
    [
        (Theory(threshold=0.01), 0.0099, 0.5, True), (Theory(threshold=0.01), 0.01, 1.0, False),
        *((Overfitting(), loss, accuracy, loss < 0.2) for loss in (0.0, 0.1999, 0.2, 5.0) for accuracy in (0.0, 1.0)),
        (Overfitting(threshold=6), 5.0, 0.0, True),
        *((Spatial(threshold=0.0501), loss, right, right > 0.94) for loss in (0.0, 9.0) for right in (1.0, 0.95, 0.94)),
        (Spatial(threshold=0.5), 1.0, 0.5, True), (Spatial(threshold=0), 1.0, 1.0, True),
        *((SparseTokens(), loss, right, right >= 0.9) for loss in (0.0, 9.0) for right in (1.0, 0.9, 0.899, 0.0)),
        (SparseTokens(error=0.5), 1.0, 0.6, True),
        *((Theory(criterion="error", error=percent / 100), loss, (n - n * percent // 100 - more) / n, more == 0)
          for n in (100, 200, 300, 700, 1000, 3000, 10**6) for percent in (0, 1, 2, 5, 7, 29)
          for loss, more in ((9.0, 0), (0.0, 1))),
    ],
)  # fmt: skip
def test_a_trial_succeeds_by_its_loss_or_its_error(task: Task, loss: float, accuracy: float, succeeds: bool) -> None:
    assert task.success(loss, accuracy) is succeeds


def test_beside_the_error_the_papers_criterion_is_told() -> None:
    task = Theory(criterion="error", threshold=0.1)
    assert task.successes(0.0999, 0.98) == {"success": False, "success_loss": True}
    assert task.successes(0.1, 0.99) == {"success": True, "success_loss": False}
    assert Theory(threshold=0.1).successes(0.0999, 0.5) == {"success": True}


@pytest.mark.parametrize(
    ("kind", "parameters", "said"),
    [
        *((Theory, *case) for case in (
            ({"relevant": 0.1, "confusion": 0.1}, "5 relevant, 5 confusing.*more relevant tokens than confusing ones"),
            ({"relevant": 0.1, "confusion": 0.4}, "5 relevant, 20 confusing.*more relevant tokens than confusing ones"),
            ({"relevant": 0.26, "irrelevant": 0.48}, "13 relevant, 13 confusing.*more relevant tokens than confusing"),
            ({"relevant": 0.2, "confusion": 0.58, "classes": 4}, "10 relevant, 29 confusing.*more relevant tokens"),
            ({"tokens": 10, "relevant": 0.04, "confusion": 0}, "0 relevant, 0 confusing"),
            ({"relevant": 0.7, "confusion": 0.5}, "35 relevant, 25 confusing and -10 irrelevant.*sum to at most 1"),
            ({"relevant": 0.4, "irrelevant": 0.7}, "20 relevant, -5 confusing and 35 irrelevant.*sum to at most 1"),
            ({"relevant": 0.6, "confusion": 0.4}, "and 0 irrelevant tokens.*each of the 3 irrelevant patterns"),
            ({"relevant": 0.92}, "and 2 irrelevant tokens.*each of the 3 irrelevant patterns"),
            ({"patterns": 4, "classes": 4}, "more patterns than the 4 classes"),
            ({"confusion": 0.1, "irrelevant": 0.5}, "more than once; got confusion and irrelevant; allowed: one of"),
            ({"spurious": 0.005}, "a spurious share of a token or more"),
            ({"spurious": 0.74}, "38 irrelevant tokens, 37 of them spurious.*beside it"),
            ({"spurious": 0.1, "classes": 4}, "classes=4; allowed: classes=2"),
            ({"d": 4}, "d must be at least their number"),
            ({"d": 5, "spurious": 0.1}, "d must be at least their number; got d=5; allowed: d of 6"),
            ({"set_size": 2, "set_diameter": 1.42}, "set_diameter < kappa"),
            ({"set_diameter": 0.3}, "set_size of 2 or more"),
        )),
        (Spatial, {"tokens": 36, "group": 5}, "one size; got tokens=36, group=5; allowed: a group that divides tokens"),
        (Spatial, {"tokens": 4, "group": 8}, "one size"),
        (Spatial, {"d": 16, "feature": 16}, "orthogonal; got feature=16; allowed: below d=16"),
        (SparseTokens, {"tokens": 3}, "got relevant=4, tokens=3; allowed: relevant of 3 or fewer"),
    ],
)  # fmt: skip
def test_parameters_that_contradict_each_other_are_a_user_error(
    kind: type[Task], parameters: dict[str, Any], said: str
) -> None:
    for ask in (lambda task: task.check(), lambda task: task.draw(2, 0, {})):
        with pytest.raises(UserError, match=said):
            ask(kind(**parameters))


def test_a_set_of_one_class_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"both classes.*got N=1; allowed: 2 or more"):
        Overfitting().draw(1, 0, {})
    assert set(Overfitting(d=3).draw(2, 0, {}).train.labels) == {0, 1}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(kind, {name: value}) for kind, cases in (
        (Theory, {"relevant": (0, 1), "confusion": (-0.1,), "irrelevant": (0,), "confusion_ratio": (-1,),
                  "patterns": (2,), "classes": (3,), "labels": ("fair",), "positions": ("sorted",), "set_size": (0,),
                  "set_diameter": (-1,), "spurious": (1,), "spurious_rate": (1.1,), "test": (0,), "watch": (-1,),
                  "criterion": ("accuracy",), "error": (-0.1, 1)}),
        (Overfitting, {"tokens": (2,), "d": (2,), "signal": (0, float("nan")), "noise": (0,), "strong": (0.5,),
                       "test": (0,), "threshold": (0,), "fitted": (-1,), "lr": (0,), "steps": (0,), "watch": (-1,)}),
        (Spatial, {"tokens": (1,), "group": (0,), "d": (1,), "rate": (1.1, -0.1), "noise": (-1,), "structure": (-1,),
                   "feature": (-1,), "start": ("learned",), "test": (0,), "threshold": (1,), "lr": (0,),
                   "lr_attention": (0,), "steps": (0,), "watch": (-1,)}),
        (SparseTokens, {"tokens": (0,), "d": (0,), "relevant": (0,), "theta": (-1, float("nan")), "positive": (0, 1),
                        "test": (0,), "error": (1,), "lr": (0,), "steps": (0,), "watch": (-1,)}),
    ) for name, values in cases.items() for value in values],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused(kind: type[Task], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        kind(**wrong)
