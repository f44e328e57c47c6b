"""A strategy on a user's network, as a torch module."""

import copy
import io
import json
import pickle
from functools import partial

import eva_vits
import pytest
import timm
import torch
import vits
from safetensors.torch import save_file
from timm.layers import Attention
from timm.models.vision_transformer import ParallelScalingBlock
from vits import any_tokens, close, vit

import sparsebench
from sparsebench import seeds
from sparsebench.deploy.apply import timm_model
from sparsebench.errors import StrategyError, UserError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.models.vits import Timm
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Published, Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask
from sparsebench.tasks.images import Composite
from sparsebench.training.evaluation import patches_in

ALL = [one.cls for one in Registry(shipped_only=True).strategies() if one.cls.kind != "oracle"]
STRATEGIES = [cls for cls in ALL if cls.budgeted and not cls.trained and not cls.fits()]
SEEING = [cls for cls in ALL if "pixels" in cls().requires() or cls.fits() or cls.name in ("dense", "tome", "tnt")]
"""Those that look at pixels or at images, and others that see tokens alone."""
EACH_WAY = ("random", "attn_topk", "tome", "evit", "dpc_knn", "ats", "idle_vit")
"""One of each way to act: at the input, in attention, merging, fusing, before a block, ragged, resting."""

MODELS = vits.ARCHITECTURES | eva_vits.KINDS
KINDS = [
    "plain", "4 registers", "distilled", "average pool without class token", "DINOv3", "EVA-02", "PE", "SigLIP",
]  # fmt: skip


def pixels(n=3, side=32, seed=1, channels=3):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "plain") for name in EACH_WAY), *(("attn_topk", kind) for kind in KINDS[1:])]
)
@torch.no_grad()
def test_all_macs_give_the_outputs_of_the_model_to_the_bit(name, kind):
    model, x = MODELS[kind](), pixels()
    before = model(x)
    sparse = sparsebench.apply(model, name, macs=1.0)
    assert torch.equal(sparse(x), before)
    assert sparse.macs_ratio == 1 and set(sparse.tokens) == {16}


@pytest.mark.filterwarnings("ignore:'perturbation")  # it has more MACs than the dense network
@pytest.mark.parametrize(
    ("cls", "kind"),
    [(cls, kind) for cls in STRATEGIES for kind in (KINDS if cls.name == "tome" else KINDS[:1])],
    ids=lambda value: getattr(value, "name", value),
)
@torch.no_grad()
def test_outputs_are_those_of_the_benchmark(cls, kind):
    model, images = MODELS[kind](), torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    network = DeepViT(model)
    x, sparse = network.normalise(images), sparsebench.apply(model, cls.name, macs=0.6)
    outputs = sparse(x)
    actor = Actor(cls(), Budget(macs=0.6), network.cost, network.grid, seeds.seed_of("strategy", "apply", 0))
    acting = actor.begin(torch.arange(3), 0, None, training=False)
    close(outputs, network(images, None if cls.trains_only else acting), atol=1e-6)
    if cls.trains_only:
        assert torch.equal(outputs, model(x)) and sparse.macs_ratio == 1
    else:
        assert not torch.allclose(outputs, model(x), atol=1e-3)
        assert (sparse.macs_ratio < 1) == (cls.name != "perturbation")  # it calls the network many times
        stay = patches_in(acting.index, 16)
        if stay.any(dim=1).all():  # otherwise all tokens are mixtures
            assert torch.equal(sparse.kept(), stay)


@torch.no_grad()
def test_a_sparse_network_describes_itself():
    """What a sparse network says of itself or an adaptive one of the last images."""
    sparse, cost = sparsebench.apply(vit(), "attn_topk:keep_rate=0.5,blocks=1+3"), DeepViT(vit()).cost
    assert sparse.tokens == (16, 8, 8, 4) and 0 < sparse.macs_ratio < 1
    assert sparse.macs == pytest.approx(sparse.macs_ratio * cost.macs(cost.dense()))
    assert sparse.spec == "attn_topk:keep_rate=0.5,blocks=1+3" and sparse.spec in repr(sparse)
    stay = sparse.kept(pixels())
    assert stay.shape == (3, 16) and stay.sum(dim=1).tolist() == [4, 4, 4] and torch.equal(sparse.kept(), stay)
    adaptive = sparsebench.apply(vit(), "ats:counts=15+15,blocks=1+3")
    bounds, stay = adaptive.tokens, adaptive.kept(pixels())
    assert adaptive.tokens[-1] == pytest.approx(stay.sum(dim=1).float().mean().item())
    assert adaptive.tokens[-1] < bounds[-1] == 15


