"""Help in groups with an example each, and names that a shell completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

COMMANDS = {
    "Measure": ("run", "status", "leaderboard", "compare", "show-tokens", "reproduce", "claims", "speed"),
    "What there is": ("list", "show", "data", "env"),
    "Write a strategy": ("new", "check"),
    "Publish and share": ("submit", "verify", "merge", "export", "observe"),
}
EXAMPLES = {
    "run": "sparsebench run attn_topk evit:keep_rate=0.7 my.py --out results",
    "status": "sparsebench status results",
    "leaderboard": "sparsebench leaderboard results --view pairs",
    "compare": "sparsebench compare attn_topk evit --picture both.png",
    "show-tokens": "sparsebench show-tokens --plugin attn_topk",
    "reproduce": "sparsebench reproduce theory --figure 2",
    "list": "sparsebench list suites",
    "show": "sparsebench show attn_topk",
    "data": "sparsebench data --verify",
    "env": "sparsebench env",
    "new": "sparsebench new my_strategy",
    "check": "sparsebench check my_strategy.py evit",
    "claims": "sparsebench claims evit-deit-s-0.7",
    "speed": "sparsebench speed timm:deit_tiny_patch16_224 evit:keep_rate=0.7 --batch 1",
    "submit": "sparsebench submit results --strategy my_strategy",
    "verify": "sparsebench verify leaderboard/submissions",
    "merge": "sparsebench merge results-1 results-2 --out results",
    "export": "sparsebench export results --format csv -o records.csv",
    "observe": "sparsebench observe results tensorboard:dir=events",
}
OPTIONS = {
    "What is run": ("plugins", "suite", "tasks", "model", "seeds", "keep", "macs", "n_train", "where"),
    "Pictures and weights": (
        "images", "backgrounds", "pretrain_images", "data_root", "download", "skip_bad", "pretrained", "weights",
        "weights_key", "networks",
    ),
    "How it is run": ("out", "dry_run", "rerun", "jobs", "device", "checkpoint", "timeout", "memory_limit", "exclusive",
                      "observe"),
    "On several machines": ("shard", "engine", "address", "cluster"),
}  # fmt: skip


def group_commands(group: click.Group, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the commands of a group, by what they are for."""
    known = {name: command for name in group.list_commands(context) if (command := group.get_command(context, name))}
    rest = tuple(name for name in known if not any(name in names for names in COMMANDS.values()))
    width = max(map(len, known)) + 8
    for title, names in (COMMANDS | {"Others": rest}).items():
        rows = [(name, known[name].get_short_help_str(formatter.width - width)) for name in names if name in known]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def group_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command, by what they are for where it has many."""
    options = (one for one in command.get_params(context) if isinstance(one, click.Option))
    rows = {one.name: row for one in options if (row := one.get_help_record(context)) is not None}
    titles = {name: title for title, names in OPTIONS.items() for name in names} if len(rows) > 12 else {}
    for title in (*OPTIONS, "Options"):
        part = [row for name, row in rows.items() if titles.get(str(name), "Options") == title]
        if part:
            with formatter.section(title):
                formatter.write_dl(part)


class Guided(click.Command):
    """A command whose help has its options in groups and ends with an example."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; see `group_options`."""
        group_options(self, context, formatter)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        if self.name in EXAMPLES:
            with formatter.section("Example"):
                formatter.write_text(EXAMPLES[self.name])


def strategies() -> Iterable[str]:
    """Return the names of strategies; nothing of them is imported."""
    from sparsebench.plugin.registry import FIRST, Registry

    return [name for name in Registry().entries if name not in (*FIRST, *observers())]


def observers() -> Iterable[str]:
    """Return the names of the observers that come with sparsebench."""
    return ("mlflow", "tensorboard")


def suites() -> Iterable[str]:
    """Return the names of suites."""
    from sparsebench.planning import suite

    return suite.names()


def tasks() -> Iterable[str]:
    """Return the names of tasks."""
    from sparsebench.plugin.registry import Registry

    return [cls.name for cls in Registry().tasks()]


def models() -> Iterable[str]:
    """Return the names of models."""
    from sparsebench.plugin.registry import Registry

    return [cls.name for cls in Registry().models()]


NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "plugins": strategies, "named": strategies, "suite": suites, "tasks": tasks, "task": tasks, "model": models,
    "observe": observers,
}  # fmt: skip
"""What names the parameters of commands take."""


def complete(_context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names that a shell offers for what is begun; files where a strategy's may be."""
    names = NAMES[str(parameter.name)]()
    offered = [CompletionItem(name) for name in sorted(names) if name.startswith(begun)]
    return offered or [CompletionItem(begun, type="file")]
