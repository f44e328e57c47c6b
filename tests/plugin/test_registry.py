import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plugin_files import write_distribution
from samples import SAMPLES

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SHIPPED = {"dense", "random", "attn_topk", "oracle", "anti_oracle", "noise"}

GOOD = (SAMPLES / "good.py").read_text()


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the good plugin file, with some texts replaced and others appended."""

    def make(name: str = "mine.py", more: str = "", **replaced: str) -> Path:
        text = GOOD
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + more)
        return path

    return make


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    """Return a function that installs one-file modules with entry points, and returns a registry with them.

    Modules whose names begin with stranger are removed afterwards.
    """

    def install(entries: dict[str, str], *, name: str = "stranger", last: bool = False, **modules: str) -> Registry:
        write_distribution(tmp_path, entries, name=name, **modules)
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)] if last else [str(tmp_path), *sys.path])
        importlib.invalidate_caches()
        return Registry()

    yield install
    for module in [module for module in sys.modules if module.startswith("stranger_")]:
        del sys.modules[module]


def ask(program: str) -> Any:
    """Run a program in another Python process, and return its variable `answer`."""
    code = f"""
import json, sys
from sparsebench.plugin.registry import Registry
r = Registry()
{program}
print(json.dumps(answer))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.integration
def test_a_strategy_is_loaded_alone_and_without_torch(tmp_path: Path) -> None:
    """Asking for one strategy imports no other and listing imports no torch."""
    (tmp_path / "json.py").write_text(GOOD)  # the name of a module that others import
    program = f"""
r.strategy('noise')
answer = [sorted(m for m in sys.modules if 'sparsebench_plugins.' in m)]
r.load_file(__import__('pathlib').Path({str(tmp_path / "json.py")!r}))
r.strategies(), r.tasks(), r.models()
answer += ['torch' in sys.modules, sys.modules['json'].__file__]
"""
    loaded, torch, file = ask(program)
    assert loaded == ["sparsebench_plugins.noise"] and not torch and not file.startswith(str(tmp_path))


@pytest.mark.parametrize(("what", "name", "near"), [
    ("strategy", "atn_topk", "attn_topk"), ("task", "compsite", "composite"), ("model", "vitt", "vit"),
])  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest(registry: Registry, what: str, name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"unknown {what}; got '{name}'; allowed: .*did you mean '{near}'"):
        getattr(registry, what)(name)


def test_a_file_brings_its_strategies(registry: Registry) -> None:
    assert registry.load_file(SAMPLES / "good.py") == ["norm"]
    registered = registry.strategy("norm")
    assert registered.file == SAMPLES / "good.py"
    assert registered.cls(largest=False).largest is False
    assert "norm" in {f.cls.name for f in registry.strategies()}


def test_dataclasses_and_annotations_in_a_file_are_resolved(registry: Registry, plugin: Callable[..., Path]) -> None:
    more = "\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n    x: 'int' = 0\n"
    path = plugin(more=more, **{'"""The longest': '"""x"""\nfrom __future__ import annotations\n"""The longest'})
    assert registry.load_file(path) == ["norm"]


