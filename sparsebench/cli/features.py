"""The command features."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsebench.cli.terminal import PATH, image_size, options
from sparsebench.errors import UserError, plain
from sparsebench.files import check_writable, content_hash
from sparsebench.plan.locate import OF_TRANSFORMERS, files_of

if TYPE_CHECKING:
    from sparsebench.deploy.features import Features, Pictures


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--images", required=True, metavar="folder:DIR", help="Pictures, in class folders or not.")
@click.option(
    "--plugin", default="dense", show_default=True, metavar="NAME|FILE.py[:PARAM=V]", help="Strategy with its budget."
)
@click.option("--weights", metavar="FILE.safetensors", type=PATH, help="Weights of MODEL. [downloaded by timm]")
@click.option("--weights-key", metavar="NAME", default="", help="The state dict to use if a checkpoint has several.")
@image_size
@click.option("--learned", metavar="FILE.safetensors", type=PATH, help="Tensors that the strategy has learned.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Pictures per batch; halved until they fit in memory.",
)
@options("device")
@click.option("--skip-bad", is_flag=True, help="Leave out unreadable pictures; the file names them.")
@click.option("-o", "--output", required=True, metavar="FILE.npz", type=PATH, help="File to write.")
def features(
    model: str,
    images: str,
    plugin: str,
    weights: Path | None,
    weights_key: str,
    side: int | None,
    learned: Path | None,
    batch: int,
    device: str,
    skip_bad: bool,
    output: Path,
) -> None:
    """Write the pooled features of a folder of pictures.

    MODEL is timm:NAME or hf:FOLDER. Features are what its head reads: the class token or the mean of the patches, after
    the last norm. A head is not needed, and not used. Pictures are cut and normalised as timm or the folder states it
    for MODEL.

    The file has the arrays features (n, channels) and paths (n), and about, JSON that says how they were computed. If
    there are class folders, it also has labels (n), their numbers, and classes, their sorted names; -1 is the label of
    a picture that is in none. With schedule=auto the schedule is chosen on some of the pictures, without labels.
    """
    from sparsebench.deploy.apply import description, timm_model
    from sparsebench.deploy.features import cut_for, extract, pictures_in, versions
    from sparsebench.runner.devices import first_of, resolve_device

    _check_output(output)
    pictures = pictures_in(images)
    network = timm_model(model, weights, weights_key, side=side)
    size, _, _ = description(network).partition(",")
    place = first_of(resolve_device(device))
    cut = cut_for(network, model.removeprefix("timm:").removeprefix("arch="))
    check_writable(output.absolute().parent)

    n = len(pictures.paths)
    with click.progressbar(length=n, label=f"{n:,} pictures", file=sys.stderr) as bar:
        result = extract(
            network,
            cut,
            plugin,
            pictures,
            learned=learned,
            batch=batch,
            device=place,
            skip_bad=skip_bad,
            on_done=bar.update,
        )
    about = {
        "model": model,
        "weights": _source_of(model, weights),
        "pool": network.global_pool,
        "versions": versions(),
    }
    result.write(output, about)
    _report(result, pictures, size, output)


def _check_output(output: Path) -> None:
    """Raise UserError if the file exists, or if its name does not end as it must."""
    from sparsebench.deploy.features import ENDING

    if output.suffix != ENDING:
        raise UserError("--output", got=output.name, allowed=f"a name that ends with {ENDING}")
    if output.exists():
        raise UserError(f"{output} already exists and is not overwritten", next_step="give another --output")


def _source_of(model: str, weights: Path | None) -> str | dict[str, str]:
    """Return where the weights of the model come from: timm, a file with its hash, or a folder as runs name it."""
    from sparsebench.models.transformers_models import fingerprint, folder_of, is_transformers

    if is_transformers(model):
        return f"{OF_TRANSFORMERS}{fingerprint(folder_of(model))}"
    if weights is None:
        return "timm"
    (file,) = files_of((weights,))  # a folder or a pattern may name it
    return {"name": file.name, "sha256": content_hash(file)}


def _report(result: Features, pictures: Pictures, size: str, output: Path) -> None:
    """Print the pictures that are left out, and what is written: features, class folders, size, strategy and cost."""
    for path, why in result.left_out.items():
        click.echo(f"left out: {plain(path)}: {plain(why)}", err=True)
    rows, channels = result.values.shape
    classes = f", {len(pictures.classes)} class folders" if pictures.classes else ""
    share = f"{result.spec}, {result.macs_ratio:.3f} of the dense MACs"
    click.echo(f"written: {output}, {rows} x {channels} features{classes}, {size}, {share}", err=True)
