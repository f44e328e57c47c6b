"""Commands that users type before they have read the documentation."""

import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from commands import call
from measured import TINY

from sparsebench.cli import main
from sparsebench.cli.terminal import COMMANDS, EXAMPLES
from sparsebench.publish.submission import submit

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SMALL = ["--suite", TINY, "--n-train", "4", "--seeds", "1"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a strategy was run."""
    here = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        done = call("run", "noise", *SMALL, "--jobs", 0)
    assert done.exit_code == 0, done.output
    return here


def test_a_strategy_is_named_by_itself_or_after_plugin_or_strategy(here: Path) -> None:
    words = "noise", "--plugin", "attn_topk", "--strategy", "evit"
    both = call("run", *words, *SMALL, "--out", here / "both", "--dry-run")
    assert both.exit_code == 0
    assert {"noise", "attn_topk", "evit"} <= {line.split()[1] for line in both.stdout.splitlines()[3:-1]}


@pytest.mark.parametrize("command", [["leaderboard"], ["status"], ["export"], ["submit", "--to", "published"]])
def test_the_folder_is_the_one_that_a_run_writes_unless_it_is_named(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(here)
    done = call(*command)
    named = call(command[0], "sparsebench-out", *command[1:]) if command[0] != "submit" else done
    assert done.exit_code == named.exit_code == 0 and done.stdout == named.stdout
    monkeypatch.chdir(tmp_path)
    assert "no records in sparsebench-out" in call(*command).stderr


def test_a_named_data_set_is_accepted_by_the_suite_for_own_pictures(tmp_path: Path) -> None:
    done = call("run", "--suite", "real", "--images", "digits", "noise", "--dry-run", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr


def test_a_board_is_not_written_into_a_submission(here: Path, tmp_path: Path) -> None:
    made = Path(
        submit(shutil.copytree(here / "sparsebench-out", tmp_path / "out"), tmp_path / "published", "noise").folder
    )
    before = sorted(made.rglob("*"))
    done = call("leaderboard", made, "--update")
    assert done.exit_code == 2 and "is a submission" in done.stderr
    assert sorted(made.rglob("*")) == before
    assert call("verify", made).exit_code == 0
    assert call("leaderboard", made).exit_code == 0


def test_every_command_has_a_group_and_an_example() -> None:
    """Every command is in a group of the help and has an example that parses."""
    names = sorted(main.commands)
    assert names == sorted(name for group in COMMANDS.values() for name in group) == sorted(EXAMPLES)
    whole = call("--help").stdout
    assert all(f"{title}:" in whole for title in COMMANDS)
    for name, example in EXAMPLES.items():
        program, command, *arguments = example.split()
        assert (program, command) == ("sparsebench", name)
        assert example in " ".join(call(name, "--help").stdout.split())
        with main.commands[name].make_context(name, arguments, resilient_parsing=False):
            pass


@pytest.mark.parametrize(
    ("line", "offered"),
    [("run attn_t", "attn_topk"), ("run --plugin evi", "evit"), ("run --suite qui", "quick"),
     ("leader", "leaderboard")],
)  # fmt: skip
def test_a_shell_completes_names(line: str, offered: str) -> None:
    words = f"sparsebench {line}"
    about = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_SPARSEBENCH_COMPLETE": "bash_complete"}
    done = CliRunner().invoke(main, prog_name="sparsebench", env=about)
    assert f"plain,{offered}" in done.stdout.splitlines(), done.output


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (["verify"], "sparsebench verify leaderboard/submissions"),
        (["observe"], "sparsebench observe results tensorboard:dir=events"),
        (["data", "nothing"], "sparsebench data --verify"),
        (["run", "-p", "attn_topk"], "sparsebench run attn_topk evit:keep_rate=0.7 my.py --out results"),
    ],
)
def test_what_is_missing_or_not_known_comes_with_an_example(words, example):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and result.output.rstrip().endswith(f"For example: {example}")
    assert len(result.output.splitlines()) == 1


SINGLE = [
    (name, option.opts[-1])
    for name, command in main.commands.items()
    for option in command.params
    if isinstance(option, click.Option) and not (option.multiple or option.is_flag)
]


def test_an_option_of_one_value_is_refused_if_it_is_repeated() -> None:
    assert len(SINGLE) > 100
    for name, option in SINGLE:
        done = call(name, option, "1", option, "2")
        assert done.exit_code == 2 and done.stderr.startswith("Error: ") and option in done.stderr, (name, option)
        assert len(done.stderr.splitlines()) == 1 and not done.stdout


@pytest.mark.parametrize(
    ("option", "first", "second"),
    [
        ("--macs", "0.45", "0.6,0.8"),
        ("--keep", "0.5,0.6", "0.9"),
        ("--n-train", "8", "24"),
    ],
)
def test_lists_of_a_repeated_option_add_up(tmp_path: Path, option: str, first: str, second: str) -> None:
    def cells(*words: str) -> int:
        done = call("run", "noise", "--suite", TINY, *words, "--dry-run", "--out", tmp_path)
        assert done.exit_code == 0, done.stderr
        return int(done.stdout.split()[0])

    one, other, both = cells(option, first), cells(option, second), cells(option, first, option, second)
    assert both > max(one, other)
    assert both == cells(option, f"{first},{second}") == cells(option, second, option, first)


def test_lists_of_names_add_up(here: Path) -> None:
    board = here / "sparsebench-out"
    both = call("leaderboard", board, "--columns", "rank", "--columns", "strategy,accuracy", "--format", "csv")
    assert both.exit_code == 0
    assert both.stdout == call("leaderboard", board, "--columns", "rank,strategy,accuracy", "--format", "csv").stdout


def test_flags_may_be_repeated_and_help_is_shown_with_repeated_options(here: Path) -> None:
    board = here / "sparsebench-out"
    assert call("leaderboard", board, "--notes", "--notes").stdout == call("leaderboard", board, "--notes").stdout
    assert call("run", "--suite", "a", "--suite", "b", "--help").exit_code == 0
