"""A job over hosts is compared with one process on the host of the command, once."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from host_network import Host

SCRIPT = Path(__file__).parents[1] / "training" / "beside.py"
AT_ONCE = """
from lockstep.cli import main, witness
witness.DELAY, witness.NICE, witness.SHARE = 0.0, 0, 1.0
main.main()
"""


def test_a_job_over_hosts_is_compared_once(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    for host in hosts[:2]:
        shutil.copy(SCRIPT, host.work)
    folder = str(hosts[0].here / "work" / "run")
    words = ("run", "--witness", "first", "--backend", "torch", "--hosts", "node1,node2", "--run-dir", folder)
    job = hosts[0].start(
        *(sys.executable, "-P", "-c", AT_ONCE, *words, SCRIPT.name, "equal", folder), **lean(SCRIPT, "torch")
    )
    assert job.end() == 0, job.err
    said = [line for line in job.err.splitlines() if "one process" in line]
    assert [line.rpartition("; digest ")[0].rpartition("; ")[2] for line in said] == [
        "compared with one process: equal"
    ], job.err
