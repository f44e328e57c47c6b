"""How often a forward pass waits for the device to read a number from it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vits import ARCHITECTURES

import sparsebench
from sparsebench.plugin.registry import Registry

FIXED = [
    registered.cls
    for registered in Registry(shipped_only=True).strategies()
    if registered.cls.kind != "oracle" and registered.cls.budgeted and not registered.cls.adaptive
]


class Reads(TorchDispatchMode):
    """Counts what goes from the device to the host as a number."""

    count = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads(call):
    with Reads() as counted:
        call()
    return counted.count


@pytest.mark.filterwarnings("ignore:'perturbation")  # which spends more than the dense network
@pytest.mark.parametrize(("kind", "training"), [("plain", False), ("average pool without class token", True)])
@pytest.mark.parametrize("cls", FIXED, ids=lambda cls: cls.name)
def test_only_the_first_pass_with_a_shape_reads_from_the_device(cls, kind, training):
    learned = "random" if cls.trained or cls.fits() else None
    sparse = sparsebench.apply(ARCHITECTURES[kind](), cls, macs=0.6, learned=learned).train(training)
    acts = training or not cls.trains_only
    x = torch.randn(3, 3, 32, 32)
    assert (reads(lambda: sparse(x)) > 0) == acts
    assert reads(lambda: sparse(x)) == reads(lambda: sparse(x)) == 0
    assert (reads(lambda: sparse(x[:2])) > 0) == acts


def test_the_count_sees_a_read():
    assert reads(lambda: int(torch.ones(3).max())) == 1
