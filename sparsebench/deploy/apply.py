"""Apply a strategy to a user's model of timm or transformers, or raise a UserError with the reason why not."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from sparsebench import seeds
from sparsebench.deploy.sparse_model import SparseModel, describe
from sparsebench.deploy.sparse_transformer import SparseTransformer
from sparsebench.errors import UserError, one_line
from sparsebench.measure.cost import CostModel
from sparsebench.measure.schedule import TokenSchedule, only_schedule
from sparsebench.models import naflex, transformers_models
from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.base import TRANSFORMERS, supported
from sparsebench.models.deep import DeepViT
from sparsebench.models.timm_models import content_of, create_vit, load_weights, published, read_dimensions
from sparsebench.models.timm_parts import refuse
from sparsebench.models.transformers_models import Converted
from sparsebench.models.vits import Timm
from sparsebench.plan.contenders import BUDGET_KEYS, fit_budget, settings_of
from sparsebench.plan.locate import locate_weights
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Strategy, complaint
from sparsebench.strategy.budget import AMOUNTS, AUTO, FRACTIONS, FULL, Budget
from sparsebench.strategy.spec import fill, parse, words_of
from sparsebench.strategy.view import Images
from sparsebench.tasks.base import Recipe
from sparsebench.training.fit import fit, modules_of
from sparsebench.training.schedules import MANY, Chosen, choose
from sparsebench.training.steps import Samples

log = logging.getLogger(__name__)

NAMES = "timm:NAME, timm:hf-hub:USER/NAME, timm:local-dir:DIR, or hf:FOLDER of the transformers library"
RANDOM = "random"
"""The value of `learned` for random initial weights, instead of a file."""
FAR = 0.05
"""Difference between the requested and the actual share of the dense MACs from which `apply` warns."""
TAKES = (
    "a timm VisionTransformer, such as timm.create_model('deit_small_patch16_224', pretrained=True), or a model of the "
    "transformers library, such as Dinov2Model"
)


def apply(
    model: nn.Module,
    strategy: str | type[Strategy] | Strategy,
    *,
    learned: str | os.PathLike[str] | None = None,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    seed: int = 0,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    image_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> SparseModel:
    """Apply a strategy to a model. The result has the same inputs and the same output format as the model.

    sparse = sparsebench.apply(model, "tome:per_block=13")
    logits = sparse(pixels)
    print(sparse.macs_ratio, sparse.tokens)

    The weights are shared with the model and have the same names, so training the sparse network trains the model. The
    model itself is not changed. Plans are fully checked at the first call for each input shape. For an adaptive
    strategy, the token counts of the budget are not calibrated on pictures (a run calibrates them). A strategy whose
    published setting has no budget, such as `a_vit:beta=-75`, needs no budget: any number of tokens may stay.

    The weights of a model of the transformers library are copied into the same network of timm, whose outputs are
    compared with the model's on two random images. The result is a `SparseTransformer`.

    Args:
        model: a timm VisionTransformer or a model of transformers, with weights of 32 or 64 bits.
        strategy: a value of `--plugin`, or your own strategy class or instance.
        learned: tensors that the strategy has learned, for a strategy that is trained or needs training images: a
            .safetensors file with tensors named `strategy.*`, as in `sparse.state_dict()`; or "random" to start a
            training.
        images: (n, channels, height, width) training pictures, normalised as for the model, for a strategy with `fit`,
            or for schedule="auto"; of these, 128 are enough.
        labels: (n,) int64 class numbers of `images`, for a strategy that needs labels.
        seed: seed of the strategy's random numbers, which also depend on the position of a picture in its batch.
        mean: mean of the pixel normalisation, for strategies that read pixels: one number, or one per channel. Default:
            `model.pretrained_cfg` (averaged over channels if the network has another number of channels), else 0.5.
        std: standard deviation of the pixel normalisation, as `mean`.
        image_size: side or (height, width) of the images, if not that of the model. Position embeddings are then
            resampled, which is logged. They are not shared with the model; all other weights are.
        options: budget and parameters of the strategy by name, such as macs=0.5, disposal="merge".

    Raises:
        UserError: the model, the strategy or an argument is not supported; the model is unchanged.
    """
    _check_model(model)
    _check_shares(options)
    instance, budget, name = strategy_of(strategy, options)
    vit, converted = _as_timm(model, image_size)
    with supported("this network", got=type(vit).__name__, allowed=TAKES):
        network = _network_of(vit, mean, std)
        chooses = budget is not None and budget.schedule == AUTO
        _check_strategy(instance, learned, images, labels, chooses)
        network.check(instance)
        amount = _amount_of(instance, budget, network.cost)
        if amount.schedule == AUTO:
            amount = choose_on_images(network, instance, amount, images, seed).counts
        if chooses:
            budget = amount
        actor = Actor(instance, amount, network.cost, network.grid, seeds.seed_of("strategy", "apply", seed))
    if learned is not None:
        _load(actor, learned)
    if images is not None and instance.fits():
        _fit_on_images(network, actor, images, labels, seed)

    words = spec_of(instance, budget, name)
    if converted is None:
        sparse = SparseModel(network, actor, words)
    else:
        sparse = SparseTransformer(network, actor, words, converted)
    _warn_if_far(sparse, instance, amount)
    return sparse


def _as_timm(model: nn.Module, image_size: int | tuple[int, int] | None) -> tuple[Any, Converted | None]:
    """Return a model as one of timm for images of a size, and its conversion if it is of the transformers library."""
    if transformers_models.family_of(model) is not None:
        converted = transformers_models.convert(model, image_size)
        log.warning(transformers_models.report(converted))
        return converted.vit, converted
    if isinstance(model, NaFlexVit):
        with supported("this network", got=type(model).__name__, allowed=TAKES):
            vit, line = naflex.convert(model, image_size)
        log.warning(line)
        return vit, None
    if image_size is not None:
        return resized(model, image_size), None
    return model, None


def resized(model: Any, size: int | tuple[int, int]) -> Any:
    """Return a timm model for images of another size. Position embeddings are resampled; other weights are shared.

    Args:
        model: the model, which stays as it is.
        size: side or (height, width) of the images in pixels.

    Raises:
        UserError: the model cannot have this size.
    """
    height, width = transformers_models.pair(size)
    with supported("this network", got=type(model).__name__, allowed=TAKES):
        refuse(model)
    own = tuple(model.patch_embed.img_size)
    if own == (height, width):
        return model
    patch = model.patch_embed.patch_size
    if any(pixels < side or pixels % side for pixels, side in zip((height, width), patch, strict=True)):
        raise UserError(
            "image_size",
            got=f"{height} x {width} pixels",
            allowed=f"multiples of the patch size, {patch[0]} x {patch[1]} pixels",
        )
    shared = {id(weight): weight for weight in model.parameters()}
    other = copy.deepcopy(model, shared)
    other.set_input_size((height, width))
    _note_resampling(type(model).__name__, other, own)
    return other


def _warn_if_far(sparse: SparseModel, strategy: Strategy, budget: Budget) -> None:
    """Warn the caller of `apply` if a network's share of the dense MACs is far from the requested one, if any.

    An adaptive strategy has no fixed cost, and one that acts only in training has that of dense.
    """
    if strategy.trains_only or strategy.adaptive or budget.macs is None:
        return
    if abs(sparse.macs_ratio - budget.macs) > FAR:
        warnings.warn(
            f"'{sparse.spec}' has {sparse.macs_ratio:.3f} of the dense MACs on this network, the closest possible",
            stacklevel=3,
        )


def _network_of(model: nn.Module, mean: Any, std: Any) -> DeepViT:
    """Return the network on which a strategy acts, which shares the weights of a timm model.

    Raises:
        UserError: the number of means or standard deviations is wrong.
        UnsupportedError: see `DeepViT`.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}
    network = DeepViT(
        model,
        mean=cfg.get("mean", 0.5) if mean is None else mean,
        std=cfg.get("std", 0.5) if std is None else std,
    )
    _check_pixels(network.channels, mean=mean, std=std)
    return network


