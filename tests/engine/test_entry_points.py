"""Engines on other machines come in by entry points, and are imported only by those who ask for them."""

import subprocess
import sys
from importlib import metadata

import pytest

from sparsebench.engine.options import GROUP, Choice
from sparsebench.errors import UserError
from sparsebench.planning.request import How


def test_the_dask_engine_comes_with_sparsebench() -> None:
    (entry,) = metadata.entry_points(group=GROUP)
    assert (entry.name, entry.value) == ("dask", "sparsebench_dask.cluster:connect")


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice.of(How(engine="dask", address="tcp://127.0.0.1:9"))
    monkeypatch.setattr(metadata, "entry_points", lambda **_about: ())
    with pytest.raises(UserError, match="--engine dask is not installed"):
        choice.connect(lambda job: None)


def test_nobody_imports_it_who_does_not_ask_for_it() -> None:
    code = (
        "import sys, sparsebench.engine.run, sparsebench.cli; "
        "assert not {'sparsebench_dask', 'distributed', 'dask'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
