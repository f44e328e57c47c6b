"""The models that come with sparsebench."""

from sparsebench.models.base import Positional, Shallow, TwoLayer
from sparsebench.models.vits import Timm, Vit

SHIPPED = (Shallow, TwoLayer, Positional, Vit, Timm)