def _amount_of(strategy: Strategy, budget: Budget | None, cost: CostModel) -> Budget:
    """Return a budget as this strategy uses it on a network; without a budget, all tokens may stay in each block."""
    if budget is not None:
        return fit_budget(budget, strategy, None, cost)
    blocks = TokenSchedule(FULL, strategy.traits(), cost).blocks
    return Budget(counts=(cost.tokens,) * len(blocks), blocks=blocks)


def timm_model(text: str, weights: Path | None, key: str = "", *, fetch: bool = True, side: int | None = None) -> Any:
    """Return a timm model with trained weights from timm or from a file.

    With a file, the image size, the channels and the classes are those of its weights. A model without a head returns
    the pooled features.

    Args:
        text: the model, in one of the forms `NAMES`.
        weights, key: a file, see `locate_weights`; None for timm's weights.
        fetch: whether to load timm's weights if there is no file; otherwise the weights are random.
        side: side of the images in pixels, if not that of the weights. Position embeddings are then resampled, which is
            logged. hf:FOLDER has its weights in the folder.

    Raises:
        UserError: there is no such model, its weights are missing or do not fit, or it cannot have this size.
    """
    if transformers_models.is_transformers(text):
        return _from_folder(text, weights, side)
    arch = _architecture(text)
    cfg = published(arch)
    own = (cfg.input_size[1], cfg.input_size[2])
    if weights is None:
        with _supported_at(text, side):
            vit = create_vit(arch, _size(own, side), cfg.num_classes, pretrained=fetch)
        if fetch:
            _note_resampling(text, vit, own)
        return vit.eval()

    file = _one_file(weights, key)
    with _supported_at(text, side):
        dims = read_dimensions(arch, file, key)
        own = dims.size or own
        classes = cfg.num_classes if dims.classes is None else dims.classes
        vit = create_vit(arch, _size(own, side), classes, channels=dims.channels or 3)
    load_weights(vit, file, key, fresh_head=False)
    _note_resampling(file.name, vit, own)
    return vit.eval()