class Enough(Strategy):
    """Keeps the tokens with a mean above `level`, but at least one."""

    name = "enough"
    site = "block"
    adaptive = True
    published = (Published("enough:level=0.1", "DeiT-S"), Published("enough:level=0.1,macs=0.5", "DeiT-S"))
    level: float = 0.0

    def plan(self, view, keep):
        mean = view.tokens.mean(dim=2)
        return Mask((mean > self.level) | (mean == mean.amax(dim=1, keepdim=True)))


@pytest.mark.parametrize(
    ("strategy", "options", "bounds"),
    [("a_vit", {"beta": -75.0, "learned": "random"}, {"counts": (16,) * 4}),
     (Enough, {"level": 0.1}, {"counts": (16,) * 3, "blocks": (1, 2, 3)})],
)  # fmt: skip
@torch.no_grad()
def test_an_adaptive_strategy_needs_no_budget(strategy, options, bounds):
    """What decides itself how much it spends needs no budget and takes one."""
    model, x = vit(), pixels()
    with sparsebench.apply(model, strategy, **options) as sparse:
        outputs, stayed = sparse(x), sparse.kept()
        assert sparse.spec in ("a_vit:beta=-75.0", "enough:level=0.1")
    with sparsebench.apply(model, strategy, **options, **bounds) as sparse:
        assert torch.equal(sparse(x), outputs) and torch.equal(sparse.kept(), stayed)
    assert strategy == "a_vit" or (stayed.sum(dim=1) < 16).all()


def test_the_weights_are_the_models_own():
    model = vit()
    names, state = [name for name, _ in model.named_parameters()], model.state_dict()
    sparse = sparsebench.apply(model, "tome:per_block=2")
    assert all(ours is theirs for ours, theirs in zip(sparse.parameters(), model.parameters(), strict=True))
    assert list(sparse.state_dict()) == list(state)
    assert all(value.data_ptr() == state[name].data_ptr() for name, value in sparse.state_dict().items())
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    assert sparse.load_state_dict(other).missing_keys == []
    assert all(not value.any() for value in model.state_dict().values())
    assert torch.nn.Sequential(sparse).state_dict().keys() == {f"0.{name}" for name in names}


def test_what_a_strategy_learns_is_part_of_it(tmp_path):
    model = vit()
    sparse = sparsebench.apply(model, "dynamic_vit:keep_rate=0.5", learned="random").train()
    own = [name for name in sparse.state_dict() if name.startswith("strategy.")]
    assert own and [name for name in sparse.state_dict() if name not in own] == list(model.state_dict())
    with pytest.raises(UserError, match="no call in training"):
        sparse.loss()
    logits = sparse(pixels())
    (logits.square().sum() + sparse.loss()).backward()
    learned = [value for name, value in sparse.named_parameters() if name.startswith("strategy.")]
    assert any(value.grad is not None and value.grad.any() for value in learned)
    sparse.eval()
    with torch.no_grad():
        learned[0].add_(1.0)
        outputs = sparse(pixels())
    save_file(sparse.state_dict(), tmp_path / "learned.safetensors")
    again = sparsebench.apply(copy.deepcopy(model), sparse.spec, learned=tmp_path / "learned.safetensors")
    assert torch.equal(again(pixels()), outputs)
    save_file(vit().state_dict(), tmp_path / "none.safetensors")
    for file, message in (("none", "does not have the weights of 'dynamic_vit'"), ("nowhere", "cannot be read")):
        with pytest.raises(UserError, match=message):
            sparsebench.apply(vit(), sparse.spec, learned=tmp_path / f"{file}.safetensors")


