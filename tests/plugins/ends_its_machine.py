"""A strategy that kills the process which has started its workers' server: on a cluster, the Dask worker."""

import os
import signal
from pathlib import Path

import sparsebench


class EndsItsMachine(sparsebench.Strategy):
    """Notes in a file that it was begun, and kills."""

    name = "ends_its_machine"
    noted: str = ""

    def scores(self, view):
        with Path(self.noted).open("a") as file:
            file.write("begun\n")
        machine = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(machine), signal.SIGKILL)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [EndsItsMachine]
