"""A class has the revision of all code that it runs: as a file, from a module, and from the cells of a notebook."""

import importlib
import json
import linecache
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from measured import TINY

import sparsebench
from sparsebench.errors import UserError
from sparsebench.plugin import classes
from sparsebench.plugin.content import file_revision
from sparsebench.plugin.registry import Registry
from sparsebench.publish.submission import submit, verify
from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

HOOK = """

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Near]
"""
STRATEGY = """import sparsebench
{imports}


class Near(sparsebench.Strategy):
    \"\"\"Keeps tokens.\"\"\"

    name = "near"

    def scores(self, view):
        {body}
"""
WORTH = "def worth(tokens):\n    return tokens.amax(dim=2)\n"


def strategy(imports: str, body: str = "return worth(view.tokens)") -> str:
    return STRATEGY.format(imports=imports, body=body.replace("\n", "\n        "))


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the test's folder the current one and first on the path, and forget its modules afterwards.

    Modules of the same names that other tests have imported are hidden.
    """
    for name in ("mine", "helper", "between", "pack"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # Python takes the bytecode of a source for up to date if second and size are the same, as after an edit of a test.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name, module in list(sys.modules.items()):
        if any(str(tmp_path) in str(vars(module).get(key)) for key in ("__file__", "__path__")):
            del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


numbers = count()


def from_notebook(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Execute a text, cell by cell, as a notebook does; return its strategy."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    for cell in text.split("# %%\n"):
        name = f"/tmp/ipykernel_1/{next(numbers)}.py"
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec", dont_inherit=True), vars(module))
    return module.Near


def from_module(name: str) -> Any:
    importlib.invalidate_caches()
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name.partition(".")[0]]:
        del sys.modules[loaded]
    return importlib.import_module(name).Near


def stored(cls: Any, out: Path) -> Path:
    """Return the file that a run with this class loads."""
    return Path(classes.write(cls, out))


def worth_of(path: Path) -> list[float]:
    """Return the scores of the strategy in a plugin file, of two tokens."""
    registry: Any = Registry()
    registry.load_file(path)
    view: Any = type("View", (), {"tokens": torch.tensor([[[1.0, 2.0], [4.0, 3.0]]])})
    scores: list[float] = registry.strategy("near").cls().scores(view)[0].tolist()
    return scores


IMPORTS: dict[str, tuple[dict[str, str], str]] = {
    "a name": ({"helper.py": WORTH}, strategy("from helper import worth")),
    "a name under another": (
        {"helper.py": WORTH}, strategy("from helper import worth as f", "return f(view.tokens)"),
    ),
    "a module": ({"helper.py": WORTH}, strategy("import helper", "return helper.worth(view.tokens)")),
    "everything": ({"helper.py": WORTH}, strategy("from helper import *")),
    "a module of a package": (
        {"pack/__init__.py": "", "pack/helper.py": WORTH},
        strategy("import pack.helper as x", "return x.worth(view.tokens)"),
    ),
    "what a package imports from itself": (
        {"pack/__init__.py": "from .helper import worth", "pack/helper.py": WORTH}, strategy("from pack import worth"),
    ),
    "a folder without __init__.py": ({"pack/helper.py": WORTH}, strategy("from pack.helper import worth")),
    "what a module imports": (
        {"helper.py": WORTH, "between.py": "from helper import worth"}, strategy("from between import worth"),
    ),
    "within a method": ({"helper.py": WORTH}, strategy("", "from helper import worth\nreturn worth(view.tokens)")),
    "what may be missing": (
        {"helper.py": WORTH},
        strategy("try:\n    from helper import worth\nexcept ImportError:\n    worth = None"),
    ),
    "by a call": (
        {"helper.py": WORTH},
        strategy("from importlib import import_module", "return import_module('helper').worth(view.tokens)"),
    ),
    "the name of an installed package": (
        {"pluggy_plugin.py": "", "tabulate.py": WORTH, "helper.py": "# none\ndim=2"},
        strategy("import tabulate", "return tabulate.worth(view.tokens)"),
    ),
    "a base class": (
        {"helper.py": "import sparsebench\n\nclass Base(sparsebench.Strategy):\n    def scores(self, view):\n"
                      "        return view.tokens.amax(dim=2)\n"},
        "import sparsebench\nfrom helper import Base\n\nclass Near(Base):\n    name = 'near'\n",
    ),
    "data beside a module": (
        {"factor.json": "2", "helper.py": "import json\nfrom pathlib import Path\n\ndef worth(tokens):\n"
                        "    factor = json.loads(Path(__file__).with_name('factor.json').read_text())\n"
                        "    return factor * tokens.amax(dim=2)\n"},
        strategy("from helper import worth"),
    ),
    "its own functions and constants in several cells": (
        {"helper.py": WORTH},
        "import math\nfrom enum import Enum\nimport sparsebench\nfrom helper import worth\nUNUSED = 1\n# %%\n"
        "STEP = 0.5\nPAIR = (-2, 1e-3)\n# %%\nclass Way(Enum):\n    UP = 'up'\n\n"
        "def twice(tokens: 'Tokens'):\n    return STEP * worth(tokens) + PAIR[0]\n\nsquare = lambda x: x ** 2\n# %%\n"
        "class Near(sparsebench.Strategy):\n    name = 'near'\n    way: Way = Way.UP\n\n"
        "    def scores(self, view):\n        return twice(square(view.tokens))\n# %%\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", IMPORTS)
def test_a_class_has_one_revision_wherever_it_comes_from(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class has one revision wherever it comes from and another when what it imports is edited."""
    files, text = IMPORTS[how]
    write(tmp_path, files | {"mine.py": text + HOOK})

    def revision() -> str:
        paths = [tmp_path / "mine.py", stored(from_module("mine"), tmp_path / "out")]
        (tmp_path / "mine.py").rename(tmp_path / "mine.txt")  # a notebook has no such file
        for name in {"mine", "helper", "between"} & set(sys.modules):
            del sys.modules[name]
        paths.append(stored(from_notebook(text, monkeypatch), tmp_path / "out"))
        (tmp_path / "mine.txt").rename(tmp_path / "mine.py")
        revisions = {file_revision(path) for path in paths}
        assert len(revisions) == 1 and worth_of(paths[0]) == worth_of(paths[1]) == worth_of(paths[2])
        return revisions.pop()

    before = revision()
    edited = next(name for name in files if "dim=2" in files[name] or name.endswith(".json"))
    other = files[edited].replace("amax", "amin") if edited.endswith(".py") else "-3"
    write(tmp_path, {edited: other})
    assert revision() != before
    write(tmp_path, {edited: files[edited]})
    assert file_revision(tmp_path / "mine.py") == before


