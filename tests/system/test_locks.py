"""File locks: who sees them, and that asking takes none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.system.locks import is_locked, share_lock, try_lock

ASKS = "import sys; from pathlib import Path; from lockstep.system.locks import is_locked; " + (
    "print(is_locked(Path(sys.argv[1])))"
)
OTHER_CONTAINER = ("unshare", "--pid", "--net", "--fork", "--mount-proc")


@pytest.mark.parametrize("lock", [try_lock, share_lock])
@pytest.mark.parametrize("where", [(), OTHER_CONTAINER], ids=["here", "another container"])
def test_a_lock_is_seen_from_other_processes(tmp_path: Path, lock: type, where: tuple[str, ...]) -> None:
    if where and (os.geteuid() or subprocess.run([*where, "true"], capture_output=True).returncode):
        pytest.skip("needs root, and unshare")
    path = tmp_path / "lock"

    def asked() -> str:
        command = [*where, sys.executable, "-c", ASKS, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    descriptor = lock(path)
    assert asked() == "True"
    os.close(descriptor)
    assert asked() == "False"


def test_asking_takes_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()
    path.touch()
    assert not is_locked(path)
    held = try_lock(path)
    assert held is not None
    assert is_locked(path)
    assert try_lock(path) is None
    # Another holder of the descriptor keeps the lock.
    copy = os.dup(held)
    os.close(held)
    assert is_locked(path)
    os.close(copy)
    assert not is_locked(path)
