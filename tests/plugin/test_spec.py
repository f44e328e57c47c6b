from contextlib import suppress
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sparsebench.errors import UserError
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import Spec, fill, parse
from sparsebench.tasks.images import Composite, Spurious


class Tuned(Strategy):
    name: ClassVar[str] = "tuned"
    power: float = 1.0
    heads: int = 4
    mode: Literal["max", "mean"] = "mean"
    layers: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None


@pytest.mark.parametrize(
    ("text", "name", "params"),
    [
        ("random", "random", {}),
        ("tuned:power=2", "tuned", {"power": [2]}),
        ("tuned:power=0.5,0.7,1e-3", "tuned", {"power": [0.5, 0.7, 0.001]}),
        ("tuned:power=1,2,mode=max,heads=8", "tuned", {"power": [1, 2], "mode": ["max"], "heads": [8]}),
        ("tuned:mode=max, mean", "tuned", {"mode": ["max", "mean"]}),
        ("tuned:a=true,b=null,c=x y", "tuned", {"a": [True], "b": [None], "c": ["x y"]}),
        ("tuned:a=", "tuned", {"a": [""]}),
        ("tuned:a=b=c", "tuned", {"a": ["b=c"]}),
        ("tuned:layers=3+6,3", "tuned", {"layers": ["3+6", 3]}),
        ("mine.py", "mine.py", {}),
        ("some/dir/mine.py:power=2", "some/dir/mine.py", {"power": [2]}),
        ("C:\\dir\\mine.py:power=2", "C:\\dir\\mine.py", {"power": [2]}),
        ("folder:some/dir", "folder:some/dir", {}),
    ],
)
def test_a_name_and_its_parameters_are_read(text, name, params):
    assert parse(text) == Spec(name, params)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timm:vit_small", Spec("timm", {"arch": ["vit_small"]})),
        ("timm:arch=vit_small,vit_base", Spec("timm", {"arch": ["vit_small", "vit_base"]})),
        ("timm", Spec("timm")),
    ],
)
def test_a_value_alone_sets_the_positional_parameter(text, expected):
    assert parse(text, positional="arch") == expected


@pytest.mark.parametrize("text", ["tuned:power=1,power=2", "tuned:power=1,2,heads=3,power=4"])
def test_a_parameter_given_twice_is_a_user_error(text):
    with pytest.raises(UserError, match="parameter 'power' is given twice"):
        parse(text)


@pytest.mark.parametrize(("text", "positional"), [("", None), (":power=1", None), ("", "arch"), (":vit_small", "arch")])
def test_a_missing_name_is_a_user_error(text, positional):
    with pytest.raises(UserError, match="a name is missing"):
        parse(text, positional)


@given(st.text())
def test_any_text_is_a_specification_or_a_user_error(text):
    with suppress(UserError):
        assert parse(text).name


def test_several_values_are_swept_over_in_every_combination():
    spec = parse("tuned:power=1,2,heads=4,8,mode=max")
    assert spec.combinations() == [
        {"power": power, "heads": heads, "mode": "max"} for power in (1, 2) for heads in (4, 8)
    ]
    assert spec.combinations(without=("power", "mode")) == [{"heads": 4}, {"heads": 8}]
    assert parse("tuned").combinations() == [{}]


def test_parameters_are_checked_and_take_their_types():
    filled = fill(Tuned, {"power": 2, "heads": 8, "mode": "max"}, "strategy 'tuned'")
    assert (filled.power, filled.heads, filled.mode) == (2.0, 8, "max")
    assert fill(Tuned, {}, "x") == Tuned()


@pytest.mark.parametrize(("value", "layers"), [("3+6+9", (3, 6, 9)), (3, (3,)), ([1, 2], (1, 2)), ((1,), (1,))])
def test_a_tuple_is_written_with_plus(value, layers):
    assert fill(Tuned, {"layers": value}, "x").layers == layers


def test_a_tuple_of_names_is_written_with_plus_even_if_they_are_digits():
    assert fill(Tuned, {"names": "cat+dog"}, "x").names == ("cat", "dog")
    (params,) = parse("spurious:held_out=3+8,canvas=28").combinations()
    assert fill(Spurious, params, "x").held_out == ("3", "8")
    (params,) = parse("budget:macs=0.5,blocks=1+2").combinations()
    assert fill(Budget, params, "x").blocks == (1, 2)


def test_null_is_no_tuple_where_there_may_be_none():
    (params,) = parse("tuned:names=null").combinations()
    assert fill(Tuned, params, "x").names is None


@pytest.mark.parametrize(("given_", "hint"), [("pwer", "power"), ("head", "heads"), ("layer", "layers")])
def test_an_unknown_parameter_is_a_user_error_with_the_nearest(given_, hint):
    with pytest.raises(UserError, match=rf"unknown parameter of strategy 'tuned'.*'{given_}'.*did you mean '{hint}'\?"):
        fill(Tuned, {given_: 1}, "strategy 'tuned'")


@pytest.mark.parametrize("params", [{"power": "much"}, {"heads": 2.5}, {"mode": "min"}, {"layers": "a+b"}])
def test_a_value_that_cannot_be_is_a_user_error_that_names_it(params):
    ((key, _),) = params.items()
    with pytest.raises(UserError, match=f"strategy 'tuned': {key}"):
        fill(Tuned, params, "strategy 'tuned'")


@pytest.mark.parametrize("text", ["composite:lr=Infinity", "composite:affine=1e999", "composite:lr=NaN"])
def test_a_number_that_is_not_finite_is_a_user_error(text):
    with pytest.raises(UserError):
        fill(Composite, parse(text).combinations()[0], "task 'composite'")


def test_a_parameter_without_a_value_is_a_user_error():
    with pytest.raises(UserError, match="without a value; got 'attn_topk:attention'; allowed: NAME:param=value"):
        parse("attn_topk:attention")


def test_a_parameter_without_a_default_is_named():
    class Power(BaseModel):
        power: float

    with pytest.raises(UserError, match="strategy 'far': power has no default; give it one in its class"):
        fill(Power, {}, "strategy 'far'")


def test_a_class_that_cannot_be_made_is_a_user_error_that_says_how_to_write_parameters():
    class Own(Strategy):
        name: ClassVar[str] = "own"

        def __init__(self, power=2.0):
            self.power = power

    class Wanting(Strategy):
        name: ClassVar[str] = "wanting"

        def __init__(self, power):
            super().__init__()

    for cls, why in ((Own, "'own' set self.power"), (Wanting, "missing 1 required positional argument: 'power'")):
        with pytest.raises(UserError, match=f"strategy 'x' cannot be made: .*{why}.*, and no __init__"):
            fill(cls, {}, "strategy 'x'")
