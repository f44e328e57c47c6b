"""What of a plugin is hashed, and that this is what is executed."""

import hashlib
import importlib.util
import os
import py_compile
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import sparsebench
from sparsebench.errors import UserError
from sparsebench.plugin import content as module
from sparsebench.plugin import installed
from sparsebench.plugin.content import Content, file_hash
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.testing import process

SAMPLES = Path(__file__).parents[1] / "plugins"
STRATEGY = """
import sparsebench
from sparsebench import Strategy
{imports}

class Far(Strategy):
    \"\"\"{text}\"\"\"

    name = "far"
    published = False

    def scores(self, view):
        return view.x.norm(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Far]
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path) -> Iterator[None]:
    """Forget what the test's plugins import, as another process would."""
    path = list(sys.path)
    yield
    for name, loaded in list(sys.modules.items()):
        if str(getattr(loaded, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path[:] = path


def write(folder: Path, **files: str) -> Path:
    """Write files, named by the path with two underscores for a slash, into packages, and return the folder."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a maker of installed distributions `far`, whose entry point is the module of that name."""

    def make(entry: str = "far.strategy", listed: tuple[str, ...] = (), **files: str) -> Path:
        site = write(tmp_path / "site", **files)
        info = site / "far-1.5.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[sparsebench]\nfar = {entry}\n")
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in listed))
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        return site

    return make


def said(registry: Registry, name: str = "far") -> str:
    """Return what the class says of itself, which is of the code that was executed."""
    return str(registry.strategy(name).cls.__doc__)


def forge(path: Path, code: Path) -> None:
    """Put another file's code into the cache of a source, as if it were compiled from that."""
    cached = Path(importlib.util.cache_from_source(str(path)))
    cached.parent.mkdir(exist_ok=True)
    py_compile.compile(str(code), cfile=str(cached), dfile=str(path), doraise=True)
    held, info = bytearray(cached.read_bytes()), path.stat()
    held[8:16] = int(info.st_mtime).to_bytes(4, "little") + (info.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    cached.write_bytes(held)


def test_a_file_alone_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, mine=STRATEGY.format(imports="import torch", text="x"), other="x = 1") / "mine.py"
    assert Content.of_file(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == file_hash(path)


def test_a_hash_covers_what_a_file_imports_from_its_folder_and_what_that_imports(tmp_path: Path) -> None:
    text = STRATEGY.format(imports="def late():\n    import near", text="x")
    files = {"mine": text, "near": "from pack.core import y", "pack__core": "y = 1", "unused": "z = 1"}
    path = write(tmp_path / "a", **files) / "mine.py"
    before = file_hash(path)
    (path.parent / "unused.py").write_text("z = 2")
    assert file_hash(path) == before
    for name in ("near.py", "pack/core.py"):
        held = (path.parent / name).read_text()
        (path.parent / name).write_text(held + "  # 2")
        assert file_hash(path) != before
        (path.parent / name).write_text(held)
    (path.parent / "pack/weights.bin").write_bytes(b"1")
    assert file_hash(path) != before
    (path.parent / "pack/weights.bin").unlink()
    copy = write(tmp_path / "b", **files) / "mine.py"
    assert file_hash(copy) == before


def test_what_every_plugin_imports_is_not_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, mine="import sparsebench, torch, random", torch="x", random="x", sparsebench__x="x")
    assert file_hash(path / "mine.py") == hashlib.sha256((path / "mine.py").read_bytes()).hexdigest()


def test_a_file_of_a_package_is_hashed_with_what_it_imports_of_that(tmp_path: Path) -> None:
    files = {"pack__core": "y = 1", "pack__mine": "from pack.core import y"}
    path = write(tmp_path, **files) / "pack/mine.py"
    before = file_hash(path)
    (tmp_path / "pack/core.py").write_text("y = 2")
    assert file_hash(path) != before


def hash_of_far() -> str:
    content = installed.installed_content("far")
    assert content is not None
    return content.sha256


def test_the_hash_of_an_installed_plugin_covers_its_package(install: Callable[..., Path]) -> None:
    text = STRATEGY.format(imports="from far.core import y", text="x")
    site = install(far__strategy=text, far__core="y = 1", far__data__more="")
    before = hash_of_far()
    for name in ("core.py", "data/more.py", "data/weights.bin"):
        held = (site / "far" / name).read_bytes() if (site / "far" / name).is_file() else None
        (site / "far" / name).write_bytes(b"y = 2")
        assert hash_of_far() != before
        (site / "far" / name).unlink() if held is None else (site / "far" / name).write_bytes(held)
    (site / "far/__pycache__").mkdir(exist_ok=True)
    (site / "far/__pycache__/x.pyc").write_bytes(b"x")
    (site / "far/.hidden").write_bytes(b"x")
    assert hash_of_far() == before