def test_two_on_one_model_refuse_each_other_until_one_is_removed():
    model = vit()
    first = sparsebench.apply(model, "tome:per_block=2")
    with pytest.raises(UserError, match=r"'tome:per_block=2' already acts on this network.*remove"):
        sparsebench.apply(model, "evit:keep_rate=0.5")
    with pytest.raises(UserError, match="already has a strategy"):
        sparsebench.apply(first, "evit:keep_rate=0.5")
    assert first.remove() is model
    with pytest.raises(UserError, match="was removed"):
        first(pixels())
    with sparsebench.apply(model, "evit:keep_rate=0.5") as second:
        second(pixels())
    sparsebench.apply(model, "tome:per_block=2")  # without a reference it is deleted at once
    sparsebench.apply(model, "tome:per_block=2").remove()


def parts_of(model):
    return [{key: type(value) for key, value in vars(part).items()} for part in model.modules()]


@torch.no_grad()
def test_an_illegal_plan_leaves_nothing_on_the_model():
    """Nothing is left on the model even by a plan that breaks the contract."""

    class Twice(Strategy):
        name = "twice"

        def plan(self, view, keep):
            return Keep(torch.zeros(len(view.tokens), keep, dtype=torch.int64))

    model, x = vit(), pixels()
    before, outputs = parts_of(model), model(x)
    with sparsebench.apply(model, "tome:per_block=2") as sparse:
        sparse(x)
    with sparsebench.apply(model, Twice, keep_rate=0.5) as sparse, pytest.raises(StrategyError, match="a token twice"):
        sparse(x)
    assert parts_of(model) == before and torch.equal(model(x), outputs)


@torch.no_grad()
def test_copies_are_networks_of_their_own():
    model, x = vit(), pixels()
    sparse = sparsebench.apply(model, "tome:per_block=2")
    outputs = sparse(x)
    twin = copy.deepcopy(sparse)
    next(model.parameters()).zero_()
    assert torch.equal(twin(x), outputs) and not torch.equal(sparse(x), outputs)
    with pytest.raises(UserError, match="acts on this network"):
        sparsebench.apply(twin.model, "tome:per_block=2")
    with io.BytesIO() as file:
        pickle.dump(twin, file)
        file.seek(0)
        assert torch.equal(pickle.load(file)(x), outputs)
    again = sparsebench.apply(vit(), twin.spec)
    again.load_state_dict(twin.state_dict())
    assert torch.equal(again(x), outputs)


