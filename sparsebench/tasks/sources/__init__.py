"""Where pictures come from: foregrounds with classes, backgrounds without, sets with groups. Read lazily."""

from sparsebench.tasks.sources.cache import BadPicturesError, Pixels, decode, telling
from sparsebench.tasks.sources.classes import HELD_OUT, Foregrounds, foreground_pixels, foregrounds
from sparsebench.tasks.sources.files import (
    Bad,
    contents,
    contents_of,
    known_contents,
    read_rgb,
    read_square,
)
from sparsebench.tasks.sources.known import CLASSES, DIGITS, OWN_TASK, PHOTOS
from sparsebench.tasks.sources.labelled import Labelled, labelled_pictures, pixels_of
from sparsebench.tasks.sources.listing import classes_in
from sparsebench.tasks.sources.locate import locate_backgrounds, locate_images
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
    "known_contents",
    "labelled_pictures",
    "locate_backgrounds",
    "locate_images",
    "pixels_of",
    "read_rgb",
    "read_square",
    "telling",
]
