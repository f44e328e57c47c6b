"""MACs of networks whose layers are not those of timm."""

from collections.abc import Callable
from typing import Any

import eva_vits
import pytest
import torch
import torch.nn.functional as F
from eva_vits import unfused
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode
from vits import vit

import sparsebench
from sparsebench.errors import UserError

LAYERS = ("qkv", "proj", "fc1", "fc2", "q_proj", "k_proj", "v_proj", "fc1_g", "fc1_x")


class LowRankUpdate(nn.Module):
    """A frozen layer plus a product of two narrow ones."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 3, bias=False)
        self.up = nn.Linear(3, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Unused(LowRankUpdate):
    """Has a low-rank update that is switched off."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class UpdatedLinear(nn.Linear):
    """A Linear with the matrices of a low-rank update."""

    def __init__(self, layer: Any):
        super().__init__(layer.in_features, layer.out_features)
        self.down = nn.Parameter(torch.randn(3, layer.in_features))
        self.up = nn.Parameter(torch.randn(layer.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Factors(nn.Module):
    """Two factors in place of a matrix."""

    def __init__(self, layer: Any):
        super().__init__()
        self.left = nn.Parameter(torch.randn(layer.in_features, 5))
        self.right = nn.Parameter(torch.randn(5, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.left @ self.right


class Matrix(nn.Module):
    """A matrix that is no parameter."""

    def __init__(self, layer: Any):
        super().__init__()
        self.matrix = layer.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


class Convolution(nn.Module):
    """A convolution of width 1 over the tokens."""

    def __init__(self, layer: Any):
        super().__init__()
        self.convolution = nn.Conv1d(layer.in_features, layer.out_features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Repeated(nn.Module):
    """Uses a layer twice."""

    def __init__(self, layer: Any):
        super().__init__()
        self.square, self.layer = nn.Linear(layer.in_features, layer.in_features), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.square(self.square(x)))


def with_norm(layer: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(layer)


def spectral(layer: nn.Module) -> nn.Module:
    return parametrizations.spectral_norm(layer)


def with_activation(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.GELU())


def replace(model: nn.Module, new: Callable[[Any], nn.Module], names: tuple[str, ...] = LAYERS) -> Any:
    """Replace the layers with these names in the blocks of a model."""
    for part in list(model.blocks.modules()):  # type: ignore[union-attr, operator]
        for name in names:
            if isinstance(layer := getattr(part, name, None), nn.Linear):
                setattr(part, name, new(layer))
    return model.eval()


def dense_macs(model: nn.Module) -> float:
    with sparsebench.apply(model, "random", macs=1.0) as sparse:
        return sparse.macs


def counted(model: nn.Module) -> int:
    """Return the MACs of one image from torch's FLOP counter over the whole network."""
    model = unfused(model).requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 32, 32))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("model", [vit, eva_vits.EVAS["EVA-02"]], ids=["plain", "EVA-02"])
@pytest.mark.parametrize(
    "new",
    [
        LowRankUpdate,
        Unused,
        UpdatedLinear,
        Factors,
        Matrix,
        Convolution,
        Repeated,
        with_norm,
        spectral,
        with_activation,
    ],
)
def test_the_macs_of_other_layers_are_those_of_the_flop_counter(
    model: Callable[[], nn.Module], new: Callable[[Any], nn.Module]
) -> None:
    changed = replace(model(), new)
    assert dense_macs(changed) == counted(changed)


def test_a_layer_without_products_costs_nothing() -> None:
    changed = replace(vit(), lambda layer: nn.Identity(), ("proj",))
    assert dense_macs(changed) == counted(changed) < dense_macs(vit())


def test_the_head_and_the_patches_are_counted_too() -> None:
    class Patches(nn.Module):
        def __init__(self, layer: nn.Module):
            super().__init__()
            self.layer, self.down, self.up = layer, nn.Conv2d(3, 2, 8, stride=8), nn.Conv2d(2, 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.up(self.down(x))

    changed: Any = vit()
    changed.head, changed.patch_embed.proj = LowRankUpdate(changed.head), Patches(changed.patch_embed.proj)
    assert dense_macs(changed) == counted(changed) > dense_macs(vit())


class Packed(nn.Module):
    """A kernel that torch's FLOP counter does not know."""

    def __init__(self, layer: Any, features: bool = True):
        super().__init__()
        self.outer = layer.out_features
        self.register_buffer("packed", torch.zeros(layer.out_features, layer.in_features // 2, dtype=torch.uint8))
        if features:
            self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=-1, keepdim=True).repeat(1, 1, self.outer)


@pytest.mark.filterwarnings("ignore:.*deprecated")  # torch's quantization will move to another package
def test_quantized_layers_cost_as_much_as_linear_ones() -> None:
    assert dense_macs(replace(vit(), Packed)) == dense_macs(vit())
    if set(torch.backends.quantized.supported_engines) - {"none"}:
        quantized = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear})
        assert dense_macs(quantized) == dense_macs(vit())
        with sparsebench.apply(quantized, "tome", macs=0.6) as sparse:
            few = sparse.tokens
        with sparsebench.apply(vit(), "tome", macs=0.6) as sparse:
            assert few == sparse.tokens


def test_products_that_only_compute_weights_are_left_out() -> None:
    class Update(nn.Module):
        def __init__(self, layer: Any):
            super().__init__()
            self.down = nn.Parameter(torch.randn(3, layer.in_features))
            self.up = nn.Parameter(torch.randn(layer.out_features, 3))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.up @ self.down

    def updated(layer: Any) -> nn.Module:
        parametrize.register_parametrization(layer, "weight", Update(layer))
        return layer

    assert dense_macs(replace(vit(), updated)) == dense_macs(vit())


class Averaging(LowRankUpdate):
    """Adds the mean over tokens, so that its MACs do not follow the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x.mean(dim=1, keepdim=True)))


class Mixing(nn.Module):
    """Attention in place of an MLP."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Broken(LowRankUpdate):
    """Multiplies matrices that do not fit."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.down(x))


def norm_with_layer() -> Any:
    changed: Any = vit()
    changed.blocks[2].norm2 = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    return changed


def attention_in_place_of_mlp() -> Any:
    changed: Any = vit()
    changed.blocks[1].mlp = Mixing()
    return changed


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: replace(vit(), lambda layer: Packed(layer, features=False), ("fc1",)), "blocks.0.mlp.fc1` (Packed)"),
        (lambda: replace(vit(), Averaging, ("qkv",)), "blocks.0.attn.qkv` (Averaging)"),
        (attention_in_place_of_mlp, "blocks.1.mlp` (Mixing)"),
        (lambda: replace(vit(), Broken, ("proj",)), "blocks.0.attn.proj` (Broken)"),
        (norm_with_layer, "blocks.2.norm2.1` (Linear)"),
        (lambda: replace(eva_vits.EVAS["norm after"](), LowRankUpdate), "blocks.0.attn.qkv` (LowRankUpdate)"),
    ],
)
def test_a_layer_whose_macs_are_unknown_is_refused_by_name(model: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(UserError) as caught:
        sparsebench.apply(model(), "random", macs=0.5)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_counting_leaves_no_trace_on_the_model() -> None:
    model = replace(vit(), LowRankUpdate).train()
    before = torch.get_rng_state()
    dense_macs(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training and not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_tensor_that_a_user_keeps_on_a_layer_of_timm_is_no_weight() -> None:
    model: Any = vit()
    for block in model.blocks:
        block.seen = block.attn.maps = block.mlp.inputs = torch.zeros(2, 4, 17, 17)
    assert dense_macs(model) == dense_macs(vit())
