"""A cell is what it asks, and has a hash of that."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.budget import Budget
from sparsebench.errors import UserError
from sparsebench.models.shipped import Shallow
from sparsebench.records.cell import Cell, Part, canonical
from sparsebench.tasks.theory import Theory


def cell(**changes):
    parts = {
        "task": Part(name="theory", params={"tokens": 50}), "model": Part(name="shallow"),
        "strategy": Part(name="random"), "budget": Budget(macs=0.5), "n_train": 30, "repetition": 2,
    }  # fmt: skip
    return Cell(**(parts | changes))


def test_every_field_changes_the_hash_which_is_pinned():
    assert cell().id == "349071f0116e3a4d"
    other = Part(name="theory", params={"tokens": 51}), Part(name="composite", params={"tokens": 50})
    changes = [
        {}, {"task": other[0]}, {"task": other[1]}, {"model": Part(name="vit")},
        {"strategy": Part(name="random", params={"a": 1})}, {"budget": Budget(macs=0.65)},
        {"budget": Budget(keep_rate=0.5)}, {"budget": Budget(keep_rate=0.5, convention="compound-ceil")},
        {"budget": Budget(macs=0.5, blocks=(1, 2))}, {"n_train": 31}, {"repetition": 3}, {"where": "train"},
        {"where": "test"}, {"track": "tuned"}, {"init": cell()}, {"init": cell(repetition=3)},
    ]  # fmt: skip
    assert len({cell(**change).id for change in changes}) == len(changes)


def test_a_cell_survives_json_with_its_hash_whatever_the_order_of_parameters():
    original = cell(init=cell(repetition=0), budget=Budget(keep_rate=0.7, blocks=(3, 6)))
    fresh = original.model_copy()
    assert original.id and original == fresh and original.model_dump() == fresh.model_dump()
    again = Cell.model_validate_json(original.model_dump_json())
    assert again == original and again.id == original.id
    a, b = ({"tokens": 50, "d": 10}, {"d": 10, "tokens": 50})
    assert cell(task=Part(name="theory", params=a)).id == cell(task=Part(name="theory", params=b)).id


def test_a_changed_copy_has_a_hash_of_its_own():
    original = cell()
    assert original.id != original.model_copy(update={"repetition": 3}).id == cell(repetition=3).id


def test_a_part_spells_out_all_parameters_but_added_ones_that_are_not_used():
    task = Part.of(Theory(tokens=60))
    assert (task.name, task.params["tokens"], task.params["d"]) == ("theory", 60, 10)
    assert Theory(**task.params) == Theory(tokens=60)
    assert not {"criterion", "error", "repacked"} & {*task.params, *Part.of(Shallow()).params}
    for cls, key, value in ((Theory, "criterion", "error"), (Theory, "error", 0.05), (Shallow, "repacked", True)):
        part = Part.of(cls(**{key: value}))
        assert part.params == Part.of(cls()).params | {key: value} and cls(**part.params) == cls(**{key: value})
    dense = Part(name="dense", params={"disposal": "drop"})
    older = cell(task=Part.of(Theory()), model=Part.of(Shallow()), strategy=dense, budget=Budget(macs=1.0), n_train=4,
                 repetition=0)  # fmt: skip
    assert older.id == "a4a35b5a675c0d7f"  # as before there were any


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES)
def test_canonical_json_is_json_and_depends_on_no_order(value):
    text = canonical(value)
    assert json.loads(text) == value
    assert canonical(json.loads(text)) == text
    if isinstance(value, dict):
        assert canonical(dict(reversed(value.items()))) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical({"x": value})


def test_half_a_surrogate_pair_is_told_in_the_users_words():
    broken = cell(strategy=Part(name="mine", params={"word": "file \udcff.txt"}))
    with pytest.raises(UserError, match=r"surrogate.*got .*\\udcff.*; allowed: text.*; give it anew"):
        _ = broken.id
