"""timm models by the words of a command, in a folder of one's own too."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import sparsebench
from sparsebench.deploy.apply import named_model
from sparsebench.errors import UserError
from sparsebench.models.vits import Timm
from sparsebench.tasks.images import Composite

ARGS = {"depth": 2, "embed_dim": 32, "num_heads": 4}
ARCH = "vit_small_patch16_dinov3"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small model, as timm saves one."""
    torch.manual_seed(0)
    model = timm.create_model(ARCH, num_classes=7, img_size=64, **ARGS)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    cfg = {"input_size": [3, 64, 64], "mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0], "num_classes": 7}
    config = {"architecture": ARCH, "num_classes": 7, "model_args": ARGS, "pretrained_cfg": cfg}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model.eval()


@torch.no_grad()
def test_a_model_of_a_folder_has_its_weights_its_size_and_its_normalisation(folder):
    path, saved = folder
    model, x = named_model(f"timm:local-dir:{path}", None), torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), saved(x))
    assert model.pretrained_cfg["mean"] == (0.1, 0.2, 0.3) or model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    with pytest.warns(UserWarning, match="the nearest it can"):  # half of the tokens at most leave a block
        sparse = sparsebench.apply(model, "tome", macs=0.7)
    assert sparse(x).shape == (2, 7) and sparse.macs_ratio < 0.8


@torch.no_grad()
def test_another_file_of_weights_may_be_given_a_folder(folder):
    path, saved = folder
    torch.save({key: value + 1 for key, value in saved.state_dict().items()}, path / "other.pth")
    model = named_model(f"timm:local-dir:{path}", path / "other.pth")
    assert torch.equal(model.cls_token, saved.cls_token + 1)


def test_folders_that_hold_no_model_are_said_to(tmp_path, folder):
    with pytest.raises(UserError, match=r"timm cannot read 'local-dir:.*nowhere'"):
        named_model(f"timm:local-dir:{tmp_path}/nowhere", None)
    (folder[0] / "config.json").write_text("{}")
    with pytest.raises(UserError, match="timm cannot make 'local-dir:"):
        named_model(f"timm:local-dir:{folder[0]}", None)


def test_a_name_of_the_hub_is_taken_as_timm_takes_it(monkeypatch):
    config = ({"input_size": (3, 64, 64), "num_classes": 3}, ARCH, ARGS)
    for module in (timm.models._factory, sparsebench.models.timm_models):
        monkeypatch.setattr(module, "load_model_config_from_hf", lambda name, **_: config)
    with torch.device("meta"):
        cost = Timm(arch="hf-hub:somebody/small").cost(Composite(canvas=64), 3)
    assert cost.tokens == 16 and cost.depth == 2


def test_cells_do_not_name_folders(folder):
    with pytest.raises(UserError, match=r"give --weights DIR/model.safetensors"):
        Timm(arch=f"local-dir:{folder[0]}", pretrained=True).check(Composite(canvas=64))
