"""The command line: lists, runs, written files and refused input."""

import csv
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from click.testing import Result
from commands import call
from measured import COMPOSITE, TINY, TOKENS, VIT
from PIL import Image
from plugin_files import write_distribution
from samples import SAMPLES

import sparsebench
from sparsebench.board.columns import ALWAYS_SHOWN, keys_of
from sparsebench.board.tables import FORMATS
from sparsebench.plugin.registry import Registry
from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SHIPPED = {"dense", "random", "attn_topk", "oracle", "anti_oracle", "noise"}
PLUGINS = [SAMPLES / f"{name}.py" for name in ("good", "raises", "returns")]
SMALL = ["--suite", TINY, "--n-train", "4", "--seeds", "1"]


def run(*words: object) -> Result:
    return call("run", *SMALL, *words)


def board_in(folder: Path) -> dict[str, dict[str, str]]:
    """Return the rows of the leaderboard in the folder, by strategy."""
    with (folder / "leaderboard.csv").open(newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Return the folder of a run with one good and two broken plugins, and the result; tests must not write to it."""
    out = tmp_path_factory.mktemp("finished")
    return out, call("run", *PLUGINS, *SMALL, "--out", out, "--jobs", 0, "--format", "csv")


@pytest.mark.integration
def test_commands_that_run_no_cell_import_no_torch_and_no_dask(finished: tuple[Path, Result], tmp_path: Path) -> None:
    lines = (
        "--help", "run --help", "--version", "list", "list tasks", "list models", "list suites", "list observers",
        "show mlflow", "observe --help", "show attn_topk", "show composite", "status OUT", "data",
        "leaderboard OUT --by task", "leaderboard OUT --format html -o NEW/page", "export OUT",
        "export OUT --format parquet -o NEW/rows", "merge RANKED -o NEW/merged", "list --bibtex", "show noise --bibtex",
        "check --help", "new --help", "show-tokens --help", "compare --help", "reproduce --help",
    )  # fmt: skip
    ranked = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"  # its outcomes have ranks
    places = {"OUT": finished[0], "NEW": tmp_path, "RANKED": ranked}
    split = [line.split() for line in lines]
    commands = [
        ["/".join(str(places.get(part, part)) for part in word.split("/")) for word in words] for words in split
    ]
    code = f"""
import sys
from sparsebench.board.published import publish
from sparsebench.cli import main
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as leave:
        assert not leave.code, words
    heavy = {{'torch', 'timm', 'torchvision', 'matplotlib', 'sparsebench_dask', 'distributed', 'dask'}}
    assert not heavy & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("what", "names"),
    [("plugins", SHIPPED), ("tasks", {"composite", "spurious"}), ("models", {"vit", "timm", "hf"}),
     ("suites", {"quick", "real"}), ("observers", {"tensorboard", "mlflow"})],
)  # fmt: skip
def test_lists_name_everything(what: str, names: set[str]) -> None:
    rows = json.loads(call("list", what, "--json").stdout)
    assert {row["name"] for row in rows} >= names
    table = call("list", what)
    assert table.exit_code == 0
    lines = table.stdout.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]