def _from_folder(text: str, weights: Path | None, side: int | None) -> Any:
    """Return the timm model of hf:FOLDER, a model of the transformers library."""
    if weights is not None:
        raise UserError(
            f"'{text}' has its weights in its folder", got=f"--weights {weights}", next_step="leave --weights out"
        )
    converted = transformers_models.load(transformers_models.folder_of(text), side)
    log.warning(transformers_models.report(converted))
    return converted.vit


def _architecture(text: str) -> str:
    """Return timm's name of the model timm:NAME."""
    spec = parse(text, positional=Timm.positional)
    if spec.name != Timm.name or set(spec.params) - {"arch"}:
        hint = f"did you mean 'timm:{text}'?" if timm.models.is_model(text) else None
        if transformers_models.is_of_transformers(Path(text)):
            hint = f"did you mean '{TRANSFORMERS}{text}'?"
        raise UserError("the timm model", got=f"'{text}'", allowed=NAMES, next_step=hint)
    (arch,) = spec.params.get("arch", ["vit_tiny_patch16_224"])
    return arch


def _one_file(weights: Path, key: str) -> Path:
    """Return the file of weights at a place, see `locate_weights`."""
    files = locate_weights((weights,), key)
    if len(files) > 1:
        raise UserError("--weights must be one file", got=f"{len(files)} files in {weights}")
    (file,) = files.values()
    return file


def _supported_at(text: str, side: int | None) -> AbstractContextManager[None]:
    """Return the context `supported` for a model with images of this side, if one is given."""
    if side is None:
        return supported(f"model '{text}'")
    return supported(f"model '{text}' at {side} x {side} pixels", next_step="give another image size")


