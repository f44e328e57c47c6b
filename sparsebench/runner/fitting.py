"""A strategy looks at training images of its cell before the test; what it learned is kept for cells like it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import safe_open, save

from sparsebench import __version__, files, seeds
from sparsebench.errors import UnsupportedError, UserError
from sparsebench.models.actor import Actor
from sparsebench.plan.job import Job
from sparsebench.records.cell import digest
from sparsebench.runner.prepare import Prepared
from sparsebench.strategy.view import Images
from sparsebench.training.fit import Fitted, fit, load, modules_of, state_digest, weights_of

log = logging.getLogger(__name__)

FIT = "fit"
"""The note of a record on what its strategy learned from training images."""
SHOWN = "shown"


def fit_cell(cell: Prepared, job: Job, out: Path) -> str:
    """Let the cell's strategy look at training images, if it wants to; return what the record is to say of it, or "".

    Raises:
        UserError: what the strategy did wrong, see `fit`.
        UnsupportedError: there are no training images, or the network knows nothing yet.
    """
    actor = cell.actor
    if actor is None or not wants_images(actor):
        return ""
    if cell.in_training is not None and cell.task.trains and not cell.answers:
        raise UnsupportedError(
            f"'{actor.strategy.name}' needs a trained network, but this training starts from random weights: it "
            "belongs to the tracks frozen and tuned"
        )
    return fit_on(cell, actor, job.origin.revision, out)


def wants_images(actor: Actor) -> bool:
    """Say whether it is to be fitted before it acts."""
    return actor.strategy.fits() and actor.acts


def fit_on(cell: Prepared, actor: Actor, revision: str, out: Path) -> str:
    """Fit an actor on training images of a cell, whose network is trained; return what a record is to say of it.

    The images are drawn from the training images alone, by seeds of the task, the number of these and the repetition.
    What it learned lies in the run's folder, by all that it depends on, and is taken from there if it is known.

    Args:
        cell: its images and its network.
        actor: the strategy on this network.
        revision: of the strategy.
        out: the run's folder.

    Raises:
        UserError, UnsupportedError: as in `fit_cell`.
    """
    strategy, train = actor.strategy, cell.train
    if not len(train.labels):
        raise UnsupportedError(f"'{strategy.name}' looks at training images before the test, and there are none here")
    named = cell.cell.task.name, cell.cell.n_train, cell.cell.repetition
    order = seeds.generator("fit", *named).permutation(len(train.labels))
    rows = torch.from_numpy(order[: strategy.fit_images]).sort().values.to(train.labels.device)
    path = out / "fits" / f"{_key(cell, actor, revision)}.safetensors"
    fitted = _read(path, actor)
    if fitted is None:
        images = Images(train.take(rows), rows, train.labels[rows] if strategy.fit_labels else None)
        seed = seeds.seed_of("fit", *named, strategy.name)
        fitted = fit(cell.network, actor, images, cell.recipe, seed, train.relevance)
        _keep(path, fitted)
    about = f"{fitted.shown} shown to the network, learned {state_digest(fitted.learned)[:16]}"
    return f"{len(rows)} training images, {about}"


def _key(cell: Prepared, actor: Actor, revision: str) -> str:
    """Return a hash of what the result of a fit depends on; of the budget that is only where the strategy acts."""
    of = cell.cell.model_dump(mode="json", include={"task", "model", "n_train", "repetition", "precision"})
    device = next(cell.network.module.parameters()).device.type
    modules = modules_of(actor).state_dict()  # before the fit they hold what they are made with
    weights = [state_digest(weights_of(cell.network)), state_digest(modules)]
    by = [actor.strategy.name, actor.strategy.model_dump(mode="json"), revision, actor.strategy.fit_images]
    return digest([of, by, list(actor.keep), weights, [__version__, torch.__version__, device]])


def _read(path: Path, actor: Actor) -> Fitted | None:
    """Return what is kept in a file, which is in the actor's modules then; None where there is none, or it is torn."""
    try:
        learned = load_tensors(path.read_bytes())
        with safe_open(path, "pt") as file:
            shown = int((file.metadata() or {})[SHOWN])
        load(actor, learned)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        log.warning("%s is not used and is made anew: %s", path.name, error)
        return None
    return Fitted(learned, shown)


def _keep(path: Path, fitted: Fitted) -> None:
    """Write what was learned; where that fails, say so and go on."""
    learned = {name: value.cpu().contiguous() for name, value in fitted.learned.items()}
    try:
        files.write_whole(path, save(learned, {SHOWN: str(fitted.shown)}))
    except UserError as error:
        log.warning("what was learned is not kept: %s", error)