def test_a_broken_plugin_is_listed_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plugin is listed and shown with its reason and disturbs no help."""
    monkeypatch.syspath_prepend(write_distribution(tmp_path, {"stranger": "a_module_that_is_nowhere"}))
    rows = {row["name"]: row for row in json.loads(call("list", "--json").stdout)}
    assert set(rows) >= SHIPPED | {"stranger"} and rows["stranger"]["kind"] == "broken"
    result, reason = call("show", "stranger"), "No module named 'a_module_that_is_nowhere'"
    assert reason in rows["stranger"]["what"] and result.exit_code == 2 and reason in result.stderr
    done = call("run", "--help")
    assert done.exit_code == 0 and "--plugin" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [("attn_topk", ["strategy attn_topk", "kind: deployable", "site: attention", "EViT", "attention = 'auto'"]),
     ("composite", ["task composite", "canvas = 32", "side of the image in pixels"]),
     ("vit", ["model vit", "depth = 3"]),
     ("quick", ['name = "quick"', "[[task]]"]),
     (str(SAMPLES / "brings_task.py"), ["task small", "trained from its first step", "canvas = 16"]),
     (str(SAMPLES / "good.py"), ["strategy norm", "Keeps the tokens with the largest norm", "largest = True"])],
)  # fmt: skip
def test_show_says_what_is_known(name: str, says: list[str]) -> None:
    result = call("show", name)
    assert result.exit_code == 0
    for text in says:
        assert text in result.stdout


def test_lists_say_what_a_strategy_needs_and_cites() -> None:
    """Lists say whether a strategy is trained or reads images and what to cite."""
    rows = {row["name"]: row for row in json.loads(call("list", "plugins", "--json").stdout)}
    trained = {name: rows[name]["trained"] for name in ("dense", "fisher_mask", "dynamic_vit")}
    assert trained == {"dense": "no", "fisher_mask": "fits", "dynamic_vit": "yes"}
    assert "ICLR 2022" in rows["attn_topk"]["citation"] and rows["dense"]["citation"] == ""
    assert "trained: no; it reads 256 training images first, with labels" in call("show", "fisher_mask").stdout
    assert "trained: no\n" in call("show", "tome").stdout and "trained: yes\n" in call("show", "a_vit").stdout


def test_each_bibtex_entry_is_printed_once_and_belongs_to_a_citation() -> None:
    strategies = [entry.cls for entry in Registry().strategies() if entry.cls.bibtex]
    printed = call("list", "--bibtex").stdout
    assert strategies and all(cls.citation and printed.count(cls.bibtex) == 1 for cls in strategies)
    assert all(cls.bibtex.count("{") == cls.bibtex.count("}") for cls in strategies)
    keys = [line for line in printed.splitlines() if line.startswith("@")]
    assert len(set(keys)) == len(keys) == len({cls.bibtex for cls in strategies})
    assert call("show", "attn_topk", "--bibtex").stdout.startswith("@inproceedings{liang2022evit,")


def test_env_names_the_libraries_and_the_hash() -> None:
    lines = dict(line.split(None, 1) for line in call("env").stdout.splitlines() if not line.startswith("CUDA"))
    assert lines["sparsebench"] == sparsebench.__version__
    assert lines["torch"] in torch.__version__ and len(lines["hash"]) == 16


def refused(result: Result, *says: str) -> None:
    """Assert that the exit code is 2 and standard error is one line that contains these texts."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    for text in says:
        assert text in line


