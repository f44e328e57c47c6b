"""The command line, called in this process."""

from typing import Any

from click.testing import CliRunner, Result

from sparsebench.cli import main


def call(*arguments: Any) -> Result:
    """Return the result of the command line with these arguments."""
    return CliRunner().invoke(main, [str(word) for word in arguments])
