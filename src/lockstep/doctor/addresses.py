"""The effect of a shell's `TF_CONFIG` on programs started there, and whether its addresses are usable.

Only queries to the name service use the network.
"""

import contextlib
import errno
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import psutil

from lockstep.cluster.tf_config import TRAINING, TaskConfig, parse, training_tasks
from lockstep.doctor.finding import Finding, Rating, Section
from lockstep.errors import ConfigError
from lockstep.system.environment import RUN
from lockstep.system.prose import count

_ROWS = Section("environment")

Resolve = Callable[[str], str]
"""Returns the IP address of a host; raises OSError or UnicodeError if it has none."""

LONGEST_WAIT = 600
"""Maximum seconds that a process started by hand waits for the others."""
_PATIENCE = 3.0
_MAX_THREADS = 16
_MAX_NAMED = 4
_NAME = "TF_CONFIG"


@dataclass(frozen=True)
class TaskAddress:
    """The address of a task, and what is known about it.

    Attributes:
        task: such as "worker 1".
        address: as in `TF_CONFIG`.
        number: the IP address of the host; empty if unknown.
        fault: why the address cannot be used at all; empty if it can.
        here: whether it belongs to this machine.
        user: the program that uses the port; empty if no program does.
    """

    task: str
    address: str
    number: str = ""
    fault: str = ""
    here: bool = True
    user: str = ""


