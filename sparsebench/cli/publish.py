"""Commands that publish and share records: submit, verify, merge, export and observe."""

from __future__ import annotations

import codecs
import csv
import json
import sys
import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from sparsebench.api import OUT
from sparsebench.board.tables import cell
from sparsebench.cli.terminal import PATH, PICTURES, Guided, folder_argument, image_size, options
from sparsebench.errors import UserError, few, plain
from sparsebench.files import whole_file
from sparsebench.models.base import TRANSFORMERS
from sparsebench.plan.request import Files
from sparsebench.records import store, table
from sparsebench.records.record import canonical
from sparsebench.runner.progress import Progress

if TYPE_CHECKING:
    from sparsebench.publish.about import About
    from sparsebench.publish.submission import Verdict

MOST_CONTRADICTIONS = 5
"""Largest number of contradictions that `merge` prints."""


@click.command(cls=Guided)
@click.argument("path", type=PATH)
@click.option("--replay", metavar="N", help="Run N (or all) cells of one submission again on this machine.")
@click.option(
    "--replay-seed",
    type=int,
    metavar="SEED",
    help="Seed of the random choice of cells, as printed by an earlier replay.",
)
@click.option(
    "--by",
    metavar="NAME",
    help="Who replays. If the cells agree, the replay is written beside the submission, and boards show it.",
)
@options("device")
@click.option("--yes", is_flag=True, help="Run the code of the submission without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, one per submission.")
@options("weights", "weights_key", "text_features", "networks", *PICTURES)
def verify(
    path: Path,
    replay: str | None,
    replay_seed: int | None,
    by: str | None,
    device: str,
    yes: bool,
    as_json: bool,
    **files: Any,
) -> None:
    """Check each submission below PATH and give it a badge.

    \b
    reported   complete and consistent; nobody has run it again
    replayed   also, randomly chosen cells were run again here and agree
    A submission with neither badge is rejected, with the reasons.

    Without --replay only files are read. --replay runs the strategy's code, from the submission or the installed
    plugin, and needs the same pictures, weights and networks as the run; for --model hf:FOLDER give --weights FOLDER.
    With --by NAME it writes a file in the submission's folder replays/, from which others see that and when NAME has
    replayed it.

    The exit code is 0 if no submission is rejected, 1 if one is, 2 if the command is wrong.
    """
    from sparsebench.publish.collection import withdrawal_of
    from sparsebench.publish.submission import verify as verified

    number = _number_of(replay)
    folders, verdicts = _submissions(path), []
    if replay and len(folders) > 1:
        raise UserError("--replay needs one submission", got=f"{len(folders)} submissions", next_step="name one")
    if by is not None and not replay:
        raise UserError("--by needs a replay", next_step="add --replay N")
    for folder in folders:
        verdict = verified(folder, placed=True)
        withdrawal = withdrawal_of(folder)
        if withdrawal:
            verdict.notes.append(f"{withdrawal}; boards leave it out")
        if replay and not verdict.wrong:
            by = _name_of(by, folder)
            _ask(folder, yes)
            from sparsebench.publish.replay import replay as replay_cells

            replay_cells(folder, verdict, number, Files(**files), device, replay_seed, Progress(folder).stopping, by)
        verdicts.append(verdict)
        if not as_json:
            click.echo(_lines(verdict))
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    sys.exit(int(any(verdict.wrong for verdict in verdicts)))


def _number_of(replay: str | None) -> int | None:
    """Return how many cells are run again; None for all, and without a replay."""
    if replay is None or replay == "all":
        return None
    if not (replay.isascii() and replay.isdecimal() and int(replay)):
        raise UserError("--replay", got=f"'{replay}'", allowed="a number of cells, 1 or more, or all")
    return int(replay)


def _name_of(by: str | None, folder: Path) -> str:
    """Return the name of who replays; "" if the replay is not to be kept."""
    from sparsebench.publish.replays import check_name
    from sparsebench.publish.submission import manifest_of

    return "" if by is None else check_name(by, manifest_of(folder))


