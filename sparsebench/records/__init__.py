"""Storage of the results of cells. Does not import torch."""
