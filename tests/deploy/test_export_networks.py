"""Sparse networks as compiled graphs and exported files."""

import importlib.util
import re

import pytest
import timm
import torch
from click.testing import CliRunner
from eva_vits import KINDS
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from vits import ARCHITECTURES, close, vit

import sparsebench
from sparsebench.cli import main
from sparsebench.deploy.export import exportable
from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry
from sparsebench.strategy import sorting

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

FIXED = [
    registered.cls
    for registered in Registry(shipped_only=True).strategies()
    if registered.cls.kind != "oracle" and registered.cls.budgeted and not registered.cls.adaptive
]
NAMES = [cls.name for cls in FIXED]
needs_onnx = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs the extra export")


class ReadsANumber(sparsebench.Strategy):
    name = "reads_a_number"
    needs = frozenset({"tokens"})

    def scores(self, view):
        norms = view.tokens.norm(dim=2)
        return norms if float(norms.sum()) > 1 else -norms


def sparse_and_pixels(name, make=vit):
    cls = next(cls for cls in FIXED if cls.name == name)
    learned = "random" if cls.trained or cls.fits() else None
    sparse = sparsebench.apply(make(depth=2), name, macs=0.6, learned=learned)  # both blocks act; tracing takes seconds
    return sparse.eval(), torch.randn(2, 2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of torch about itself
@pytest.mark.parametrize("compares", [False, True], ids=["sorts", "compares, as on a GPU"])
@pytest.mark.parametrize("name", ["evit", "tome"])  # torch.export traces the others, see below
@torch.no_grad()
def test_the_network_compiles_whole(name, compares, monkeypatch):
    sparse, (x, other) = sparse_and_pixels(name)
    torch._dynamo.reset()
    monkeypatch.setattr(sorting, "_compares", lambda values: torch.compiler.is_compiling() and compares)
    compiled = torch.compile(sparse, fullgraph=True, backend="eager")
    compiled(x)
    close(compiled(other), sparse(other))


@pytest.mark.filterwarnings("ignore")  # warnings of torch about itself
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("divprune", lambda sparse: sparse),
        ("random", lambda sparse: sparse),
        ("attn_topk", torch.nn.Sequential),
    ],
    ids=["divprune", "random", "attn_topk inside another module"],
)
@torch.no_grad()
def test_a_trace_of_one_batch_is_refused(name, wrap):
    """A trace of one batch is refused but a program of torch export is right."""
    sparse, (x, other) = sparse_and_pixels(name)
    with pytest.raises(UserError, match=r"torch\.jit\.trace") as caught:
        torch.jit.trace(wrap(sparse), x)
    assert "\n" not in str(caught.value)
    close(torch.export.export(wrap(sparse), (x,), strict=False).module()(other), sparse(other))


def test_what_is_listed_of_files_is_what_is_tested_here():
    answers = {cls.name: exportable(cls) for cls in FIXED}
    assert set(answers.values()) == {"yes"}
    assert {exportable(Registry().strategy(name).cls) for name in ("ats", "oracle")} == {"no"}
    assert exportable(type("Mine", (FIXED[0],), {"__module__": "mine"})) == "?"


def run_onnx(file, x, output="logits"):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run([output], {"pixels": x.numpy()})[0])


ROTARY = ("DINOv3", "EVA-02", "PE", "SigLIP")


@pytest.mark.slow  # tracing takes seconds; the test of the command exports one
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["pt2", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, vit) for name in NAMES), *((name, KINDS[k]) for name in ("attn_topk", "tome", "evit") for k in ROTARY)],
)
@torch.no_grad()
def test_a_file_gives_what_the_sparse_network_gives(name, make, form, tmp_path):
    sparse, (_, other) = sparse_and_pixels(name, make)
    file = tmp_path / f"sparse.{form}"
    assert sparse.train().export(file, batch=2) == file
    assert all(part.training for part in sparse.modules())  # exporting does not change the mode
    sparse.eval()
    found = torch.export.load(file).module()(other) if form == "pt2" else run_onnx(file, other)
    close(found, sparse(other), atol=1e-4)


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_equal_scores_are_decided_as_in_the_benchmark(tmp_path):
    class Alike(sparsebench.Strategy):
        name = "alike"

        def scores(self, view):
            return (view.index % 3).float()

    sparse, x = sparsebench.apply(vit(depth=2), Alike, keep_rate=0.5), torch.randn(1, 3, 32, 32)
    close(run_onnx(sparse.export(tmp_path / "sparse.onnx"), x), sparse(x), atol=1e-4)


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_file_of_a_network_without_a_head_gives_features(tmp_path):
    sparse, x = sparsebench.apply(vit(depth=2, num_classes=0), "tome:per_block=3"), torch.randn(2, 3, 32, 32)
    close(run_onnx(sparse.export(tmp_path / "sparse.onnx", batch=2), x, "features"), sparse(x), atol=1e-4)


