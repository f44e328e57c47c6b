"""What a user asks of a run: fields, keywords and options are the same."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import sparsebench
from sparsebench.cli.run import run as command
from sparsebench.errors import UserError
from sparsebench.planning.request import OPTIONS, Files, How, Options, Request, values_of

NAMES = [name for options in OPTIONS.values() for name in options]


def test_the_keywords_are_the_fields_that_users_may_set() -> None:
    assert len(NAMES) == len(set(NAMES)) and set(get_type_hints(Options)) == set(NAMES) - {"plugins"}
    assert all(one.metadata for one in (*fields(Files), *fields(How)) if one.init)


def test_the_function_and_the_command_have_the_defaults_of_the_fields() -> None:
    keywords = inspect.signature(sparsebench.run).parameters
    assert values_of({name: keywords[name].default for name in NAMES}) == (Request(), Files(), How())
    parsed = command.make_context("run", []).params
    assert values_of({name: parsed[name] for name in NAMES}) == (Request(), Files(), How())


def test_nothing_said_leaves_the_defaults() -> None:
    assert values_of({}) == (Request(), Files(), How())


def test_python_may_say_things_in_other_types() -> None:
    request, files, how = values_of({
        "plugins": "random", "tasks": ["theory"], "keep": [0.5], "n_train": range(3), "weights": "a.safetensors",
        "data_root": None, "images": "digits", "checkpoint": None, "cluster": "c.yaml", "observe": "tensorboard",
    })  # fmt: skip
    assert request == Request(plugins=("random",), tasks=("theory",), keep=(0.5,), n_train=(0, 1, 2))
    assert files == Files("digits", weights=Path("a.safetensors"))
    assert how == How(checkpoint=0.0, cluster=Path("c.yaml"), observe=("tensorboard",))


@pytest.mark.parametrize("name", ["job", "figures", "single", "located"])
def test_what_is_no_option_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown argument; got '{name}'; allowed: .*n_train"):
        sparsebench.run(**{name: 1})  # type: ignore[arg-type]
