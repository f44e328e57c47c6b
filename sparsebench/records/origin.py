"""Where a strategy came from: a module of its own, so that a list of strategies needs no more."""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

PROJECT = "sparsebench"


class Origin(BaseModel):
    """Where a strategy came from.

    Attributes:
        plugin: the entry point's name, or the file's.
        distribution, version: the installed package, "" for a file.
        revision: what its class declares where it is installed, as "1"; of a file a hash of its code, which is never a
            number. Records of earlier versions have a hash of the text of its source there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plugin: str
    distribution: str = ""
    version: str = ""
    revision: str = Field("", validation_alias=AliasChoices("revision", "sha256"))

    @property
    def identity(self) -> str:
        """What tells a strategy from others of its name: the distribution, if any, and the revision."""
        return f"{self.distribution} {self.revision}".strip()

    @property
    def is_shipped(self) -> bool:
        """Whether it came with sparsebench."""
        return self.distribution == PROJECT