def test_what_cannot_be_exported_is_said_in_one_line(tmp_path, monkeypatch):
    sparse = sparsebench.apply(vit(), "attn_topk:macs=0.6")
    (tmp_path / "here.pt2").write_text("mine")
    for name, batch, message in [
        ("a.tflite", 1, "got a.tflite; allowed: .onnx, .pt2"),
        ("a.pt2", 0, r"batch size \(batch\); got 0; allowed: 1 or more"),
        ("here.pt2", 1, "already exists"),
        ("nowhere/a.pt2", 1, "folder .*nowhere does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            sparse.export(tmp_path / name, batch)
    assert (tmp_path / "here.pt2").read_text() == "mine"
    with pytest.raises(UserError, match=r"'ats:macs=0\.6' cannot be exported: its token counts"):
        sparsebench.apply(vit(), "ats:macs=0.6").export(tmp_path / "a.pt2")
    reading = sparsebench.apply(vit(), ReadsANumber, keep_rate=0.5)
    with pytest.raises(UserError, match=r"'reads_a_number:keep_rate=0\.5' cannot be exported as \.pt2"):
        reading.export(tmp_path / "b.pt2")
    assert not (tmp_path / "b.pt2").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need onnx, onnxscript.*pip install 'sparsebench\[export\]'"):
        sparse.export(tmp_path / "a.onnx")


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_the_command_writes_a_sparse_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model("test_vit", num_classes=3).eval()
    save_file(model.state_dict(), "weights.safetensors")
    words = ["export", "timm:test_vit", "--plugin", "attn_topk:keep_rate=0.5"]
    done = CliRunner().invoke(main, [*words, "--weights", "weights.safetensors", "-o", "sparse.pt2"])
    assert done.exit_code == 0, done.output
    assert re.search(r"written: sparse.pt2, attn_topk:keep_rate=0.5, 0\.\d+ of the MACs", done.output)
    x = torch.randn(1, 3, 160, 160)
    close(
        torch.export.load("sparse.pt2").module()(x), sparsebench.apply(model, "attn_topk:keep_rate=0.5")(x), atol=1e-4
    )
    for more, message in [
        (["--weights", "weights.safetensors"], "a network needs an output file"),
        (["--weights", "nowhere.safetensors", "-o", "b.pt2"], "nowhere.safetensors cannot be read"),
    ]:
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == 2 and message in done.output
    done = CliRunner().invoke(main, [*words[:2], "-o", "b.pt2"])
    assert done.exit_code == 2 and "--plugin" in done.output
    done = CliRunner().invoke(main, ["export", "vit", *words[2:], "-o", "b.pt2"])
    assert done.exit_code == 2 and "allowed: timm:NAME" in done.output


class Reads(TorchDispatchMode):
    """Counts numbers that are copied from the device to the host."""

    count = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads(call):
    with Reads() as counted:
        call()
    return counted.count


@pytest.mark.filterwarnings("ignore:'perturbation")  # it has more MACs than the dense network
@pytest.mark.parametrize(
    ("cls", "kind", "training"),
    [
        *((cls, "plain", False) for cls in FIXED),
        *((cls, "average pool without class token", True) for cls in FIXED if cls.trained or cls.trains_only),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_only_the_first_pass_with_a_shape_reads_from_the_device(cls, kind, training):
    learned = "random" if cls.trained or cls.fits() else None
    sparse = sparsebench.apply(ARCHITECTURES[kind](depth=2), cls, macs=0.7, learned=learned).train(training)
    acts = training or not cls.trains_only
    x = torch.randn(3, 3, 32, 32)
    assert (reads(lambda: sparse(x)) > 0) == acts
    assert reads(lambda: sparse(x)) == reads(lambda: sparse(x)) == 0
    assert (reads(lambda: sparse(x[:2])) > 0) == acts