@pytest.mark.usefixtures("no_early_start")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plugin", "atn_topk"], ["unknown strategy", "did you mean 'attn_topk'"]),
        (["--plugin", "nowhere.py"], ["nowhere.py does not exist"]),
        (["--plugin", SAMPLES / "good.py", "--plugin", SAMPLES / "import_error.py"], ["a_module_that_is_nowhere"]),
        ([SAMPLES / "takes_random.py"], ["has the name of installed plugin 'random'; rename it"]),
        (["--plugin", "attn_topk:depth=3"], ["unknown parameter", "'depth'", "attention"]),
        (["--plugin", "attn_topk:attention=all"], ["attention", "all"]),
        (["--plugin", f"{SAMPLES / 'returns.py'}:along=2"],
         ["has several strategies, and not all have parameter 'along'", "returns.py flat:along=2"]),
        (["--plugin", "attn_topk:keep_rate=0"], ["keep rate", "got 0", "(0, 1]"]),
        (["--plugin", "attn_topk:keep=0.5"], ["did you mean 'keep_rate'"]),
        (["--plugin", "attn_topk,noise"], ["did you mean 'attn_topk'"]),
        (["--plugin", ""], ["a name is missing"]),
        (["--task", "compsite"], ["unknown task", "did you mean 'composite'"]),
        (["--task", "composite:canva=20"], ["unknown parameter", "did you mean 'canvas'"]),
        (["--task", "composite:canvas=few"], ["canvas", "few"]),
        (["--task", "composite:lr=Infinity"], ["lr"]),
        (["--task", "composite:foreground=40"], ["larger than the canvas"]),
        (["--model", "vitt"], ["unknown model", "did you mean 'vit'"]),
        (["--model", "vit:dim=15,heads=2"], ["heads must divide"]),
        (["--model", "vit:dim=16,32"], ["one value"]),
        (["--task", "sets", "--plugin", TOKENS, "--model", "vit"], ["takes images"]),
        (["--task", "composite", "--model", "timm:vit_tinny_patch16_224"], ["did you mean 'vit_tiny_patch16_224'"]),
        (["--task", "composite", "--plugin", TOKENS, "--model", "one_layer"], ["takes tokens"]),
        (["--suite", "quik"], ["unknown suite", "did you mean 'quick'"]),
        (["--suite", "nowhere.toml"], ["suite file nowhere.toml cannot be read: No such file"]),
        (["--suite", "real"], ["--images folder:DIR"]),
        (["--keep", "0"], ["keep rate", "got 0.0", "(0, 1]"]),
        (["--keep", "nan"], ["keep rate", "got nan", "(0, 1]"]),
        (["--keep", "abc"], ["--keep", "abc"]),
        (["--macs", "2"], ["fraction of MACs", "got 2.0"]),
        (["--seeds", "0"], ["--seeds", "got 0", "greater than 0"]),
        (["--n-train", "0"], ["--n-train", "got 0"]),
        (["--device", "foo"], ["--device", "'foo'", "auto, cpu, cuda"]),
        (["--dask", "x", "--jobs", "2"], ["--dask: the cluster ", "; leave --jobs out"]),
        (["--dask", "x", "--device", "cuda:1"], ["allowed: cpu or cuda with --dask"]),
        (["--shard", "2/2"], ["--shard; got '2/2'; allowed: I/N"]),
        pytest.param(
            ["--device", "cuda"], ["--device cuda", "--device cpu"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (["--format", "html"], ["html", "latex"]),
        (["--images", "folder:nowhere"], ["nowhere", "train"]),
        (["--images", "cats"], ["--images", "digits, cifar10, cifar100, svhn, folder:DIR"]),
        (["--images", "cifar10", "--data-root", "nowhere"], ["cifar10 is missing", "nowhere", "--download"]),
        (["--backgrounds", "nowhere"], ["--backgrounds", "nowhere"]),
        (["--jobs", "-1"], ["--jobs", "-1"]),
        (["--timeout", "soon"], ["--timeout", "'soon'", "10m"]),
        (["--timeout", "1h", "--jobs", "0"], ["--timeout needs a worker process", "--jobs 1"]),
        (["--memory-limit", "1MiB"], ["--memory-limit", "0.5GiB"]),
        (["--precision", "bfloat16"], ["task 'composite' trains networks; --precision is for tests"]),
        (["--sede", "1"], ["--sede"]),
    ],
    ids=lambda x: " ".join(map(str, x))[-40:],
)  # fmt: skip
def test_a_wrong_option_leaves_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], says: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = zip(SMALL[::2], SMALL[1::2], strict=True)
    small = [word for option, value in pairs if option not in arguments for word in (option, value)]
    real, dry = (call("run", *small, "--out", "out", *arguments, *more) for more in ([], ["--dry-run"]))
    refused(real, *says)
    assert dry.output == real.output and not (tmp_path / "out").exists()


