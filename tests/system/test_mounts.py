"""Whether hosts may share a file follows from the kind of its file system."""

from pathlib import Path

import pytest

from lockstep.system.mounts import is_shared

MOUNTS = """\
27 1 8:1 / / rw,relatime - ext4 /dev/root rw
30 27 0:40 / /home rw - nfs4 server:/home rw
31 30 8:2 / /home/local rw master:1 - ext4 /dev/sdb rw
32 27 0:41 / /data\\040two rw - fuse.sshfs host:/ rw
33 27 0:42 / /hidden rw - nfs server:/ rw
34 27 8:3 / /hidden rw - xfs /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/work/a", False),
        ("/home/a", True),
        ("/homes/a", False),
        ("/home/local/a", False),
        ("/data two/a", True),
        ("/hidden/a", False),
    ],
)
def test_kinds_of_file_systems(tmp_path: Path, path: str, shared: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert is_shared(Path(path), mounts) is shared


def test_a_machine_without_the_list() -> None:
    assert not is_shared(Path("/a"), Path("/nonexistent"))
