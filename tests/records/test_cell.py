import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsebench.budget import Budget
from sparsebench.errors import UserError
from sparsebench.models.shipped import Shallow
from sparsebench.records.cell import Cell, Part, canonical
from sparsebench.tasks.theory import Theory


def cell(**changes):
    parts = {
        "task": Part(name="theory", params={"tokens": 50}),
        "model": Part(name="shallow"),
        "strategy": Part(name="random"),
        "budget": Budget(macs=0.5),
        "n_train": 30,
        "repetition": 2,
    }
    return Cell(**(parts | changes))


def test_the_hash_of_a_cell_is_pinned():
    assert cell().id == "349071f0116e3a4d"


def test_every_field_changes_the_hash():
    cells = [
        cell(),
        cell(task=Part(name="theory", params={"tokens": 51})),
        cell(task=Part(name="composite", params={"tokens": 50})),
        cell(model=Part(name="vit")),
        cell(strategy=Part(name="random", params={"a": 1})),
        cell(budget=Budget(macs=0.65)),
        cell(budget=Budget(keep_rate=0.5)),
        cell(budget=Budget(keep_rate=0.5, convention="compound-ceil")),
        cell(budget=Budget(macs=0.5, blocks=(1, 2))),
        cell(n_train=31),
        cell(repetition=3),
        cell(where="train"),
        cell(where="test"),
        cell(init=cell()),
        cell(init=cell(repetition=3)),
    ]
    assert len({c.id for c in cells}) == len(cells)


def test_the_order_of_parameters_does_not_change_the_hash():
    a, b = ({"tokens": 50, "d": 10}, {"d": 10, "tokens": 50})
    assert cell(task=Part(name="theory", params=a)).id == cell(task=Part(name="theory", params=b)).id


def test_a_cell_survives_json_with_its_hash():
    original = cell(init=cell(repetition=0), budget=Budget(keep_rate=0.7, blocks=(3, 6)))
    again = Cell.model_validate_json(original.model_dump_json())
    assert again == original and again.id == original.id
    assert Cell.model_validate(original.model_dump(mode="json")).id == original.id


def test_the_hash_is_the_same_in_another_process(pytestconfig):
    code = "import sys; from sparsebench.records.cell import Cell; print(Cell.model_validate_json(sys.argv[1]).id)"
    command = [sys.executable, "-c", code, cell().model_dump_json()]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert done.stdout.strip() == cell().id, done.stderr


def test_asking_for_the_hash_changes_nothing():
    asked, fresh = cell(), cell()
    assert len(asked.id) == 16 and int(asked.id, 16) >= 0
    assert asked == fresh and asked.model_dump() == fresh.model_dump()


def test_a_changed_copy_has_a_hash_of_its_own():
    original = cell()
    assert original.id != original.model_copy(update={"repetition": 3}).id == cell(repetition=3).id


def test_a_cell_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        cell().repetition = 5


@pytest.mark.parametrize(
    "wrong", [{"n_train": -1}, {"repetition": -1}, {"where": "nowhere"}, {"workers": 2}, {"task": "theory"}]
)
def test_a_field_that_is_wrong_or_unknown_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        cell(**wrong)


def test_a_part_spells_out_all_parameters_of_the_thing():
    task = Theory(tokens=60)
    part = Part.of(task)
    assert part.name == "theory" and part.params["tokens"] == 60 and part.params["d"] == 10
    assert Theory(**part.params) == task


def test_parameters_that_were_added_are_in_a_cell_where_they_are_used_and_change_no_older_hash():
    def changed(task, model):
        budget, strategy = Budget(macs=1.0), Part(name="dense", params={"disposal": "drop"})
        parts = {"task": Part.of(task), "model": Part.of(model), "strategy": strategy, "budget": budget}
        return cell(**parts, n_train=4, repetition=0)

    old = changed(Theory(), Shallow())
    assert old.id == "a4a35b5a675c0d7f"  # before there were any
    assert not {"criterion", "error", "repacked"} & {*old.task.params, *old.model.params}
    others = {"criterion": "error", "error": 0.05}
    for key, value in others.items():
        new = changed(Theory(**{key: value}), Shallow())
        assert new.task.params == old.task.params | {key: value} and Theory(**new.task.params) == Theory(**{key: value})
    new = changed(Theory(), Shallow(repacked=True))
    assert new.model.params == old.model.params | {"repacked": True} and new.id != old.id


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


def test_canonical_json_is_sorted_dense_and_readable():
    assert canonical({"b": [1, 2.5], "a": {"ü": None}}) == '{"a":{"ü":null},"b":[1,2.5]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical({"x": value})


def test_half_a_surrogate_pair_is_told_in_the_users_words():
    broken = cell(strategy=Part(name="mine", params={"word": "file \udcff.txt"}))
    with pytest.raises(UserError, match=r"surrogate.*got .*\\udcff.*; allowed: text.*; give it anew"):
        _ = broken.id
