"""The training loop, one for every task, model and way to take a step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError
from sparsebench.models.acting import Actor
from sparsebench.models.base import Network
from sparsebench.models.shallow import ShallowViT
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Autograd, Samples, Steps


def steps_for(network: Network, actor: Actor | None, samples: Samples, recipe: Recipe) -> Steps:
    """Return the fastest steps there are for that network: in closed form where they apply, else by autograd."""
    if isinstance(network, ShallowViT):
        from sparsebench.training import closed_form  # compiles, which pictures need not wait for

        if closed_form.applies(network, recipe):
            return closed_form.ClosedForm(network, actor, samples, recipe)
    return Autograd(network, actor, samples, recipe)


def train(
    steps: Steps,
    n: int,
    recipe: Recipe,
    order_seed: tuple[object, ...],
    on_step: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Train with batches drawn without replacement, pass by pass.

    Args:
        steps: what is trained.
        n: number of training samples.
        recipe: how.
        order_seed: dimensions that name the order of the samples.
        on_step: called with the number of steps done, before the first and after each.

    Returns:
        steps done, passes done, and the last pass's mean loss.

    Raises:
        DivergedError: the loss became NaN or infinite.
    """
    batch = min(recipe.batch, n)
    total = min(recipe.steps, recipe.epochs * math.ceil(n / batch))
    step, epoch, mean = 0, 0, math.nan
    if on_step is not None:
        on_step(0)
    while step < total:
        order = seeds.generator(*order_seed, epoch).permutation(n)
        visit, seen = 0 if recipe.fixed_selection else epoch, 0
        summed: Tensor | float = 0.0
        for start in range(0, min(n, (total - step) * batch), batch):
            rows = order[start : start + batch]
            summed = summed + steps.step(rows, visit, step / total)
            step, seen = step + 1, seen + len(rows)
            if on_step is not None:
                on_step(step)
        epoch += 1
        mean = float(summed) / seen
        if not math.isfinite(mean):
            raise DivergedError(f"training diverged: the loss of pass {epoch} is {mean}")
        if recipe.stop_at_zero_loss and mean == 0.0 and seen == n:
            break
    return {"steps": float(step), "epochs": float(epoch), "train_loss": mean}
