"""Where a strategy came from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PROJECT = "sparsebench"


class Origin(BaseModel):
    """Where a strategy came from.

    Attributes:
        plugin: the entry point's name, or the file's.
        distribution, version: the installed package, "" for a file.
        sha256: of the source, so that an edited strategy is run again: a shipped one's file, else the plugin's files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plugin: str
    distribution: str = ""
    version: str = ""
    sha256: str = ""

    @property
    def is_shipped(self) -> bool:
        """Whether it came with sparsebench."""
        return self.distribution == PROJECT
