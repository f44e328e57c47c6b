import hashlib
import pickle
import shutil
import tarfile
import threading
import types
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torchvision
from PIL import Image
from scipy.io import savemat

from sparsebench.errors import UserError
from sparsebench.tasks import sources
from sparsebench.tasks.sources.composites import backgrounds, foregrounds, locate_backgrounds, locate_images
from sparsebench.tasks.sources.known import SETS

RNG = np.random.default_rng(0)
CLASSES = ["apple", "beetle", "cup"]


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(monkeypatch):
    """Return a function that serves a folder on this machine, and returns its address."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def serve(folder):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def cifar(tmp_path, monkeypatch, served):
    """Return the path of a tiny CIFAR-100, as an archive that torchvision fetches, and its pixels and labels."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    made, server = torchvision.datasets.CIFAR100, tmp_path / "server"
    folder = server / made.base_folder
    folder.mkdir(parents=True)
    drawn = {}
    for split, n in (("train", 12), ("test", 6)):
        pixels = RNG.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(n) % 3
        flat = pixels.transpose(0, 3, 1, 2).reshape(n, -1)
        (folder / split).write_bytes(pickle.dumps({"data": flat, "fine_labels": labels.tolist()}))
        drawn[split] = pixels, labels
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": CLASSES}))
    archive = server / made.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, made.base_folder)
    sums = {name: md5(folder / name) for name in ("train", "test", "meta")}
    monkeypatch.setattr(made, "url", f"{served(server)}/{archive.name}")
    monkeypatch.setattr(made, "tgz_md5", md5(archive))
    monkeypatch.setattr(made, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(made, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(made, "meta", made.meta | {"md5": sums["meta"]})
    return types.SimpleNamespace(archive=archive, folder=folder, root=tmp_path / "data", drawn=drawn)


def test_a_set_is_fetched_on_request_only_and_then_read(cifar):
    with pytest.raises(UserError, match=r"cifar100 is missing .*train is not there.*--data-root DIR.*--download"):
        locate_images("cifar100", cifar.root, False)
    assert not cifar.root.exists()
    assert locate_images("cifar100", cifar.root, True) == ("cifar100", cifar.root)
    assert locate_images("cifar100", cifar.root, False) == ("cifar100", cifar.root)
    for _ in range(2):  # from the files, and from the cache
        sources.composites._foregrounds.cache_clear()
        result = foregrounds("cifar100", 32, {"cifar100": cifar.root})
        assert result.classes == tuple(CLASSES)
        for split in ("train", "test"):
            pixels, labels = cifar.drawn[split]
            for k, name in enumerate(CLASSES):
                result_pixels = getattr(result, split)[name].transpose(0, 2, 3, 1)
                np.testing.assert_array_equal(result_pixels, pixels[labels == k])
    assert foregrounds("cifar100", 8, {"cifar100": cifar.root}).train["cup"].shape == (4, 3, 8, 8)


def test_a_failed_download_is_a_user_error(cifar):
    cifar.archive.unlink()
    with pytest.raises(UserError, match=r"cifar100 cannot be read or fetched into"):
        locate_images("cifar100", cifar.root, True)


@pytest.mark.parametrize("damage", [b"", b"other bytes", None], ids=["empty", "other bytes", "missing"])
def test_an_unofficial_file_is_refused_and_never_unpickled(cifar, damage):
    """A file that is not the official one is refused and never unpickled."""
    shutil.copytree(cifar.folder, cifar.root / cifar.folder.name)
    name, root = locate_images("cifar100", cifar.root, False)
    path = cifar.root / cifar.folder.name / "test"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(UserError, match=f"cifar100 is {'missing' if damage is None else 'corrupt'}"):
        locate_images("cifar100", cifar.root, False)
    with pytest.raises(UserError, match="cifar100 is missing or corrupt"):  # the files changed after the check
        foregrounds(name, 7, {name: root})


def test_svhn_has_its_channels_turned_and_its_tens_are_zeros(tmp_path, monkeypatch):
    made, split_list, drawn = torchvision.datasets.SVHN, {}, {}
    for split, n in (("train", 20), ("test", 10)):
        pixels, labels = RNG.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) % 10
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": pixels.transpose(1, 2, 3, 0), "y": np.where(labels == 0, 10, labels)[:, None]})
        split_list[split] = [path.as_uri(), path.name, md5(path)]
        drawn[split] = pixels, labels
    monkeypatch.setattr(made, "split_list", split_list)
    name, root = locate_images("svhn", tmp_path, False)
    sources.composites._foregrounds.cache_clear()
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    result = foregrounds(name, 32, {name: root})
    assert result.classes == tuple("0123456789")
    for split, (pixels, labels) in drawn.items():
        for k in range(10):
            result_pixels = getattr(result, split)[str(k)].transpose(0, 2, 3, 1)
            np.testing.assert_array_equal(result_pixels, pixels[labels == k])


@pytest.fixture
def flowers(tmp_path, monkeypatch):
    """Return the root of a tiny Flowers102: 2 training, 3 validation and 5 test pictures, each with its own shade."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    made, folder = torchvision.datasets.Flowers102, tmp_path / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    for i in range(1, 11):
        Image.new("RGB", (30, 20), (20 * i, 0, 0)).save(folder / "jpg" / f"image_{i:05d}.jpg", quality=95)
    savemat(folder / "imagelabels.mat", {"labels": np.ones((1, 10), dtype=int)})
    savemat(folder / "setid.mat", {"trnid": [[1, 4]], "valid": [[2, 5, 7]], "tstid": [[3, 6, 8, 9, 10]]})
    sums = {key: (name, md5(folder / name)) for key, name in (("label", "imagelabels.mat"), ("setid", "setid.mat"))}
    monkeypatch.setattr(made, "_file_dict", made._file_dict | sums)
    monkeypatch.setitem(SETS, "flowers102", replace(SETS["flowers102"], pictures=10))
    sources.composites._backgrounds.cache_clear()
    return tmp_path


def test_training_and_test_flowers_are_disjoint(flowers):
    name, root = locate_backgrounds("flowers102", flowers)
    assert (name, root) == ("flowers102", flowers)
    source = backgrounds(name, 8, {name: root})
    assert source.kinds == ("flowers", "clean") and source.textured == (0,)
    kinds = np.array([0] * 300 + [1] * 3)
    for test, expected in ((False, {1, 2, 4, 5, 7}), (True, {3, 6, 8, 9, 10})):
        drawn = source.draw(np.random.default_rng(0), kinds, test=test)
        assert {round(red / 20) for red in drawn[:300, 0, 4, 4].tolist()} == expected
        assert not drawn[300:].any()


def test_incomplete_flowers_are_a_user_error(flowers):
    (flowers / "flowers-102" / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(UserError, match=r"flowers102 is corrupt .*holds 9 of 10 pictures"):
        locate_backgrounds("flowers102", flowers)
