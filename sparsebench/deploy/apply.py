"""From a network of one's own and the words of a strategy to a sparse network, or the reason why not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsebench import seeds
from sparsebench.budget import FULL, Budget
from sparsebench.deploy.images import check_given, fit_on_images
from sparsebench.deploy.sparse_model import SparseModel
from sparsebench.deploy.words import Asked, understand, words
from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import CostModel
from sparsebench.measure.counts import stages
from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.deep import DeepViT
from sparsebench.planning.budgets import fit_budget
from sparsebench.strategy import Strategy
from sparsebench.training.fit import modules_of

RANDOM = "random"
"""In place of a file: what the strategy learns begins with random numbers, and is to be trained."""
FAR = 0.05
"""Share of the dense MACs by which a budget may be missed without a word."""
TAKES = "a timm VisionTransformer, as timm.create_model('deit_small_patch16_224', pretrained=True) gives it"


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
    **options: Any,
) -> SparseModel:
    """Return the sparse network; see `sparsebench.apply`, whose documentation this is."""
    _check_model(model)
    asked = understand(strategy, options)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    try:
        network = DeepViT(
            model,
            mean=cfg.get("mean", 0.5) if mean is None else mean,
            std=cfg.get("std", 0.5) if std is None else std,
        )
        _check_pixels(network.channels, mean=mean, std=std)
        _check_strategy(asked.strategy, learned, images, labels)
        _check_needs(asked.strategy, network)
        if asked.budget is None:
            budget = _all_tokens(asked.strategy, network.cost)
        else:
            budget = fit_budget(asked.budget, asked.strategy, None, network.cost)
        stream = seeds.seed_of("strategy", "apply", seed)
        actor = Actor(asked.strategy, budget, network.cost, network.grid, stream)
    except UnsupportedError as error:
        raise UserError(str(error), got=type(model).__name__, allowed=TAKES) from error
    if learned is not None:
        _load(actor, asked, learned)
    if images is not None:
        fit_on_images(network, actor, images, labels, seed)
    sparse = SparseModel(network, actor, words(asked))
    macs = None if asked.strategy.trains_only or asked.strategy.adaptive else budget.macs
    if macs is not None and abs(sparse.macs_ratio - macs) > FAR:
        warnings.warn(
            f"'{sparse.spec}' spends {sparse.macs_ratio:.3f} of the dense MACs on this network, the nearest it can",
            stacklevel=3,
        )
    return sparse


def _all_tokens(strategy: Strategy, cost: CostModel) -> Budget:
    """Return the budget of a strategy that decides itself: all tokens as upper bounds, wherever it acts."""
    blocks = stages(FULL, strategy.traits(), cost.depth)
    return Budget(counts=(cost.tokens,) * len(blocks), blocks=blocks)


def _check_model(model: Any) -> None:
    """Raise UserError for what is no network, has a strategy already, or has weights that nothing can act on."""
    if isinstance(model, SparseModel):
        raise UserError(f"the network is sparse already: {model.spec}", next_step="give its model, after .remove()")
    if not isinstance(model, nn.Module):
        raise UserError("a network is wanted", got=type(model).__name__, allowed=TAKES)
    if (holder := SparseModel.on(model)) is not None:
        raise UserError(
            f"'{holder.spec}' acts on this network, and two would be in each other's way",
            next_step="call .remove() of that one first, or give a copy.deepcopy of the network",
        )
    kinds = {weight.dtype for weight in model.parameters()}
    if wrong := sorted(str(kind) for kind in kinds - {torch.float32, torch.float64}):
        raise UserError(
            "weights of a network in half precision: scores would tie and tokens would be merged in it",
            got=wrong[0].removeprefix("torch."), allowed="float32 or float64",
            next_step="call model.float(), and torch.autocast around what you compute",
        )  # fmt: skip


def _check_pixels(channels: int, **given: float | Sequence[float] | None) -> None:
    """Raise UserError unless the mean and std that a user gives are one number, or one a channel."""
    for name, values in given.items():
        if isinstance(values, Sequence) and len(values) not in (1, channels):
            raise UserError(
                f"{name}, which pixels are normalised with", got=f"{len(values)} numbers",
                allowed=" or ".join(map(str, sorted({1, channels}))) + ", one a channel",
            )  # fmt: skip


def _check_strategy(strategy: Strategy, learned: Any, images: Any, labels: Any) -> None:
    """Raise UserError for a strategy that cannot act outside the benchmark, or has not learned what it needs."""
    name = strategy.name
    if strategy.kind == "oracle":
        raise UserError(
            f"'{name}' is an oracle: it is told which patches matter, which only the benchmark's data know",
            next_step="take a strategy that decides by what it sees; sparsebench list plugins",
        )
    if strategy.trained and learned is None:
        raise UserError(
            f"'{name}' must be trained, and nothing says what it learned",
            next_step=f"give learned=FILE.safetensors, or learned='{RANDOM}' to train it yourself",
        )
    if strategy.fits():
        check_given(strategy, learned, images, labels)
        return
    if learned is not None and not strategy.trained:
        raise UserError(f"'{name}' learns nothing", got=f"learned={learned}", next_step="leave learned out")
    if images is not None or labels is not None:
        raise UserError(
            f"'{name}' looks at no images before it acts", got="images" if images is not None else "labels",
            next_step="leave images and labels out",
        )  # fmt: skip


def _check_needs(strategy: Strategy, network: DeepViT) -> None:
    """Raise UserError or UnsupportedError for a strategy that needs what the architecture cannot give."""
    gives = network.gives(strategy.site)
    if missing := sorted(strategy.reads() - gives):
        raise UserError(
            f"'{strategy.name}' needs {', '.join(missing)}, which this network cannot give",
            got=f"{type(network.module).__name__} with {network.class_rows} class tokens",
            allowed=", ".join(sorted(gives)),
            next_step="take a strategy that reads something else; sparsebench list plugins",
        )
    if strategy.reads_out and network.module.global_pool != "token":
        raise UserError(
            f"'{strategy.name}' says what the head reads of the class token, and this network's head reads another",
            got=f"global_pool={network.module.global_pool}", allowed="global_pool=token",
        )  # fmt: skip


def _load(actor: Actor, asked: Asked, learned: str | os.PathLike[str]) -> None:
    """Put what the strategy learned, the weights of a file whose names begin with `strategy.`, into its modules."""
    if str(learned) == RANDOM:
        return
    path, modules = Path(learned), modules_of(actor)
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is no file of weights that can be read", got=str(error), allowed=".safetensors"
        ) from error
    given: dict[str, Tensor] = {
        key.removeprefix(f"{LEARNED}."): value for key, value in state.items() if key.startswith(f"{LEARNED}.")
    }
    wanted = {key: tuple(value.shape) for key, value in modules.state_dict().items()}
    if {key: tuple(value.shape) for key, value in given.items()} != wanted:
        wrong = sorted(set(wanted) ^ set(given)) or sorted(k for k in wanted if tuple(given[k].shape) != wanted[k])
        raise UserError(
            f"{path.name} does not hold what '{asked.strategy.name}' learned at this budget",
            got=f"{len(given)} weights of it; {LEARNED}.{wrong[0]} does not fit",
            allowed=f"{len(wanted)} weights that begin with {LEARNED}.",
        )  # fmt: skip
    modules.load_state_dict(given)
