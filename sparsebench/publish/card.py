"""The card of a submission on the Hugging Face Hub: who submits, tables, citations, and results in its YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebench.board import views
from sparsebench.board.board import Board, gather
from sparsebench.board.tables import markdown, render
from sparsebench.errors import few, plain
from sparsebench.publish.submission import Manifest, Verdict

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TAGS = ("sparsebench", "vision-transformer", "token-pruning", "token-merging", "benchmark")
TASK = "image-classification"
METRICS = ("accuracy", "accuracy_delta", "macs_ratio")
"""Keys of the columns that the YAML has, as fractions."""


def card_of(folder: Path, verdict: Verdict, manifest: Manifest, name: str) -> str:
    """Return the card of a submission, as Markdown with a head of YAML.

    Args:
        folder: the submission.
        verdict: its verdict.
        manifest: its manifest.
        name: USER/NAME of the data set.
    """
    board = gather(folder, {verdict.strategy: verdict.badge})
    suite = f"suite {verdict.suite}" if verdict.suite else "cells without a suite"
    version = f"{verdict.strategy}/{verdict.version}"
    tables = render(views.report(board.judged), "md")
    return "\n".join(
        [
            "---",
            _metadata(board, verdict, f"{verdict.strategy}, {suite}"),
            "---",
            "",
            f"# {verdict.strategy}, {suite}",
            "",
            f"Records of a strategy that removes or merges the tokens of Vision Transformers, from sparsebench "
            f"{manifest.sparsebench}.",
            "",
            *(f"- {line}" for line in _who(manifest, verdict)),
            "",
            "## Results",
            "",
            tables.strip(),
            "",
            "## Check them",
            "",
            "```bash",
            f"hf download {name} --repo-type dataset --local-dir submission",
            "sparsebench verify submission",
            f"sparsebench verify submission/{version} --replay 2",
            f"sparsebench leaderboard submission/{version}",
            "```",
            "",
            "## Citation",
            "",
            _code_block("\n\n".join(board.bibtex), "bibtex") if board.bibtex else "The strategies name no publication.",
            "",
        ]
    )


def _metadata(board: Board, verdict: Verdict, title: str) -> str:
    """Return the YAML of a card."""
    from huggingface_hub import DatasetCardData
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = list(_results(board, verdict.strategy))
    more: dict[str, Any] = {"tags": list(TAGS)}
    files = f"{verdict.strategy}/{verdict.version}/records/*.parquet"
    more["configs"] = [{"config_name": "records", "data_files": files}]
    if results:
        more["model-index"] = eval_results_to_model_index(verdict.strategy, results)
    return DatasetCardData(pretty_name=title, task_categories=[TASK], **more).to_yaml(line_break="\n")


def _results(board: Board, strategy: str) -> Iterator[EvalResult]:
    """Yield the results of the strategy, each of one task, network and budget."""
    from huggingface_hub import EvalResult

    for row in views.report(board.by_task).data.rows:
        if row["strategy"] != strategy and not row["strategy"].startswith(f"{strategy}("):
            continue
        task, model = (plain(row.get(key) or "", 100) for key in ("task", "model"))
        keys = ("model", "strategy", "budget", "n_train")
        settings = {key: plain(row[key], 200) for key in keys if row.get(key) is not None}
        at = " at ".join(settings[key] for key in ("strategy", "budget") if key in settings)
        for key in METRICS:
            if isinstance(row.get(key), float):
                yield EvalResult(
                    task_type=TASK,
                    dataset_type=f"sparsebench-{re.sub('[^A-Za-z0-9._-]', '-', task)}",
                    dataset_name=f"{task}, {model}",
                    dataset_config=", ".join(settings.values()),  # the client joins results of one configuration
                    dataset_args=settings,
                    metric_type=key,
                    metric_name=f"{key}, {at}",
                    metric_value=round(row[key], 10),
                )


def _who(manifest: Manifest, verdict: Verdict) -> Iterator[str]:
    """Yield who submits, and where to read more, as Markdown."""
    about = manifest.about
    fields = {
        "by": few(about.authors, 10, 100),
        "affiliation": about.affiliation,
        "date": manifest.date,
        "paper": about.paper,
        "code": about.code,
        "licence of the code": about.licence,
        "note": about.note,
        "badge": f"{verdict.badge}: {verdict.meaning}",
    }
    for name, value in fields.items():
        if name in ("paper", "code") and value:
            yield f"{name}: <{value}>"
        elif value:
            yield f"{name}: {markdown(plain(value, 600))}"
    for replay in verdict.replays:
        yield f"replayed: {markdown(plain(replay, 300))}"


def _code_block(text: str, language: str) -> str:
    """Return a text as a block of code, which no line of the text ends."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
