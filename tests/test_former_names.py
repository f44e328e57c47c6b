"""Public names that were renamed: they work for one version and say so once."""

import subprocess
import sys
import warnings

import pytest

import sparsebench
from sparsebench.strategy import Strategy, Traits

FORMER = {"Lesson": "LossInputs", "Told": "ModelOutputs"}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_works_and_warns_once(name, monkeypatch):
    monkeypatch.setattr(sparsebench, "_WARNED", set())
    with pytest.warns(FutureWarning, match=f"sparsebench.{name} is now sparsebench.{FORMER[name]}"):
        former = getattr(sparsebench, name)
    assert former is getattr(sparsebench, FORMER[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(sparsebench, name) is former


def test_a_strategy_of_the_former_interface_loads_and_the_warning_names_its_line(tmp_path):
    (tmp_path / "older.py").write_text("from sparsebench import Lesson\n\nprint(Lesson.__name__)\n")
    done = subprocess.run([sys.executable, tmp_path / "older.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "LossInputs\n"
    assert "older.py:1: FutureWarning: sparsebench.Lesson is now sparsebench.LossInputs" in done.stderr


def test_shipped_strategies_do_not_warn():
    code = "import sparsebench_plugins.a_vit, sparsebench_plugins.dynamic_vit, sparsebench_plugins.diffrate_search"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_no_former_one():
    with pytest.raises(AttributeError, match="no attribute 'Lessons'"):
        _ = sparsebench.Lessons


def test_a_former_method_works_and_warns():
    class Any(Strategy):
        name = "any"

    with pytest.warns(FutureWarning, match=r"Strategy\.traits"):
        traits = Any().habits()
    assert isinstance(traits, Traits) and traits.site == Any().traits().site