@pytest.mark.integration
def test_an_unwritable_folder_exits_with_2_before_any_cell(tmp_path: Path) -> None:
    """A folder that cannot be written leaves with 2 before anything runs."""
    (tmp_path / "file").write_bytes(b"")
    refused(call("run", *SMALL, "--out", tmp_path / "file" / "out"), "cannot write to", "--out")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["leaderboard", "nowhere"], ["no records in nowhere"]),
        (["leaderboard", "nowhere", "--format", "pdf"], ["pdf", "latex", "html"]),
        (["leaderboard"], ["no records in sparsebench-out"]),
        (["leaderboard", "nowhere", "--update"], ["sparsebench run STRATEGY --out DIR"]),
        (["lst"], ["Did you mean 'list'"]),
        (["show", "atn_topk"], ["unknown", "did you mean 'attn_topk'"]),
        (["show", "nowhere.py"], ["nowhere.py does not exist"]),
        (["show", SAMPLES / "import_error.py"], ["a_module_that_is_nowhere"]),
        (["list", "pluggins"], ["pluggins", "plugins"]),
        (["list", "tasks", "--bibtex"], ["--bibtex"]),
        (["list", "--json", "--bibtex"], ["--bibtex"]),
        (["show", "random", "--bibtex"], ["has no BibTeX entry"]),
        (["show", "quick", "--bibtex"], ["BibTeX"]),
        (["show", "composite", "--bibtex"], ["has no BibTeX entry"]),
        (["ran"], ["ran"]),
    ],
    ids=lambda x: " ".join(map(str, x))[-40:],
)
def test_any_other_wrong_command_leaves_with_2_and_one_line(
    arguments: list[Any], says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the root of a checkout may contain folders of runs
    refused(call(*arguments), *says)


def test_failed_cells_exit_with_1(
    finished: tuple[Path, Result],
) -> None:
    """Cells that failed leave 1 and the reason and the others are on the board."""
    out, done = finished
    says = "raises on composite: 1 cell failed: ValueError: no idea which token matters"
    assert done.exit_code == 1 and says in (out / "leaderboard.md").read_text() and "Traceback" not in done.stderr
    assert "listed on composite done" not in done.stderr
    assert "7 failed" in done.stderr and "--rerun failed" in done.stderr
    board = board_in(out)
    assert set(board) == {"dense", "random", "oracle", "anti_oracle", "norm"}
    assert all(row["accuracy"] and row["macs_ratio"] for row in board.values())
    assert board["norm"]["kind"] == "deployable" and board["norm"]["budget"] == "macs 0.5"


RETURNS = SAMPLES / "returns.py"
SAYS = {
    "listed": "scores must have shape (4, 16), got list; return a (B, N) tensor (returns.py:",
    "flat": "scores must have shape (4, 16), got (4,); return a (B, N) tensor (returns.py:",
    "strange": "scores must be real numbers, got torch.complex",
    "misread": "unknown field of the view; got 'token'; allowed: ",
    "remembers": "'remembers' set self.last: it keeps no state between calls; use view.memory in a pass (returns.py:",
    "peeks": "view.relevance was read but not declared: only kind = 'oracle' may declare it (declared: tokens) (ret",
}

BY_KEYS = """
import sparsebench

class ByKeys(sparsebench.Strategy):
    name = "by_keys"
    needs = frozenset({"keys"})

    def scores(self, view):
        return view.keys.norm(dim=3).mean(dim=1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [ByKeys]
"""


@pytest.mark.parametrize("name", SAYS)
def test_what_is_wrong_is_said_at_once_with_file_and_line(finished: tuple[Path, Result], name: str) -> None:
    (line,) = [line for line in finished[1].stderr.splitlines() if line.startswith(f"failed: {name} on composite: ")]
    assert SAYS[name] in line
    source = RETURNS.read_text().splitlines()
    number = int(line.partition("(returns.py:")[2].partition(")")[0])
    begins = next(i for i, text in enumerate(source) if f'name = "{name}"' in text)
    assert begins < number <= begins + 5


def test_a_strategy_that_no_model_fits_gets_a_note_on_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "by_keys.py"
    file.write_text(BY_KEYS)
    done = call("run", file, "--suite", "quick-scratch", "--task", COMPOSITE, "--model", VIT, "--n-train", 20,
                "--seeds", 1, "--out", tmp_path / "out", "--jobs", 0)  # fmt: skip
    assert (
        done.exit_code == 0 and "unsupported: needs keys, which this model cannot give at the input site" in done.stdout
    )
    assert done.stderr.splitlines()[-1] == (
        "next: give the strategy what it lacks (see the note above), and run the same command"
    )


def test_the_same_command_again_names_what_runs_the_failed_again(finished: tuple[Path, Result], tmp_path: Path) -> None:
    shutil.copytree(finished[0] / "records", tmp_path / "records")
    again = call("run", *PLUGINS, *SMALL, "--out", tmp_path, "--jobs", 0)
    assert "cells are in the store; 7 of them failed, --rerun failed tries them again" in again.stderr


def test_a_parameter_without_a_type_is_named_with_what_to_write(tmp_path: Path) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text(RETURNS.read_text().replace('    name = "listed"\n', '    name = "listed"\n    power = 2.0\n'))
    assert "non-annotated attribute was detected: `power = 2.0`" in call("show", bare).stderr


def test_the_board_is_printed_and_written_in_every_form(
    finished: tuple[Path, Result],
) -> None:
    out, done = finished
    assert done.stdout == (out / "leaderboard.csv").read_text()
    assert done.stdout.splitlines()[0] == ",".join(keys_of(ALWAYS_SHOWN))
    rows = json.loads((out / "leaderboard.json").read_text())
    assert [row["strategy"] for row in rows] == list(board_in(out))
    assert "| dense" in (out / "leaderboard.md").read_text()
    with Image.open(out / "leaderboard.png") as picture:
        assert picture.format == "PNG"
    assert (out / "leaderboard.html").read_text().startswith("<!doctype html>")
    assert str(out) in done.stderr


@pytest.mark.parametrize("form", FORMATS)
def test_the_board_is_made_again_from_the_records_alone(
    finished: tuple[Path, Result], tmp_path: Path, form: str
) -> None:
    shutil.copytree(finished[0] / "records", tmp_path / "records")
    result = call("leaderboard", tmp_path, "--format", form)
    assert result.exit_code == 0
    if form in ("csv", "json", "md"):
        assert result.stdout == (finished[0] / f"leaderboard.{form}").read_text()
    else:
        assert "norm" in result.stdout and "it broke" not in result.stdout
        assert "raises on composite" in result.stdout


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(tmp_path: Path) -> None:
    result = run("--dry-run", "--out", tmp_path / "out", "--shard", "0/1")
    assert result.exit_code == 0 and "4 of 4 cells to run" in result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["composite", "anti_oracle", "1", "unknown", "unknown"] in rows
    assert ["all", "4", "unknown", "unknown"] in rows
    assert not list(tmp_path.iterdir())


def test_a_dry_run_reckons_from_what_the_folder_has(tmp_path: Path) -> None:
    assert run("--jobs", "0", "--out", tmp_path).exit_code == 0
    files = sorted(tmp_path.rglob("*"))
    seconds = sum(record.seconds for record in store.read(tmp_path).values())
    result = run("--dry-run", "--rerun", "always", "--out", tmp_path)
    (total,) = (line.split() for line in result.output.splitlines() if line.startswith("all"))
    assert total[1] == "4" and sum(60**i * int(part) for i, part in enumerate(reversed(total[2].split(":")))) >= seconds
    assert sorted(tmp_path.rglob("*")) == files
    assert "0 of 4 cells to run" in run("--dry-run", "--out", tmp_path).output


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = run("--dask", "tcp://127.0.0.1:9", "--out", tmp_path)
    assert done.exit_code == 2
    assert done.stderr == "Error: Dask is not installed; pip install 'sparsebench[cluster]'\n"


def test_a_run_loads_its_suite_reads_its_records_and_judges_them_once(tmp_path: Path) -> None:
    from sparsebench.board.judge import judge
    from sparsebench.board.reading import read
    from sparsebench.plan import suite
    from sparsebench.records.store import Store

    calls: Counter[CodeType] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code] if event == "call" else []))
    try:
        result = run("--jobs", "0", "--out", tmp_path)
    finally:
        sys.setprofile(None)
    assert result.exit_code == 0, result.output
    once = {"suite": suite.load, "the plan's records": Store.summaries, "the board's records": read}
    assert {name: calls[function.__code__] for name, function in once.items()} == dict.fromkeys(once, 1)
    assert calls[judge.__code__] == 2, "over all tasks, and task by task"