def test_what_else_a_distribution_brings_is_hashed_and_no_other_distribution(install: Callable[..., Path]) -> None:
    files = {"far": STRATEGY.format(imports="import beside, stranger", text="x"), "beside": "", "stranger": ""}
    site = install("far", ("far.py", "beside.py"), **files)
    before = hash_of_far()
    (site / "stranger.py").write_text("x = 1")
    assert hash_of_far() == before
    (site / "beside.py").write_text("x = 1")
    assert hash_of_far() != before


def test_compiled_code_beside_a_file_is_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, mine=STRATEGY.format(imports="", text="true"), evil=STRATEGY.format(imports="", text="evil"))
    forge(path / "mine.py", path / "evil.py")
    spec = importlib.util.spec_from_file_location("as_python_does", path / "mine.py")
    assert spec is not None and spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    assert plain.Far.__doc__ == "evil"  # Python itself runs it
    registry = Registry()
    registry.load_file(path / "mine.py")
    assert said(registry) == "true"


def test_compiled_code_of_a_module_beside_a_file_is_not_run(tmp_path: Path) -> None:
    imports = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport near_by"
    text = STRATEGY.format(imports=imports, text="x") + "\nFar.__doc__ = near_by.text\n"
    path = write(tmp_path, mine=text, near_by='text = "true"', evil='text = "evil"')
    forge(path / "near_by.py", path / "evil.py")
    registry = Registry()
    registry.load_file(path / "mine.py")
    assert said(registry) == "true"


def test_compiled_code_of_an_installed_package_is_not_run(install: Callable[..., Path]) -> None:
    text = STRATEGY.format(imports="from far import core", text="x") + "\nFar.__doc__ = core.text\n"
    site = install(far__strategy=text, far__core='text = "true"', evil='text = "evil"')
    forge(site / "far/core.py", site / "evil.py")
    assert said(Registry()) == "true"
    assert not (site / "far/__pycache__/strategy.cpython-311.pyc").exists()


def test_what_was_read_is_executed_though_the_file_changes_meanwhile(tmp_path: Path) -> None:
    imports = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport near_by"
    rewrite = "__import__('pathlib').Path(__file__).with_name('near_by.py').write_text('text = \"evil\"')"
    text = STRATEGY.format(imports=imports.replace("import near_by", f"{rewrite}\nimport near_by"), text="x")
    path = write(tmp_path, mine=text + "\nFar.__doc__ = near_by.text\n", near_by='text = "true"')
    registry = Registry(rehearses=False)
    registry.load_file(path / "mine.py")
    assert said(registry) == "true"


def test_a_file_that_changed_is_loaded_anew_with_what_it_imports(install: Callable[..., Path]) -> None:
    text = STRATEGY.format(imports="from far import core", text="x") + "\nFar.__doc__ = core.text\n"
    site = install(far__strategy=text, far__core='text = "first"')
    assert said(Registry()) == "first"
    (site / "far/core.py").write_text('text = "second"')
    assert said(Registry()) == "second"


def test_tracebacks_and_sources_are_as_of_any_module(tmp_path: Path) -> None:
    import inspect

    path = write(tmp_path, mine=STRATEGY.format(imports="", text="x")) / "mine.py"
    registry = Registry()
    registry.load_file(path)
    assert inspect.getsource(registry.strategy("far").cls).startswith("class Far")
    assert registry.strategy("far").cls.scores.__code__.co_filename == str(path)


def test_links_in_a_loop_end_and_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, mine="import pack", pack__core="")
    os.symlink(path / "pack", path / "pack/again")
    os.mkfifo(path / "pack/pipe")
    os.symlink("/nowhere", path / "pack/dangling")
    assert sorted(Content.of_file(path / "mine.py").names()) == ["mine.py", "pack/__init__.py", "pack/core.py"]


def test_a_plugin_that_is_too_large_or_cannot_be_read_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, mine="import near", near="x = 1") / "mine.py"
    monkeypatch.setattr(module, "MOST_FILES", 1)
    with pytest.raises(UserError, match=r"plugin mine\.py is too large; got 2 files"):
        Registry().load_file(path)
    monkeypatch.undo()
    with open(tmp_path / "near.py", "wb") as file:
        os.truncate(file.fileno(), 2**32)
    with pytest.raises(UserError, match=r"near\.py cannot be read"):
        Registry().load_file(path)
    assert file_hash(path) == file_hash(tmp_path) == file_hash(tmp_path / "none.py") == ""


