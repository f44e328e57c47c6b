"""The classes of ImageNet-1k, as timm's files have them; read without importing timm, which imports torch."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

SYNSETS, LEMMAS = "imagenet_synsets.txt", "imagenet_synset_to_lemma.txt"


@lru_cache(maxsize=1)
def classes() -> tuple[str, ...]:
    """Return the WordNet ids of the 1000 classes, in the order of a head's outputs."""
    return tuple(_lines(SYNSETS))


def numbers_of(folders: tuple[str, ...]) -> list[int | None]:
    """Return for each folder the class of ImageNet-1k that it is named after, or None.

    Names are WordNet ids, such as n01440764, or one of the class's names, such as tench, great_white_shark. A name
    that two classes have, such as crane, is neither's: those have to be named otherwise, by their ids for instance.
    """
    numbers = {wordnet: number for number, wordnet in enumerate(classes())}
    texts = dict(line.split("\t", 1) for line in _lines(LEMMAS))
    named = [{_plain(name) for name in texts[wordnet].split(",")} for wordnet in classes()]
    times = Counter(name for names in named for name in names)
    numbers |= {name: number for number, names in enumerate(named) for name in names if times[name] == 1}
    return [numbers.get(_plain(folder)) for folder in folders]


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").split())


def _lines(name: str) -> list[str]:
    spec = find_spec("timm")
    assert spec is not None and spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "data" / "_info" / name).read_text(encoding="utf-8")
    return text.splitlines()