@pytest.mark.parametrize("name", ["tome", "evit", "pitome", "sinkhorn"])
@torch.no_grad()
def test_under_autocast_what_a_strategy_sees_is_in_full_precision(name):
    learned = {"learned": "random"} if name == "sinkhorn" else {}
    model, x = vit(), pixels()
    sparse = sparsebench.apply(model, name, keep_rate=0.5, **learned)
    exact = sparse(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = sparse(x)
        assert rounded.dtype == model(x).dtype
    close(rounded.float() / exact.abs().max(), exact / exact.abs().max(), atol=0.1)


class Even(Strategy):
    """Keeps random tokens."""

    name = "even"
    first_one: bool = False

    def plan(self, view, keep):
        assert view.tokens.dtype == torch.float32
        return Keep(any_tokens(view, keep).index)


@torch.no_grad()
def test_a_strategy_of_ones_own_in_place_of_the_words(tmp_path):
    x, model = pixels(), vit()
    one = sparsebench.apply(model, Even, macs=0.5, first_one=True)
    assert one.spec == "even:first_one=true,macs=0.5"
    two = sparsebench.apply(copy.deepcopy(model), Even(first_one=True), macs=0.5)
    assert torch.equal(one(x), two(x)) and two.spec == one.spec
    with pytest.raises(UserError, match="got first_one=True"):
        sparsebench.apply(vit(), Even(), macs=0.5, first_one=True)
    file = tmp_path / "mine.py"
    file.write_text(
        "import sparsebench\nclass Last(sparsebench.Strategy):\n    name = 'last'\n"
        "    def scores(self, view):\n        return view.index.float()\n"
        "@sparsebench.hookimpl\ndef sparsebench_strategies():\n    return [Last]\n"
    )
    last = sparsebench.apply(vit(), f"{file}:keep_rate=0.5")
    assert last.kept(x).tolist() == [[False] * 8 + [True] * 8] * 3 and last.spec == f"{file}:keep_rate=0.5"


def test_random_numbers_belong_to_the_seed_and_the_place():
    x, model = pixels(), vit()
    one = sparsebench.apply(model, "random:keep_rate=0.5")
    assert torch.equal(one.kept(x), one.kept(x)) and torch.equal(one.kept(x[:2]), one.kept(x)[:2])
    assert not torch.equal(sparsebench.apply(vit(), "random:keep_rate=0.5", seed=1).kept(x), one.kept(x))
    one.train()
    assert not torch.equal(one.kept(x), one.kept(x))


@pytest.mark.parametrize(
    ("model", "words", "options", "message"),
    [
        (lambda: torch.nn.Linear(3, 3), "tome:macs=.5", {}, "Linear is not a timm VisionTransformer.*allowed: a timm"),
        (lambda: "deit", "tome:macs=.5", {}, "got str; allowed: a timm"),
        (lambda: timm.create_model("resnet18"), "tome:macs=.5", {}, "not a timm VisionTransformer"),
        (lambda: vit().half(), "tome:macs=.5", {}, "half precision.*got float16; allowed: float32"),
        (lambda: vit().bfloat16(), "tome:macs=.5", {}, "got bfloat16"),
        (vit, "tome", {}, "the budget of 'tome' is missing; give one"),
        (vit, "ats", {}, "the budget of 'ats' is missing; give one"),
        (vit, "a_vit:blocks=1+2", {"learned": "random"}, "the budget of 'a_vit' is missing; give one"),
        (vit, "tome:macs=.5,.7", {}, "one strategy at one budget; got .*, which is 2"),
        (vit, "tome:macs=.5", {"macs": 0.7}, "'macs' is given twice"),
        (vit, "tome:macs=2", {}, r"fraction of MACs; got 2; allowed: \(0, 1\]"),
        (vit, "tome", {"macs": "0.5"}, r"macs must be a number; got '0\.5'; allowed: \(0, 1\]"),
        (vit, "tome:macs=.5", {"colour": 3}, "unknown parameter of strategy 'tome'"),
        (vit, "tomme:macs=.5", {}, "unknown strategy; got 'tomme'.*did you mean 'tome'"),
        (vit, "all:macs=.5", {}, "a network takes one strategy"),
        (vit, "random:macs=.5,schedule=every", {}, "acts at the input only"),
        (vit, "dynamic_vit:macs=.5", {}, "must be trained.*give learned=FILE"),
        (vit, "tome:macs=.5", {"learned": "x.safetensors"}, "'tome' needs no images; got learned"),
        (vit, "oracle:macs=.5", {}, "is an oracle"),
        (vit, int, {"macs": 0.5}, "is not a subclass of sparsebench.Strategy"),
        (MODELS["average pool without class token"], "attn_topk:macs=.5,attention=class", {},
         "needs class_attention, which this network of 0 class tokens cannot give"),
        (partial(vit, attn_layer=type("Own", (Attention,), {})), "ats:macs=.5", {}, "attention of type Own"),
        (partial(vit, block_fn=ParallelScalingBlock), "evit:macs=.5", {}, "blocks of type ParallelScalingBlock"),
        *((partial(vit, in_chans=channels), "tome:macs=.7", {name: (0.5, 0.4, 0.3)},
           f"{name} of the pixel normalisation; got 3 numbers; allowed: {allowed}, one per channel")
          for channels, allowed in ((1, "1"), (4, "1 or 4")) for name in ("mean", "std")),
        (partial(vit, in_chans=4), "fisher_mask:macs=.7", {"images": pixels(8), "labels": torch.arange(8) % 5},
         r"got \(8, 3, 32, 32\).*; allowed: \(n, 4, 32, 32\)"),
        (partial(vit, num_classes=0), "fisher_mask:macs=.7", {"images": pixels(8), "labels": torch.zeros(8).long()},
         "'fisher_mask' looks at labels, and the network has no head"),
        (partial(vit, global_pool="avg"), "a_vit:macs=.5", {"learned": "random"}, "does not read it .global_pool=avg"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_one_line_and_change_nothing(model, words, options, message):
    """What cannot be is refused in one line and leaves the model as it was."""
    made = model()
    before = parts_of(made) if isinstance(made, torch.nn.Module) else None
    with pytest.raises(UserError, match=message) as caught:
        sparsebench.apply(made, words, **options)
    assert "\n" not in str(caught.value)
    assert before is None or parts_of(made) == before


@pytest.mark.parametrize(
    ("x", "message", "channels"),
    [
        (torch.rand(2, 3, 24, 24), r"got \(2, 3, 24, 24\) torch.float32.*; allowed: \(B, 3, 32, 32\)", 3),
        (torch.rand(3, 32, 32), r"got \(3, 32, 32\)", 3),
        ("x.png", "got str", 3),
        (torch.rand(2, 3, 32, 32).half(), "got .*float16.*; allowed: .*float32", 3),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "got .*uint8", 3),
        (torch.rand(2, 3, 32, 32, device="meta"), "got .* on meta; allowed: .* on cpu", 3),
        *((pixels(channels=given), rf"\(3, {given}, 32, 32\).*allowed: \(B, {channels}, 32", channels)
          for channels, given in ((1, 3), (4, 3), (3, 1))),
    ],
)  # fmt: skip
def test_pixels_that_the_model_does_not_take(x, message, channels):
    with pytest.raises(UserError, match=message):
        sparsebench.apply(vit(in_chans=channels), "tome:per_block=2")(x)


@pytest.mark.parametrize("words", ["tps:keep_rate=0.5", "pru_merge:keep_rate=0.5", "downsample:keep_rate=0.5"])
def test_no_patch_stays_where_tokens_are_mixed_of_many(words):
    sparse = sparsebench.apply(vit(), words)
    assert sparse(pixels()).shape[0] == 3
    for given in ((), (pixels(),)):
        with pytest.raises(UserError, match="each token is a mixture of many patches"):
            sparse.kept(*given)


def test_all_patches_stay_where_nothing_acts_in_a_test():
    sparse = sparsebench.apply(vit().eval(), "patch_dropout:keep_rate=0.5")
    with pytest.raises(UserError, match="was not called yet"):
        sparse.kept()
    sparse(pixels())
    assert sparse.kept().shape == (3, 16) and sparse.kept().all() and sparse.kept(pixels(2)).all()
    sparse.train()(pixels())
    assert sparse.kept().sum(dim=1).tolist() == [8, 8, 8]
    sparse.eval()(pixels(1))
    assert sparse.kept().shape == (1, 16) and sparse.kept().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.set_input_size((64, 64)), r"its patches were \(4, 4\), and are \(8, 8\)"),
        (lambda model: model.set_input_size(patch_size=(4, 4)), r"its patches were \(4, 4\), and are \(8, 8\)"),
        (lambda model: model.blocks.pop(1), r"its blocks were \d, and are \d"),
    ],
    ids=["image", "patch", "blocks"],
)
def test_a_network_that_was_changed_afterwards_is_told_to_be_applied_again(change, message):
    model = vit().eval()
    sparse = sparsebench.apply(model, "tome:per_block=2")
    change(model)
    for side in (32, 64):
        with pytest.raises(
            UserError, match=f"was changed after 'tome:per_block=2' .*{message}; call .remove.., and apply"
        ):
            sparse(pixels(side=side))
    again = sparsebench.apply(sparse.remove(), "tome:per_block=2")
    side = model.patch_embed.img_size[0]
    assert again(pixels(side=side)).shape[0] == 3


