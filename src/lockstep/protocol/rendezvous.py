"""The messages between a process that a user starts by hand for a task, and the coordinator of its job.

JSON, one message per packet. After `Admitted`, both use `lockstep.protocol.worker` on the same socket.
"""

from collections.abc import Sequence

import msgspec

from lockstep.protocol.channel import decoded, too_long
from lockstep.system.prose import count

MAX_PACKET = 256 * 1024
"""The size limit of an encoded message in bytes, and the size of the buffers of receivers."""

MOST_OF_ARRIVAL = 120 * 1024
"""The size limit of an encoded arrival in bytes, which is also an argument of the coordinator's command."""


class Task(msgspec.Struct, frozen=True):
    """A training task.

    Attributes:
        kind: "chief" or "worker".
        index: its index among the tasks of this kind.
        address: its address, as in `TF_CONFIG`.
        place: the address with the host's IP address instead of its name.
    """

    kind: str
    index: int
    address: str
    place: str

    @property
    def name(self) -> str:
        """The name of the task in messages."""
        return f"{self.kind} {self.index}"

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    """A process has started for a task; the descriptor of its stderr is sent with this message.

    Attributes:
        tasks: all training tasks, in the order of their replicas.
        slot: the index of the task of the process.
        version: the version of Lockstep.
        backend: the backend of Keras.
        cores: number of cores that the process may use.
        gpus: the GPUs that are visible to the process.
        target: the script or module that it runs.
        module: whether `target` is a module.
        here: the tasks on the same host, by index; empty if all tasks are.
    """

    tasks: tuple[Task, ...]
    slot: int
    version: str
    backend: str
    cores: int
    gpus: tuple[str, ...]
    target: str
    module: bool = False
    here: tuple[int, ...] = ()

    @property
    def task(self) -> Task:
        """The task of the process."""
        return self.tasks[self.slot]

    @property
    def local(self) -> tuple[int, ...]:
        """The tasks of this host, by index."""
        return self.here or tuple(range(len(self.tasks)))


class KeepWaiting(msgspec.Struct, frozen=True, tag="patience"):
    """The process must wait for `what`."""

    what: str


class Rejected(msgspec.Struct, frozen=True, tag="turned away"):
    """The process cannot take part, for `reason`; `again` says whether it may try again later."""

    reason: str
    again: bool = False


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The process becomes a worker.

    Attributes:
        worker: its id.
        joins: whether it joins a running job.
        seed: the seed of all random numbers in the job.
        threads: number of threads that compute one replica.
        run_dir: the run folder, absolute.
        coordinator: process id of the coordinator.
        device_users: the number of workers on its host that use one of its GPUs.
    """

    worker: int
    joins: bool
    seed: int
    threads: int
    run_dir: str
    coordinator: int
    device_users: int


Answer = KeepWaiting | Rejected | Admitted

_arrivals: msgspec.json.Decoder[Arrival] = msgspec.json.Decoder(Arrival)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Arrival | Answer) -> bytes:
    """Return the packet of `message`.

    Raises:
        ValueError: the message is too large.
    """
    packet = msgspec.json.encode(message)
    if len(packet) > MAX_PACKET:
        raise ValueError(too_long(len(packet), MAX_PACKET))
    return packet


def decode_arrival(packet: bytes) -> Arrival:
    """Return the arrival in a packet.

    Raises:
        ValueError: the packet is not an encoded arrival, or its slot is not one of its tasks.
    """
    arrival = decoded(_arrivals, packet)
    for slot in (arrival.slot, *arrival.here):
        if not 0 <= slot < len(arrival.tasks):
            raise ValueError(f"no slot {slot} of {len(arrival.tasks)}")
    return arrival


def decode_answer(packet: bytes) -> Answer:
    """Return the answer in a packet.

    Raises:
        ValueError: the packet is not an encoded answer.
    """
    return decoded(_answers, packet)


def refusal(first: Arrival, other: Arrival, pid: int | None) -> str:
    """Return why a process cannot take part in a job, or an empty string if it can.

    Args:
        first: the first arrival of the job.
        other: the arrival of the process.
        pid: process id of another process for the same task; None if there is none.
    """
    name, version = other.task.name, first.version
    if other.version != version:
        return f"{name} runs Lockstep {other.version}, but the job uses {version}; use one version for all"
    if difference := cluster_difference(other.tasks, first.tasks):
        return f"{name} and {first.task.name} have {difference}"
    if pid is not None:
        return (
            f"{name} ({other.task.address}) is already running: process {pid}. Each process needs its own "
            "task in TF_CONFIG: give this one another 'index', or stop that process first"
        )
    if other.backend != first.backend:
        return (
            f"{name} runs Keras on {other.backend}, but {first.task.name} on {first.backend}, which do not "
            "give the same bits; set one KERAS_BACKEND for all"
        )
    return ""


def cluster_difference(first: Sequence[Task], second: Sequence[Task]) -> str:
    """Return how the tasks of two clusters differ, with the remedy, or an empty string if they do not."""
    if len(first) != len(second):
        difference = (
            f"{count(len(first), 'task')} ({_listed(first)}), "
            f"{count(len(second), 'task')} ({_listed(second)})"
        )
    else:
        unlike = [
            pair for pair in zip(first, second, strict=True) if _identity(pair[0]) != _identity(pair[1])
        ]
        if not unlike:
            return ""
        difference = f"{unlike[0][0]} in the one, {unlike[0][1]} in the other"
    return f"different clusters: {difference}. Give all tasks the same 'cluster' in TF_CONFIG"


def _identity(task: Task) -> tuple[str, int, str]:
    return task.kind, task.index, task.place


def _listed(tasks: Sequence[Task]) -> str:
    return ", ".join(task.address for task in tasks)