def test_a_package_may_import_from_itself(tmp_path: Path) -> None:
    text = strategy("from . import parts\nfrom .parts import worth", "return worth(view.tokens) + parts.ONE")
    write(tmp_path, {"pack/__init__.py": "", "pack/parts.py": WORTH + "ONE = 1\n", "pack/mine.py": text + HOOK})
    path = tmp_path / "pack" / "mine.py"
    copy = stored(from_module("pack.mine"), tmp_path / "out")
    assert file_revision(path) == file_revision(copy) and worth_of(path) == worth_of(copy) == [3, 5]
    before = file_revision(path)
    write(tmp_path, {"pack/parts.py": WORTH + "ONE = 2\n"})
    assert worth_of(path) == [4, 6] and worth_of(copy) == [3, 5]
    assert file_revision(path) != before == file_revision(copy)


def test_what_a_class_does_not_use_does_not_count(tmp_path: Path) -> None:
    text = strategy("from helper import worth") + HOOK
    more = "from __future__ import annotations\nimport os\nfrom typing import TYPE_CHECKING\n# a comment\nLEFT = 3\n"
    more += "if TYPE_CHECKING:\n    from torch import Tensor\n\ndef other(x: Tensor) -> int:\n    return x\n"
    write(tmp_path, {"helper.py": WORTH, "a/mine.py": text, "a/helper.py": WORTH, "b/helper.py": WORTH})
    write(tmp_path, {"b/mine.py": more + text + "\nif __name__ == '__main__':\n    print(1)\n"})
    assert file_revision(tmp_path / "a/mine.py") == file_revision(tmp_path / "b/mine.py")


@pytest.mark.parametrize(
    "statement",
    ["Near.more = 3", "sparsebench.Strategy.first = 0.5", "_ = setattr(Near, 'needs', frozenset())",
     "for name in ():\n    pass", "Near = Near", "@print\ndef f(): pass"],
)  # fmt: skip
def test_a_statement_that_may_change_the_class_counts(tmp_path: Path, statement: str) -> None:
    text = strategy("", "return view.tokens.amax(dim=2)") + HOOK
    write(tmp_path, {"mine.py": text, "other/mine.py": f"{text}\n{statement}\n"})
    assert file_revision(tmp_path / "mine.py") != file_revision(tmp_path / "other/mine.py")


