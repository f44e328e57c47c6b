"""Who submits, and where to read more: the authors, addresses, licence and note of a submission, as checked plain text.

The fields are shown on boards, so each is one line without control characters or marks that change the direction of
writing. Addresses are http or https, with a host and without a user's name before it, which could hide the host.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from operator import not_
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from sparsebench.errors import LONGEST_ADDRESS, UserError, is_address, plain, reason_of
from sparsebench.records.record import Value

FILE = "submission.toml"
MOST_AUTHORS, MOST_BYTES = 50, 100_000
LONGEST = {"authors": 100, "affiliation": 200, "licence": 60, "note": 500}
"""Most characters of each text; of each name for authors."""
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .+()-]*")
MOST_MARKS = 6
"""Most marks on one letter. No name needs more, and many of them would cover the lines around the letter."""
SELECTORS = [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), *range(0x180B, 0x1810)]
FILLERS = dict.fromkeys([0x115F, 0x1160, 0x034F, 0x17B4, 0x17B5, *SELECTORS])
"""Letters and marks that show nothing: fillers of Korean (others are equal to them in the form NFKC), a joiner, two
vowels of Khmer, and selectors of variants."""


class About(Value):
    """Who submits, and where to read more. All fields may be empty.

    Attributes:
        authors: names of persons or groups.
        affiliation: where they work.
        paper, code: addresses.
        licence: licence of the strategy's code, such as an SPDX name.
        note: one line for readers of the board.
    """

    authors: tuple[str, ...] = Field((), exclude_if=not_)
    affiliation: str = Field("", exclude_if=not_)
    paper: str = Field("", exclude_if=not_)
    code: str = Field("", exclude_if=not_)
    licence: str = Field("", exclude_if=not_)
    note: str = Field("", exclude_if=not_)

    @field_validator("authors")
    @classmethod
    def _authors(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(names) > MOST_AUTHORS:
            raise UserError("authors", got=f"{len(names)} names", allowed=f"at most {MOST_AUTHORS}")
        names = tuple(text_of("authors", name) for name in names)
        if not all(map(key_of, names)):
            raise UserError("authors", got="a name without letters", allowed="names of persons or groups")
        return names

    @field_validator("affiliation", "note")
    @classmethod
    def _texts(cls, text: str, info: Any) -> str:
        return text_of(info.field_name, text)

    @field_validator("licence")
    @classmethod
    def _licence(cls, text: str) -> str:
        text = text_of("licence", text)
        if text and not LICENCE.fullmatch(text):
            raise UserError("licence", got=f"'{plain(text, 80)}'", allowed="a name such as Apache-2.0 or MIT")
        return text

    @field_validator("paper", "code")
    @classmethod
    def _addresses(cls, text: str, info: Any) -> str:
        text = text.strip()
        if text and not is_address(text):
            raise UserError(
                info.field_name,
                got=f"'{plain(text, 80)}'",
                allowed=f"an address https://HOST/PATH of at most {LONGEST_ADDRESS} characters",
                next_step="write brackets, quotes and spaces in it as %28, %29, %27 and %20",
            )
        return text


def text_of(name: str, text: str) -> str:
    """Return a text without space around it. Raise UserError if it is too long, or more than one printable line."""
    text, most = text.strip(), LONGEST[name]
    if len(text) > most:
        raise UserError(name, got=f"{len(text)} characters", allowed=f"at most {most}")
    if not text.isprintable():
        raise UserError(name, got=f"'{plain(text, 80)}'", allowed="one line of printable characters")
    if _most_marks(text) > MOST_MARKS:
        raise UserError(name, got=f"a letter with {_most_marks(text)} marks", allowed=f"at most {MOST_MARKS}")
    return text


def _most_marks(text: str) -> int:
    """Return the largest number of marks that stand on one letter."""
    most = n = 0
    for letter in text:
        category = unicodedata.category(letter)
        if category in ("Mn", "Me"):  # a spacing mark, Mc, covers nothing
            n += 1
        elif category != "Mc":
            n = 0
        most = max(most, n)
    return most


def key_of(name: str) -> str:
    """Return the visible letters, digits and marks of a name, without case: names with equal ones count as the same.

    Marks are vowels in many writings. The form NFKC may have capitals again, which the second casefold removes.
    """
    folded = unicodedata.normalize("NFKC", name.casefold()).casefold()
    text = unicodedata.normalize("NFKC", folded).translate(FILLERS)
    return "".join(letter for letter in text if letter.isalnum() or unicodedata.category(letter).startswith("M"))


def about_of(values: dict[str, Any], source: str) -> About:
    """Return the description with these values.

    Args:
        values: fields of `About`; the authors may be one name or a list.
        source: where the values come from, for errors.

    Raises:
        UserError: a field is unknown or its value is not allowed.
    """
    authors = values.get("authors", ())
    values = values | {"authors": (authors,) if isinstance(authors, str) else authors}
    unknown = sorted(values.keys() - About.model_fields.keys())
    if unknown:
        raise UserError(source, got=f"the field '{plain(unknown[0], 60)}'", allowed=list(About.model_fields))
    try:
        return About.model_validate(values)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except ValidationError as error:
        raise UserError(source, got=reason_of(error), allowed="texts, and a list of texts for authors") from error


def read_about(path: Path) -> dict[str, Any]:
    """Return the fields in a TOML file. Raise UserError if it cannot be read or has a field that is not allowed."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is too large", allowed=f"{MOST_BYTES} bytes")
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read", got=reason_of(error), next_step="give a TOML file") from error
    about_of(values, str(path))
    return values
