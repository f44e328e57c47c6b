"""The works that a board cites: each once, and those of its data and weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from commands import call
from published_boards import write_part

from sparsebench.board.citations import of_records, once
from sparsebench.models.vits import Timm
from sparsebench.tasks.sources.known import SETS


def keys(entries: list[str]) -> list[str]:
    return [match[1] for entry in entries for match in [re.match(r"@\w+\{([^,\s]+),", entry)] if match]


def records(model: dict[str, object], network: str = "", **task: object) -> pd.DataFrame:
    setting = json.dumps([{"name": "composite", "params": task}, {"name": "timm", "params": model}])
    return pd.DataFrame({"setting": [setting, setting], "network": [network, network]})


def test_the_file_of_a_board_has_sparsebench_methods_and_data_once_each(tmp_path: Path) -> None:
    board = write_part(tmp_path / "board", ("dense", "attn_topk", "tome"), ["composite", "theory"])
    made = call("leaderboard", board, "--format", "bibtex")
    assert made.exit_code == 0
    entries = made.stdout.strip().split("\n\n")
    found = keys(entries)
    assert len(found) == len(entries) == len(set(found))
    assert {"sparsebench", "bolya2023tome", "liang2022evit"} < set(found)
    titles = [re.sub(r"\W", "", match.lower()) for match in re.findall(r"(?m)^\s*title\s*=\s*(.*)", made.stdout)]
    assert len(titles) == len(set(titles)) == len(entries)
    assert "Handwritten Digits" in made.stdout


@pytest.mark.parametrize("name", SETS)
def test_each_data_set_that_can_be_named_is_cited(name: str) -> None:
    without = of_records(records({}, images="folder-123"))
    assert len(of_records(records({}, images=name))) == len(without) + 1


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("deit_small_patch16_224", "Training data-efficient"),
        ("deit3_base_patch16_224.fb_in22k_ft_in1k", "Revenge"),
        ("vit_base_patch16_224.augreg2_in21k_ft_in1k", "How to train your"),
        ("vit_small_patch14_dinov2.lvd142m", "DINOv2"),
        ("vit_small_patch16_224.dino", "Emerging"),
        ("vit_base_patch16_224.mae", "Masked Autoencoders"),
        ("vit_base_patch16_clip_224.openai", "Natural Language Supervision"),
        ("vit_base_patch16_siglip_224.webli", "Sigmoid Loss"),
    ],
)
def test_trained_weights_are_cited_and_random_ones_are_not(arch: str, words: str) -> None:
    assert "arch" in Timm.model_fields
    random = of_records(records({"arch": arch}))
    tested, trained = records({"arch": arch}, "pretrained"), records({"arch": arch, "pretrained": True})
    for cited in map(of_records, (tested, trained)):
        new = [entry for entry in cited if entry not in random]
        assert len(new) == 2 and any(words in entry for entry in new) and any("Wightman" in entry for entry in new)


def test_weights_of_a_file_are_named_in_a_comment() -> None:
    (comment,) = [line for line in of_records(records({}, "mine.pth\u202e")) if line.startswith("%")]
    assert "mine.pth" in comment and comment.isprintable()


def test_a_work_in_two_spellings_is_one_and_two_works_have_two_keys() -> None:
    same = ["@misc{a, title = {On {ViTs}: A  study}}", '@inproceedings{b,\n  title="On ViTs: a study"}']
    assert once(same) == same[:1]
    two = once(["@misc{a, title={One}}", "@misc{a, title={Two}}", "@misc{a, title={Three}}"])
    assert len(set(keys([entry.replace("{a", "{a", 1) for entry in two]))) == 3
