"""Strategies that reach for what is not theirs: labels, the mask, the network, torch, the harness, files, processes."""

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from sparsebench import Strategy
from sparsebench.plugin.registry import Registry
from sparsebench.testing import audit, run
from sparsebench.testing.parametrize import resolve
from sparsebench.testing.trial import RuleError
from sparsebench.training.steps import Samples

SAMPLES = Path(__file__).resolve().parents[1] / "plugins"
CHECKS = {check.name: check for check in run.CHECKS}


def strategy_of(sample):
    """Return the strategy of a bad plugin, loaded in this process."""
    ((strategy, _),) = resolve(str(SAMPLES / f"{sample}.py"), Registry())
    return strategy


def passes(strategy, *names):
    for name in names:
        CHECKS[name](strategy)


@pytest.mark.parametrize(
    ("sample", "check", "says"),
    [
        ("peeks_at_labels", "keeps_to_its_view", "looked into: gc.get_objects"),
        ("peeks_at_labels", "labels_change_nothing", "the choice depends on the labels"),
        ("peeks_at_frames", "keeps_to_its_view", "looked into: tb_frame"),
        ("peeks_at_frames", "labels_change_nothing", "the choice depends on the labels"),
        ("peeks_at_mask", "keeps_to_its_view", r"looked into: view\._random"),
        ("taps_the_harness", "torch_is_left_alone", r"replaced: .*sparsebench\.training\.steps\.Samples\.take"),
        ("taps_the_harness", "labels_change_nothing", "the choice depends on the labels"),
        ("patches_torch", "torch_is_left_alone", r"replaced: torch\.nn\.functional\.cosine_similarity$"),
        ("mutates_model", "model_is_left_alone", r"changed: weights \[class token\]"),
        ("third_batch", "acts_without_error", "no room for another batch"),
    ],
)
def test_what_is_not_the_strategys_is_named(sample, check, says, monkeypatch):
    monkeypatch.setattr(Samples, "take", Samples.take)  # to be put back
    monkeypatch.setattr(torch.nn.functional, "cosine_similarity", torch.nn.functional.cosine_similarity)
    strategy = strategy_of(sample)
    with pytest.raises(RuleError, match=says):
        CHECKS[check](strategy)


def test_the_mask_is_not_even_behind_the_back_door():
    passes(strategy_of("peeks_at_mask"), "relevance_changes_nothing", "reads_no_relevance")


def test_one_that_writes_to_the_records_is_named_by_the_file(tmp_path, monkeypatch):
    (tmp_path / "out" / "records").mkdir(parents=True)
    (tmp_path / "out" / "records" / "a.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuleError, match=r"it opens a\.jsonl to write"):
        CHECKS["machine_is_left_alone"](strategy_of("writes_records"))


@pytest.mark.skipif(not audit.written_bytes(), reason="this system does not say what a process has written")
def test_one_that_writes_by_a_library_which_opens_files_itself_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVES_TENSORS_IN", str(tmp_path))
    with pytest.raises(RuleError, match="it wrote to a file"):
        CHECKS["machine_is_left_alone"](strategy_of("saves_tensors"))


def test_one_that_writes_while_it_is_loaded_is_named(tmp_path, monkeypatch):
    path = tmp_path / "writes.py"
    note = f"open({str(tmp_path / 'note')!r}, 'w').close()\n"
    path.write_text((SAMPLES / "good.py").read_text() + note)
    with audit.watch() as events:
        ((strategy, _),) = resolve(str(path), Registry())
    monkeypatch.setattr(audit, "AT_LOAD", events)
    with pytest.raises(RuleError, match="it opens note to write"):
        CHECKS["machine_is_left_alone"](strategy)
    passes(strategy_of("prints"), "machine_is_left_alone")  # which is another's, and only prints


class Busy(Strategy):
    """Does what a strategy may: logs, warns, reads files, formats errors, imports, compiles."""

    name: ClassVar[str] = "busy"

    def scores(self, view):
        logging.getLogger("busy").info("scores")
        warnings.warn("careful", stacklevel=1)
        Path(__file__).read_text()
        open(os.devnull, "w").close()
        try:
            raise KeyError(1)
        except KeyError:
            traceback.format_exc()
        sys.modules.pop("this_one_is_not_there", None)
        import colorsys  # noqa: F401

        return view.tokens.norm(dim=-1) * torch.compile(torch.ones_like, backend="eager")(view.tokens[..., 0])


def test_what_libraries_do_for_a_strategy_is_not_held_against_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    passes(Busy(), "keeps_to_its_view", "torch_is_left_alone", "machine_is_left_alone")


@pytest.mark.parametrize("act", ["remove", "rename", "mkdir"])
def test_other_changes_to_files_are_seen(act, tmp_path):
    (tmp_path / "a").write_text("")
    do = {
        "remove": lambda: (tmp_path / "a").unlink(),
        "rename": lambda: (tmp_path / "a").replace(tmp_path / "b"),
        "mkdir": lambda: (tmp_path / "c").mkdir(),
    }[act]
    with audit.watch() as events:
        do()
    (tmp_path / "afterwards").write_text("")
    assert audit.changes(Busy(), events) == [f"os.{act}"]
