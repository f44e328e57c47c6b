"""Models with Vision Transformers: a small one, and timm's by name. Does not import torch before one is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from sparsebench import hookimpl, seeds
from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel, plain_vit_cost
from sparsebench.models.base import Model, Network, Start, number_of, stem_macs, supported
from sparsebench.strategy.spec import unused_parameters
from sparsebench.tasks.base import Data, Inputs, Locations, Task
from sparsebench.tasks.sources.files import check_unchanged, path_of

if TYPE_CHECKING:
    from pathlib import Path

    from sparsebench.models.deep import DeepViT
    from sparsebench.models.timm_models import Dimensions
    from sparsebench.models.zero_shot import TextFeatures


class _Deep(Model):
    """A timm VisionTransformer.

    Attributes:
        later: the parameters that do not change the random initial weights.
    """

    inputs: ClassVar[Inputs] = "images"
    later: ClassVar[frozenset[str]] = frozenset({"attention", "precision", "pretrained", "weights", "weights_key"})

    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of matrix products; bfloat16 uses autocast"
    )

    def _network(self, canvas: int, data: Data) -> Network:
        """Return the network for images of canvas x canvas pixels."""
        raise NotImplementedError

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The initial weights do not depend on the parameters in `later`."""
        import torch

        parameters = self.model_dump_json(exclude=set(self.later) | unused_parameters(self))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of("init", self.name, parameters, repetition))
            return self._network(data.train.inputs.shape[-1], data)

    def _check_patch(self, task: Task, patch: int) -> None:
        """Raise UserError if the task has a fixed patch size and it is not the model's, `patch` pixels."""
        bound = task.bound_to()
        if bound is not None and bound != patch:
            raise UserError(
                f"{self.name}: the model must have the patches of the task, for which relevance is known",
                got=f"patch={bound} in the task, {patch} in the model",
                allowed=f"patch={patch}",
                next_step="change the task's patch or the model",
            )


