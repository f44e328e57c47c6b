"""Write docs/reference/cli.md from the commands."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from sparsebench.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
ABOUT = """# Commands

`sparsebench COMMAND --help` prints the same text. Exit codes are 0 for success, 1 if something failed, 2 if the
command is wrong.
"""
NO_WRAP = "\b\n"


def page() -> str:
    """Return the page, with one section per command."""
    return "\n".join([ABOUT, *_sections(main, "sparsebench")])


def _sections(group: click.Group, words: str) -> Iterator[str]:
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        yield from _section(command, f"{words} {name}")


def _section(command: click.Command, words: str) -> Iterator[str]:
    arguments = [_argument(argument) for argument in command.params if isinstance(argument, click.Argument)]
    options = [option for option in command.params if isinstance(option, click.Option)]
    yield f"## {words.removeprefix('sparsebench ')}\n"
    yield f"`{' '.join([words, *arguments, *(['[OPTIONS]'] if options else [])])}`\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        verbatim = paragraph.startswith(NO_WRAP)  # click's mark of a paragraph that is not wrapped
        yield f"```text\n{paragraph.removeprefix(NO_WRAP).strip()}\n```\n" if verbatim else f"{paragraph}\n"
    if options:
        yield "\n".join(f"- `{_names(x)}`: {' '.join((x.help or '').split())}{_default(x)}" for x in options)
        yield ""


def _argument(argument: click.Argument) -> str:
    value = _value(argument)
    return value if argument.required or value.startswith("[") else f"[{value}]"


def _names(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {_value(option)}"


def _value(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.Choice):
        return "|".join(parameter.type.choices)
    return parameter.metavar or (parameter.name or "").upper()


def _default(option: click.Option) -> str:
    if not option.show_default or option.default is None:
        return ""
    value = ",".join(map(str, option.default)) if option.multiple else option.default
    return f" Default: `{value}`."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