ARGS = {"depth": 2, "embed_dim": 32, "num_heads": 4}
ARCH = "vit_small_patch16_dinov3"


@torch.no_grad()
def test_a_model_of_a_folder_has_its_weights(tmp_path):
    """A model of a folder has its weights its size and its normalisation."""
    saved, path = timm.create_model(ARCH, num_classes=7, img_size=64, **ARGS).eval(), tmp_path
    save_file(saved.state_dict(), path / "model.safetensors")
    cfg = {"input_size": [3, 64, 64], "mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0], "num_classes": 7}
    config = {"architecture": ARCH, "num_classes": 7, "model_args": ARGS, "pretrained_cfg": cfg}
    (path / "config.json").write_text(json.dumps(config))
    model, x = timm_model(f"timm:local-dir:{path}", None), torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), saved(x))
    assert tuple(model.pretrained_cfg["mean"]) == (0.1, 0.2, 0.3)
    with pytest.warns(UserWarning, match="the closest possible"):  # a block can remove at most half of the tokens
        sparse = sparsebench.apply(model, "tome", macs=0.7)
    assert sparse(x).shape == (2, 7) and sparse.macs_ratio < 0.8
    (path / "config.json").write_text("{}")
    for name, message in ((f"{path}/nowhere", "timm cannot read 'local-dir:.*nowhere'"), (path, "timm cannot build")):
        with pytest.raises(UserError, match=message):
            timm_model(f"timm:local-dir:{name}", None)


