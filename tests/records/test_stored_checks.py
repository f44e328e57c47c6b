"""Reports of the checks in a results folder: as they were, whole or not there, and read without torch."""

import json
import logging
import os
import subprocess
import sys

import pytest

from sparsebench import UserError
from sparsebench.records import checks
from sparsebench.records.origin import Origin
from sparsebench.testing import Outcome, Report


def report(**more):
    given = {"strategy": "mine", "origin": Origin(plugin="mine", revision="a"), "versions": {"sparsebench": "1"}}
    outcome = Outcome(check="prints_nothing", group="required", says="So.", status="failed", message='it wrote "ü\n"')
    return Report(**(given | {"outcomes": (outcome,)} | more))


def test_a_report_comes_back_as_it_was_and_a_newer_one_takes_its_place(tmp_path):
    assert checks.read(tmp_path) == []
    checks.write(report(), tmp_path)
    assert checks.read(tmp_path) == [report()]
    newer = report(outcomes=())
    checks.write(newer, tmp_path)
    assert checks.read(tmp_path) == [newer]


@pytest.mark.parametrize(
    "other",
    [{"strategy": "its"}, {"params": {"power": 2.0}}, {"origin": Origin(plugin="mine", revision="b")},
     {"versions": {"sparsebench": "2"}}],
)  # fmt: skip
def test_another_strategy_parameter_source_or_version_has_a_report_of_its_own(tmp_path, other):
    checks.write(report(), tmp_path)
    checks.write(report(**other), tmp_path)
    assert len(checks.read(tmp_path)) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema_version": 99}', b'{"schema_version": 1}', b"\xff" * 9]
)
def test_what_is_no_report_is_left_out_with_a_warning_of_one_line(tmp_path, caplog, content):
    checks.write(report(), tmp_path)
    (tmp_path / "checks" / "bad.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert checks.read(tmp_path) == [report()]
    assert [len(r.getMessage().splitlines()) for r in caplog.records] == [1] and "bad.json" in caplog.text


def test_one_of_another_schema_is_left_out(tmp_path, caplog):
    path = checks.write(report(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 0}))
    assert checks.read(tmp_path) == [] and "schema_version" in caplog.text


def test_a_write_that_is_cut_short_leaves_the_old_report(tmp_path, monkeypatch):
    checks.write(report(), tmp_path)

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        checks.write(report(outcomes=()), tmp_path)
    assert checks.read(tmp_path) == [report()]
    assert [path.suffix for path in (tmp_path / "checks").iterdir()] == [".json"]


def test_reading_imports_no_torch(tmp_path):
    checks.write(report(), tmp_path)
    code = (
        "import sys; from pathlib import Path; from sparsebench.records.checks import Badges; "
        "from sparsebench.records import checks; Badges(checks.read(Path(sys.argv[1]))); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.stdout == "False\n", done.stderr
