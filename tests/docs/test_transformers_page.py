"""The page on models of the transformers library runs from top to bottom."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import code, text_of
from transformers_kinds import folder_of, model_of

from sparsebench.models.transformers_families import CLASSES, WITH_TEXT

PAGE = "docs/how-to/transformers.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(model_of("ViT with 5 classes, no biases"), tmp_path / "my-model")
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* of the dense MACs")  # the model is smaller than a user's
        for block in code(PAGE):
            exec(compile(block, PAGE, "exec"), names)
    assert names["output"].logits.shape == (4, 5) and names["output"].loss > 0
    assert (tmp_path / "my-tuned-model" / "model.safetensors").is_file()
    assert isinstance(names["model"], type(model_of("ViT with 5 classes, no biases")))
    assert torch.is_tensor(names["pixels"])


def test_the_page_names_all_classes() -> None:
    text = text_of(PAGE)
    assert all(f"`{name}`" in text for name in (*CLASSES, *WITH_TEXT))
