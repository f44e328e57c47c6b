"""The checks in their own process: strategies that hang, crash or need too much memory do not end the command."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from samples import SAMPLES

from sparsebench.cli import main
from sparsebench.testing import Report, process


def named(sample, limit=60.0):
    """Return the status and the message of the first required check that did not pass, and the report."""
    (report,) = process.check(str(SAMPLES / f"{sample}.py"), limit, groups=("required",))
    bad = next(o for o in report.outcomes if o.status not in ("passed", "unsupported"))
    return bad.check, bad.status, bad.message, report


@pytest.mark.integration
@pytest.mark.parametrize(
    ("sample", "limit", "check", "status", "says"),
    [
        ("exits", 60.0, "acts_without_error", "crashed", "it left the process with 0"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("segfaults", 60.0, "acts_without_error", "crashed", "it was ended by SIGSEGV"),
            ("sleeps", 3.0, "acts_without_error", "timeout", "it took more than 3 s and was ended"),
            ("allocates", 20.0, "acts_without_error", "failed", "ran out of memory"),
            ("import_error", 60.0, "loads", "failed", "a_module_that_is_nowhere"),
        )),
    ],
)  # fmt: skip
def test_damage_of_a_strategy_to_its_process_is_named(sample, limit, check, status, says):
    *outcome, message, report = named(sample, limit)
    assert outcome == [check, status] and says in message
    assert not report.conforms


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["closes", "scribbles"])
def test_a_strategy_that_writes_to_the_channel_of_results_is_named(sample):
    check, status, _, report = named(sample)
    assert (check, status) == ("acts_without_error", "crashed") and not report.conforms


@pytest.mark.slow
def test_a_file_that_hangs_while_it_is_loaded_is_named(tmp_path):
    path = tmp_path / "hangs.py"
    path.write_text("import time\n\ntime.sleep(600)\n")
    (report,) = process.check(str(path), 2.0)
    assert [(o.check, o.status) for o in report.outcomes] == [("loads", "timeout")] and not report.conforms


PATCHES = """
from typing import ClassVar
import timm.layers.mlp, sparsebench

class First(sparsebench.Strategy):
    name: ClassVar[str] = "first"

    def scores(self, view):
        timm.layers.mlp.Mlp.forward = lambda self, x: x
        return view.tokens.norm(dim=-1)

class Second(sparsebench.Strategy):
    name: ClassVar[str] = "second"

    def scores(self, view):
        return view.tokens.norm(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [First, Second]
"""


@pytest.mark.slow
def test_strategies_of_a_file_do_not_affect_one_another(tmp_path):
    path = tmp_path / "two.py"
    path.write_text(PATCHES)
    first, second = process.check(str(path), groups=("required",))
    assert (first.strategy, second.strategy) == ("first", "second")
    assert not first.conforms and second.conforms


def command(*arguments):
    line = [sys.executable, "-W", "error", "-m", "sparsebench", "check", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command_checks_each_combination_and_each_strategy_of_a_file(tmp_path):
    text = (SAMPLES / "good.py").read_text()
    second = '\n\nclass Smallest(Norm):\n    """Keeps the smallest."""\n\n    name: ClassVar[str] = "smallest"\n'
    path = tmp_path / "two.py"
    path.write_text(text.replace("\n\n@", second + "\n\n@").replace("[Norm]", "[Norm, Smallest]"))
    done = command(f"{path}:largest=false", "--json")
    assert done.returncode == 0, done.stderr
    objects = json.loads(done.stdout)
    reports = [Report.model_validate({k: v for k, v in values.items() if k != "conforms"}) for values in objects]
    assert [(r.strategy, r.params) for r in reports] == [("norm", {"largest": False}), ("smallest", {"largest": False})]
    assert all(r.origin.revision.startswith("code-") and r.conforms and r.versions["torch"] for r in reports)
    assert all(o.seconds > 0 for r in reports for o in r.outcomes if o.group == "informative")


def test_an_invalid_target_is_one_line_and_another_exit_code():
    done = CliRunner().invoke(main, ["check", "nowhere.py"])
    assert (done.exit_code, done.stderr) == (2, "Error: plugin file nowhere.py does not exist\n")