def description(model: Any) -> str:
    """Return the size of a timm model's images and its output in words.

    >>> description(timm.create_model("test_vit", num_classes=7))
    '160 x 160 pixels, logits of 7 classes'
    """
    height, width = model.patch_embed.img_size
    output = f"logits of {model.num_classes} classes" if model.num_classes else "pooled features: it has no head"
    return f"{height} x {width} pixels, {output}"


def _size(own: tuple[int, int], side: int | None) -> tuple[int, int]:
    """Return the (height, width) of the images: that of the weights, unless a side is given."""
    return own if side is None else (side, side)


def _note_resampling(owner: str, vit: Any, own: tuple[int, int]) -> None:
    """Log that position embeddings were resampled, if the image size is not the weights' own (height, width)."""
    size = tuple(vit.patch_embed.img_size)
    if size != own and vit.pos_embed is not None:
        log.warning("%s: position embeddings are resampled from %d x %d to %d x %d pixels", owner, *own, *size)


def strategy_of(
    strategy: str | type[Strategy] | Strategy, options: dict[str, Any]
) -> tuple[Strategy, Budget | None, str]:
    """Return the strategy, its budget, and its name or file, for a value of `--plugin`, a class or an instance.

    The budget is None if none is given and the strategy needs none: it is adaptive, and a published setting has no
    budget.

    Raises:
        UserError: a name is unknown, an option is given twice, has several values or is missing.
    """
    budget_keys = set(options) & set(BUDGET_KEYS)
    if isinstance(strategy, str):
        spec = parse(strategy)
        name = spec.name
        instance, budget = _from_name(strategy, options)
        budget_keys |= set(spec.params) & set(BUDGET_KEYS)
    else:
        amounts = {key: value for key, value in options.items() if key in budget_keys}
        params = {key: value for key, value in options.items() if key not in budget_keys}
        instance = _from_object(strategy, params)
        name = instance.name
        budget = fill(Budget, amounts, f"the budget of '{name}'") if budget_keys & set(AMOUNTS) else None

    if not instance.budgeted:
        if budget_keys:
            got = ", ".join(sorted(budget_keys))
            raise UserError(f"'{instance.name}' has no budget", got=got, next_step="leave it out")
        return instance, FULL, name
    if budget is None and (budget_keys or not _may_lack_budget(instance)):
        raise UserError(
            f"the budget of '{instance.name}' is missing",
            next_step="give one, such as macs=0.5, keep_rate=0.7 or per_block=13",
        )
    return instance, budget, name


def _from_name(text: str, options: dict[str, Any]) -> tuple[Strategy, Budget | None]:
    """Return the strategy and the budget of a value of `--plugin`, which the options complete."""
    clash = sorted(set(parse(text).params) & set(options))
    if clash:
        raise UserError(f"'{clash[0]}' is given twice", got=f"'{text}' and {clash[0]}={options[clash[0]]}")
    settings = settings_of(text, Registry(), more=options)
    if len(settings) != 1:
        raise UserError(
            "a network takes one strategy at one budget",
            got=f"'{text}', which is {len(settings)}",
            next_step="name one, or give its class",
        )
    return settings[0]


def _from_object(strategy: type[Strategy] | Strategy, params: dict[str, Any]) -> Strategy:
    """Return an instance unchanged, or an instance of a class with these parameters."""
    if isinstance(strategy, Strategy):
        if params:
            raise UserError(
                f"'{strategy.name}' is an instance, so its parameters are fixed",
                got=", ".join(f"{key}={params[key]}" for key in sorted(params)),
                allowed=BUDGET_KEYS,
                next_step="give the parameters when you create it",
            )
        return strategy
    problem = complaint(strategy)
    if problem:
        raise UserError(problem, next_step="give a name, as in 'tome:per_block=13', or a strategy")
    return fill(strategy, params, f"strategy '{strategy.name}'", BUDGET_KEYS)


