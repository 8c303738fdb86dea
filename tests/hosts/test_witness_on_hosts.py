"""A job over hosts is compared with one process on the host of the command, and does not depend on that."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host

SCRIPT = Path(__file__).parents[1] / "training" / "beside.py"
KILLED = "not compared with one process: the comparison was killed by SIGKILL"
AT_ONCE = """
from lockstep.cli import main, witness
witness.DELAY, witness.NICE, witness.SHARE = 0.0, 0, 1.0
main.main()
"""


@pytest.mark.parametrize(
    ("what", "notes", "verdict"),
    [
        ("equal", [], "compared with one process: equal"),
        pytest.param("dies", [f"lockstep: {KILLED}"], KILLED, marks=pytest.mark.slow),
    ],
)
def test_a_job_over_hosts_is_compared_once(
    what: str,
    notes: list[str],
    verdict: str,
    hosts: Sequence[Host],
    lean: Callable[..., dict[str, str]],
) -> None:
    for host in hosts[:2]:
        shutil.copy(SCRIPT, host.work)
    folder = str(hosts[0].here / "work" / "run")
    words = ("run", "--witness", "first", "--backend", "torch", "--hosts", "node1,node2", "--run-dir", folder)
    job = hosts[0].start(
        *(sys.executable, "-P", "-c", AT_ONCE, *words, SCRIPT.name, what, folder), **lean(SCRIPT, "torch")
    )
    assert job.end() == 0, job.err
    *noted, last = [line for line in job.err.splitlines() if "one process" in line]
    assert noted == notes, job.err
    assert f"16 steps on 2 workers; {verdict}; digest " in last, job.err
