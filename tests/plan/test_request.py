"""The user's input: fields, keywords and options are the same."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from measured import TINY
from running import inline

import sparsebench
from sparsebench.cli.run import run as command
from sparsebench.errors import UserError
from sparsebench.plan.expand import expand
from sparsebench.plan.request import OPTIONS, Execution, Files, Request, values_of
from sparsebench.plugin.registry import Registry
from sparsebench.runner.prepare import Prepared

NAMES = [name for options in OPTIONS.values() for name in options]


def test_the_function_and_the_command_have_the_defaults_of_the_fields() -> None:
    keywords = inspect.signature(sparsebench.run).parameters
    assert values_of({name: keywords[name].default for name in NAMES}) == (Request(), Files(), Execution())
    parsed = command.make_context("run", []).params
    assert values_of({name: parsed[name] for name in NAMES}) == (Request(), Files(), Execution())


def test_python_may_say_things_in_other_types() -> None:
    request, files, execution = values_of({
        "plugins": "random", "tasks": ["plain"], "keep": [0.5], "n_train": range(1, 4), "weights": "a.safetensors",
        "data_root": None, "images": "digits", "checkpoint": None, "observe": "tensorboard",
    })  # fmt: skip
    assert request == Request(plugins=("random",), tasks=("plain",), keep=(0.5,), n_train=(1, 2, 3))
    assert files == Files(("digits",), weights=(Path("a.safetensors"),))
    assert execution == Execution(checkpoint=0.0, observe=("tensorboard",))


@pytest.mark.parametrize("name", ["job", "figures", "single", "places"])
def test_what_is_no_option_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown argument; got '{name}'; allowed: .*n_train"):
        sparsebench.run(**{name: 1})  # type: ignore[arg-type]


def test_a_task_with_too_many_items_is_refused_early() -> None:
    """A task with more items than a record holds is refused before anything runs."""

    def request(n: int) -> Request:
        return Request(suite=TINY, tasks=(f"composite:test={n}",), n_train=(4,), seeds=1)

    with pytest.raises(UserError, match="task 'composite': test items; got 200001; allowed: at most 200000"):
        expand(request(200_001), Registry())
    assert expand(request(200_000), Registry())


def test_data_with_more_items_than_a_record_holds_cost_no_training(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of pictures of a folder is known only after they are drawn."""
    (job,) = job_of("dense", n_train=4)
    monkeypatch.setattr("sparsebench.tasks.base.MOST_ITEMS", 19)
    monkeypatch.setattr(Prepared, "order", property(lambda _: pytest.fail("it was trained")))
    (record,) = inline([job], Registry(), tmp_path)
    assert record.failure is not None and "test items; got 20; allowed: at most 19" in record.failure.reason
