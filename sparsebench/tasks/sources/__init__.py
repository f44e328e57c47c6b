"""Where pictures come from: foregrounds with classes, backgrounds without, sets with groups. Read lazily."""

from sparsebench.tasks.sources.cache import BadPicturesError, Pixels, decode, telling
from sparsebench.tasks.sources.classes import HELD_OUT, Foregrounds, foreground_pixels, foregrounds
from sparsebench.tasks.sources.files import (
    Bad,
    contents,
    contents_of,
    keep_contents,
    known_contents,
    listing_of,
    read_rgb,
    read_square,
)
from sparsebench.tasks.sources.known import CLASSES, DIGITS, OWN_TASK, PHOTOS
from sparsebench.tasks.sources.labelled import Labelled, labelled_pictures, pixels_of
from sparsebench.tasks.sources.listing import classes_in, names_in, strays_in
from sparsebench.tasks.sources.locate import locate_backgrounds, locate_images, strays_of
from sparsebench.tasks.sources.scenes import Photos, background_pixels, backgrounds

__all__ = [
    "CLASSES",
    "DIGITS",
    "HELD_OUT",
    "OWN_TASK",
    "PHOTOS",
    "Bad",
    "BadPicturesError",
    "Foregrounds",
    "Labelled",
    "Photos",
    "Pixels",
    "background_pixels",
    "backgrounds",
    "classes_in",
    "contents",
    "contents_of",
    "decode",
    "foreground_pixels",
    "foregrounds",
    "keep_contents",
    "known_contents",
    "labelled_pictures",
    "listing_of",
    "locate_backgrounds",
    "locate_images",
    "names_in",
    "pixels_of",
    "read_rgb",
    "read_square",
    "strays_in",
    "strays_of",
    "telling",
]
