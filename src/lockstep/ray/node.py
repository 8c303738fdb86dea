"""The node that an actor runs on."""

import os
import threading
import time

ANSWERS_WITHIN = 60.0
"""Seconds in which an actor that runs answers a call."""

_LOOK_EVERY = 0.25


def end_with_raylet() -> None:
    """Let this process end when the raylet of its node does, which Ray does not always ensure."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(raylet: int) -> None:
    while os.getppid() == raylet:
        time.sleep(_LOOK_EVERY)
    os._exit(1)
