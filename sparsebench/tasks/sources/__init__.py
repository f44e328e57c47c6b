"""Where pictures come from: foregrounds with classes, backgrounds without, sets with groups. Read lazily."""

from sparsebench.tasks.sources.cache import Pixels as Pixels
