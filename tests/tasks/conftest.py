import csv
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

COUNTS = {0: (12, 4, 4, 8), 1: (2, 2, 2, 2), 2: (3, 3, 3, 3)}
"""The numbers of pictures in the groups (0, 0), (0, 1), (1, 0), (1, 1) of each split."""


def colour(number):
    return 3 * number, 255 - 3 * number, 40


def drawn_rows():
    """Return (split, label, attribute) of each picture, splits and groups in mixed order."""
    rows = [(s, g // 2, g % 2) for s, counts in COUNTS.items() for g, n in enumerate(counts) for _ in range(n)]
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def write_csv(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture
def waterbirds(tmp_path, monkeypatch):
    """Return a tiny Waterbirds in its published layout. The colour of a picture depends on its row."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    root, rows = tmp_path / "waterbird_complete95_forest2water2", drawn_rows()
    names = [f"{i % 3:03}.Bird/Bird_{i:04}.jpg" for i in range(len(rows))]
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + i % 5, 30), colour(i)).save(root / name, quality=95)
    table = [
        (i + 1, name, y, s, a, f"/sea/{i}.jpg") for i, (name, (s, y, a)) in enumerate(zip(names, rows, strict=True))
    ]
    write_csv(root / "metadata.csv", ["img_id", "img_filename", "y", "split", "place", "place_filename"], table)
    return SimpleNamespace(root=root, counts=COUNTS, rows=rows, names=names, table=root / "metadata.csv")


@pytest.fixture(params=["txt", "csv"])
def celeba(request, tmp_path, monkeypatch):
    """Return a tiny CelebA, in the published or in Kaggle's layout: Blond_Hair and Male are groups, Young is random."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    root, rows = tmp_path / "celeba", drawn_rows()
    folder = root / "img_align_celeba"
    folder = folder / "img_align_celeba" if request.param == "csv" else folder
    folder.mkdir(parents=True)
    names = [f"{i + 1:06}.jpg" for i in range(len(rows))]
    for i, name in enumerate(names):
        Image.new("RGB", (18, 22), colour(i)).save(folder / name, quality=95)
    young = np.random.default_rng(1).integers(0, 2, len(rows))
    header = ["Male", "Young", "Blond_Hair"]
    values = [[2 * a - 1, 2 * int(z) - 1, 2 * y - 1] for (_, y, a), z in zip(rows, young, strict=True)]
    if request.param == "csv":
        write_csv(
            root / "list_attr_celeba.csv", ["image_id", *header], [[n, *v] for n, v in zip(names, values, strict=True)]
        )
        write_csv(
            root / "list_eval_partition.csv", ["image_id", "partition"], zip(names, (r[0] for r in rows), strict=True)
        )
    else:
        lines = [f"{name}  {'  '.join(map(str, v))}" for name, v in zip(names, values, strict=True)]
        (root / "list_attr_celeba.txt").write_text("\n".join([str(len(rows)), " ".join(header) + " ", *lines]) + "\n")
        lines = [f"{name} {row[0]}" for name, row in zip(names, rows, strict=True)]
        (root / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return SimpleNamespace(
        root=root, rows=rows, names=names, young=young, table=root / f"list_attr_celeba.{request.param}"
    )