def _may_lack_budget(strategy: Strategy) -> bool:
    """Return whether any number of tokens may stay: it is adaptive, and has a published setting without a budget."""
    published = (parse(setting.words) for setting in strategy.published)
    return strategy.adaptive and any(not setting.params.keys() & AMOUNTS for setting in published)


def spec_of(strategy: Strategy, budget: Budget | None, name: str) -> str:
    """Return the value of `--plugin` for which `strategy_of` returns these values.

    >>> spec_of(*strategy_of("tome:per_block=13", {"proportional": False}))
    'tome:proportional=false,per_block=13'
    """
    params = strategy.model_dump(mode="json", exclude_defaults=True)
    amounts = budget.model_dump(exclude_unset=True, exclude_none=True) if budget and strategy.budgeted else {}
    return name + words_of(params | amounts)


def _check_model(model: Any) -> None:
    """Raise UserError if the model is not a network, already has a strategy, or has weights in half precision."""
    if isinstance(model, SparseModel):
        raise UserError(f"the network already has a strategy: {model.spec}", next_step="give what .remove() returns")
    if not isinstance(model, nn.Module):
        raise UserError("the model", got=type(model).__name__, allowed=TAKES)
    if (holder := SparseModel.on(model)) is not None:
        raise UserError(
            f"'{holder.spec}' already acts on this network, and a network can have only one strategy",
            next_step="call .remove() on that sparse network, or give a copy.deepcopy of the model",
        )
    dtypes = {weight.dtype for weight in model.parameters()}
    if wrong := sorted(str(dtype) for dtype in dtypes - {torch.float32, torch.float64}):
        raise UserError(
            "weights in half precision: scores would have ties, and tokens would be merged in half precision",
            got=wrong[0].removeprefix("torch."),
            allowed="float32 or float64",
            next_step="call model.float(), and use torch.autocast",
        )


def _check_shares(options: dict[str, Any]) -> None:
    """Raise UserError if a share of a budget is a text."""
    for key in FRACTIONS:
        value = options.get(key)
        if isinstance(value, str):
            raise UserError(f"{key} must be a number", got=repr(value), allowed="(0, 1]")


def _check_pixels(channels: int, **statistics: float | Sequence[float] | None) -> None:
    """Raise UserError unless mean and std are one number, or one number per channel."""
    for name, values in statistics.items():
        if isinstance(values, Sequence) and len(values) not in (1, channels):
            raise UserError(
                f"{name} of the pixel normalisation",
                got=f"{len(values)} numbers",
                allowed=" or ".join(map(str, sorted({1, channels}))) + ", one per channel",
            )


def _check_strategy(strategy: Strategy, learned: Any, images: Any, labels: Any, chooses: bool) -> None:
    """Raise UserError if the strategy is an oracle, or if `learned`, `images` and `labels` are not what it needs.

    `chooses` says whether a schedule is asked to be chosen on `images`.
    """
    name = strategy.name
    if strategy.kind == "oracle":
        raise UserError(
            f"'{name}' is an oracle: it reads the relevance mask, which only the benchmark's data have",
            next_step="choose another strategy; see sparsebench list plugins",
        )
    if strategy.trained and learned is None:
        raise UserError(
            f"'{name}' must be trained, but no trained parameters are given",
            next_step=f"give learned=FILE.safetensors, or learned='{RANDOM}' to train it yourself",
        )
    if chooses and not only_schedule(strategy) and images is None:
        raise UserError(
            f"schedule='auto' chooses the schedule of '{name}' on pictures, and none are given",
            next_step=f"give images=PIXELS in Python, about {MANY} training pictures normalised as for the model, or "
            "the counts that `sparsebench schedules` prints",
        )
    if chooses and not strategy.fits():
        images = None  # they are for the choice
    arguments = {"learned": learned, "images": images, "labels": labels}
    names = [argument for argument, value in arguments.items() if value is not None]
    allowed = [["learned"]] if strategy.trained or strategy.fits() else [[]]
    if strategy.fits():
        allowed.append(["images", "labels"] if strategy.fit_labels else ["images"])
    if names not in allowed:
        need = f"needs about {strategy.fit_images} training images" if strategy.fits() else "needs no images"
        raise UserError(
            f"'{name}' {need}",
            got=" and ".join(names) or "neither images nor learned",
            allowed=" or ".join(" and ".join(words) or "neither images nor learned" for words in allowed),
        )


