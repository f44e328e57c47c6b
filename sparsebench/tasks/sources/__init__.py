"""Sources of pictures: foregrounds with classes, backgrounds without, data sets with groups. Read lazily."""

from sparsebench.tasks.sources.cache import Pixels as Pixels