def test_two_strategies_share_a_module_of_which_each_has_its_own(tmp_path: Path) -> None:
    write(tmp_path, {"helper.py": WORTH, "mine.py": strategy("from helper import worth")})
    write(tmp_path, {"far.py": strategy("from helper import worth").replace('"near"', '"far"')})
    registry: Any = Registry()
    paths = [stored(from_module(name), tmp_path / "out") for name in ("mine", "far")]
    assert [registry.load_file(path) for path in paths] == [["near"], ["far"]]
    first, second = (registry.strategy(name).cls.scores.__globals__["worth"] for name in ("near", "far"))
    assert first is not second and Path(first.__code__.co_filename).parent == paths[0].parent


def test_a_module_with_the_name_of_the_strategy_is_stored_beside_it(tmp_path: Path) -> None:
    write(tmp_path, {"near.py": WORTH, "mine.py": strategy("from near import worth") + HOOK})
    copy = stored(from_module("mine"), tmp_path / "out")
    assert worth_of(copy) == [2, 4] and file_revision(copy) == file_revision(tmp_path / "mine.py")


def test_modules_elsewhere_on_the_path_count_and_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"lib/helper.py": WORTH, "own/mine.py": strategy("from helper import worth") + HOOK})
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    before = file_revision(tmp_path / "own/mine.py")
    (tmp_path / "lib/helper.py").write_text(WORTH.replace("amax", "amin"))
    assert file_revision(tmp_path / "own/mine.py") != before


REFUSED: dict[str, tuple[dict[str, str], str, str]] = {
    "a variable of a function": (
        {}, "import sparsebench\n\ndef make(power):\n" + "".join(
            f"    {line}\n" for line in STRATEGY.format(imports="", body="return view.tokens.amax(dim=2) * power")
            .replace("import sparsebench\n", "").splitlines()) + "    return Near\n\nNear = make(2)\n",
        "uses 'power', a variable of the function around it",
    ),
    "an open file": (
        {}, strategy("import sys\nlog = sys.stderr", "log.flush()\nreturn view.tokens.amax(dim=2)"),
        "'Near' uses 'log', which cannot be stored with it; got .*; write the strategy to a file",
    ),
    "a lambda without source": (
        {}, strategy("worth = eval('lambda tokens: tokens.amax(dim=2)')"), "uses 'worth', which cannot be stored",
    ),
    "an attribute that was added": (
        {}, strategy("", "return view.tokens.amax(dim=2) * self.power") + "\n\nNear.power = 3\n",
        "'Near.power' was set after the class was defined",
    ),
    "an attribute that was changed": (
        {},
        strategy("", "return view.tokens.amax(dim=2)") + "\n\nNear.scores = lambda self, view: view.tokens[:, :, 0]\n",
        "'Near.scores' was set after the class was defined",
    ),
    "a value that was changed": (
        {"helper.py": WORTH + "SCALE = 1.0\n"},
        strategy("import helper\nhelper.SCALE = 2.0", "return helper.worth(view.tokens) * helper.SCALE"),
        "'helper.SCALE' differs from .*helper.py",
    ),
    "a compiled module": (
        {"helper.abi3.so": ""}, strategy("", "import helper\nreturn helper.worth(view.tokens)"),
        "module 'helper' cannot be stored with the results: it is compiled",
    ),
    "data with a computed name": (
        {"part0.json": "2", "helper.py": "import json\nfrom pathlib import Path\n\ndef worth(tokens):\n    n = 0\n"
         "    return tokens.amax(dim=2) * json.load(open(Path(__file__).parent / f'part{n}.json'))\n"},
        strategy("from helper import worth"), "helper.py reads a file beside it, by __file__",
    ),
    "large data": (
        {"pack/__init__.py": WORTH, "pack/large.bin": "0" * (11 * 2**20)}, strategy("from pack import worth"),
        "too large to be stored with its results",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_stored_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    files, text, says = REFUSED[what]
    write(tmp_path, files | {"mine.py": text})
    with pytest.raises(UserError, match=says):
        sparsebench.run(from_module("mine"), suite=TINY, out=tmp_path / "out")
    assert not (tmp_path / "out" / "records").exists()


def test_a_module_with_the_name_of_one_of_python_is_refused(tmp_path: Path) -> None:
    name = "zipapp"  # nothing here imports it
    write(tmp_path, {f"{name}.py": WORTH, "mine.py": strategy(f"from {name} import worth")})
    with pytest.raises(UserError, match=rf"module '{name}' has the name of a module of Python; .*{name}.py; rename it"):
        stored(from_module("mine"), tmp_path / "out")


def test_a_notebook_may_have_functions_of_python_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython puts another `open` into its namespace; this one is the author's."""
    text = strategy("", "return view.tokens.amax(dim=2) * len([1]) * abs(-3)")
    cls = from_notebook(f"def abs(x):\n    return x\n# %%\n{text}", monkeypatch)
    vars(sys.modules["__main__"])["len"] = exec
    assert worth_of(stored(cls, tmp_path / "out")) == [-6, -12]


def test_a_module_whose_file_is_gone_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"helper.py": WORTH, "mine.py": strategy("import helper", "return helper.worth(view.tokens)")})
    cls = from_module("mine")
    (tmp_path / "helper.py").unlink()
    with pytest.raises(UserError, match=r"module 'helper' .*: its file is gone; got .*helper.py"):
        sparsebench.run(cls, suite=TINY, out=tmp_path / "out")


