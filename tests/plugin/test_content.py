"""The hash of a plugin file covers the code that is executed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from measured import TINY
from samples import SAMPLES

import sparsebench
from sparsebench.plugin.content import file_revision
from sparsebench.plugin.registry import Registry
from sparsebench.plugin.source import code_of
from sparsebench.records import store
from sparsebench.testing import process

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

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
    """Remove the imports of the test's plugins afterwards, as if each test were another process."""
    path = list(sys.path)
    yield
    for name, loaded in list(sys.modules.items()):
        if str(getattr(loaded, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path[:] = path


def write(folder: Path, **files: str) -> Path:
    """Write files into packages, and return the folder; two underscores in a name mean a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
    return folder


def test_a_hash_covers_imports_of_imports(tmp_path: Path) -> None:
    """A hash covers what a file imports from its folder and what that imports."""
    text = STRATEGY.format(imports="def late():\n    import near", text="x")
    files = {"mine": text, "near": "from pack.core import y", "pack__core": "y = 1", "unused": "z = 1"}
    path = write(tmp_path / "a", **files) / "mine.py"
    before = file_revision(path)
    (path.parent / "unused.py").write_text("z = 2")
    assert file_revision(path) == before
    for name in ("near.py", "pack/core.py"):
        source = (path.parent / name).read_text()
        (path.parent / name).write_text(source + "\nz = 2")
        assert file_revision(path) != before
        (path.parent / name).write_text(source)
    (path.parent / "pack/weights.bin").write_bytes(b"1")
    assert file_revision(path) != before
    (path.parent / "pack/weights.bin").unlink()
    copy = write(tmp_path / "b", **files) / "mine.py"
    assert file_revision(copy) == before


def test_what_every_plugin_imports_is_not_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, mine="import sparsebench, torch, random", torch="x", random="x", sparsebench__x="x")
    before = file_revision(path / "mine.py")
    (path / "torch.py").write_text("y")
    assert file_revision(path / "mine.py") == before


def test_a_file_of_a_package_is_hashed_with_what_it_imports_of_that(tmp_path: Path) -> None:
    files = {"pack__core": "y = 1", "pack__mine": "from pack.core import y"}
    path = write(tmp_path, **files) / "pack/mine.py"
    before = file_revision(path)
    (tmp_path / "pack/core.py").write_text("y = 2")
    assert file_revision(path) != before


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
    """Write a plugin file with a module and a package beside it, which all contain one word."""
    imports = "import helper\nfrom typing import ClassVar\n\ndef late():\n    from helper import WHAT\n    return WHAT"
    strategy = USES.format(imports=imports, text=word).replace('name = "far"', f'name = "{name}"')
    core = f'WORD = "{word}"\n'
    files = {"helper": HELPER, "pack__core": core, "mine": strategy}
    write(folder, **files)
    (folder / "pack" / "__init__.py").write_text("from .core import WORD\n")
    return folder / "mine.py"


def test_a_file_imports_what_lies_beside_it_and_no_other_file_does(tmp_path: Path) -> None:
    """Another folder has modules of the same names."""
    registry = Registry()
    for word, name in (("a", "far"), ("b", "further")):
        assert registry.load_file(own(tmp_path / word, word, name)) == [name]
    classes: list[Any] = [registry.strategy(name).cls for name in ("far", "further")]
    assert [cls.what for cls in classes] == ["aaa", "bbb"] == [cls.late() for cls in classes]
    own(tmp_path / "a", "c", "far")
    again: Any = Registry()
    assert again.load_file(tmp_path / "a" / "mine.py") == ["far"]
    assert again.strategy("far").cls.what == again.strategy("far").cls.late() == "ccc"


@pytest.mark.slow
def test_check_run_and_apply_take_what_lies_beside_a_file(tmp_path: Path) -> None:
    good = (SAMPLES / "good.py").read_text().replace("import sparsebench\n", "import helper\nimport sparsebench\n", 1)
    mine = good.replace("view.tokens.norm(dim=-1)", "helper.worth(view)")
    assert mine != good
    worth = "def worth(view):\n    return view.tokens.norm(dim=-1)\n"
    path = write(tmp_path, helper=worth, mine=mine) / "mine.py"
    (report,) = process.check(str(path), groups=("required",))
    assert report.conforms, report.outcomes
    suite = {"suite": TINY, "n_train": 4, "seeds": 1}
    board = sparsebench.run(str(path), out=tmp_path / "out", jobs=1, device="cpu", **suite)  # type: ignore[arg-type]
    assert "norm" in set(board["strategy"])
    assert {record.status for record in store.read(tmp_path / "out").values()} == {"ok"}
    sparse = sparsebench.apply(timm.create_model("test_vit"), f"{path}:macs=0.5")
    assert sparse(torch.rand(1, 3, 160, 160)).shape == (1, 1000) and sparse.macs_ratio < 0.7


SOURCE = '''# a comment
"""A module."""
from __future__ import annotations
import math as m
from . import a as b, c
X: int | None = None
def f(a, /, b: int = 0x10, *c, d, e=1e-3, **g) -> "t":
    "Says."
    if not (y := a @ b) or a is not ...:
        return {**g, "é\\u2028": [*c, -1, 2j, b"\\0"], None: {1, True}}
    else:
        raise ValueError(f"{a!r:>{b}} and{y=}" "more" f"{b:}") from None
    lambda z, *, w=(1,): z[1:, ::2] if w else (yield)
@m.cache
class C[T](Base, metaclass=M):
    """Of it."""
    async def g(self):
        async with a as (b, c), d: pass
        async for x in [i for j in k if j async for i in j]: del x, self.y
        try: await x
        except* (A, B) as e: global q
        finally: assert x, "y"
    match x:
        case {"a": 1, **rest} | [1, *_] | Point(x=0, y=None) if a < b <= c: x += 1; y //= 2
        case _: nonlocal_ = x if y else z
'''.replace("C[T]", "C")


GOLDEN = "219ac9ba769d6ba1e60f53082717ed4ebaecd58444975a54767fb71f3c33d86b"


def test_the_hash_of_code_ignores_python_and_layout() -> None:
    """The hash of code is the same on every python and of layout nothing."""
    assert code_of(SOURCE.encode()) == GOLDEN
    assert code_of(SOURCE.replace("# a comment", "").replace('    """Of it."""\n', "").encode()) == GOLDEN
    assert code_of(b"x = 'a'  \n") == code_of(b'x = ("a")') != code_of(b"x = 'b'")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"), ("x = 1", "x = True"), ("x = '1'", "x = b'1'"), ("x = y", "x = 'y'"),
        ("x = a, b", "x = [a, b]"), ("x[1:]", "x[:1]"), ("x = f''", "x = ''"), ("{**a}", "{a: a}"),
        ("def f(*, a=1, b): 0", "def f(*, a, b=1): 0"), ("f(a, *b)", "f(*b, a)"), ("a = b = c", "a = c"),
        ("from a import b", "from .a import b"), ("if a:\n  b\nc", "if a:\n  b\n  c"), ("f'{a}b'", "f'{a!r}b'"),
        ("x = None", "x: None"), ("def f(): return", "def f(): return None"),
    ],
)  # fmt: skip
def test_other_code_has_another_hash(one: str, other: str) -> None:
    assert code_of(one.encode()) != code_of(other.encode())


def test_what_is_no_python_counts_by_its_bytes_and_long_numbers_are_known() -> None:
    assert code_of(b"what is # this") != code_of(b"what is # that")
    long = b"x = 0x" + b"f" * 9000  # too long for Python to write in decimal
    assert code_of(long) == code_of(long + b" # a comment") != code_of(long + b"f")
