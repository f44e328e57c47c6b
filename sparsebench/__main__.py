"""python -m sparsebench."""

from sparsebench.cli import run_cli

if __name__ == "__main__":
    run_cli()