def test_a_file_that_takes_a_name_is_refused_and_what_has_it_stays(
    registry: Registry, plugin: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=r"takes_random\.py: .* installed plugin 'random'; rename it"):
        registry.load_file(SAMPLES / "takes_random.py")
    assert registry.strategy("random").origin.distribution == "sparsebench"
    assert registry.load_file(plugin("a/mine.py")) == ["norm"]
    with pytest.raises(UserError, match=r"b/mine\.py: its strategy 'norm' has the name .*a/mine\.py'; rename it"):
        registry.load_file(plugin("b/mine.py"))
    assert registry.strategy("norm").file == plugin("a/mine.py").resolve()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("def (", " (odd name-1.py, line 1)"), ("import sys\nsys.exit(3)\n", " (odd name-1.py:2)"), ("\0", ""),
        ("raise Exception('a\\nb')", " (odd name-1.py:1)"), ("import helper", " (helper.py:2)"),
    ],
)  # fmt: skip
def test_whatever_a_file_does_while_it_loads_is_one_line_with_its_place(
    registry: Registry, tmp_path: Path, text: str, place: str
) -> None:
    path = tmp_path / "odd name-1.py"
    path.write_text(text)
    (tmp_path / "helper.py").write_text("a = 1\nb = c\n")
    with pytest.raises(UserError, match=rf"odd name-1\.py: \w.*{re.escape(place)}$") as raised:
        registry.load_file(path)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(("old", "new", "says"), [
    ('"norm"', '"two words"', "plain identifier"),
    ('    name: ClassVar[str] = "norm"\n', "", "plain identifier, got None"),
    ("name: ClassVar[str]", "name: str", "Norm.name cannot be a parameter; write name: ClassVar[str] = 'norm'"),
    ("largest: bool", "trained: bool = True\n    largest: bool", "write trained: ClassVar[bool] = True"),
    ("largest: bool", "loss: float = 0.5\n    largest: bool", "a parameter 'loss', which is a method of Strategy"),
    ("largest: bool", "table: memoryview = None\n    largest: bool",
     "the type of a parameter; got <class 'memoryview'>; "
     "allowed: int, float, str, bool, None, Literal, Enum, and tuples or lists of them"),
    ("largest: bool", 'kind: ClassVar[str] = "best"\n    largest: bool', "kind must be one of"),
    ("largest: bool", 'site: ClassVar[str] = "output"\n    largest: bool', "site must be one of"),
    ("largest: bool", 'needs: ClassVar[frozenset[str]] = frozenset({"labels"})\n    largest: bool', "unknown labels"),
    ("largest: bool", 'needs: ClassVar = "keys"\n    largest: bool', "needs must be a set, as frozenset({'keys'})"),
    ("largest: bool", 'needs: ClassVar = ["keys"]\n    largest: bool', "needs must be a set, as frozenset({'keys'})"),
    ("[Norm]", "Norm", "must return a list of classes, as [MyClass]; got <class"),
    ("[Norm]", "Norm()", "must return a list of classes"),
    ("[Norm]", "'norm'", "must return a list of classes"),
    ("[Norm]", "None", "must return a list"),
    ("[Norm]", "[Norm()]", "is an instance of a strategy; return the class, Norm"),
    ("[Norm]", "[int]", "is not a subclass of sparsebench.Strategy"),
    ("largest: bool", 'needs: ClassVar[frozenset[str]] = frozenset({"relevance"})\n    largest: bool',
     "its kind must be 'oracle', got 'deployable'"),
    ("def sparsebench_strategies", "def sparsebench_strategy", "did you mean 'sparsebench_strategies'"),
    ("import sparsebench\n", "import a_module_that_is_nowhere\nimport sparsebench\n", "ModuleNotFoundError: No module"),
])  # fmt: skip
def test_a_file_that_does_not_load_leaves_nothing(
    registry: Registry, plugin: Callable[..., Path], old: str, new: str, says: str
) -> None:
    """A file that does not load is refused with the reason and leaves nothing."""
    with pytest.raises(UserError, match=rf"plugin file .*mine\.py: .*{re.escape(says)}"):
        registry.load_file(plugin(**{old: new}))
    assert "norm" not in {registered.cls.name for registered in registry.strategies()} and registry.files == []


