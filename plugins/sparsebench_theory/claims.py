"""What the papers claim, as data: claims.toml of a theory has each claim, the published value, and the rule."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources
from typing import Any

from sparsebench.paper import Verdict, Word


def verdicts_of(package: str, **constants: Any) -> Callable[..., Verdict]:
    """Return the maker of verdicts on the claims of a package; constants are what its rules name."""
    text = (resources.files(package) / "claims.toml").read_text(encoding="utf-8")
    claims: dict[str, dict[str, str]] = tomllib.loads(text)

    def verdict(key: str, measured: str, word: Word, fits: str = "", **names: Any) -> Verdict:
        """Return the verdict on the claim of that key; names are what its texts leave open."""
        said: dict[str, Any] = {field: text.format(**constants, **names) for field, text in claims[key].items()}
        return Verdict(measured=measured, fits=fits, verdict=word, **said)

    return verdict
