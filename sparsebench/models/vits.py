"""Vision Transformers by their parameters: a small one, and timm's by name. Imports no torch until one is built."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from sparsebench import seeds
from sparsebench.collector import without_collector
from sparsebench.errors import UnsupportedError, UserError
from sparsebench.layers.widths import stem_widths
from sparsebench.measure.cost import BlockCost, CostModel, VitCost
from sparsebench.models.base import Model, Network, Start, number_of
from sparsebench.spec import unused_parameters
from sparsebench.tasks.base import Data, Inputs, Locations, Task

MLP_RATIO = 4
"""Neurons of a block's MLP over its width, in timm's VisionTransformer unless told otherwise."""


class _Deep(Model):
    """A timm VisionTransformer.

    Attributes:
        later: the parameters that do not change the random weights it begins with.
    """

    inputs: ClassVar[Inputs] = "images"
    later: ClassVar[frozenset[str]] = frozenset({"attention", "precision", "pretrained", "weights"})

    precision: Literal["float32", "bfloat16"] = Field("float32", description="of products; bfloat16 by autocast")

    def _vit(self, canvas: int, classes: int) -> Any:
        raise NotImplementedError

    def _network(self, vit: Any, data: Data) -> Network:
        """Return what acts on the timm model."""
        raise NotImplementedError

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The kind of attention and the precision do not change the first weights."""
        import torch

        law = self.model_dump_json(exclude=set(self.later) | unused_parameters(self))
        with torch.random.fork_rng(devices=[]), without_collector():  # timm is loaded with the first
            torch.default_generator.manual_seed(seeds.seed_of("init", self.name, law, repetition))
            return self._network(self._vit(data.train.inputs.shape[-1], len(data.classes)), data)

    def _check_patch(self, task: Task, patch: int) -> None:
        """Raise UserError if the task needs patches that are not the model's, `patch` pixels a side."""
        bound = task.bound_to()
        if bound is not None and bound != patch:
            raise UserError(
                f"{self.name}: the task's patches must be the model's, for which relevance is known",
                got=f"patch={bound} in the task, {patch} in the model", allowed=f"patch={patch}",
                next_step="change the task's patch or the model",
            )  # fmt: skip


