"""Settings of the Linux kernel for processes."""

import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os
from pathlib import Path
from lockstep.system.prctl import keep_priority

os.nice(7)
os.setsid()
keep_priority()
print(Path("/proc/self/autogroup").read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not weigh sessions against each other")
def test_a_new_session_keeps_the_priority_of_its_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.split()[-2:] == ["nice", "7"], done.stderr
