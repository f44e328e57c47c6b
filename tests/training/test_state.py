from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save
from sparsebench_plugins.random import Random

from sparsebench.models.actor import Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.images import Spurious
from sparsebench.training.augment import Augmentation
from sparsebench.training.loop import Course, EarlyStopping, Training, can_be_resumed, resume, state_of, steps_for
from sparsebench.training.steps import Autograd, Samples

TASK = Spurious(
    canvas=16, foreground=10, test=8, batch=7, epochs=5, lr=0.01, warmup=0.3, flip=True, shift=2, smoothing=0.1,
    pretrain_epochs=0, validation=0.2, patience=2,
)  # fmt: skip
DATA = TASK.draw(25, 0, {}).held_back(0.2)
STEPS = 15  # three a pass


def samples_of(split, augmentation=None):
    return Samples(*map(torch.from_numpy, (split.inputs, split.labels, split.relevance_on((4, 4)))), augmentation)


def begun(early=True, **sizes):
    """Return a training with dropout, in the random state that a cell begins with."""
    network = Vit(**{"dim": 16, "depth": 2, "heads": 2, "patch": 4} | sizes).build(DATA, 0)
    for block in network.module.blocks:
        block.mlp.drop1.p = block.attn.proj_drop.p = 0.3
    recipe = TASK.recipe()
    actor = Actor(Random(), Budget(keep_rate=0.5), network.cost, network.grid, 3)
    moved = Augmentation(torch.arange(len(DATA.train.labels)), 5, True, 2, torch.from_numpy(DATA.train.boxes), (4, 4))
    validation = DATA.validation
    stopping = EarlyStopping(network, actor, samples_of(validation), validation.groups, recipe) if early else None
    torch.manual_seed(1)
    steps = Autograd(network, actor, samples_of(DATA.train, moved), recipe)
    return Training(steps, Course(20, recipe, ("order",)), stopping)


def weights(training):
    return {name: value.clone() for name, value in training.steps.network.module.state_dict().items()}


class StoppedError(Exception):
    pass


def stopped_after(training, k):
    def stop(step):
        if step >= k:
            raise StoppedError

    with pytest.raises(StoppedError):
        training.run(stop)
    return load(save({name: value.clone() for name, value in state_of(training).items()}))


@cache
def undisturbed(early):
    training = begun(early)
    return training.run(), weights(training)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("k", [0, 2, 3, 8, 14])
def test_a_resumed_training_ends_as_an_undisturbed_one_to_the_bit(k, early):
    done, expected = undisturbed(early)
    if k >= done["steps"]:
        return
    state = stopped_after(begun(early), k)
    training = begun(early)
    torch.manual_seed(99)
    resume(training, state)
    assert training.run() == done
    here = weights(training)
    assert here.keys() == expected.keys() and all(torch.equal(here[name], expected[name]) for name in here)


def test_a_training_may_be_resumed_again_and_again():
    done, expected = undisturbed(False)
    training = begun(False)
    for k in range(1, STEPS):
        state = stopped_after(training, k)
        training = begun(False)
        resume(training, state)
    assert training.run() == done
    assert all(torch.equal(value, expected[name]) for name, value in weights(training).items())


def test_dropout_and_the_optimiser_are_part_of_the_state():
    """Without them the weights would be others: the test of equal bits has something to find."""
    _, expected = undisturbed(False)
    for lost in ("random.cpu", "steps.optimiser."):
        state, training = stopped_after(begun(False), 4), begun(False)
        fresh = {name: value for name, value in state_of(training).items() if name.startswith(lost)}
        resume(training, {name: value for name, value in state.items() if not name.startswith(lost)} | fresh)
        training.run()
        assert not torch.equal(weights(training)["head.weight"], expected["head.weight"])


def test_the_parts_that_the_memory_asked_for_are_part_of_the_state():
    training = begun()
    training.steps.parts = 4
    state, fresh = stopped_after(training, 2), begun()
    resume(fresh, state)
    assert fresh.steps.parts == 4


@pytest.mark.parametrize("other", [{"dim": 32}, {"depth": 3}, {"early": True}])
def test_the_state_of_another_training_changes_nothing(other):
    state, training = stopped_after(begun(early=False), 4), begun(**{"early": False} | other)
    before = weights(training)
    with pytest.raises(ValueError, match="does not fit"):
        resume(training, state)
    assert training.course.step == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(training).items())


def test_only_steps_by_autograd_are_resumed():
    class Own:
        def trainer(self, actor, samples, recipe):
            return SimpleNamespace(step=None, store=None)

    training = begun()
    own = Training(steps_for(Own(), None, training.steps.samples, training.steps.recipe), training.course)
    assert not can_be_resumed(own) and can_be_resumed(training)
