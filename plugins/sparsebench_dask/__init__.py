"""Cells on the workers of a Dask scheduler: the option `--dask`, by an entry point of `sparsebench.engines`."""