class Vit(_Deep):
    """A small Vision Transformer for small images: timm's VisionTransformer, class token, random weights."""

    name: ClassVar[str] = "vit"
    added: ClassVar[frozenset[str]] = frozenset({"stem"})

    dim: int = Field(64, gt=0, description="width of the tokens")
    depth: int = Field(3, gt=0, description="blocks")
    heads: int = Field(4, gt=0, description="attention heads; must divide dim")
    patch: int = Field(4, gt=0, description="side of a patch in pixels; must divide the image")
    attention: Literal["content", "positional"] = Field(
        "content", description="input of queries and keys: the tokens, or only the position embedding"
    )
    stem: Literal["linear", "conv"] = Field(
        "linear", description="patch embedding: one projection, or convolutions (Xiao et al. 2021)"
    )

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        if self.dim % self.heads:
            raise UserError("vit: heads must divide dim", got=f"dim={self.dim}, heads={self.heads}")
        if not task.trains:
            raise UserError(
                f"task '{task.name}' tests trained weights, and model 'vit' has none",
                next_step="choose a timm model, for example --model timm:deit_tiny_patch16_224 --pretrained",
            )
        if self.stem == "conv" and (self.patch not in (2, 4, 8, 16, 32) or self.dim % self.patch):
            raise UserError(
                "vit: each convolution of stem=conv halves the image",
                got=f"patch={self.patch}, dim={self.dim}",
                allowed="a patch of 2, 4, 8, 16 or 32 that divides dim",
                next_step="or leave out stem=conv",
            )
        canvas = getattr(task, "canvas", self.patch)
        if canvas % self.patch:
            raise UserError("vit: patch must divide the image", got=f"patch={self.patch}, image={canvas}")
        self._check_patch(task, self.patch)

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`: the cost of `deep.small_vit`, without biases."""
        C = self.dim
        tokens = (number_of(task, "canvas") // self.patch) ** 2
        patch = 3 * self.patch**2 * C if self.stem == "linear" else stem_macs(C, self.patch)
        return plain_vit_cost(C, self.depth, self.heads, tokens=tokens, embed=patch, classes=classes)

    def _network(self, canvas: int, data: Data) -> Network:
        """See `_Deep._network`."""
        from sparsebench.models.deep import DeepViT, PositionalDeepViT, small_vit

        vit = small_vit(canvas, len(data.classes), **self.model_dump(exclude={"precision"}))
        if self.attention == "content":
            return DeepViT(vit, precision=self.precision)
        return PositionalDeepViT(vit, data.train.order, precision=self.precision)


class Timm(_Deep):
    """A timm VisionTransformer by name, with random weights, timm's trained weights or those of a file.

    Pixels are normalised as in timm's configuration of the model. The image size is the task's; if the task leaves it
    to the model, it is the size for which a file's weights were trained. The number of channels is also that of the
    file. The head is taken from the trained weights if its number of classes is the task's. Otherwise it is random,
    which is allowed only for tasks that train.
    """

    name: ClassVar[str] = "timm"
    positional: ClassVar[str | None] = "arch"
    added: ClassVar[frozenset[str]] = frozenset({"weights_key", "in_chans"})

    arch: str = Field("vit_tiny_patch16_224", description="name of a model in timm.list_models()")
    pretrained: bool = Field(False, description="start from timm's trained weights")
    weights: str = Field(
        "", pattern=r"^(weights-[0-9a-f]{12})?$", description="start from the weights of a file; set by --weights FILE"
    )
    weights_key: str = Field("", description="state dict in the file; set by --weights-key NAME")
    in_chans: int = Field(3, description="number of input channels: 3, or 1 for grey; with a file, as in its weights")
    _dimensions: Dimensions | None = PrivateAttr(None)

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        if self.pretrained and self.weights:
            raise UserError("weights are timm's or a file's, not both", next_step="leave out --pretrained or --weights")
        if not task.trains and not (self.pretrained or self.weights):
            raise UserError(
                f"task '{task.name}' tests trained weights", next_step="give --pretrained or --weights FILE.safetensors"
            )
        if self.arch.startswith("local-dir:"):
            raise UserError(
                "a folder exists on one machine and may change, but cells identify weights by their content",
                got=f"timm:{self.arch}",
                allowed="timm:NAME with --weights, or timm:hf-hub:USER/NAME --pretrained",
                next_step="name the architecture of its config.json, and give --weights DIR/model.safetensors",
            )
        if self.in_chans not in (1, 3):
            raise UserError(
                f"model 'timm:{self.arch}': images are read in colour, or in grey for a network with one channel",
                got=f"a network of {self.in_chans} channels",
                allowed="3, 1",
            )
        if self._dimensions is not None and self._dimensions.size is not None and not _canvas(task):
            height, width = self._dimensions.size
            raise UserError(
                f"the weights are for {height} x {width} pixels, but images are cropped to squares",
                next_step="give a size, --image-size SIDE; position embeddings are then resampled",
            )
        self._check_patch(task, self._meta_network(task, 2).patch[0])

    def with_weights(self, locations: Locations) -> Self:
        """See `Model.with_weights`: channels and image size follow from the weights of a file."""
        from sparsebench.models.timm_models import read_dimensions

        if self.weights not in locations:
            return self
        with supported(f"model 'timm:{self.arch}'"):
            dimensions = read_dimensions(self.arch, locations[self.weights], self.weights_key)
        model = self.model_copy(update={"in_chans": dimensions.channels or self.in_chans})
        model._dimensions = dimensions
        return model

    def cut(self) -> Mapping[str, Any]:
        """See `Model.cut`: timm's transform for the name, also for a file's weights, but with the file's image size."""
        from sparsebench.models.timm_models import cut_of

        cut = cut_of(self.arch)
        size = self._dimensions and self._dimensions.size
        if not size:
            return cut
        height, width = size
        return cut | {"canvas": height if height == width else 0}

    def patch_size(self) -> int | None:
        """See `Model.patch_size`; None for patches that are not square."""
        from sparsebench.models.timm_models import meta_vit, published

        height, width = meta_vit(self.arch, tuple(published(self.arch).input_size[1:]), 1).patch_embed.patch_size
        return height if height == width else None

    def classes(self, locations: Locations) -> int | None:
        """See `Model.classes`; for a file's weights only known after `with_weights`."""
        from sparsebench.models.timm_models import published

        if self.pretrained:
            return published(self.arch).num_classes
        return None if self._dimensions is None else self._dimensions.classes

    def check_weights(self, task: Task, locations: Locations) -> str:
        """See `Model.check_weights`. timm's weights are downloaded here, once for all cells."""
        from sparsebench.models.timm_models import create_vit, cut_of, head_error, match_weights

        classes, canvas = task.known_classes(locations), _canvas(task)
        outputs = 2 if classes is None else len(classes)
        if self.classes(locations) == 0 and not task.trains:  # the network is used for its features
            outputs = 0
        vit = self._meta_network(task, outputs).module
        owner = f"timm's '{self.arch}'"
        size = (cut_of(self.arch).get("canvas", canvas),) * 2
        if self.weights:
            file = path_of(self.weights, locations, "--weights")
            match_weights(vit, file, self.weights_key, fresh_head=not task.reads_head)
            owner = file.name
            size = (self._dimensions and self._dimensions.size) or size
        if self.pretrained:
            head = vit.pretrained_cfg["num_classes"]
            if task.reads_head and head != vit.num_classes:
                raise head_error(owner, head, vit.num_classes)
            create_vit(self.arch, canvas, vit.num_classes, channels=self.in_chans, pretrained=True)
        if not (self.weights or self.pretrained) or size == (canvas, canvas):
            return ""
        note = f"{owner} is made for {size[0]} x {size[1]} pixels, and task '{task.name}' has {canvas} x {canvas}"
        has_embeddings = vit.pos_embed is not None
        how = "position embeddings are resampled" if has_embeddings else "rotary positions are computed for this size"
        return f"{note}: its {how}"

    def start(self, network: Network, task: Task, locations: Locations) -> Start:
        """See `Model.start`. Weights from timm were already loaded by `build`."""
        from sparsebench.models.timm_models import load_weights

        vit = network.module
        if self.weights:
            file = path_of(self.weights, locations, "--weights")
            head = load_weights(vit, file, self.weights_key, fresh_head=not task.reads_head)
            check_unchanged(file, self.weights)
            return Start(self.weights, head)
        if not self.pretrained:
            return Start()
        cfg = vit.pretrained_cfg
        name = f"hf-hub:{cfg['hf_hub_id']}" if cfg.get("hf_hub_id") else cfg["url"]
        return Start(name, cfg["num_classes"] == vit.num_classes)

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`. Builds the network on the meta device, so it imports torch."""
        return self._meta_network(task, classes).cost

    def _meta_network(self, task: Task, classes: int) -> DeepViT:
        """Return the network on the meta device, see `meta_vit`; raise UserError if it is not supported."""
        from sparsebench.models.deep import DeepViT
        from sparsebench.models.timm_models import meta_vit

        with supported(f"model 'timm:{self.arch}'"):
            return DeepViT(meta_vit(self.arch, _canvas(task), classes, self.in_chans))

    def _network(self, canvas: int, data: Data) -> Network:
        """See `_Deep._network`."""
        from sparsebench.models.deep import DeepViT
        from sparsebench.models.timm_models import create_vit

        vit = create_vit(self.arch, canvas, len(data.classes), channels=self.in_chans, pretrained=self.pretrained)
        cfg = vit.pretrained_cfg
        return DeepViT(vit, mean=cfg["mean"], std=cfg["std"], precision=self.precision)


class Hf(_Deep):
    """A model of the transformers library, from the folder that its save_pretrained wrote.

    Its weights are used in the same network of timm, whose outputs are compared with the model's. Pixels are cut and
    normalised as the folder's image processor does it. Position embeddings are resampled as the model does it.
    """

    name: ClassVar[str] = "hf"
    positional: ClassVar[str | None] = "weights"

    weights: str = Field("", pattern=r"^(hf-[0-9a-f]{12})?$", description="the folder; set by --model hf:FOLDER")
    text_features: str = Field(
        "", pattern=r"^(text-[0-9a-f]{12})?$", description="classes as features of texts; set by --text-features FILE"
    )
    _folder: Any = PrivateAttr(None)  # a Path
    _texts: Any = PrivateAttr(None)  # a Path

    def located(self, locations: Locations) -> Self:
        """See `Model.located`."""
        model = self.model_copy()
        model._folder = locations.get(self.weights)
        model._texts = locations.get(self.text_features)
        return model

    def with_weights(self, locations: Locations) -> Self:
        """See `Model.with_weights`."""
        return self.located(locations)

    def _place(self) -> Path:
        """Return the folder; raise UserError if it is not known."""
        if self._folder is None:
            raise UserError(f"model 'hf:{self.weights}' is not on this machine", next_step="give --model hf:FOLDER")
        return self._folder

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        self._check_patch(task, self._meta_network(task).patch[0])

    def cut(self) -> Mapping[str, Any]:
        """See `Model.cut`."""
        from sparsebench.models.timm_models import cut_from
        from sparsebench.models.transformers_models import published_cut

        return cut_from(published_cut(self._place()))

    def patch_size(self) -> int | None:
        """See `Model.patch_size`; None for patches that are not square."""
        from sparsebench.models.transformers_models import meta_network, published

        height, width = meta_network(self._place(), published(self._place()).input_size[1:]).patch_embed.patch_size
        return height if height == width else None

    def classes(self, locations: Locations) -> int | None:
        """See `Model.classes`."""
        from sparsebench.models.transformers_models import published

        if self.text_features:
            return len(self.located(locations)._read_texts().classes)
        return published(self.located(locations)._place()).num_classes

    def _read_texts(self) -> TextFeatures:
        """Return the features of texts."""
        from sparsebench.models.zero_shot import read_text_features

        if self._texts is None:
            raise UserError(f"'{self.text_features}' of this cell is not on this machine", next_step="--text-features")
        return read_text_features(self._texts)

    def _with_texts(self, whole: Any, vit: Any) -> None:
        """Give a network the head of the features of texts."""
        from sparsebench.models.zero_shot import set_text_head

        set_text_head(whole, vit, self._read_texts())

    def check_weights(self, task: Task, locations: Locations) -> str:
        """See `Model.check_weights`."""
        from sparsebench.models.transformers_models import load, report

        model = self.located(locations)
        converted = load(model._place(), _canvas(task))
        if self.text_features:
            model._with_texts(converted.whole, converted.vit)
        return report(converted)

    def start(self, network: Network, task: Task, locations: Locations) -> Start:
        """See `Model.start`. The weights were already loaded by `build`."""
        from sparsebench.models.transformers_models import check_unchanged

        check_unchanged(self._place(), self.weights)
        return Start(self.weights, network.module.num_classes == self.classes(locations))

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`. Builds the network on the meta device, so it imports torch and transformers."""
        return self._meta_network(task, classes).cost

    def _meta_network(self, task: Task, classes: int = 2) -> DeepViT:
        """Return the network on the meta device; raise UserError if it is not supported."""
        from sparsebench.models.deep import DeepViT
        from sparsebench.models.transformers_models import meta_network, skeleton
        from sparsebench.models.zero_shot import text_head

        vit = meta_network(self._place(), _canvas(task))
        if self.text_features:
            vit.head = text_head(skeleton(self._place()), vit, classes)
            vit.num_classes = classes
            return DeepViT(vit.to("meta"))
        with supported(f"model 'hf:{self._place()}'"):
            vit.reset_classifier(classes)
            return DeepViT(vit.to("meta"))

    def _network(self, canvas: int, data: Data) -> Network:
        """See `_Deep._network`."""
        from sparsebench.models.deep import DeepViT
        from sparsebench.models.transformers_models import load

        converted = load(self._place(), canvas)
        vit = converted.vit
        if self.text_features and data.classes:
            self._with_texts(converted.whole, vit)
        if vit.num_classes != len(data.classes):
            vit.reset_classifier(len(data.classes))
        cfg = vit.pretrained_cfg
        return DeepViT(vit, mean=cfg["mean"], std=cfg["std"], precision=self.precision)


def _canvas(task: Task) -> int:
    return getattr(task, "canvas", 224)


@hookimpl
def sparsebench_models() -> list[type[Model]]:
    """See `Hooks`."""
    return [Vit, Timm, Hf]
