"""Uploads of submissions to a server on this machine that speaks the calls of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import call
from forge import PLUGIN
from hub_server import TOKEN, Hub, running
from running import run_without_board

from sparsebench.publish.submission import MANIFEST, RECORDS

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_picture", "timed_once")]

NAME = "me/tokens"
HOSTILE = "<img src=x onerror=alert(1)>|[x](https://bad.example)`$\\alert{1}$ --- a: \"b\" 'c' #d"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a server, and let the client speak to it, with a token and without waiting between attempts."""
    from huggingface_hub import constants

    with running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield hub


def submitted(out: Path, to: Path, *words: str, name: str = NAME) -> Any:
    return call("submit", out, "--to", to, "--author", "Ada One", "--hub", name, *words)


def test_an_upload_is_a_data_set_that_can_be_verified(hub: Hub, out: Path, tmp_path: Path) -> None:
    made = submitted(out, tmp_path / "to")
    assert made.exit_code == 0, made.output
    assert made.stdout == f"{hub.address}/datasets/{NAME}\n"
    (folder,) = (tmp_path / "to" / "norm").iterdir()
    files = hub.files[NAME]
    for path in (MANIFEST, RECORDS, "plugin/good.py"):
        assert files[f"norm/{folder.name}/{path}"] == (folder / path).read_bytes()
    for path, content in files.items():  # as downloaded
        (tmp_path / "down" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "down" / path).write_bytes(content)
    (tmp_path / "down" / ".cache" / "huggingface").mkdir(parents=True)
    verified = call("verify", tmp_path / "down")
    assert verified.exit_code == 0 and verified.stdout.count("reported") == 1
    assert len(hub.commits) == 1 and TOKEN not in made.output


def head_of(card: str) -> dict[str, Any]:
    """Return the YAML of a card, as the client of the Hub reads it."""
    from huggingface_hub import RepoCard

    return dict(yaml.safe_load(RepoCard(card, ignore_metadata_errors=False).data.to_yaml()))


def test_the_card_has_results_as_yaml_tables_and_citations(hub: Hub, out: Path, tmp_path: Path) -> None:
    words = ("--paper", "https://a.example/paper", "--licence", "MIT", "--note", HOSTILE, "--affiliation", HOSTILE)
    made = submitted(out, tmp_path / "to", "--author", HOSTILE, *words)
    assert made.exit_code == 0, made.output
    card = hub.files[NAME]["README.md"].decode()
    head = head_of(card)
    assert "sparsebench" in head["tags"] and head["configs"][0]["data_files"].startswith("norm/tiny-3-")
    (model,) = head["model-index"]
    found = {
        (result["dataset"]["name"].split(",")[0], metric["type"]): metric["value"]
        for result in model["results"]
        for metric in result["metrics"]
    }
    rows = [row for row in board_rows(tmp_path / "to") if row["strategy"] == "norm"]
    assert {(row["task"], "accuracy") for row in rows} <= found.keys()
    for row in rows:
        assert found[row["task"], "accuracy"] == pytest.approx(row["accuracy"], rel=1e-8)
    for result in model["results"]:  # each metric is named with the settings of its result
        assert all(result["dataset"]["args"]["budget"] in metric["name"] for metric in result["metrics"])
    text = card.split("\n---\n", 1)[1]
    assert "Ada One" in text and "<https://a.example/paper>" in text and "MIT" in text and "| norm" in text
    assert "<img" not in text.replace("\\<img", "") and "](https://bad" not in text.replace("\\](", "")


def board_rows(folder: Path) -> list[dict[str, Any]]:
    import json

    (one,) = folder.glob("*/*")
    return list(json.loads(call("leaderboard", one, "--by", "task", "--format", "json").stdout))


def test_a_second_upload_sends_what_has_changed_or_says_that_nothing_has(
    hub: Hub, few_out: Path, tmp_path: Path
) -> None:
    submitted(few_out, tmp_path / "to")
    (folder,) = (tmp_path / "to" / "norm").iterdir()
    before = dict(hub.files[NAME])
    again = submitted(few_out, tmp_path / "to")
    assert again.exit_code == 0 and "nothing was uploaded" in again.stderr and len(hub.commits) == 1
    call("withdraw", folder, "--reason", "wrong seeds")
    hub.calls.clear()
    withdrawn = submitted(few_out, tmp_path / "to")
    assert withdrawn.exit_code == 0 and "withdrawn" in withdrawn.stderr
    assert f"norm/{folder.name}/withdrawn.json" in hub.files[NAME] and "put" not in hub.calls
    (folder / "withdrawn.json").unlink()
    kept = submitted(few_out, tmp_path / "to")  # others may have withdrawn it
    assert kept.exit_code == 0 and "withdrawn.json" in kept.stderr
    assert hub.files[NAME].keys() - before.keys() == {f"norm/{folder.name}/withdrawn.json"}


def test_a_second_upload_removes_its_own_files_and_keeps_those_of_others(
    hub: Hub, few_out: Path, tmp_path: Path
) -> None:
    submitted(few_out, tmp_path / "to")
    (folder,) = (tmp_path / "to" / "norm").iterdir()
    place = f"norm/{folder.name}"
    hub.files[NAME] |= {f"{place}/replays/2026-01-02-ab.json": b"{}", f"{place}/plugin/earlier.py": b""}
    made = submitted(few_out, tmp_path / "to")
    assert made.exit_code == 0 and "2026-01-02-ab.json" in made.stderr
    assert f"{place}/replays/2026-01-02-ab.json" in hub.files[NAME]
    assert f"{place}/plugin/earlier.py" not in hub.files[NAME]


