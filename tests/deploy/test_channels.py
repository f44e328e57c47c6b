"""Networks of another number of channels than three."""

import pytest
import torch
from vits import vit

import sparsebench
from sparsebench.errors import UserError
from sparsebench.models.deep import DeepViT
from sparsebench.plugin.registry import Registry

ALL = [one.cls for one in Registry(shipped_only=True).strategies() if one.cls.kind != "oracle"]
STRATEGIES = [cls for cls in ALL if "pixels" in cls().requires() or cls.fits() or cls.name in ("dense", "tome", "tnt")]
"""Those that look at pixels or at images, and others that see tokens alone."""
CHANNELS = pytest.mark.parametrize("channels", [1, 4])


def pixels(channels, n=3, seed=1):
    return torch.randn(n, channels, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:.* spends")  # more than the dense network, or the nearest it can
@pytest.mark.parametrize("cls", STRATEGIES, ids=lambda cls: cls.name)
@torch.no_grad()
def test_strategies_act(cls, channels=4):
    model, x = vit(in_chans=channels), pixels(channels)
    given = {"macs": 0.7} if cls.budgeted else {}
    if cls.trained:
        given["learned"] = "random"
    elif cls.fits():
        given["images"] = pixels(channels, 8, 2)
        given |= {"labels": torch.arange(8) % 5} if cls.fit_labels else {}
    logits = sparsebench.apply(model, cls.name, **given)(x)
    assert logits.shape == (3, 5) and logits.isfinite().all()
    dense = cls.name == "dense" or cls.trains_only
    assert dense == torch.allclose(logits, model(x), atol=1e-4)


@CHANNELS
@torch.no_grad()
def test_pixels_are_restored_with_a_mean_a_channel_or_one_for_all(channels):
    model, x = vit(in_chans=channels), pixels(channels)
    scale = torch.linspace(0.1, 2, channels)
    for std, weight in ((scale.tolist(), scale), (0.3, torch.full((channels,), 0.3))):
        sparse = sparsebench.apply(model, "patch_variance", keep_rate=0.5, mean=[0.0] * channels, std=std)
        patches = (x * weight[:, None, None]).unfold(2, 8, 8).unfold(3, 8, 8)
        spread = patches.var(dim=(4, 5), correction=0).mean(dim=1).flatten(1)
        kept = torch.zeros(3, 16, dtype=torch.bool).scatter(1, spread.topk(8).indices, True)
        assert torch.equal(sparse.kept(x), kept)
        sparse.remove()


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize(("channels", "allowed"), [(1, "1, one a channel"), (4, "1 or 4, one a channel")])
def test_a_mean_of_other_channels_is_refused(name, channels, allowed):
    with pytest.raises(UserError, match=f"{name}, which pixels are normalised with; got 3 numbers; allowed: {allowed}"):
        sparsebench.apply(vit(in_chans=channels), "tome", macs=0.7, **{name: (0.5, 0.4, 0.3)})


@pytest.mark.parametrize(("channels", "given"), [(1, 3), (4, 3), (3, 1)])
def test_pixels_and_images_of_other_channels_are_refused(channels, given):
    model, said = vit(in_chans=channels), rf"got \({{}}, {given}, 32, 32\).*; allowed: \({{}}, {channels}, 32, 32\)"
    with pytest.raises(UserError, match=said.format(3, "B")):
        sparsebench.apply(model, "tome:macs=0.7")(pixels(given))
    with pytest.raises(UserError, match=said.format(8, "n")):
        images = pixels(given, 8)
        sparsebench.apply(model, "fisher_mask", macs=0.7, images=images, labels=torch.arange(8) % 5)


@torch.no_grad()
def test_pictures_in_colour_are_grey_to_a_network_of_one_channel():
    model = vit(in_chans=1)
    network = DeepViT(model, mean=(0.1, 0.2, 0.3), std=0.5)
    colours = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    real = colours.double() / 255
    grey = (0.299 * real[:, :1] + 0.587 * real[:, 1:2] + 0.114 * real[:, 2:]).float()
    for images in (colours, colours.float() / 255, grey):
        torch.testing.assert_close(network(images), model((grey - 0.2) / 0.5), atol=1e-5, rtol=1e-5)
