"""What a user asks of a run: fields, keywords and options are the same."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import sparsebench
from sparsebench.cells.prepare import Prepared
from sparsebench.cli.run import run as command
from sparsebench.engine import inline
from sparsebench.errors import UserError
from sparsebench.planning.expand import expand
from sparsebench.planning.request import OPTIONS, Files, How, Options, Request, values_of
from sparsebench.plugin.registry import Registry

NAMES = [name for options in OPTIONS.values() for name in options]


def test_the_keywords_are_the_fields_that_users_may_set() -> None:
    assert len(NAMES) == len(set(NAMES)) and set(get_type_hints(Options)) == set(NAMES) - {"plugins"}
    assert [one.name for one in (*fields(Files), *fields(How)) if one.init and not one.metadata] == ["dry"]


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
    assert files == Files("digits", weights=(Path("a.safetensors"),))
    assert how == How(checkpoint=0.0, cluster=Path("c.yaml"), observe=("tensorboard",))


@pytest.mark.parametrize("name", ["job", "figures", "single", "located"])
def test_what_is_no_option_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown argument; got '{name}'; allowed: .*n_train"):
        sparsebench.run(**{name: 1})  # type: ignore[arg-type]


def test_a_task_with_more_items_than_a_record_holds_is_refused_before_anything_runs() -> None:
    def asked(n: int) -> Request:
        return Request(suite="quick-scratch", tasks=(f"theory:test={n}",), n_train=(4,), seeds=1)

    with pytest.raises(UserError, match="task 'theory': test items; got 200001; allowed: at most 200000"):
        expand(asked(200_001), Registry())
    assert expand(asked(200_000), Registry())


def test_data_with_more_items_than_a_record_holds_cost_no_training(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many pictures a folder has is known when they are drawn."""
    (job,) = job_of("dense", "theory:steps=10,test=20,tokens=20", n_train=4)
    monkeypatch.setattr("sparsebench.tasks.base.MOST_ITEMS", 19)
    monkeypatch.setattr(Prepared, "order", property(lambda _: pytest.fail("it was trained")))
    (record,) = inline([job], Registry(), tmp_path, "cpu", {})
    assert record.failure is not None and "test items; got 20; allowed: at most 19" in record.failure.reason
