"""Where pictures come from: foregrounds with classes, backgrounds without, sets with groups. Read lazily."""

from sparsebench.sources.classes import HELD_OUT, Foregrounds, foregrounds
from sparsebench.sources.files import contents_of, fingerprint, read_rgb, read_square
from sparsebench.sources.known import CIFAR10, CLASSES, DIGITS, OWN_TASK, PHOTOS
from sparsebench.sources.labelled import Labelled, labelled_pictures, squares_of
from sparsebench.sources.listing import classes_in, left_out, listing, pictures_in
from sparsebench.sources.locate import left_out_of, locate_backgrounds, locate_images
from sparsebench.sources.scenes import Backgrounds, Photos, Pictures, backgrounds

__all__ = [
    "CIFAR10",
    "CLASSES",
    "DIGITS",
    "HELD_OUT",
    "OWN_TASK",
    "PHOTOS",
    "Backgrounds",
    "Foregrounds",
    "Labelled",
    "Photos",
    "Pictures",
    "backgrounds",
    "classes_in",
    "contents_of",
    "fingerprint",
    "foregrounds",
    "labelled_pictures",
    "left_out",
    "left_out_of",
    "listing",
    "locate_backgrounds",
    "locate_images",
    "pictures_in",
    "read_rgb",
    "read_square",
    "squares_of",
]