def _load(actor: Actor, learned: str | os.PathLike[str]) -> None:
    """Load the tensors named `strategy.*` of a file into the strategy's modules; "random" loads nothing."""
    if str(learned) == RANDOM:
        return
    path = Path(learned)
    modules = modules_of(actor)
    start = f"{LEARNED}."
    tensors = {key.removeprefix(start): value for key, value in content_of(path).items() if key.startswith(start)}
    try:
        modules.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(
            f"{path.name} does not have the weights of '{actor.strategy.name}' at this budget",
            got=one_line(error)[:200],
            allowed=f"{len(modules.state_dict())} weights whose names begin with {start}",
        ) from error


def _check_images(network: DeepViT, images: Any) -> None:
    """Raise UserError unless images are (n, channels, height, width), finite, and of the sizes of the network."""
    weight = next(network.module.parameters())
    n = len(images) if isinstance(images, Tensor) and images.ndim else 0
    shape = (n, *network.pixels)
    if n == 0 or tuple(images.shape) != shape or images.dtype != weight.dtype or not images.isfinite().all():
        allowed = f"(n, {', '.join(map(str, shape[1:]))}), n >= 1, finite {weight.dtype}, normalised as for the network"
        raise UserError("training images", got=describe(images), allowed=allowed)


def choose_on_images(network: DeepViT, strategy: Strategy, budget: Budget, images: Any, seed: int) -> Chosen:
    """Choose the schedule of a strategy on (n, channels, height, width) images, normalised as for the model.

    Raises:
        UserError: the images do not fit the model.
    """
    _check_images(network, images)
    inputs = network.restore(images[:MANY].to(next(network.module.parameters()).device))
    samples = Samples(inputs, torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device), None)
    stream = seeds.seed_of("schedule", "apply", seed)
    classifies = network.module.num_classes > 0
    was_training = network.module.training
    chosen = choose(network, strategy, budget, samples, samples.items, stream, classifies=classifies)
    network.module.train(was_training)
    return chosen


def _fit_on_images(network: DeepViT, actor: Actor, images: Any, labels: Any, seed: int) -> None:
    """Fit the actor's strategy on (n, channels, height, width) images, normalised as for the model.

    Raises:
        UserError: the images or labels do not fit the model; or see `fit`.
    """
    _check_images(network, images)
    weight = next(network.module.parameters())
    classes = network.module.num_classes
    n = len(images)
    if labels is not None and not classes:
        raise UserError(
            f"'{actor.strategy.name}' looks at labels, and the network has no head, so it has no classes",
            next_step="use another strategy, or give the network a head",
        )
    if labels is not None and (
        not isinstance(labels, Tensor)
        or labels.dtype != torch.int64
        or tuple(labels.shape) != (n,)
        or int(labels.min()) < 0
        or int(labels.max()) >= classes
    ):
        raise UserError(
            "labels of the training images",
            got=describe(labels),
            allowed=f"({n},) torch.int64, classes of the network, 0..{classes - 1}",
        )
    inputs = network.restore(images.to(weight.device))
    targets = None if labels is None else labels.to(weight.device)
    recipe = Recipe("cross-entropy", "adamw", 0.0, 0, epochs=0, steps=0)
    if actor.acts:
        rows = torch.arange(len(images), device=weight.device)
        fit(network, actor, Images(inputs, rows, targets), recipe, seeds.seed_of("fit", "apply", seed))
