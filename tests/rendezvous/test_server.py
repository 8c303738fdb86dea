"""What the server of processes that a user starts by hand does when one of them is started again."""

import contextlib
import os
import socket
import subprocess

import pytest

from lockstep.protocol.rendezvous import MAX_PACKET, Admitted, Arrival, Task, decode_answer, encode
from lockstep.rendezvous import server as server_module
from lockstep.rendezvous.server import RendezvousServer

TASKS = tuple(Task("worker", index, f"127.0.0.1:{index}", f"127.0.0.1:{index}") for index in range(2))


def arrival(slot: int) -> Arrival:
    return Arrival(TASKS, slot, "1.0", "jax", 1, (), "main.py")


def test_a_process_that_is_started_again_takes_the_place_of_the_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the connection of that one ends later, for example because a child has inherited it."""
    admitted = [Admitted(worker, False, 0, 1, "/r", 7, 1) for worker in range(2)]
    with contextlib.ExitStack() as ends:

        def start() -> "subprocess.Popen[bytes]":
            process = ends.enter_context(subprocess.Popen(["sleep", "600"]))
            ends.callback(process.kill)
            return process

        def connect(process: "subprocess.Popen[bytes]", slot: int) -> socket.socket:
            """Let a process arrive; this one holds its end of the connection."""
            monkeypatch.setattr(server_module, "peer", lambda connection: (process.pid, os.geteuid()))
            end = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            end.settimeout(60.0)
            end.connect(listener.getsockname())
            server.serve()
            end.send(encode(arrival(slot)))
            server.serve()
            return end

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")
        listener.listen()
        server = RendezvousServer(arrival(0), [listener])
        ends.callback(server.close)
        first, other, again = start(), start(), start()
        held = connect(first, 0)
        first.kill()
        first.wait(60.0)
        waiting = connect(again, 0)
        held.close()
        server.serve()
        connected = connect(other, 1)
        assert server.is_complete
        assert {slot: one.handle.pid for slot, one in server.waiting.items()} == {0: again.pid, 1: other.pid}
        for worker, end in enumerate((waiting, connected)):
            slot, process = server.admit(worker, lambda shares, worker=worker: admitted[worker])  # type: ignore[misc]
            ends.callback(process.handle.close)
            assert slot == worker
            while not isinstance(answer := decode_answer(end.recv(MAX_PACKET)), Admitted):
                pass
            assert answer == admitted[worker]
