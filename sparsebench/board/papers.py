"""The address of a publication, from a BibTeX entry and a citation in plain text."""

from __future__ import annotations

import re
from urllib.parse import quote, quote_plus

from sparsebench.errors import plain

DOI, ARXIV = "https://doi.org/", "https://arxiv.org/abs/"
SEARCH = "https://scholar.google.com/scholar?q="
RESERVED = "/:?#[]@!$&'()*+,;=%"
"""Characters of a URL that have a meaning in it."""
FIELD = re.compile(r'\b(url|doi)\s*=\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|"([^"]*)")', re.IGNORECASE)
"""A field of a BibTeX entry that has an address; its value is in braces, or in quotes."""
URL_TEXT = re.compile(r"https?://[^\s<>\"{}\\^`|]+")
DOI_TEXT = re.compile(r"\b10\.\d{4,9}/[^\s\"{}]+")
DOI_IN_TEXT = re.compile(r"(?i:\bdoi)(?:\.org/|\W{1,6})(10\.\d{4,9}/[^\s\"{}]+)")
ARXIV_IN_TEXT = re.compile(r"(?i:arxiv|eprint)\W{1,6}(?:preprint arXiv:)?(\d{4}\.\d{4,5}|[a-z-]+(?:\.[A-Z]{2})?/\d{7})")
SPELLINGS = (
    (re.compile(r"\$\\sim\$|\\(?:textasciitilde|~)(?:\{\})?"), "~"),
    (re.compile(r"\{\\([#$%&_])\}|\\([#$%&_{}])"), r"\1\2"),
    (re.compile(r"\\(?:url|string)\b"), ""),
    (re.compile(r"[{}]"), " "),
)
"""What LaTeX writes in an address, and the characters that it stands for."""


def address_of(bibtex: str, citation: str) -> str:
    """Return the address of a publication; a search for the citation if none is known, or "" without both.

    The fields `url` and `doi` of the entry come first, then a DOI or an arXiv number anywhere, then any other URL,
    which may be that of the code.
    """
    fields: dict[str, str] = {}
    for name, braced, quoted in FIELD.findall(bibtex):
        fields.setdefault(name.lower(), _without_latex(braced or quoted))
    text = f"{_without_latex(bibtex)} {citation}"
    if url := URL_TEXT.search(fields.get("url", "")):
        return _quoted(url[0])
    if doi := DOI_TEXT.search(fields.get("doi", "")) or DOI_IN_TEXT.search(text):
        return DOI + quote(_trimmed(doi[doi.lastindex or 0]), safe="/:;(),", errors="replace")
    if arxiv := ARXIV_IN_TEXT.search(text):
        return ARXIV + arxiv[1]
    if url := URL_TEXT.search(text):
        return _quoted(url[0])
    return f"{SEARCH}{quote_plus(plain(citation, 300))}" if citation else ""


def _quoted(url: str) -> str:
    """Return a URL in ASCII."""
    return quote(_trimmed(url), safe=RESERVED, errors="replace")


def _without_latex(text: str) -> str:
    """Return a text without LaTeX's escapes. A brace becomes a space, as it ends an address."""
    for pattern, character in SPELLINGS:
        text = pattern.sub(character, text)
    return text


def _trimmed(address: str) -> str:
    """Return an address in a text without the punctuation after it; a closing bracket belongs to it if it is opened."""
    while address:
        last = address[-1]
        unopened = (last == ")" and address.count(")") > address.count("(")) or (
            last == "]" and address.count("]") > address.count("[")
        )
        if last not in ".,;:!?'" and not unopened:
            break
        address = address[:-1]
    return address
