"""Where a strategy came from."""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

PROJECT = "sparsebench"


class Origin(BaseModel):
    """Where a strategy came from.

    Attributes:
        plugin: the entry point's name, or the file's.
        distribution, version: the installed package, "" for a file.
        revision: of the strategy, so that one that chooses otherwise is run again. Until records had it, it was the
            hash of its source, which stands in its place where they are read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plugin: str
    distribution: str = ""
    version: str = ""
    revision: str = Field("", validation_alias=AliasChoices("revision", "sha256"))

    @property
    def is_shipped(self) -> bool:
        """Whether it came with sparsebench."""
        return self.distribution == PROJECT
