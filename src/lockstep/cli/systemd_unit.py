"""A service of systemd that runs a command again after a reboot. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.protocol.job_spec import AFTER_GRACE

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@+=-]+")
_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t", "%": "%%"}
_MARGIN = 5.0
"""Seconds for the command to end after its job."""

_UNIT = """\
[Unit]
Description={description}
# After five failures within an hour, the service stays down.
StartLimitIntervalSec=3600
StartLimitBurst=5

[Service]
Type=exec
SyslogIdentifier=lockstep
WorkingDirectory={folder}
{variables}ExecStart={command}
# Only the command gets SIGTERM: the job saves a checkpoint within --grace, and ends with status 143.
KillMode=mixed
TimeoutStopSec={patience}
SuccessExitStatus=143
# A worker that the kernel kills because memory runs out is replaced.
OOMPolicy=continue
# Status 2: the job was refused, and would be again.
Restart=on-failure
RestartSec=10
RestartPreventExitStatus=2
# A job that has succeeded does not begin again after the next reboot.
ExecStopPost=/bin/sh -c 'test "$$EXIT_STATUS" != 0 || systemctl --user disable %n'

[Install]
WantedBy=default.target
"""


def unit(
    description: str, folder: Path, command: Sequence[str], variables: Mapping[str, str], grace: float
) -> str:
    """Return the text of a service of a user.

    Args:
        description: the description of the service, in one line.
        folder: its working folder, absolute.
        command: the path of a program, absolute, and its arguments.
        variables: its environment, besides that of the service manager.
        grace: seconds that the job may take after SIGTERM for a checkpoint, and for uploads.
    """
    return _UNIT.format(
        description=_one_line(description),
        folder=_one_line(str(folder)),
        variables="".join(f"Environment={quoted(f'{name}={value}')}\n" for name, value in variables.items()),
        # Only in commands does a dollar sign begin a variable.
        command=" ".join(quoted(word).replace("$", "$$") for word in command),
        patience=math.ceil(grace + AFTER_GRACE + _MARGIN),
    )


def quoted(word: str) -> str:
    """Return a word in the form in which systemd reads it in a list of words."""
    if _PLAIN.fullmatch(word):
        return word
    return '"' + "".join(_ESCAPES.get(sign, sign) for sign in word) + '"'


def _one_line(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")