def resolve_host(host: str) -> str:
    """Return the IP address that a script started by hand would use; a `Resolve`."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    infos.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(infos[0][4][0])


def examine_tf_config(
    text: str | None, resolve: Resolve = resolve_host, patience: float = _PATIENCE
) -> list[Finding]:
    """Return the findings on a `TF_CONFIG`; none if it is not set.

    Args:
        text: its value; None if it is not set.
        resolve: finds the IP address of a host.
        patience: maximum seconds for all hosts together.
    """
    if text is None:
        return []
    try:
        config = parse(text)
    except ConfigError as error:
        return [
            _ROWS.warning(
                _NAME,
                str(error),
                "correct it, or unset TF_CONFIG: lockstep run sets its own, but a script that is started by "
                "hand exits where it creates a strategy",
            )
        ]
    return judge(config, inspect_addresses(config, resolve, patience))


def inspect_addresses(config: TaskConfig, resolve: Resolve, patience: float) -> list[TaskAddress]:
    """Inspect the addresses of all tasks; none in child processes of workers, which use no address."""
    if config.environment == RUN:
        return []
    cluster = config.cluster
    tasks = [
        (f"{job} {index}", cluster.task_address(job, index))
        for job in cluster.jobs
        for index in cluster.task_indices(job)
    ]
    known = _resolved(list(dict.fromkeys(_split(address)[0] for _, address in tasks)), resolve, patience)
    return [_inspect(task, address, *known[_split(address)[0]]) for task, address in tasks]


def judge(config: TaskConfig, addresses: Sequence[TaskAddress]) -> list[Finding]:
    """Return the findings on a complete `TF_CONFIG`. Pure.

    Args:
        config: the parsed value.
        addresses: of its tasks.
    """
    trainers = tuple(f"{job} {index}" for job, index, _ in training_tasks(config.cluster))
    # A single training task needs no address, and parameter servers and evaluators do not use theirs.
    used = trainers if len(trainers) > 1 else ()
    judged = [_of_address(each, each.task in used) for each in addresses]
    faults = [finding for finding in judged if finding is not None]
    usable = all(fault.rating is Rating.FINE for fault in faults)
    if addresses and not faults:
        faults = [_of_usable_addresses(addresses)]
    numbers = [each.number for each in addresses if each.task in used]
    example = bool(numbers) and all(map(_is_loopback, numbers))
    return [_of_config(config, trainers, usable, example), *faults]


def _of_config(config: TaskConfig, trainers: Sequence[str], usable: bool, example: bool) -> Finding:
    own = f"{config.task_type} {config.task_id}"
    facts = {"task": own, "training": list(trainers), "environment": config.environment}
    if config.environment == RUN:
        reason = "a job of lockstep run has set it: a script that is started by hand trains alone"
        return _ROWS.warning(_NAME, reason, "unset TF_CONFIG", **facts)
    if config.task_type == "ps":
        reason = (
            f"this process is {own}, which does nothing: a script that is started by hand exits "
            "where it creates a strategy"
        )
        remedy = "give it a task of type chief or worker, or unset TF_CONFIG; lockstep run sets its own"
        return _ROWS.warning(_NAME, reason, remedy, **facts)
    if config.task_type not in TRAINING:
        reason = (
            "this process is the evaluator: a script that is started by hand evaluates the checkpoints of "
            f"{count(len(trainers), 'task')}; lockstep run sets its own TF_CONFIG"
        )
        return _ROWS.fine(_NAME, reason, **facts)
    if len(trainers) == 1:
        reason = f"{own} is the only task that trains: a script that is started by hand trains alone"
        return _ROWS.warning(_NAME, reason, "unset TF_CONFIG if it is left over in this shell", **facts)
    reason = f"this process is {own}, one of {len(trainers)} tasks that train"
    if usable:
        others = _listed([task for task in trainers if task != own])
        reason += f": a script that is started by hand waits for {others}, {LONGEST_WAIT} s at most"
    reason += "; lockstep run sets its own TF_CONFIG"
    if not example:
        return _ROWS.fine(_NAME, reason, **facts)
    return _ROWS.warning(
        _NAME,
        f"{reason}. All addresses are loopback, as in an example",
        "unset TF_CONFIG if it is left over in this shell; otherwise start the other tasks too",
        **facts,
    )


def _of_address(place: TaskAddress, used: bool) -> Finding | None:
    """Return the finding on the address of a task; None if it has no fault."""
    refuse = "workers that are started by hand refuse to train"
    if place.fault:
        reason = f"{place.address}: {place.fault}"
        remedy = "correct it in every TF_CONFIG, or give the IP address of the host"
    elif not place.here:
        reason = f"{place.address} is not an address of this machine"
        refuse = "workers that are started by hand on several machines need a key"
        remedy = (
            "make a key with lockstep key FILE, copy it to each machine, and set LOCKSTEP_KEY_FILE; or give "
            "all tasks that train addresses of this machine, such as 127.0.0.1:20000"
        )
    elif place.user:
        reason = f"{place.address} is in use by {place.user}"
        remedy = "stop that program, or give this task another port in every TF_CONFIG"
        refuse = f"{place.task}, started by hand, refuses to train"
    else:
        return None
    name, facts = f"{_NAME}: {place.task}", asdict(place)
    if not used:
        return _ROWS.fine(name, f"{reason}; Lockstep does not use this address", **facts)
    return _ROWS.warning(name, f"{reason}: {refuse}", remedy, **facts)


def _of_usable_addresses(places: Sequence[TaskAddress]) -> Finding:
    name, facts = f"{_NAME}: addresses", {"numbers": {place.address: place.number for place in places}}
    if len(places) == 1:
        return _ROWS.fine(name, f"{places[0].address} belongs to this machine, and its port is free", **facts)
    return _ROWS.fine(name, f"all {len(places)} belong to this machine, and their ports are free", **facts)


def _resolved(hosts: Sequence[str], resolve: Resolve, patience: float) -> dict[str, tuple[str, str]]:
    """Return for each host its IP address, or "" and the reason for which it is unknown."""
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, tuple[str, str]]] = queue.SimpleQueue()
    for host in hosts:
        requests.put(host)

    def resolve_requests() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                host = requests.get_nowait()
                answers.put((host, _answer(host, resolve)))

    # On its own, the system waits much longer for a name server that does not answer.
    for _ in range(min(_MAX_THREADS, len(hosts))):
        threading.Thread(target=resolve_requests, daemon=True).start()
    known = dict.fromkeys(hosts, ("", f"the host could not be resolved within {patience:g} s"))
    deadline = time.monotonic() + patience
    with contextlib.suppress(queue.Empty):
        for _ in hosts:
            host, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            known[host] = answer
    return known


def _answer(host: str, resolve: Resolve) -> tuple[str, str]:
    try:
        return resolve(host), ""
    except (OSError, UnicodeError) as error:
        return "", f"the host cannot be resolved ({getattr(error, 'strerror', None) or error})"


def _inspect(task: str, address: str, number: str, why: str) -> TaskAddress:
    if not number:
        return TaskAddress(task, address, fault=why)
    fault = _bind_error(number, 0)
    if fault is not None and fault.errno == errno.EADDRNOTAVAIL:
        return TaskAddress(task, address, number, here=False)
    if fault is not None:
        return TaskAddress(task, address, number, fault=f"cannot be used here ({fault.strerror or fault})")
    # Lockstep does not listen there, so only another program that uses the address is a fault.
    port = _split(address)[1]
    error = _bind_error(number, port)
    user = _user_of(number, port) if error is not None and error.errno == errno.EADDRINUSE else ""
    return TaskAddress(task, address, number, user=user)


def _bind_error(number: str, port: int) -> OSError | None:
    """Bind a port of this machine and release it; return the error, if any."""
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((number, port))
    except OSError as error:
        return error
    return None


def _user_of(number: str, port: int) -> str:
    names = (number, "0.0.0.0", "::", f"::ffff:{number}")
    with contextlib.suppress(psutil.Error, OSError):
        found = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.laddr and connection.laddr.port == port and connection.laddr.ip in names
        ]
        # Sockets that listen come before connections from that port.
        found.sort(key=lambda connection: connection.status != psutil.CONN_LISTEN)
        pid = next((connection.pid for connection in found if connection.pid), None)
        if pid is not None:
            return _program(pid)
        if found:
            return "a process of another user (only root can see which)"
    return "another program that is not visible from here"


def _program(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(number: str) -> bool:
    return bool(number) and ipaddress.ip_address(number.partition("%")[0]).is_loopback


def _listed(tasks: Sequence[str]) -> str:
    if len(tasks) > _MAX_NAMED:
        return f"{', '.join(tasks[:_MAX_NAMED])} and {len(tasks) - _MAX_NAMED} more"
    *most, last = tasks
    return f"{', '.join(most)} and {last}" if most else last
