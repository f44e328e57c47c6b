from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import Spec, fill, parse, words_of
from sparsebench.tasks.images import Composite, Spurious

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


class Order(Enum):
    UP = "rising"
    DOWN = "falling"


class Tuned(Strategy):
    name: ClassVar[str] = "tuned"
    power: float = 1.0
    heads: int = 4
    mode: Literal["max", "mean"] = "mean"
    layers: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    limit: float | None = 1.0
    widths: list[int] = [1]  # noqa: RUF012 (a parameter; pydantic copies it)
    groups: frozenset[str] = frozenset()
    order: Order = Order.UP


@pytest.mark.parametrize(
    ("text", "positional", "name", "params"),
    [
        ("random", None, "random", {}),
        ("tuned:power=2", None, "tuned", {"power": [2]}),
        ("tuned:power=0.5,0.7,1e-3", None, "tuned", {"power": [0.5, 0.7, 0.001]}),
        ("tuned:power=1,2,mode=max,heads=8", None, "tuned", {"power": [1, 2], "mode": ["max"], "heads": [8]}),
        ("tuned:mode=max, mean", None, "tuned", {"mode": ["max", "mean"]}),
        ("tuned:a=true,b=null,c=x y", None, "tuned", {"a": [True], "b": [None], "c": ["x y"]}),
        ("tuned:a=", None, "tuned", {"a": [""]}),
        ("tuned:a=b=c", None, "tuned", {"a": ["b=c"]}),
        ("tuned:layers=3+6,3", None, "tuned", {"layers": ["3+6", 3]}),
        ("some/dir/mine.py:power=2", None, "some/dir/mine.py", {"power": [2]}),
        ("C:\\dir\\mine.py:power=2", None, "C:\\dir\\mine.py", {"power": [2]}),
        ("folder:some/dir", None, "folder:some/dir", {}),
        ("timm:vit_small", "arch", "timm", {"arch": ["vit_small"]}),
        ("timm:arch=vit_small,vit_base", "arch", "timm", {"arch": ["vit_small", "vit_base"]}),
        ("timm", "arch", "timm", {}),
    ],
)
def test_a_name_and_its_parameters_are_read(text, positional, name, params):
    assert parse(text, positional) == Spec(name, params)


@pytest.mark.parametrize(
    ("text", "positional", "says"),
    [
        ("tuned:power=1,power=2", None, "parameter 'power' is given twice"),
        ("tuned:power=1,2,heads=3,power=4", None, "parameter 'power' is given twice"),
        ("", None, "a name is missing"), (":power=1", None, "a name is missing"), ("", "arch", "a name is missing"),
        (":vit_small", "arch", "a name is missing"),
        *((f"dir/mine.py{rest}", None, "plugin file; got 'dir/mine.py.*'; allowed: FILE.py:param=value,param=value; or")
          for rest in (":alpha", ":", ",alpha=1", ": alpha=1")),
        ("attn_topk:attention", None, "without a value; got 'attn_topk:attention'; allowed: NAME:param=value"),
    ],
)  # fmt: skip
def test_what_is_no_specification_is_a_user_error(text, positional, says):
    with pytest.raises(UserError, match=says):
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


@pytest.mark.parametrize(
    ("cls", "text", "filled"),
    [
        (Tuned, "tuned:power=2,heads=8,mode=max", {"power": 2.0, "heads": 8, "mode": "max", "layers": ()}),
        (Tuned, "tuned:layers=3+6+9", {"layers": (3, 6, 9)}),
        (Tuned, "tuned:layers=3", {"layers": (3,)}),
        (Tuned, "tuned:layers=[1]", {"layers": (1,)}),
        (Tuned, "tuned:names=cat+dog", {"names": ("cat", "dog")}),
        (Tuned, "tuned:names=null", {"names": None}),
        (Tuned, "tuned:limit=None,names=None", {"limit": None, "names": None}),
        (Tuned, "tuned:limit=null", {"limit": None}),
        (Tuned, "tuned:widths=5+6,groups=a+b", {"widths": [5, 6], "groups": frozenset("ab")}),
        (Tuned, "tuned:widths=5", {"widths": [5]}),
        (Tuned, "tuned:widths=,layers=", {"widths": [], "layers": ()}),
        (Tuned, "tuned:order=falling", {"order": Order.DOWN}),
        (Spurious, "spurious:held_out=3+8,canvas=28", {"held_out": ("3", "8")}),
        (Budget, "budget:macs=0.5,blocks=1+2", {"blocks": (1, 2)}),
    ],
)
def test_parameters_are_checked_and_take_their_types(cls, text, filled):
    (params,) = parse(text).combinations()
    instance = fill(cls, params, "x")
    assert {name: getattr(instance, name) for name in filled} == filled