def test_an_installed_plugin_that_cannot_be_read_costs_only_itself(install: Callable[..., Path]) -> None:
    site = install(far__strategy=STRATEGY.format(imports="", text="x"))
    with open(site / "far/weights.bin", "wb") as file:
        os.truncate(file.fileno(), 2**32)
    registry = Registry()
    assert registry.strategy("attn_topk").failure is None
    assert "weights.bin cannot be read" in str(registry.strategy("far").failure)


def test_the_metadata_of_the_sample_is_found(install: Callable[..., Path]) -> None:
    install(far__strategy="")
    assert metadata.distribution("far").version == "1.5"


USES = STRATEGY.replace(
    "published = False", "what: ClassVar[str] = helper.WHAT\n    late: ClassVar = staticmethod(late)"
)
HELPER = """
from pack import WORD
from pack.core import WORD as again
import pack.core

WHAT = WORD + again + pack.core.WORD
"""


def own(folder: Path, word: str, name: str) -> Path:
    """Write a plugin file with a module and a package beside it, all of one word."""
    imports = "import helper\nfrom typing import ClassVar\n\ndef late():\n    from helper import WHAT\n    return WHAT"
    strategy = USES.format(imports=imports, text=word).replace('name = "far"', f'name = "{name}"')
    core = f'WORD = "{word}"\n'
    files = {"helper": HELPER, "pack__core": core, "mine": strategy}
    write(folder, **files)
    (folder / "pack" / "__init__.py").write_text("from .core import WORD\n")
    return folder / "mine.py"


def test_a_file_imports_what_lies_beside_it_and_no_other_file_does(tmp_path: Path) -> None:
    """In the working directory lies another module of that name."""
    registry, before = Registry(), set(sys.modules)
    for word, name in (("a", "far"), ("b", "further")):
        assert registry.load_file(own(tmp_path / word, word, name)) == [name]
        assert registry.strategy(name).failure is None, registry.strategy(name).failure
    classes: list[Any] = [registry.strategy(name).cls for name in ("far", "further")]
    assert [cls.what for cls in classes] == [cls.late() for cls in classes] == ["aaa", "bbb"]
    assert not {"helper", "pack", "pack.core"} & (set(sys.modules) - before)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("helper")
    own(tmp_path / "a", "c", "far")
    again: Any = Registry()
    assert again.load_file(tmp_path / "a" / "mine.py") == ["far"]
    assert again.strategy("far").cls.what == again.strategy("far").cls.late() == "ccc"


def test_what_lies_beside_a_file_hides_nothing_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "raise SystemExit('hidden')"
    imports = "import tabulate, json, here\nWHAT = tabulate.tabulate, json.dumps"
    files = {"mine": STRATEGY.format(imports=imports, text="x"), "tabulate": wrong, "json": wrong, "here": "a = 1"}
    path = write(tmp_path / "plugin", **files) / "mine.py"
    cwd = write(tmp_path / "cwd", here=wrong)
    monkeypatch.chdir(cwd)
    monkeypatch.syspath_prepend(cwd)
    registry = Registry()
    assert registry.load_file(path) == ["far"] and registry.strategy("far").failure is None


def test_check_run_and_apply_take_what_lies_beside_a_file(tmp_path: Path) -> None:
    good = (SAMPLES / "good.py").read_text().replace("import sparsebench\n", "import helper\nimport sparsebench\n", 1)
    mine = good.replace("view.tokens.norm(dim=-1)", "helper.worth(view)")
    assert mine != good
    worth = "def worth(view):\n    return view.tokens.norm(dim=-1)\n"
    path = write(tmp_path, helper=worth, mine=mine) / "mine.py"
    (report,) = process.check(str(path), groups=("required",))
    assert report.conforms, report.outcomes
    suite = {"suite": "quick-scratch", "tasks": "theory:steps=2,test=20,tokens=20", "n_train": 4, "seeds": 1}
    board = sparsebench.run(str(path), out=tmp_path / "out", jobs=1, device="cpu", **suite)  # type: ignore[arg-type]
    assert "norm" in set(board["strategy"])
    assert {record.status for record in store.read(tmp_path / "out").values()} == {"ok"}
    sparse = sparsebench.apply(timm.create_model("test_vit"), f"{path}:macs=0.5")
    assert sparse(torch.rand(1, 3, 160, 160)).shape == (1, 1000) and sparse.macs_ratio < 0.7
