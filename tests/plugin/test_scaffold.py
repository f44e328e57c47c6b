import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from sparsebench.cli import main
from sparsebench.cli.check import write
from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry
from sparsebench.testing import process

ROOT = Path(__file__).resolve().parents[2]


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=folder)


def ruff(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ruff")
    line = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=folder)


@pytest.mark.slow
def test_a_new_strategy_conforms_and_its_test_passes(tmp_path: Path) -> None:
    files = write("far_out", tmp_path, Registry())
    assert [path.name for path in files] == ["far_out.py", "test_far_out.py"]
    (report,) = process.check(str(files[0]))
    assert report.strategy == "far_out" and {o.status for o in report.outcomes} <= {"passed", "unsupported"}
    done = pytest_in(tmp_path)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_new_package_passes_its_tests(tmp_path: Path) -> None:
    """A new package passes its tests and brings its strategy by the entry point."""
    write("far_out", tmp_path, Registry(), package=True)
    folder = tmp_path / "far_out"
    done = pytest_in(folder)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout
    meta = tomllib.loads((folder / "pyproject.toml").read_text())
    assert meta["project"]["name"] == "sparsebench-far-out"
    assert meta["project"]["entry-points"]["sparsebench"] == {"far_out": "far_out.strategy"}
    assert "${{ matrix.python }}\n" in (folder / ".github/workflows/test.yml").read_text()
    assert "{{" not in "".join(path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".md"))


@pytest.mark.parametrize("package", [False, True])
def test_what_is_written_is_clean(tmp_path: Path, package: bool) -> None:
    write("far_out", tmp_path, Registry(), package=package)
    folder = tmp_path / "far_out" if package else tmp_path
    long = "" if package else "--line-length=120"
    for arguments in (["check", "--isolated"], ["check", f"--config={ROOT / 'pyproject.toml'}"], ["format", "--check"]):
        done = ruff(folder, *arguments, *filter(None, [long]))
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_package_can_be_built_and_installed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    write("far_out", tmp_path, Registry(), package=True)
    line = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=tmp_path / "far_out")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    code = "from sparsebench.plugin.registry import Registry; print(Registry().strategy('far_out').origin.distribution)"
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    path = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "sparsebench-far-out", done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [("two words", "letters, digits and _"), ("class", "letters"), ("_x", "letters"), ("", "letters"),
     ("../up", "letters"), ("random", "'random' already"), ("torch", "'torch' already")],
)  # fmt: skip
def test_names_that_will_not_do_are_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        write(name, tmp_path, Registry())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", [False, True])
def test_nothing_is_overwritten(tmp_path: Path, package: bool) -> None:
    there = tmp_path / ("far_out" if package else "test_far_out.py")
    there.write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        write("far_out", tmp_path, Registry(), package=package)
    assert [path.name for path in tmp_path.iterdir()] == [there.name] and there.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write("far_out", tmp_path / "file" / "below", Registry())


def test_the_command_says_what_comes_next(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["new", "far_out", "--dir", str(tmp_path)])
    assert done.exit_code == 0 and f"sparsebench check {tmp_path / 'far_out.py'}" in done.output
    assert CliRunner().invoke(main, ["new", "far_out", "--dir", str(tmp_path)]).exit_code == 2
