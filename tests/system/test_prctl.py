"""Settings of the Linux kernel for processes."""

import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")
PROGRAM = """
import os
from pathlib import Path
from lockstep.system.prctl import keep_priority

nice = os.nice(7)
os.setsid()
keep_priority()
print(Path("/proc/self/autogroup").read_text(), nice)
"""


@pytest.mark.skipif(
    not AUTOGROUP.exists() or ENABLED.read_text().strip() != "1",
    reason="the kernel does not weigh sessions against each other",
)
def test_a_new_session_keeps_the_priority_of_its_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    *_, name, weight, nice = done.stdout.split()
    assert (name, int(weight)) == ("nice", max(int(nice), 0)), done.stderr
