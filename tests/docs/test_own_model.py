"""The page on pruning your own model runs from top to bottom."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from pages import code
from PIL import Image
from safetensors.torch import save_file

PAGE = "docs/how-to/own-model.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns about its own modules in an export
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_file(timm.create_model("deit_tiny_patch16_224", num_classes=2).state_dict(), "my-weights.safetensors")
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        Path("my-pictures", kind).mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 255, (240, 240, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path("my-pictures", kind, f"{number}.png"))
    names: dict[str, Any] = {}
    for block in code(PAGE):
        exec(compile(block, PAGE, "exec"), names)
    assert names["stay"].shape == (4, 196) and 0 < names["stay"].float().mean() < 0.5
    ratios = list(names["curve"])
    assert ratios[0] == 1 and all(
        abs(ratio - macs) < 0.05 for ratio, macs in zip(ratios, (1, 0.8, 0.6, 0.4), strict=True)
    )
    assert names["curve"][1.0] == names["accuracy"](names["model"])
    assert Path("sparse.pt2").stat().st_size > 1e6
    assert all(weight.grad is not None for weight in names["model"].parameters())
