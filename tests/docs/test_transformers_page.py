"""The page on models of the transformers library runs from top to bottom."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from pages import code, text_of
from transformers_kinds import WIDE, folder_of, model_of, transformers

from sparsebench.models.transformers_families import CLASSES, WITH_TEXT
from sparsebench.models.zero_shot import read_text_features

pytestmark = pytest.mark.integration

tokenizers = pytest.importorskip("tokenizers")
PAGE = "docs/how-to/transformers.md"
WORDS = ("?", "[", "]", "a", "photo", "of", "cat", "dog")


def _clip() -> Any:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text |= {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CLIPModel(transformers.CLIPConfig(vision_config=WIDE, text_config=text, projection_dim=20))


def _tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: k for k, word in enumerate(WORDS)}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "?", "bos_token": "[", "eos_token": "]", "unk_token": "?"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16, **special)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(model_of("ViT with 5 classes, no biases"), tmp_path / "my-model")
    folder_of(_clip(), tmp_path / "my-clip")
    _tokenizer().save_pretrained(tmp_path / "my-clip")
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* of the dense MACs")  # the model is smaller than a user's
        for block in code(PAGE):
            exec(compile(block, PAGE, "exec"), names)
    assert names["output"].logits.shape == (4, 5) and names["output"].loss > 0
    texts = read_text_features(tmp_path / "texts.npz")
    assert texts.classes == ("cat", "dog") and texts.features.shape == (2, 20)
    assert (tmp_path / "my-tuned-model" / "model.safetensors").is_file()


def test_the_page_names_all_classes() -> None:
    text = text_of(PAGE)
    assert all(f"`{name}`" in text for name in (*CLASSES, *WITH_TEXT))
