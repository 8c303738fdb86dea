"""The descriptors that another process passes over a Unix socket."""

import array
import socket


def receive_descriptors(
    connection: socket.socket, size: int, number: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Receive some bytes and the descriptors that came with them, which other programs do not inherit.

    `socket.recv_fds` ignores its flags in Python 3.11, so its descriptors would be inherited.

    Args:
        connection: the socket.
        size: maximum number of bytes.
        number: maximum number of descriptors; the kernel closes others.
        flags: further flags of `recvmsg`.

    Raises:
        OSError: as `recvmsg`.
    """
    descriptors = array.array("i")
    space = socket.CMSG_LEN(number * descriptors.itemsize)
    data, ancillary, _, _ = connection.recvmsg(size, space, flags | socket.MSG_CMSG_CLOEXEC)
    for _, _, packed in ancillary:
        descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
    return data, list(descriptors)
