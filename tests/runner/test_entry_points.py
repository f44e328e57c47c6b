"""Engines on other machines come in by entry points, and are imported only by those who ask for them."""

import subprocess
import sys
from importlib import metadata


def test_the_dask_engine_comes_with_sparsebench() -> None:
    (entry,) = metadata.entry_points(group="sparsebench.engines")
    assert (entry.name, entry.value) == ("dask", "sparsebench_dask.cluster:connect")


def test_nobody_imports_it_who_does_not_ask_for_it() -> None:
    code = (
        "import sys, sparsebench.runner.run, sparsebench.cli; "
        "assert not {'sparsebench_dask', 'distributed', 'dask'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
