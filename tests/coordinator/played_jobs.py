"""Jobs that tests play: admin sockets without a training behind them."""

import select
import socket
import threading
from pathlib import Path

import pytest

from lockstep.coordinator.admin_socket import AdminSocket, take_name
from lockstep.protocol.admin import AdminRequest, Refused, Reply, ScaleRequest, Status, StopRequest


class PlayedJob:
    """A job whose coordinator is a thread; a stop request ends it."""

    def __init__(self, name: str, since: float, folder: str = "") -> None:
        self._folder = folder or f"/runs/{name}"
        self.admin = AdminSocket.over(take_name(name), self.answer)
        self.requests: list[AdminRequest] = []
        self.since = since
        self.wanted = 3
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def status(self) -> Status:
        name = self.admin.name
        return Status(name, "a.py", 7, self._folder, self.since, 4, (0, 2), (), self.wanted, "fit 1")

    def answer(self, request: AdminRequest) -> Reply:
        self.requests.append(request)
        match request:
            case ScaleRequest(workers) if workers > 4:
                return Refused(f"{workers} workers are more than the 4 replicas")
            case ScaleRequest(workers):
                self.wanted = workers
            case StopRequest():
                self._wake.close()
        return self.status

    def _run(self) -> None:
        while self._woken not in select.select([self.admin, self._woken], [], [])[0]:
            self.admin.serve()
        self.admin.close()

    def close(self) -> None:
        self._wake.close()
        self._thread.join()
        self._woken.close()


class Jobs:
    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: list[PlayedJob | AdminSocket] = []

    def play(self, suffix: str = "", since: float = 0.0, folder: str = "") -> PlayedJob:
        job = PlayedJob(self.name + suffix, since, folder)
        self.opened.append(job)
        return job

    def play_silent(self, suffix: str = "") -> AdminSocket:
        """Open an admin socket that no process serves."""
        admin = AdminSocket.over(take_name(self.name + suffix), pytest.fail)
        self.opened.append(admin)
        return admin

    def close(self) -> None:
        for job in self.opened:
            job.close()


class OwnSockets:
    """The system's list, without the other jobs of this user."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def read_bytes(self) -> bytes:
        lines = Path("/proc/net/unix").read_bytes().split(b"\n")
        return b"\n".join(line for line in lines if self._name in line)
