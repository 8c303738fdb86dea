"""Processes of Lockstep have its modules, whatever is in the current folder, and end with their parents."""

import os
import select
import subprocess
import sys
from pathlib import Path

import lockstep
from lockstep.system.child_process import command_of, ending_with_this_process

PARENT = """
import subprocess, sys
from lockstep.system.child_process import ending_with_this_process
child = [sys.executable, "-c", "import sys; print('lives', flush=True); sys.stdin.read()"]
subprocess.Popen(ending_with_this_process(child), stdout=int(sys.argv[1]), pass_fds=[int(sys.argv[1])])
print("started", flush=True)
sys.stdin.read()
"""


def test_files_in_the_current_folder_hide_nothing(tmp_path: Path) -> None:
    for name in ("types.py", "click.py", "lockstep.py"):
        (tmp_path / name).write_text("raise SystemExit('this is the file in the current folder')")
    for command in (
        command_of("lockstep", "--version"),
        ending_with_this_process(command_of("lockstep", "--version")),
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stderr) == (0, "")
        assert lockstep.__version__ in done.stdout


def test_a_child_ends_with_its_parent() -> None:
    reads, writes = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(writes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[writes],
    )
    os.close(writes)
    with os.fdopen(reads, "rb") as output, parent:
        assert parent.stdout is not None
        assert (parent.stdout.readline(), output.readline()) == (b"started\n", b"lives\n")
        assert not select.select([output], [], [], 0)[0]
        parent.kill()
        # The pipe ends when no process has it.
        assert output.read() == b""
