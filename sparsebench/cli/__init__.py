"""The command line. Each file has a group of commands, which call other rooms."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from typing import Any

import click

from sparsebench import __version__
from sparsebench.cli import check, features, leaderboard, listing, look, papers, publish, run
from sparsebench.cli.terminal import COMMANDS, EXAMPLES, check_repeated, refusal
from sparsebench.errors import UserError, limit_of
from sparsebench.plugin.observer import leave_in_time

LEAST = 5e9
"""Bytes of address space below which torch and its libraries may fail to load."""


def _example(error: click.ClickException) -> str:
    """Return an example for a missing or superfluous argument or an unknown option; "" for other errors."""
    bad_value = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
    context = error.ctx if isinstance(error, click.UsageError) and not bad_value else None
    example = EXAMPLES.get(context.info_name or "") if context else None
    return f" For example: {example}" if example else ""


class _Group(click.Group):
    """Prints errors of users as one line and exits with 2. This is the only place that does so."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command; see `click.Command.main`."""
        try:
            result = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.Abort:
            sys.exit(130)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(2)
        except click.ClickException as error:
            click.echo(f"Error: {' '.join(error.format_message().split())}{_example(error)}", err=True)
            sys.exit(error.exit_code)
        except UserError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.code)
        except BrokenPipeError:  # the reader of the output stopped reading
            sys.exit(1)
        except (OSError, MemoryError, RuntimeError, ImportError) as error:
            if (line := refusal(error)) is None:
                raise
            click.echo(f"Error: {line}", err=True)
            sys.exit(2)
        if kwargs.get("standalone_mode", True):
            sys.exit(result if isinstance(result, int) else 0)
        return result

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        """Return the name, the command and its arguments; see `click.Group.resolve_command`."""
        name, command, arguments = super().resolve_command(context, args)
        if command is not None and not context.resilient_parsing:
            check_repeated(context, command, arguments)
        return name, command, arguments

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups."""
        width = formatter.width - max(map(len, EXAMPLES)) - 8
        for title, names in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


@click.group(
    cls=_Group,
    epilog=f"Example:  {EXAMPLES['run']}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="sparsebench")
def main() -> None:
    """Benchmark token sparsification in Vision Transformers, on data with known relevant tokens."""


for command in (
    run.run,
    run.status,
    listing.list_,
    listing.show,
    listing.data,
    listing.env,
    look.show_tokens,
    look.compare,
    look.schedules,
    look.speed,
    features.features,
    leaderboard.leaderboard,
    papers.reproduce,
    papers.claims,
    check.new,
    check.check,
    publish.submit,
    publish.verify,
    publish.withdraw,
    publish.merge,
    publish.export,
    publish.observe,
):
    command.epilog = f"Example:  {EXAMPLES[str(command.name)]}"
    main.add_command(command)


def run_cli() -> None:
    """Start the command line. Warnings of the library go to standard error. The process ends even if threads hang."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # it was closed, as by >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  to the end
        if isinstance(stream, io.TextIOWrapper):  # names that the encoding lacks must not be an error
            stream.reconfigure(errors="backslashreplace")
    gc.set_threshold(50_000)  # most objects, modules and records, live until the end: collect garbage less often
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    if (size := limit_of("RLIMIT_AS")) is not None and size < LEAST:  # torch may end the process without an exception
        limit = f"the address space of a process is limited to {size / 1e9:.2f} GB"
        click.echo(f"warning: {limit}, and torch alone may need more: raise `ulimit -v`", err=True)
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        try:
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if code == 0:  # otherwise an error was printed already
                click.echo(f"Error: standard output: {refusal(error)}", err=True)
                code = 2
        leave_in_time(code)
        gc.freeze()  # otherwise the interpreter collects garbage in all modules at its end, which takes a second
        sys.exit(code)