def _submissions(path: Path) -> list[Path]:
    """Return the submissions below a path. Raise UserError if it is not a folder or has none."""
    from sparsebench.publish.submission import submissions_in

    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    folders = submissions_in(path)
    if not folders:
        raise UserError(f"no submissions in {path}", next_step="submissions are folders <strategy>/<version>")
    return folders


def _ask(folder: Path, yes: bool) -> None:
    """Tell the user which code will run with which rights, and continue only if the user agrees."""
    from sparsebench.publish.replay import has_sandbox, no_network
    from sparsebench.publish.submission import manifest_of, plugin_of

    manifest = manifest_of(folder)
    plugin = plugin_of(folder, manifest)
    code = f"the file {plain(plugin)}" if plugin else f"the installed plugin of '{plain(manifest.strategy, 60)}'"
    network = "without network" if no_network() else "WITH network access, because `unshare` does not work here"
    limits = f"{network}, with access to your files, because `bwrap` does not work here"
    if has_sandbox():
        limits = "without network, in a sandbox that hides your home folder and writes only temporary files"
    line = f"this runs {code} with your user rights, {limits}"
    if yes:
        click.echo(line, err=True)
    elif not sys.stdin.isatty():
        raise UserError(line, next_step="give --yes to confirm")
    else:
        click.confirm(f"{line}; continue?", abort=True, err=True)


def _lines(verdict: Verdict) -> str:
    lines = [f"{verdict.folder}: {verdict.badge}: {verdict.meaning}"]
    if verdict.strategy:
        scope = f"suite {verdict.suite}" if verdict.suite else "cells without a suite"
        lines.append(f"{verdict.strategy} {verdict.version}, {scope}, {verdict.records} records")
    return "\n  ".join([*lines, *verdict.why, *verdict.notes])


@click.command()
@folder_argument
@click.option("--strategy", metavar="NAME", help="Strategy to submit, if FOLDER has several deployable strategies.")
@click.option(
    "--to",
    default="leaderboard/submissions",
    show_default=True,
    type=PATH,
    help="Folder of submissions, in a clone of the repository.",
)
@click.option(
    "--about",
    metavar="FILE.toml",
    type=PATH,
    help="File with authors, affiliation, paper, code, licence and note.  [submission.toml, if there is one here]",
)
@click.option("--author", "authors", multiple=True, metavar="NAME", help="An author; repeat it for several.")
@click.option("--affiliation", metavar="TEXT", help="Where the authors work.")
@click.option("--paper", metavar="ADDRESS", help="Address of the paper.")
@click.option("--code", metavar="ADDRESS", help="Address of the code.")
@click.option("--licence", metavar="NAME", help="Licence of the strategy's code, such as Apache-2.0.")
@click.option("--note", metavar="TEXT", help="One line for readers of the board.")
@click.option(
    "--replaces",
    metavar="VERSION",
    default="",
    help="Folder name of an earlier submission of the strategy by one of the authors; boards then leave it out.",
)
@click.option(
    "--pull-request", is_flag=True, help="Open a pull request too, by git and the program gh, from your fork."
)
@click.option("--hub", metavar="USER/NAME", help="Upload it too, to this data set of the Hugging Face Hub.")
@click.option(
    "--dry-run", is_flag=True, help="Write and send nothing: show the files, where they would go, and the card."
)
def submit(
    folder: Path,
    strategy: str | None,
    to: Path,
    about: Path | None,
    replaces: str,
    pull_request: bool,
    hub: str | None,
    dry_run: bool,
    **fields: str | tuple[str, ...],
) -> None:
    """Write the results of a run's FOLDER as a submission.

    The submission has the records of the strategy and of the baselines, with outcomes, the strategy's file, the machine
    and the suite, and who submits. In a terminal the command asks for what neither options nor the file say. The
    submission names a suite only if it has all cells of the suite. The command writes TO/<strategy>/<version> and
    prints the git commands that publish it, for the remotes of the clone. It refuses a strategy without any result.

    Without --pull-request and --hub nothing is uploaded. With them, the same command goes on where an earlier one was
    interrupted, and uploads only what has changed. --hub takes the token of `hf auth login` or of HF_TOKEN.

    Cells of a task or model in another plugin file than the strategy's cannot be replayed from a submission.
    """
    from sparsebench.publish.submission import THERE, check_place, check_replaced, manifest_of
    from sparsebench.publish.submission import submit as write_submission

    if hub is not None:
        from sparsebench.publish.hub import address_of

        address_of(hub)  # a wrong name is refused before anything is written
    who = _about(about, {name: value for name, value in fields.items() if value})
    is_again = pull_request or hub is not None
    if dry_run:
        with tempfile.TemporaryDirectory() as place:
            verdict = write_submission(folder, Path(place), strategy, who)
            if replaces:
                check_replaced(to / verdict.strategy, replaces, who)
            manifest = manifest_of(Path(verdict.folder)).model_copy(update={"replaces": replaces})
            if check_place(to / verdict.strategy / verdict.version, manifest if is_again else None):
                verdict.notes.append(THERE)
            _preview(verdict, to, who, pull_request, hub)
        return

    verdict = write_submission(folder, to, strategy, who, replaces, is_again)
    _tell(verdict, who)
    if hub is not None:
        _upload(verdict, hub)
    if pull_request or hub is None:
        _request(verdict, who, pull_request)