def test_no_part_of_the_token_is_printed_where_a_long_message_is_cut(
    hub: Hub, few_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError(" ".join([TOKEN] * 40))  # as a library may repeat the header of a request

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    made = submitted(few_out, tmp_path / "to")
    assert made.exit_code == 2 and "[token]" in made.stderr and TOKEN[:6] not in made.stderr


def test_a_broken_connection_leaves_nothing_and_the_same_command_goes_on(
    hub: Hub, few_out: Path, tmp_path: Path
) -> None:
    for call_ in ("create", "info", "preupload", "put", "commit"):
        hub.breaks = {call_}
        made = submitted(few_out, tmp_path / "to")
        assert made.exit_code == 2 and made.stderr.splitlines()[-1].startswith("Error: "), call_
        assert made.stdout == "" and TOKEN not in made.output
        assert set(hub.files.get(NAME, {})) <= {".gitattributes"}, call_
    hub.breaks = set()
    assert submitted(few_out, tmp_path / "to").exit_code == 0
    assert len(hub.commits) == 1 and "README.md" in hub.files[NAME]


def test_a_refused_token_and_a_foreign_name_are_one_line_each(
    hub: Hub, few_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = submitted(few_out, tmp_path / "to", name="others/tokens")
    monkeypatch.setenv("HF_TOKEN", "hf_anotherToken")
    refused = submitted(few_out, tmp_path / "to")
    for made in (foreign, refused):
        (line,) = [line for line in made.stderr.splitlines() if line.startswith("Error")]
        assert made.exit_code == 2 and "token" in line and "hf_anotherToken" not in made.output
    assert not hub.files


def test_without_a_token_the_client_is_not_asked(
    hub: Hub, few_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    made = submitted(few_out, tmp_path / "to")
    assert made.exit_code == 2 and "hf auth login" in made.stderr and not hub.calls


def test_what_somebody_else_has_written_is_not_overwritten(hub: Hub, few_out: Path, tmp_path: Path) -> None:
    hub.files[NAME] = {".gitattributes": b"", "README.md": b"mine"}
    made = submitted(few_out, tmp_path / "to")
    assert made.exit_code == 2 and "README.md" in made.stderr and hub.files[NAME]["README.md"] == b"mine"


def test_the_card_of_another_submission_is_not_replaced(hub: Hub, few_out: Path, tmp_path: Path) -> None:
    submitted(few_out, tmp_path / "to")
    before = dict(hub.files[NAME])
    shutil.rmtree(tmp_path / "to")
    made = call("submit", few_out, "--to", tmp_path / "to", "--author", "Bo Two", "--hub", NAME)
    assert made.exit_code == 2 and "another submission" in made.stderr and hub.files[NAME] == before


WRONG = ("tokens", "me/to/kens", "me/../x", "https://h.example/me/x", "me/a b", "/x", "me/")
ENDS = ("me/x.", "me/x-", "me-/x", ".me/x", "me/x.git", f"me/{'x' * 97}")


@pytest.mark.parametrize("name", WRONG + ENDS)
def test_names_that_are_none_are_refused_before_anything_is_written(few_out: Path, tmp_path: Path, name: str) -> None:
    made = submitted(few_out, tmp_path / "to", name=name)
    assert made.exit_code == 2 and made.stderr.count("\n") == 1 and not (tmp_path / "to").exists()


def test_a_dry_run_shows_files_target_and_card_and_sends_nothing(
    hub: Hub, few_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", hub.address.replace("//", "//user:secret@"))
        made = submitted(few_out, tmp_path / "to", "--dry-run")
    assert made.exit_code == 0 and "secret" not in made.output, made.output
    for words in (RECORDS, MANIFEST, f"{hub.address}/datasets/{NAME}", "model-index", "Ada One", "| norm"):
        assert words in made.stdout
    assert not hub.calls and not (tmp_path / "to").exists() and TOKEN not in made.output
    submitted(few_out, tmp_path / "to")
    assert hub.files[NAME]["README.md"].decode().strip() in made.stdout
    assert "already" in submitted(few_out, tmp_path / "to", "--dry-run").stdout


def test_the_endpoint_is_that_of_the_environment(few_out: Path, tmp_path: Path) -> None:
    with running() as hub:
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        words = ["submit", str(few_out), "--to", str(tmp_path / "to"), "--hub", NAME]
        command = [sys.executable, "-m", "sparsebench", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and re.fullmatch(f"{hub.address}/datasets/{NAME}\n", done.stdout)
    assert TOKEN not in done.stdout + done.stderr


def test_each_network_and_budget_has_a_result_of_its_own(hub: Hub, suite: Path, tmp_path: Path) -> None:
    head, spurious, _ = suite.read_text().split("[[task]]")
    other = spurious.replace("depth = 1", "depth = 2")
    (tmp_path / "two.toml").write_text("[[task]]".join((head, spurious, other)))
    run_without_board(str(PLUGIN), suite=str(tmp_path / "two.toml"), seeds=1, out=tmp_path / "out")
    made = submitted(tmp_path / "out", tmp_path / "to")
    assert made.exit_code == 0, made.output
    (model,) = head_of(hub.files[NAME]["README.md"].decode())["model-index"]
    rows = [row for row in board_rows(tmp_path / "to") if row["strategy"] == "norm"]
    values = []
    for result in model["results"]:
        (value,) = [metric["value"] for metric in result["metrics"] if metric["type"] == "accuracy"]
        values.append(value)
    assert len(rows) == 2 and sorted(values) == pytest.approx(sorted(row["accuracy"] for row in rows))
