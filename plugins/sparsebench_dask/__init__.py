"""The engine `dask`: cells on the workers of a Dask scheduler. It comes in by an entry point, `sparsebench.engines`."""