def _tell(verdict: Verdict, about: About) -> None:
    """Say what was written."""
    from sparsebench.publish.collection import WITHDRAWN

    click.echo(f"written: {verdict.folder}, {verdict.records} records, {verdict.badge}: {verdict.meaning}", err=True)
    for note in verdict.notes:
        click.echo(note, err=True)
    if (Path(verdict.folder) / WITHDRAWN).exists():
        click.echo(f"it is withdrawn: boards leave it out until {WITHDRAWN} is removed", err=True)
    if not about.authors:
        click.echo("it names no author: --author NAME, or authors in submission.toml, names them", err=True)


def _request(verdict: Verdict, about: About, is_wanted: bool) -> None:
    """Open the pull request of a submission; if it is not wanted or not possible, print the commands for it."""
    from sparsebench.publish import pull_request
    from sparsebench.publish.clone import git_steps

    folder = Path(verdict.folder)
    reason = pull_request.obstacle(folder) if is_wanted else ""
    if reason:
        click.echo(f"no pull request is opened: {reason}; these commands do the same", err=True)
    if reason or not is_wanted:
        click.echo(git_steps(verdict))
        return
    places = pull_request.places_of(folder, prepare=True)
    click.echo(pull_request.request(verdict, about, places))
    click.echo(f"the clone has still its branch; before you pull the merged submission, remove {folder}", err=True)


def _upload(verdict: Verdict, name: str) -> None:
    """Upload a submission to a data set of the Hub, and print its address."""
    from sparsebench.publish import hub
    from sparsebench.publish.card import card_of
    from sparsebench.publish.submission import manifest_of

    folder = Path(verdict.folder)
    done = hub.upload(folder, verdict, card_of(folder, verdict, manifest_of(folder), name), name)
    click.echo(done.address)
    if not done.changed:
        click.echo("it has the same files already; nothing was uploaded", err=True)
    if done.kept:
        click.echo(f"it keeps files that are not here: {few(done.kept)}; only its page can remove them", err=True)


def _preview(verdict: Verdict, to: Path, about: About, wants_request: bool, hub: str | None) -> None:
    """Print what `submit` would write and send: the files, the branch and the request, the data set and its card."""
    from sparsebench.publish import pull_request
    from sparsebench.publish.clone import branch_of, git_steps, title_of
    from sparsebench.publish.submission import files_of, manifest_of

    written = Path(verdict.folder)
    verdict.folder = str(to / verdict.strategy / verdict.version)
    click.echo(f"would write {verdict.folder}, {verdict.records} records, {verdict.badge}: {verdict.meaning}")
    for path in files_of(written):
        click.echo(f"  {path.relative_to(written).as_posix()}, {path.stat().st_size:,} bytes")
    for note in verdict.notes:
        click.echo(note)
    if wants_request:
        folder = Path(verdict.folder)
        reason = pull_request.obstacle(folder)
        if reason:
            click.echo(f"would open no pull request: {reason}; these commands do the same\n{git_steps(verdict)}")
        else:
            places = pull_request.places_of(folder, prepare=False)
            click.echo(
                f"would push {branch_of(verdict)} to {places.head.page}, and ask {places.target.page} to pull it:"
            )
            click.echo(f"{title_of(verdict)}\n\n{pull_request.body_of(verdict, about)}")
    if hub is not None:
        from sparsebench.publish.card import card_of
        from sparsebench.publish.hub import address_of

        click.echo(f"would upload it to {address_of(hub)}, with this card as README.md:\n")
        click.echo(card_of(written, verdict, manifest_of(written), hub))


