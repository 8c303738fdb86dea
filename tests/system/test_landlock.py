"""A process that may write only below some folders."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.system.landlock import can_restrict

PROGRAM = """
import os, sys
from pathlib import Path
from lockstep.system.landlock import write_only_below

folder = Path(sys.argv[1])
opened = open(folder / "opened", "w")
write_only_below([folder / "inside", folder / "missing"])

def rename():
    os.rename(folder / "inside/new", folder / "new")

acts = {
    "create inside": lambda: (folder / "inside/new").write_text("1"),
    "remove inside": lambda: (folder / "inside/old").unlink(),
    "create": lambda: (folder / "new").write_text("1"),
    "write": lambda: (folder / "old").write_text("1"),
    "truncate": lambda: os.truncate(folder / "old", 0),
    "remove": lambda: (folder / "old").unlink(),
    "rename": rename,
    "link": lambda: (folder / "link").symlink_to("old"),
    "read": lambda: (folder / "old").read_text(),
    "make a folder": lambda: (folder / "made").mkdir(),
    "write to an open file": lambda: (opened.write("1"), opened.close()),
}
for name, act in acts.items():
    try:
        act()
    except OSError as error:
        print(name, "is refused:", error.strerror)
print((folder / "old").read_text())
"""


@pytest.mark.skipif(not can_restrict(), reason="the kernel has no Landlock")
def test_a_process_writes_only_below_some_folders(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for name in ("old", "inside/old"):
        (tmp_path / name).write_text(name)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    *refused, old = done.stdout.splitlines()
    names = [line.partition(" is refused: ")[0] for line in refused]
    assert names == ["create", "write", "truncate", "remove", "rename", "link"], done.stderr
    assert old == "old"