def test_an_edited_module_runs_as_it_is_in_its_file(tmp_path: Path) -> None:
    """A constant that differs is refused, because the process has already computed with it."""
    write(tmp_path, {"helper.py": WORTH, "mine.py": strategy("import helper", "return helper.worth(view.tokens)")})
    cls = from_module("mine")
    before = stored(cls, tmp_path / "out")
    write(tmp_path, {"helper.py": WORTH.replace("amax", "amin")})
    after = stored(cls, tmp_path / "out")
    assert (worth_of(before), worth_of(after)) == ([2, 4], [1, 3])
    assert file_revision(before) != file_revision(after)
    write(tmp_path, {"mine.py": "\n\n\n" + (tmp_path / "mine.py").read_text()})
    with pytest.raises(UserError, match=r"mine.py was edited after 'Near' was imported from it; restart Python"):
        stored(cls, tmp_path / "out")


def test_an_import_that_the_source_does_not_show_is_refused(tmp_path: Path) -> None:
    text = strategy("import sys\nsys.path.append('lib')\nfrom helper import worth") + HOOK
    write(tmp_path, {"lib/helper.py": WORTH, "mine.py": text})
    path = list(sys.path)
    with pytest.raises(UserError, match=r"imports module 'helper' in a way that its source does not show"):
        Registry().load_file(tmp_path / "mine.py")
    sys.path[:] = path


SCRIPT = f"""import sys
import sparsebench
import helper


class Near(sparsebench.Strategy):
    name = "near"

    def scores(self, view):
        return helper.worth(view.tokens)


if __name__ == "__main__":
    sparsebench.run(Near, suite={TINY!r}, n_train=4, seeds=1, jobs=1, out="out")
"""


@pytest.mark.slow
def test_an_edited_module_of_a_script_computes_again(tmp_path: Path) -> None:
    """The folder's name has a colon, by which PYTHONPATH cannot have it."""
    place = tmp_path / "a:b"
    write(place, {"step.py": SCRIPT, "helper.py": WORTH})

    def run() -> dict[str, Any]:
        done = subprocess.run([sys.executable, "step.py"], cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        records = store.read(place / "out").values()
        return {record.origin.revision: record for record in records if record.label == "near"}

    first = run()
    write(place, {"helper.py": WORTH.replace("amax", "amin")})
    second = run()
    ((before, old),) = first.items()
    ((after, new),) = second.items()
    assert before != after and old.status == new.status == "ok" and old.trajectory == new.trajectory
    made = submit(place / "out", tmp_path / "to", "near")
    for path in place.glob("*.py"):
        path.unlink()
    assert {path.name for path in Path(made.folder, "plugin").iterdir()} == {"near.py", "helper.py"}
    assert verify(Path(made.folder)).badge == "reported"
    words = ["verify", made.folder, "--replay", "all", "--yes", "--device", "cpu", "--json"]
    done = subprocess.run([sys.executable, "-m", "sparsebench", *words], cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(done.stdout)[0]["badge"] == "replayed", done.stdout + done.stderr


def test_data_that_are_no_text_are_published(tmp_path: Path) -> None:
    write(tmp_path, {"pack/__init__.py": WORTH, "mine.py": strategy("from pack import worth")})
    (tmp_path / "pack/table.bin").write_bytes(b"\xff\x00\x01")
    sparsebench.run(from_module("mine"), suite=TINY, n_train=4, seeds=1, jobs=0, out=tmp_path / "out")
    made = submit(tmp_path / "out", tmp_path / "to", "near")
    assert Path(made.folder, "plugin/pack/table.bin").read_bytes() == b"\xff\x00\x01"
    assert verify(Path(made.folder)).badge == "reported"