def _about(file: Path | None, given: dict[str, Any]) -> About:
    """Return who submits: from a file, options, which come first, and in a terminal from questions."""
    from sparsebench.publish.about import FILE, about_of, read_about

    if file is None and Path(FILE).is_file():
        file = Path(FILE)
        click.echo(f"read: {file}", err=True)
    values = (read_about(file) if file is not None else {}) | given
    about = about_of(values, "who submits")
    if sys.stdin.isatty():
        about = about_of(values | _answers(about), "who submits")
    return about


QUESTIONS = {
    "authors": "Authors, separated by ;",
    "affiliation": "Affiliation",
    "paper": "Address of the paper",
    "code": "Address of the code",
    "licence": "Licence of the code",
    "note": "A line for readers",
}
"""What `submit` asks for in a terminal, by field of `About`."""


def _answers(about: About) -> dict[str, Any]:
    """Ask for the fields that are still empty, and return the answers that are not. A wrong answer is asked again."""
    from sparsebench.publish.about import About

    answers: dict[str, Any] = {}
    for field, question in QUESTIONS.items():
        if getattr(about, field):
            continue
        if not answers:
            click.echo("Boards show who submits. Leave empty what does not apply.", err=True)

        def value_of(text: str, field: str = field) -> Any:
            value: Any = text
            if field == "authors":
                value = tuple(filter(None, map(str.strip, text.split(";"))))
            try:
                return getattr(About.model_validate({field: value}), field)
            except UserError as error:
                raise click.UsageError(str(error)) from error

        answers[field] = click.prompt(question, default="", show_default=False, value_proc=value_of, err=True)
    return {field: answer for field, answer in answers.items() if answer}


@click.command()
@click.argument("folder", type=PATH)
@click.option("--reason", required=True, metavar="TEXT", help="One line that boards show.")
def withdraw(folder: Path, reason: str) -> None:
    """Withdraw the submission in FOLDER: boards leave it out and name the reason.

    The files stay; withdrawn.json is written beside them. Remove this file to submit again.
    """
    from sparsebench.publish.collection import withdraw as write_withdrawal

    click.echo(f"written: {write_withdrawal(folder, reason)}", err=True)


