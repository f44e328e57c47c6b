"""The option `--dask`: cells run on the workers of a Dask scheduler. Loaded by an entry point `sparsebench.engines`."""
