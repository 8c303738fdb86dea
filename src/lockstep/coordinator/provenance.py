"""The provenance of a run, for its first event: versions, script and machine."""

import hashlib
import platform
import socket
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.system.cuda import version_of
from lockstep.system.environment import usable_cores
from lockstep.system.files import read_regular
from lockstep.worker.script import Script

_DISTRIBUTIONS = ("keras-lockstep", "keras", "numpy")


def provenance(script: Script) -> dict[str, Any]:
    """Return fields of `JobStarted`, without importing the libraries whose versions they name."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in _DISTRIBUTIONS if (version := version_of(name))},
        },
        "script": _hashed(script),
        "cores": usable_cores(),
        "host": socket.gethostname(),
        "directory": str(Path.cwd()),
    }


def _hashed(script: Script) -> dict[str, str] | None:
    """Return the path and the SHA-256 of the file with the script's code, or None if it cannot be read."""
    try:
        source = script.source()
        if source is None:
            return None
        path = Path(source).absolute()
        return {"path": str(path), "sha256": hashlib.sha256(read_regular(path)).hexdigest()}
    except (ConfigError, OSError):
        return None