@click.command()
@click.argument("folders", nargs=-1, required=True, type=PATH)
@click.option("-o", "--out", required=True, type=PATH, help="New folder to write.")
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Merge the records of several FOLDERS into a new one.

    The same records always give the same bytes. If several folders have a cell, the newest success is used. Exits with
    1 if a record contradicts itself, see sparsebench verify.
    """
    from sparsebench.publish.submission import contradictions

    click.echo(f"written: {out}, {store.merge(folders, out)} records", err=True)
    wrong = list(islice(contradictions(out), MOST_CONTRADICTIONS))
    for text in wrong:
        click.echo(f"{out}: {text}", err=True)
    sys.exit(int(bool(wrong)))


@click.command()
@click.argument("what", metavar=f"[FOLDER={OUT}|MODEL]", required=False)
@click.option("--format", "form", type=click.Choice(["csv", "jsonl", "parquet"]), default="csv", show_default=True)
@click.option("-o", "--out", metavar="FILE", type=PATH, help="File to write. [standard output]")
@click.option("--plugin", metavar="NAME[:PARAM=V]", help="Export MODEL with this strategy, instead of records.")
@click.option("--weights", metavar="FILE.safetensors", type=PATH, help="Weights of MODEL. [downloaded by timm]")
@click.option("--weights-key", metavar="NAME", default="", help="The state dict to use if a checkpoint has several.")
@image_size
@click.option("--learned", metavar="FILE.safetensors", type=PATH, help="Tensors that the strategy has learned.")
@click.option("--batch", type=int, default=1, show_default=True, help="Batch size of the exported network.")
def export(
    what: str | None,
    form: str,
    out: Path | None,
    plugin: str | None,
    weights: Path | None,
    weights_key: str,
    side: int | None,
    learned: Path | None,
    batch: int,
) -> None:
    """Export the records of a run, or a network with a strategy.

    With a FOLDER, writes one row per record. docs/reference/records.md describes the columns of csv and parquet; jsonl
    has the complete records.

    With --plugin, writes the network MODEL (timm:NAME or hf:FOLDER) to -o FILE.pt2, or to FILE.onnx, which needs
    pip install 'sparsebench[export]'. A network without a head gives the pooled features. In ONNX files the input is
    named pixels, and the output logits or features.
    """
    if plugin is None:
        _export_records(what, form, out)
        return
    if what is None:
        raise UserError("MODEL is missing", next_step="name a model, such as timm:deit_small_patch16_224")
    if out is None:
        raise UserError("a network needs an output file", next_step="give -o FILE.onnx or FILE.pt2")
    from sparsebench.deploy.apply import apply, description, timm_model

    model = timm_model(what, weights, weights_key, side=side)
    with apply(model, plugin, learned=learned) as sparse:
        sparse.export(out, batch)
        share = f"{sparse.macs_ratio:.3f} of the MACs of {what}"
        click.echo(f"written: {out}, {sparse.spec}, {share}, {description(model)}")


def _export_records(what: str | None, form: str, out: Path | None) -> None:
    """Write the records of a folder to a file, or to standard output."""
    if what is not None and what.startswith(("timm:", TRANSFORMERS)):
        raise UserError(f"{what} is exported with a strategy", next_step="give --plugin NAME, and -o FILE.onnx or .pt2")
    folder = Path(OUT if what is None else what)
    if out is None:
        if form == "parquet":
            raise UserError("parquet needs an output file", next_step="give -o FILE")
        _write_records(folder, form, sys.stdout.buffer)
        return
    if out.exists():
        raise UserError(f"{out} already exists and is not overwritten", next_step="give another -o")
    with whole_file(out) as file:
        n = _write_records(folder, form, file)
    click.echo(f"written: {out}, {n} records", err=True)


def _write_records(folder: Path, form: str, file: BinaryIO) -> int:
    """Write the records of a run's folder that count, and return their number.

    csv has the results of checks, but no outcomes of test items and no columns of JSON.
    """
    import pyarrow.parquet as pq

    from sparsebench.records import reports

    rows = table.in_order(store.rows(folder)).sort_by("cell_id")
    if form == "parquet":
        pq.write_table(rows.replace_schema_metadata(), file)
    elif form == "jsonl":
        for record in map(table.record_of, table.rows_of(rows)):
            file.write(canonical(record.model_dump(mode="json")).encode("ascii", "backslashreplace") + b"\n")
    else:
        text = codecs.getwriter("utf-8")(file)  # unlike a TextIOWrapper it never closes the file, which others flush
        writer = csv.writer(text, lineterminator="\n")
        checked = reports.read(folder)
        unread = {table.CHECKSUM, *table.ITEM, *table.PARTS}
        shown = rows.select([name for name in rows.column_names if name not in unread])
        for number, row in enumerate(table.rows_of(shown)):
            if checked:
                badge = reports.badge_of(checked, row["strategy"], row["revision"])
                row |= dict(zip((reports.CHECKS, reports.REMARK), badge, strict=True))
            if not number:
                writer.writerow(map(cell, row))
            writer.writerow(map(cell, row.values()))
    return len(rows)


@click.command()
@click.argument("folder", type=PATH)
@click.argument("observers", nargs=-1, required=True, metavar="NAME|FILE.py[:PARAM=V]...")
def observe(folder: Path, observers: tuple[str, ...]) -> None:
    """Send the records of a run's FOLDER to observers.

    `run --observe` does this during the run. Exits with 1 if an observer failed.
    """
    from sparsebench.runner.run import show_folder

    n, failed = show_folder(observers, folder)
    click.echo(f"{n} records" + (f"; failed: {', '.join(failed)}" if failed else ""), err=True)
    sys.exit(int(bool(failed)))
