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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import psutil

from lockstep.cluster.tf_config import TRAINING, TaskConfig, parse, training_tasks
from lockstep.doctor.check import Finding, Rating, Sources, fine, warning
from lockstep.errors import ConfigError
from lockstep.hosts.where import GATHERING
from lockstep.system.environment import RUN
from lockstep.system.prose import count, first_of

_MAX_THREADS = 16
_MAX_NAMED = 4


@dataclass(frozen=True)
class TaskAddress:
    """The address of a task, and the facts about it.

    Attributes:
        task: its name, such as "worker 1".
        address: its address, as in `TF_CONFIG`.
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


def look_at_tf_config(sources: Sources) -> tuple[str | None, list[TaskAddress]]:
    """Return the value of `TF_CONFIG`, None if it is not set, and the facts about its addresses."""
    text = sources.environment.get("TF_CONFIG")
    try:
        config = parse(text) if text is not None else None
    except ConfigError:
        config = None
    # Child processes of workers do not use an address.
    if config is None or config.environment == RUN:
        return text, []
    tasks = [
        (f"{job} {index}", config.cluster.task_address(job, index))
        for job in config.cluster.jobs
        for index in config.cluster.task_indices(job)
    ]
    hosts = list(dict.fromkeys(_split(address)[0] for _, address in tasks))
    answers = _resolved(hosts, sources.resolve, sources.patience)
    return text, [_address(task, address, *answers[_split(address)[0]]) for task, address in tasks]


def judge_tf_config(facts: tuple[str | None, Sequence[TaskAddress]]) -> list[Finding]:
    """Judge the effect of `TF_CONFIG` on a script that is started by hand."""
    text, addresses = facts
    if text is None:
        return []
    try:
        config = parse(text)
    except ConfigError as error:
        remedy = (
            "correct it, or unset TF_CONFIG: lockstep run sets its own, but a script that is started by "
            "hand exits where it creates a strategy"
        )
        return [warning(str(error), remedy)]
    trainers = tuple(f"{job} {index}" for job, index, _ in training_tasks(config.cluster))
    # A single training task does not need an address, and parameter servers and evaluators do not use theirs.
    used = trainers if len(trainers) > 1 else ()
    faults = [finding for each in addresses for finding in _judge_address(each, each.task in used)]
    usable = all(fault.rating is Rating.FINE for fault in faults)
    if addresses and not faults:
        faults = [_judge_usable_addresses(addresses)]
    numbers = [each.number for each in addresses if each.task in used]
    example = bool(numbers) and all(map(_is_loopback, numbers))
    return [_judge_config(config, trainers, usable, example), *faults]


def _judge_config(config: TaskConfig, trainers: Sequence[str], usable: bool, example: bool) -> Finding:
    task = f"{config.task_type} {config.task_id}"
    facts = {"task": task, "training": list(trainers), "environment": config.environment}
    if config.environment == RUN:
        reason = "a job of lockstep run has set it: a script that is started by hand trains alone"
        return warning(reason, "unset TF_CONFIG", facts)
    if config.task_type == "ps":
        reason = (
            f"this process is {task}, which does nothing: a script that is started by hand exits "
            "where it creates a strategy"
        )
        remedy = "give it a task of type chief or worker, or unset TF_CONFIG; lockstep run sets its own"
        return warning(reason, remedy, facts)
    if config.task_type not in TRAINING:
        reason = (
            "this process is the evaluator: a script that is started by hand evaluates the checkpoints of "
            f"{count(len(trainers), 'task')}; lockstep run sets its own TF_CONFIG"
        )
        return fine(reason, facts)
    if len(trainers) == 1:
        reason = f"{task} is the only task that trains: a script that is started by hand trains alone"
        return warning(reason, "unset TF_CONFIG if it is left over in this shell", facts)
    reason = f"this process is {task}, one of {len(trainers)} tasks that train"
    if usable:
        others = _listed([other for other in trainers if other != task])
        reason += f": a script that is started by hand waits for {others}, {GATHERING:g} s at most"
    reason += "; lockstep run sets its own TF_CONFIG"
    if not example:
        return fine(reason, facts)
    return warning(
        f"{reason}. All addresses are loopback, as in an example",
        "unset TF_CONFIG if it is left over in this shell; otherwise start the other tasks too",
        facts,
    )


def _judge_address(address: TaskAddress, used: bool) -> Iterator[Finding]:
    """Yield the finding on the address of a task, if it has a fault."""
    refuse = "workers that are started by hand refuse to train"
    if address.fault:
        reason = f"{address.address}: {address.fault}"
        remedy = "correct it in every TF_CONFIG, or give the IP address of the host"
    elif not address.here:
        reason = f"{address.address} is not an address of this machine"
        refuse = "workers that are started by hand on several machines need a key"
        remedy = (
            "make a key with lockstep key FILE, copy it to each machine, and set LOCKSTEP_KEY_FILE; or give "
            "all tasks that train addresses of this machine, such as 127.0.0.1:20000"
        )
    elif address.user:
        reason = f"{address.address} is in use by {address.user}"
        remedy = "stop that program, or give this task another port in every TF_CONFIG"
        refuse = f"{address.task}, started by hand, refuses to train"
    else:
        return
    name, facts = f"TF_CONFIG: {address.task}", asdict(address)
    if used:
        yield warning(f"{reason}: {refuse}", remedy, facts, name)
    else:
        yield fine(f"{reason}; Lockstep does not use this address", facts, name)


def _judge_usable_addresses(addresses: Sequence[TaskAddress]) -> Finding:
    reason = f"all {len(addresses)} belong to this machine, and their ports are free"
    if len(addresses) == 1:
        reason = f"{addresses[0].address} belongs to this machine, and its port is free"
    facts = {"numbers": {each.address: each.number for each in addresses}}
    return fine(reason, facts, "TF_CONFIG: addresses")


def _resolved(
    hosts: Sequence[str], resolve: Callable[[str], str], patience: float
) -> dict[str, tuple[str, str]]:
    """Return the IP address of each host, or "" and the reason why it is unknown."""
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, tuple[str, str]]] = queue.SimpleQueue()
    for host in hosts:
        requests.put(host)

    def resolve_requests() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                host = requests.get_nowait()
                answers.put((host, _answer(host, resolve)))

    # By default, the system waits much longer for a name server that does not answer.
    for _ in range(min(_MAX_THREADS, len(hosts))):
        threading.Thread(target=resolve_requests, daemon=True).start()
    results = dict.fromkeys(hosts, ("", f"the host could not be resolved within {patience:g} s"))
    deadline = time.monotonic() + patience
    with contextlib.suppress(queue.Empty):
        for _ in hosts:
            host, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            results[host] = answer
    return results


def _answer(host: str, resolve: Callable[[str], str]) -> tuple[str, str]:
    try:
        return resolve(host), ""
    except (OSError, UnicodeError) as error:
        return "", f"the host cannot be resolved ({getattr(error, 'strerror', None) or error})"


def _address(task: str, address: str, number: str, why: str) -> TaskAddress:
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
        users = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.laddr and connection.laddr.port == port and connection.laddr.ip in names
        ]
        # Sockets that listen come before connections from that port.
        users.sort(key=lambda connection: connection.status != psutil.CONN_LISTEN)
        pid = next((connection.pid for connection in users if connection.pid), None)
        if pid is not None:
            return _program(pid)
        if users:
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
        return first_of(tasks, _MAX_NAMED)
    *most, last = tasks
    return f"{', '.join(most)} and {last}" if most else last