class Power(BaseModel):
    power: float


class Own(Strategy):
    name: ClassVar[str] = "own"

    def __init__(self, power=2.0):
        self.power = power


class Wanting(Strategy):
    name: ClassVar[str] = "wanting"

    def __init__(self, power):
        super().__init__()


@pytest.mark.parametrize(
    ("cls", "params", "says"),
    [
        (Tuned, {"pwer": 1}, r"unknown parameter of x.*'pwer'.*did you mean 'power'\?"),
        (Tuned, {"head": 1}, r"unknown parameter of x.*'head'.*did you mean 'heads'\?"),
        *((Tuned, {key: value}, f"x: {key}")
          for key, value in (("power", "much"), ("heads", 2.5), ("mode", "min"), ("layers", "a+b"))),
        *((Composite, {key: float(value)}, f"x: {key}") for key in ("lr", "affine") for value in ("inf", "nan")),
        (Tuned, {"power": "0.3:macs=0.5"}, "x: power: .*; got 0.3:macs=0.5; separate parameters by commas"),
        (Tuned, {"widths": "[5"}, "x: widths.*; separate several values by [+], as in widths=1[+]2"),
        (Tuned, {"power": "None"}, "x: power: .*; got None"),
        (Tuned, {"order": "sideways"}, "x: order: .*'rising' or 'falling'; got sideways"),
        (Power, {}, "x: parameter 'power' has no default; give it a value"),
        (Own, {}, "x cannot be made: .*'own' set self.power.*, and no __init__"),
        (Wanting, {}, "x cannot be made: .*missing 1 required positional argument: 'power'.*, and no __init__"),
    ],
)  # fmt: skip
def test_what_parameters_cannot_be_is_a_user_error_that_names_them(cls, params, says):
    with pytest.raises(UserError, match=says):
        fill(cls, params, "x")


def test_parameters_can_be_typed_again_as_records_hold_them():
    instance = Tuned(limit=None, widths=[2, 3], order=Order.DOWN, layers=(4,))
    words = words_of(instance.model_dump(mode="json", exclude_defaults=True))
    (params,) = parse(f"tuned{words}").combinations()
    assert fill(Tuned, params, "x") == instance


CHOICES = """
from enum import Enum
from sparsebench import Strategy, hookimpl


class Order(Enum):
    UP = "rising"
    DOWN = "falling"


class Sorted(Strategy):
    name = "sorted"
    order: Order = Order.DOWN
    limit: float

    def scores(self, view):
        return view.tokens.sum(dim=2)


@hookimpl
def sparsebench_strategies():
    return [Sorted]
"""


def test_show_lists_the_values_of_a_choice(
    tmp_path: Path,
) -> None:
    """Show lists the values of a choice and a run names what has no default."""
    path = tmp_path / "sorted.py"
    path.write_text(CHOICES)
    shown = CliRunner().invoke(main, ["show", str(path)])
    assert "order = 'falling'  ('rising' | 'falling')" in shown.output and "limit = required" in shown.output
    done = CliRunner().invoke(main, ["run", str(path), "--suite", "smoke", "--dry-run", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "parameter 'limit' has no default" in done.stderr


@pytest.mark.parametrize("base", ["@dataclass\nclass Base:\n    size: int = 3\n\nclass Mine(Base, Strategy):",
                                  "@dataclass\nclass Mine(Strategy):\n    size: int = 3\n"])  # fmt: skip
def test_a_dataclass_is_refused_when_its_file_is_loaded(tmp_path: Path, base: str) -> None:
    path = tmp_path / "mine.py"
    text = CHOICES.replace("class Sorted(Strategy):", f"from dataclasses import dataclass\n\n{base}")
    path.write_text(text.replace("    limit: float\n", "").replace("[Sorted]", "[Mine]"))
    with pytest.raises(UserError, match="a dataclass; write the parameters as fields of the class"):
        Registry().load_file(path)
