"""File systems that several hosts can share."""

import os
import re
from pathlib import Path

_OVER_NETWORKS = re.compile(
    r"nfs\d?|cifs|smb.*|ceph|lustre|gpfs|beegfs|glusterfs|9p|virtiofs|afs|ocfs2|gfs2|pvfs2|orangefs|wekafs|fuse\..+"
)
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def is_shared(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a file is in a file system that other hosts may share, judging by its kind.

    Args:
        path: the absolute path of the file, which may not exist.
        mounts: the kernel's list of the file systems of this process.
    """
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return False
    file, longest, kind = os.fsencode(os.path.realpath(path)), -1, ""
    for line in lines:
        before, _, after = line.partition(b" - ")
        mount = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), before.split(b" ")[4])
        if (file == mount or file.startswith(mount.rstrip(b"/") + b"/")) and len(mount) >= longest:
            # A later file system hides an earlier one at the same mount point.
            longest, kind = len(mount), after.split(b" ")[0].decode()
    return _OVER_NETWORKS.fullmatch(kind) is not None