class Vit(_Deep):
    """A small Vision Transformer for small images: timm's VisionTransformer, class token, random weights."""

    name: ClassVar[str] = "vit"
    added: ClassVar[frozenset[str]] = frozenset({"stem"})

    dim: int = Field(64, gt=0, description="width of the tokens")
    depth: int = Field(3, gt=0, description="blocks")
    heads: int = Field(4, gt=0, description="attention heads; must divide dim")
    patch: int = Field(4, gt=0, description="side of a patch in pixels; must divide the image")
    attention: Literal["content", "positional"] = Field(
        "content", description="what queries and keys are made of: the tokens, or the position embedding alone"
    )
    stem: Literal["linear", "conv"] = Field(
        "linear", description="what makes the patches: one projection, or convolutions (Xiao et al. 2021)"
    )

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        if self.dim % self.heads:
            raise UserError("vit: heads must divide dim", got=f"dim={self.dim}, heads={self.heads}")
        if not task.trains:
            raise UserError(
                f"task '{task.name}' tests trained weights, and model 'vit' has none",
                next_step="name a timm model, as in --model timm:deit_tiny_patch16_224 --pretrained",
            )
        if self.stem == "conv" and (self.patch not in (2, 4, 8, 16, 32) or self.dim % self.patch):
            raise UserError(
                "vit: a stem of convolutions halves the image", got=f"patch={self.patch}, dim={self.dim}",
                allowed="a patch of 2, 4, 8, 16 or 32 that divides dim", next_step="or leave stem=conv out",
            )  # fmt: skip
        canvas = getattr(task, "canvas", self.patch)
        if canvas % self.patch:
            raise UserError("vit: patch must divide the image", got=f"patch={self.patch}, image={canvas}")
        self._check_patch(task, self.patch)

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`: the closed form of `small_vit.small_vit`, biases not counted."""
        C, tokens = self.dim, (number_of(task, "canvas") // self.patch) ** 2
        block = BlockCost(3 * C * C, C * C, 2 * MLP_RATIO * C * C, C)
        return VitCost(tokens, 1, 1, self._patch_macs(), C * classes, (block,) * self.depth, C, self.heads)

    def _patch_macs(self) -> int:
        """Return the MACs of making one patch: of a projection, or of the convolutions of `stem.ConvStem`."""
        if self.stem == "linear":
            return 3 * self.patch**2 * self.dim
        widths = stem_widths(self.dim, self.patch)
        places = [(self.patch >> k) ** 2 for k in range(1, len(widths))]
        return self.dim**2 + sum(n * 9 * C * wider for n, (C, wider) in zip(places, pairwise(widths), strict=True))

    def _vit(self, canvas: int, classes: int) -> Any:
        from sparsebench.models.small_vit import small_vit

        return small_vit(canvas, classes, **self.model_dump(exclude={"precision"}))

    def _network(self, vit: Any, data: Data) -> Network:
        """See `_Deep._network`."""
        from sparsebench.models.deep import DeepViT
        from sparsebench.models.small_vit import PositionalDeepViT

        if self.attention == "content":
            return DeepViT(vit, precision=self.precision)
        return PositionalDeepViT(vit, data.train.order, precision=self.precision)


class Timm(_Deep):
    """Any timm VisionTransformer by name, at the task's image size: random weights, timm's trained ones, or a file's.

    Pixels are normalised as timm has it for that model. A head of as many classes as the task has comes with the
    weights; where the numbers differ it is a fresh one, which only a task that trains can have.
    """

    name: ClassVar[str] = "timm"
    positional: ClassVar[str | None] = "arch"

    arch: str = Field("vit_tiny_patch16_224", description="a name that timm.list_models() gives")
    pretrained: bool = Field(False, description="begin with the weights that timm fetches for that name")
    weights: str = Field(
        "", pattern=r"^(weights-[0-9a-f]{12})?$", description="begin with those of a file: given by --weights FILE"
    )

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        if self.pretrained and self.weights:
            raise UserError("weights are either timm's or a file's", next_step="leave --pretrained or --weights out")
        if not task.trains and not (self.pretrained or self.weights):
            raise UserError(
                f"task '{task.name}' tests trained weights", next_step="give --pretrained or --weights FILE.safetensors"
            )
        if self.arch.startswith("local-dir:"):
            raise UserError(
                "a folder is on one machine, and what lies in it may change: cells name weights by what is in them",
                got=f"timm:{self.arch}", allowed="timm:NAME with --weights, or timm:hf-hub:USER/NAME --pretrained",
                next_step="name the architecture of its config.json, and give --weights DIR/model.safetensors",
            )  # fmt: skip
        vit = self.empty(task, 2)
        self._check_patch(task, vit.patch_embed.patch_size[0])

    def cut(self) -> Mapping[str, Any]:
        """See `Model.cut`: as timm has it for the name, whose weights they are or not."""
        from sparsebench.models.timm_models import cut_of

        return cut_of(self.arch)

    def classes(self, locations: Locations) -> int | None:
        """See `Model.classes`."""
        from sparsebench.models.timm_models import classes_in, classes_of

        if self.weights:
            return classes_in(self._file(locations))
        return (classes_of(self.arch) or None) if self.pretrained else None

    def check_weights(self, task: Task, locations: Locations) -> None:
        """See `Model.check_weights`. What timm has to fetch is fetched here, once for all cells."""
        from sparsebench.models.timm_models import check_head, match_weights, named_vit

        classes = task.known_classes(locations)
        vit = self.empty(task, 2 if classes is None else len(classes))
        if self.weights:
            match_weights(vit, self._file(locations), fresh_head=task.trains)
        if self.pretrained:
            if not task.trains:
                check_head(vit, f"timm's '{self.arch}'")
            named_vit(self.arch, _canvas(task), vit.num_classes, pretrained=True)

    def start(self, network: Network, task: Task, locations: Locations) -> Start:
        """See `Model.start`. What timm fetches is in the built network already."""
        from sparsebench.models.timm_models import check_head, load_weights

        vit = network.module
        if self.weights:
            return Start(self.weights, load_weights(vit, self._file(locations), fresh_head=task.trains))
        if not self.pretrained:
            return Start()
        if not task.trains:
            check_head(vit, f"timm's '{self.arch}'")
        cfg = vit.pretrained_cfg
        name = f"hf-hub:{cfg['hf_hub_id']}" if cfg.get("hf_hub_id") else cfg["url"]
        return Start(name, cfg["num_classes"] == vit.num_classes)

    def _file(self, locations: Locations) -> Path:
        if self.weights not in locations:
            raise UserError(
                f"the weights '{self.weights}' of this cell are not on this machine", next_step="give --weights"
            )
        return locations[self.weights]

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`. The network is made without numbers for that; imports torch."""
        from sparsebench.models.deep import DeepViT

        try:
            return DeepViT(self.empty(task, classes)).cost
        except UnsupportedError as error:
            raise UserError(str(error)) from error

    def empty(self, task: Task, classes: int) -> Any:
        """Return the timm model without numbers, if it can be acted on."""
        import torch

        from sparsebench.models.deep import DeepViT
        from sparsebench.models.timm_models import named_vit

        try:
            with torch.device("meta"):
                return DeepViT(named_vit(self.arch, _canvas(task), classes)).module
        except UnsupportedError as error:
            raise UserError(f"model 'timm:{self.arch}' is not supported: {error}") from error

    def _vit(self, canvas: int, classes: int) -> Any:
        from sparsebench.models.timm_models import named_vit

        return named_vit(self.arch, canvas, classes, pretrained=self.pretrained)

    def _network(self, vit: Any, data: Data) -> Network:
        """See `_Deep._network`."""
        from sparsebench.models.deep import DeepViT

        cfg = vit.pretrained_cfg
        return DeepViT(vit, mean=cfg["mean"], std=cfg["std"], precision=self.precision)


def _canvas(task: Task) -> int:
    return getattr(task, "canvas", 224)
