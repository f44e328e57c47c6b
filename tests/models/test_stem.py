"""Patches made by convolutions: what they cost, what they see, and that everything else goes on as before."""

import pytest
import torch
from eva_vits import unfused
from torch.utils.flop_counter import FlopCounterMode

import sparsebench
from sparsebench.errors import UserError
from sparsebench.models.base import Model
from sparsebench.models.vits import Vit
from sparsebench.records import store
from sparsebench.records.cell import Part
from sparsebench.tasks.images import Composite

SIZES = {"dim": 32, "depth": 3, "heads": 2, "patch": 8}
TASK = Composite(canvas=32, foreground=16, test=8)


def network_of(model: Model):
    network = model.build(TASK.draw(8, 0, {}), 0)
    network.module.eval()
    return network


def test_its_macs_are_those_that_torch_counts() -> None:
    network = network_of(Vit(**SIZES, stem="conv"))
    unfused(network.module)  # the counters of some versions of torch do not see fused attention on a CPU
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 32, 32))
    # The closed form counts what a deployed model computes, and so does the counter.
    assert counter.get_total_flops() / 2 == network.cost.macs(network.cost.dense())


def test_a_token_sees_less_than_one_patch_beyond_its_own() -> None:
    network = network_of(Vit(**SIZES, stem="conv"))
    images = torch.rand(1, 3, 32, 32, requires_grad=True)
    network.module.patch_embed(images)[0, 10].sum().backward()  # row 2, column 2 of the patches of 8 pixels
    rows = torch.nonzero(images.grad.abs().sum(dim=(0, 1, 3))).flatten()
    assert (rows.min(), rows.max()) == (9, 23)  # 15 pixels, of which 8 are its own


def test_a_linear_stem_is_as_before() -> None:
    assert "stem" not in Part.of(Vit()).params and Part.of(Vit(stem="conv")).params["stem"] == "conv"
    one, other = (network_of(Vit(**SIZES, **more)).module.state_dict() for more in ({}, {"stem": "linear"}))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "sizes", [{"patch": 6, "dim": 36, "heads": 2}, {"patch": 8, "dim": 30, "heads": 2}, {"patch": 1}]
)
def test_a_patch_that_cannot_be_halved_is_refused(sizes) -> None:
    with pytest.raises(UserError, match="that divides dim"):
        Vit(**sizes, stem="conv").check(Composite(canvas=24, foreground=12))


def test_a_network_that_is_loaded_is_the_one_that_was_trained(tmp_path) -> None:
    """Running statistics are weights too: with others the test would come out otherwise."""
    sparsebench.run(
        ["attn_topk"], tasks="composite:canvas=32,foreground=16,test=20,epochs=1,pretrain_epochs=0,batch=8",
        model="vit:dim=32,depth=3,heads=2,patch=8,stem=conv", n_train=[16], seeds=1, out=tmp_path, where="test",
        macs=[1.0, 0.5], device="cpu", jobs=0,
    )  # fmt: skip
    records = {(r.label, r.cell.budget.macs): r for r in store.read(tmp_path).values()}
    assert {r.status for r in records.values()} == {"ok"}, [r.failure for r in records.values()]
    dense, whole, half = (records[key] for key in (("dense", 1.0), ("attn_topk", 1.0), ("attn_topk", 0.5)))
    assert whole.metrics["test_loss"] == dense.metrics["test_loss"]
    assert half.metrics["macs_ratio"].value < 0.7 and half.metrics["test_loss"] != dense.metrics["test_loss"]
