"""Runs a notifier beside this process: packets come from stdin, one per line; `end STATUS` ends it."""

import os
import socket
import sys

from lockstep.cli.notifier import JobIdentity, notifier_beside, parse_receiver
from lockstep.errors import ConfigError

try:
    receiver = parse_receiver(sys.argv[1])
except ConfigError as error:
    sys.exit(str(error))
identity = JobIdentity("train-1", "train.py", "/runs/train-1", "node1")
with notifier_beside(receiver, identity) as notifier:
    assert notifier is not None
    with socket.socket(fileno=os.dup(notifier.descriptor)) as connection:
        for line in sys.stdin:
            if line.startswith("end "):
                notifier.end(int(line.removeprefix("end ")))
            elif line.startswith("kill"):
                os.kill(os.getpid(), 9)
            else:
                connection.send(line.strip().encode())
