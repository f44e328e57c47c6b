"""Whether a submission is whole, which its files say alone."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forge import changed, kinds, put, rewritten, sealed

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.publish.folder import MANIFEST, RECORDS, manifest_of, read_records
from sparsebench.publish.verify import submissions_in, verify, verify_each
from sparsebench.records.manifests import Asked

Tamper = Callable[..., Path]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("origin", "revision"), "0" * 64, "of another revision"),
        (("kind",), "baseline", "of another kind"),
        (("label",), "dense", "has strategy 'norm'"),
        (("cell", "strategy", "name"), "<img src=x>", "incomplete: it lacks 2 of the 4 settings"),
        (("environment",), "0" * 16, "has a machine without a name"),
        (("cell", "repetition"), 7, "is not of the suite"),
    ],
)
def test_records_that_do_not_belong_are_rejected(tampered: Tamper, path: Any, value: Any, said: str) -> None:
    verdict = verify(tampered(put(value, *path)))
    assert (verdict.badge, verdict.wrong) == ("rejected", True) and said in " ".join(verdict.why), verdict.why


def test_records_of_another_deployable_strategy_do_not_belong(tampered: Tamper) -> None:
    verdict = verify(tampered(put("deployable", "kind"), strategy="random"))
    assert verdict.badge == "rejected" and "of another strategy than is submitted" in verdict.why[0]


def test_a_record_that_is_there_twice_is_named(sound: Path, tmp_path: Path) -> None:
    folder = changed(sound, tmp_path, lambda raw: None)
    twice = [one for record in read_records(sound) for one in (record, record)]
    assert "is there twice" in verify(rewritten(folder, twice)).why[0]


def test_a_changed_byte_is_found_by_the_manifest(sound: Path, tmp_path: Path) -> None:
    for name in (RECORDS, "plugin/good.py"):
        folder = Path(shutil.copytree(sound, tmp_path / name))
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        assert f"'{name}' has another SHA-256 than {MANIFEST} says" in verify(folder).why[0]


def test_torn_records_and_files_that_are_missing_or_too_many_are_named(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "torn"))
    (folder / RECORDS).write_bytes((folder / RECORDS).read_bytes()[:-50])
    assert verify(sealed(folder)).badge == "rejected"
    (folder / RECORDS).unlink()
    assert "records" in verify(folder).why[0] and "is not there" in verify(folder).why[0]
    folder = Path(shutil.copytree(sound, tmp_path / "more"))
    (folder / "notes.txt").write_text("x")
    assert verify(folder).why == [f"'notes.txt' is not in {MANIFEST}"]
    (folder / "notes.txt").unlink()
    (folder / MANIFEST).write_text("{}")
    assert "manifest.json: " in verify(folder).why[0]
    (folder / MANIFEST).unlink()
    assert verify(folder).why == [f"there is no {MANIFEST}"]


def test_missing_settings_are_incomplete_and_other_suites_are_named(sound: Path, out: Path, tmp_path: Path) -> None:
    folder = changed(sound, tmp_path, lambda raw: None)
    left = [one for one in read_records(sound) if one.label != "norm" or one.cell.task.name != "theory"]
    verdict = verify(rewritten(folder, left))
    assert verdict.badge == "rejected" and "incomplete: it lacks 2 of the 4 settings of suite tiny 3" in verdict.why[0]
    assert verify(sound, [Asked(name="tiny", version=4, settings=("a",))]).notes == [
        "not of the board: it answers suite tiny 3 with 4 settings, and the board suite tiny 4 with 1"
    ]
    (same,) = verify_each([sound], out)
    (unknown,) = verify_each([sound], tmp_path)
    assert same.notes == [] and "the board does not say what" in unknown.notes[0]


def test_a_suite_or_a_source_of_another_name_is_rejected(sound: Path, tmp_path: Path) -> None:
    manifest = manifest_of(sound)
    for about, said in (
        ({"suite": manifest.suite.model_copy(update={"sha256": "0" * 16})}, "its suite is not the one"),
        ({"strategy": "other"}, "what its strategy is"),
        ({"version": "tiny-3-000000000000"}, "its version is not that of its suite and plugin"),
    ):
        folder = sealed(changed(sound, tmp_path / str(list(about)), lambda raw: None), **about)
        assert said in verify(folder).why[0]


def test_the_folder_is_called_as_what_it_holds(sound: Path, tmp_path: Path) -> None:
    for name in (f"attn_topk/{sound.name}", "norm/quick-1-000000000000"):
        shutil.copytree(sound, tmp_path / name)
        result = CliRunner().invoke(main, ["verify", str(tmp_path / name)])
        assert result.exit_code == 1 and f"its folder is not called norm/{sound.name}" in result.stdout
        shutil.rmtree(tmp_path / name)


def test_submissions_are_found_below_a_folder(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "submissions"
    copy = Path(shutil.copytree(sound, root / "norm" / sound.name))
    (root / "README.md").write_text("about")
    (root / "mine" / "c").mkdir(parents=True)
    found = submissions_in(root)
    assert found == [root / "mine" / "c", copy] and submissions_in(copy) == [copy]
    assert [v.badge for v in verify_each(found)] == ["rejected", "reported"]
    for nothing in (tmp_path / "none", root / "README.md"):
        with pytest.raises(UserError, match="is no folder"):
            submissions_in(nothing)


def test_verifying_imports_no_torch_and_no_plugin(sound: Path) -> None:
    code = f"""
import sys
from sparsebench.cli import main
try:
    main(["verify", {str(sound)!r}, "--json"])
except SystemExit as leave:
    assert not leave.code, leave.code
assert not {{'torch', 'timm', 'torchvision', 'matplotlib'}} & set(sys.modules)
assert not [name for name in sys.modules if name.startswith(("sparsebench_plugins", "sparsebench_local"))]
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["badge"] == "reported"


def test_each_kind_of_forgery_has_no_better_badge_than_is_true(few: Path, tmp_path: Path) -> None:
    for kind, (best, folder) in kinds(few, tmp_path).items():
        assert (kind, verify(folder, placed=True).badge) == (kind, best)