@pytest.mark.parametrize("path", ["nowhere.py", "."])
def test_a_file_that_is_not_there_is_refused(registry: Registry, path: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        registry.load_file(Path(path))


def test_a_name_without_its_ending_or_its_prefix_is_guessed(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GOOD)
    with pytest.raises(UserError, match=r"unknown strategy; got 'mine'.*did you mean 'mine\.py'\?"):
        registry.strategy("mine")
    with pytest.raises(UserError, match=r"unknown model.*did you mean 'timm:deit_small_patch16_224'"):
        registry.model("deit_small_patch16_224")


def test_a_plugin_brings_tasks_and_models(registry: Registry) -> None:
    registry.load_file(SAMPLES / "brings_tokens.py")
    assert registry.task("sets").name == "sets" and registry.model("one_layer").name == "one_layer"


def test_a_task_with_the_name_of_another_is_refused(registry: Registry, plugin: Callable[..., Path]) -> None:
    more = """

from sparsebench.tasks.base import Task


class MyTask(Task):
    name: ClassVar[str] = "composite"


@sparsebench.hookimpl
def sparsebench_tasks():
    return [MyTask]
"""
    with pytest.raises(UserError, match=r"mine\.py: its task 'composite' has the name of one of plugin 'tasks'"):
        registry.load_file(plugin(more=more))
    assert registry.task("composite").__module__.startswith("sparsebench.tasks.")


Installed = Callable[..., Registry]


@pytest.mark.parametrize(("name", "version"), [("stranger", "1.5"), ("", "")])
def test_an_installed_plugin_is_found_under_any_entry_point(installed: Installed, name: str, version: str) -> None:
    """A distribution without a name works too."""
    registered = installed({"bundle": "stranger_norm"}, name=name, stranger_norm=GOOD).strategy("norm")
    assert (registered.cls.name, registered.origin.plugin) == ("norm", "bundle")
    assert (registered.origin.distribution, registered.origin.version) == (name, version)


def test_a_broken_installed_plugin_costs_only_itself(installed: Installed) -> None:
    registry = installed(
        {"norm": "stranger_norm", "broken": "stranger_broken", "gone": "stranger_gone", "big": "stranger_big"},
        stranger_norm=GOOD, stranger_broken="import sys\nsys.exit('no')\n", stranger_big="1 / 0\n",
    )  # fmt: skip
    assert registry.strategy("random").cls.name == "random" and registry.broken == {}  # none of them was imported
    assert {registered.cls.name for registered in registry.strategies()} >= SHIPPED | {"norm"}
    assert set(registry.broken) == {"broken", "gone", "big"} and "SystemExit" in registry.broken["broken"]
    for look, name, says in ((registry.strategy, "broken", "SystemExit: no"), (registry.model, "big", "ZeroDivisionE")):
        with pytest.raises(UserError, match=f"plugin '{name}' does not load: {says}"):
            look(name)


def test_list_imports_an_installed_plugin_only_after_a_change(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each call it would cost what its imports cost."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    imports = tmp_path / "imports"
    text = f"with open({str(imports)!r}, 'a') as file:\n    file.write('.')\n{GOOD}"
    installed({"norm": "stranger_counted"}, stranger_counted=text)

    def listed(*words: str) -> str:
        sys.modules.pop("stranger_counted", None)
        done = CliRunner().invoke(main, ["list", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert listed("--json") == listed("--json") and imports.read_text() == "."
    assert "norm" not in listed("tasks") and "composite" in listed("tasks") and imports.read_text() == ".."
    (tmp_path / "stranger_counted.py").write_text(text.replace("Keeps the tokens", "Keeps only tokens"))
    assert "Keeps only tokens" in listed("--json") and imports.read_text() == "..."
    (tmp_path / "stranger_counted.py").write_text("1 / 0")
    assert "ZeroDivisionError" in listed("--json") and "ZeroDivisionError" in listed("--json")


@pytest.mark.parametrize("value", ["a b", "", ":x", "a..b", "-"])
def test_an_entry_point_that_names_no_module_costs_only_itself(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    registry = installed({"ghost": value, "norm": "stranger_norm"}, stranger_norm=GOOD)
    assert {registered.cls.name for registered in registry.strategies()} >= SHIPPED | {"norm"}
    assert set(registry.broken) == {"ghost"} and "names no module" in registry.broken["ghost"]
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for words, code in (
        (["list", "--json"], 0),
        (["run", "ghost", "--suite", "smoke", "--dry-run"], 2),
        (["show", "ghost"], 2),
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == code, done.output
        assert "names no module" in done.stdout + done.stderr and "Traceback" not in done.stderr
        assert words[0] != "run" or "ghost" not in done.stdout


@pytest.mark.parametrize("last", [False, True], ids=["first on the path", "last on the path"])
@pytest.mark.parametrize("entry", ["random", "other"])
def test_an_installed_plugin_cannot_take_the_place_of_a_shipped_strategy(
    installed: Installed, entry: str, last: bool
) -> None:
    text = GOOD.replace('"norm"', '"random"')
    registry = installed({entry: "stranger_random"}, name="a_stranger", last=last, stranger_random=text)
    registry.load_all()
    registered = registry.strategy("random")
    assert registered.origin.distribution == "sparsebench"
    assert registered.cls.__module__ == "sparsebench_plugins.random"
