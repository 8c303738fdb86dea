"""Ends processes of a job with parameter servers with SIGKILL: workers between their pushes to two servers,
servers at a point of what they do with a message. Stops servers with SIGSTOP.
"""

import os
import signal
from collections.abc import Sequence
from typing import Any

from lockstep.keras.parameter_server import server_shards
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.server_process import ServerProcess
from lockstep.keras.parameter_server.server_shards import KeptServer, ServerShards, StandbyLink
from lockstep.keras.parameter_server.server_tables import ServerTables
from lockstep.protocol.parameter_server import EndCall, Keep, Pull, Push, Read, ReadRows, WriteRows
from lockstep.transport.array_channel import AskingChannel, QuestionArrival
from lockstep.worker import job

KINDS: dict[str, Any] = {
    "pull": Pull,
    "push": Push,
    "read": Read,
    "end": EndCall,
    "read-rows": ReadRows,
    "write-rows": WriteRows,
}


def lose_between_pushes(step: int, *workers: int) -> None:
    """End these workers after the first push of this step or a later one, unless the job follows an order."""
    here, send = job.current(), AskingChannel.send

    def sent(self: AskingChannel, message: Any, arrays: Any = ()) -> None:
        send(self, message, arrays)
        if isinstance(message, Push) and message.step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    if here.worker in workers and here.settings.order is None:
        AskingChannel.send = sent  # type: ignore[method-assign]


def lose_servers(given: Sequence[str]) -> None:
    """End the given server at the given point, unless this job follows a recorded order.

    Servers send their state to their standbys after few messages.

    Args:
        given: the number of the server, and the arguments of `lose_this_process`; empty for none.
    """
    here = job.current()
    if here.settings.order is not None:
        return
    server_shards.KEPT_BYTES = 0
    if given and here.context.has_servers and here.worker == here.context.tasks.id_of_server(int(given[0])):
        _, call, kind, number, when = given
        lose_this_process(call, kind, int(number), when)


def stop_server(server: str, limit: str, task: str = "") -> None:
    """Stop a server when it receives a push, also as a standby, and let processes give up earlier.

    Args:
        server: the number of the server.
        limit: the seconds for which these processes wait for others.
        task: the type of their task; empty for all.
    """
    here, put, init = job.current(), ServerProcess._put, TaskProcess.__init__
    tasks = here.context.tasks

    def made(self: TaskProcess, *given: Any) -> None:
        init(self, *given)
        if task in ("", tasks.of(here.worker)[0]):
            self.timeout = float(limit)

    def put_(self: ServerProcess, arrival: QuestionArrival) -> None:
        message = arrival.message.question if isinstance(arrival.message, Keep) else arrival.message
        if isinstance(message, Push) and message.step >= 5:
            # Stops this thread, too, before it continues.
            signal.raise_signal(signal.SIGSTOP)
        put(self, arrival)

    TaskProcess.__init__ = made  # type: ignore[method-assign]
    if here.worker == tasks.id_of_server(int(server)):
        ServerProcess._put = put_  # type: ignore[method-assign]


def lose_this_process(call: str, kind: str, number: int, when: str) -> None:
    """End this process, that of a server.

    Args:
        call: the name of the call in which it ends, such as `fit-2`; `others` for all but `fit`, in which it
            receives a question for rows.
        kind: of a message.
        number: of the message among those of its kind in the call, from 1.
        when: once the message is `received`, `sent` to the standby, `confirmed` by it, `answered`, or
            `repeated` by this process, which is the standby.
    """
    opened, arrive, end_call = ServerProcess.open, ServerShards.arrive, ServerShards.end_call
    send, confirm, repeat, put = StandbyLink.send, StandbyLink.confirm, ServerShards.repeat, ServerTables._put
    active, seen, current = False, 0, ""

    def reach(point: str) -> None:
        if current == kind and seen == number and point == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def open_(self: ServerProcess) -> Any:
        nonlocal active
        active = self.call.name.replace(" ", "-") == call
        return opened(self)

    def received(message: Any) -> None:
        nonlocal seen, current
        reach("answered")
        current = next((name for name, one in KINDS.items() if active and isinstance(message, one)), "")
        seen += current == kind
        reach("received")

    def arrived(self: ServerShards, arrival: QuestionArrival) -> None:
        received(arrival.message)
        arrive(self, arrival)

    def ended(self: ServerShards, arrival: QuestionArrival) -> None:
        received(arrival.message)
        end_call(self, arrival)

    def sent(self: StandbyLink, *given: Any) -> None:
        send(self, *given)
        reach("sent")

    def confirmed(self: StandbyLink) -> None:
        confirm(self)
        reach("confirmed")

    def repeated(self: ServerShards, kept: KeptServer) -> None:
        nonlocal seen, current
        if active and kept.messages and isinstance(kept.messages[0][1], KINDS[kind]):
            seen, current = seen + 1, kind
            reach("repeated")
        repeat(self, kept)

    def put_(self: ServerTables, arrival: QuestionArrival) -> None:
        nonlocal seen, current
        if call == "others" and isinstance(arrival.message, ReadRows):
            seen, current = seen + 1, kind
            reach("received")
        put(self, arrival)

    if when == "repeated":
        ServerShards.repeat = repeated  # type: ignore[method-assign]
        ServerProcess.open = open_  # type: ignore[method-assign]
        return
    ServerTables._put = put_  # type: ignore[method-assign]
    ServerProcess.open = open_  # type: ignore[method-assign]
    ServerShards.arrive, ServerShards.end_call = arrived, ended  # type: ignore[method-assign]
    StandbyLink.send, StandbyLink.confirm = sent, confirmed  # type: ignore[method-assign]