def test_a_network_of_another_library_is_pointed_to_timm(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit_msn", "architectures": ["ViTMSNModel"]}))
    with pytest.raises(UserError, match=rf"transformers library is hf:{tmp_path}") as caught:
        timm_model(f"timm:local-dir:{tmp_path}", None)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=rf"did you mean 'hf:{tmp_path}'"):
        timm_model(str(tmp_path), None)
    with pytest.raises(UserError, match=r"ViTMSNModel is not a timm .*timm\.create_model.* load the weights"):
        sparsebench.apply(type("ViTMSNModel", (torch.nn.Module,), {})(), "tome:macs=.5")
    with pytest.raises(UserError) as caught:
        sparsebench.apply(timm.create_model("resnet18"), "tome:macs=.5")
    assert "load the weights" not in str(caught.value)


@torch.no_grad()
def test_weights_without_a_head_give_features(tmp_path):
    file = tmp_path / "features.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), file)
    model = timm_model("timm:test_vit", file).eval()
    sparse = sparsebench.apply(model, "attn_topk:macs=0.6")
    assert sparse(torch.zeros(2, 3, 160, 160)).shape == (2, model.num_features)


def test_a_name_of_the_hub_is_taken_as_timm_takes_it(monkeypatch):
    config = ({"input_size": (3, 64, 64), "num_classes": 3}, ARCH, ARGS)
    for module in (timm.models._factory, sparsebench.models.timm_models):
        monkeypatch.setattr(module, "load_model_config_from_hf", lambda name, **_: config)
    with torch.device("meta"):
        cost = Timm(arch="hf-hub:somebody/small").cost(Composite(canvas=64), 3)
    assert cost.tokens == 16 and cost.depth == 2


@pytest.mark.filterwarnings("ignore:.*the closest possible")
@pytest.mark.parametrize("cls", SEEING, ids=lambda cls: cls.name)
@torch.no_grad()
def test_strategies_act_on_pixels_of_four_channels(cls, channels=4):
    model, x = vit(in_chans=channels), pixels(channels=channels)
    given = {"macs": 0.7} if cls.budgeted else {}
    if cls.trained:
        given["learned"] = "random"
    elif cls.fits():
        given["images"] = pixels(8, seed=2, channels=channels)
        given |= {"labels": torch.arange(8) % 5} if cls.fit_labels else {}
    logits = sparsebench.apply(model, cls.name, **given)(x)
    assert logits.shape == (3, 5) and logits.isfinite().all()
    dense = cls.name == "dense" or cls.trains_only
    assert dense == torch.allclose(logits, model(x), atol=1e-4)


@pytest.mark.parametrize("channels", [1, 4])
@torch.no_grad()
def test_pixels_are_restored_with_a_mean_a_channel_or_one_for_all(channels):
    model, x = vit(in_chans=channels), pixels(channels=channels)
    scale = torch.linspace(0.1, 2, channels)
    for std, weight in ((scale.tolist(), scale), (0.3, torch.full((channels,), 0.3))):
        sparse = sparsebench.apply(model, "patch_variance", keep_rate=0.5, mean=[0.0] * channels, std=std)
        patches = (x * weight[:, None, None]).unfold(2, 8, 8).unfold(3, 8, 8)
        spread = patches.var(dim=(4, 5), correction=0).mean(dim=1).flatten(1)
        kept = torch.zeros(3, 16, dtype=torch.bool).scatter(1, spread.topk(8).indices, True)
        assert torch.equal(sparse.kept(x), kept)
        sparse.remove()


@torch.no_grad()
def test_pictures_in_colour_are_grey_to_a_network_of_one_channel():
    model = vit(in_chans=1)
    network = DeepViT(model, mean=(0.1, 0.2, 0.3), std=0.5)
    colours = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    real = colours.double() / 255
    grey = (0.299 * real[:, :1] + 0.587 * real[:, 1:2] + 0.114 * real[:, 2:]).float()
    for images in (colours, colours.float() / 255, grey):
        torch.testing.assert_close(network(images), model((grey - 0.2) / 0.5), atol=1e-5, rtol=1e-5)
