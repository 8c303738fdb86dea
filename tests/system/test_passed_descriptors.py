"""Descriptors that arrive over a socket: programs that a script starts later do not inherit them."""

import os
import socket

import pytest

from lockstep.system.passed_descriptors import receive_descriptors


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_passed_descriptors_arrive_and_are_not_inherited(kind: socket.SocketKind) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    reading, writing = os.pipe()
    with ours, theirs, os.fdopen(reading, "rb") as file:
        socket.send_fds(ours, [b"text"], [writing])
        os.close(writing)
        data, descriptors = receive_descriptors(theirs, 10, 2)
        assert data == b"text"
        assert not any(map(os.get_inheritable, descriptors))
        with os.fdopen(descriptors[0], "wb") as copy:
            copy.write(b"sent")
        assert file.read() == b"sent"


def test_a_socket_without_a_message_does_not_block() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BlockingIOError):
        receive_descriptors(theirs, 10, 1, socket.MSG_DONTWAIT)
