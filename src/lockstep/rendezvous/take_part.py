"""How processes that a user starts by hand, each with its own `TF_CONFIG`, take part in one job.

The first process starts a coordinator, which all processes find through the addresses of their tasks. When
the coordinator admits a process, the process restarts its script in place (`exec`). So it is a worker from
the first line on, as with `lockstep run`.

The coordinator does not belong to a terminal, and holds the cluster's addresses as names of abstract Unix
sockets. So there is only one, and processes find it under any address, even if their lists differ. These
differences from `lockstep run` remain: the user restarts lost workers; each worker writes to its own
terminal, without a log; its exit status is unknown to the agent.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from lockstep.cluster.tf_config import TRAINING, TaskConfig, parse, training_tasks
from lockstep.errors import ConfigError, LockstepError, UnfitError, with_code
from lockstep.launcher.backend import Choice, Wishes, choose_backend, refuse_legacy_keras
from lockstep.protocol.rendezvous import MOST_OF_ARRIVAL, Admitted, Arrival, Task, encode
from lockstep.rendezvous.addresses import (
    check_free,
    claim,
    connect,
    has_place,
    holder,
    resolve,
)
from lockstep.rendezvous.waiting import RendezvousWait
from lockstep.system.child_process import command_of
from lockstep.system.environment import (
    KEY_FILE,
    RUN,
    WorkerIdentity,
    environment_at_start,
    job_environment,
    keras_backend,
    key_file,
    legacy_keras,
    replaced_hash_seed,
    tf_config_given,
    tf_config_now,
    usable_cores,
    visible_gpus,
    worker_environment,
)
from lockstep.system.invocation import Invocation, current_program
from lockstep.system.notes import GATHERING_NOTE_EVERY, note
from lockstep.system.standard_streams import flush_streams
from lockstep.transport.addresses import is_loopback, split_address
from lockstep.version import __version__
from lockstep.worker import job
from lockstep.worker.script import Script

_OWN = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")
"""The variables of a worker that keep the user's own values."""
_PAUSE = 0.02
_PATIENCE = 20.0
_MOST_COORDINATORS = 20

_followed: set[str | None] = set()


def take_part() -> None:
    """Follow the `TF_CONFIG` of this process; called whenever a strategy is created or entered.

    This returns in a worker of a job, and in a process that does not need others: without `TF_CONFIG`, as the
    only training task, or as an evaluator. One of several training tasks waits for the others, and then
    restarts its script as a worker. A parameter server exits.

    Raises:
        ConfigError: `TF_CONFIG` is invalid or was set too late, or the processes do not fit together.
        PeerStuckError: the wait for the other tasks exceeded its limit.
        UnfitError: the coordinator cannot be started or reached.
    """
    text = tf_config_now()
    if job.is_worker():
        if text not in (tf_config_given(), *_followed) and job.is_chief():
            _followed.add(text)
            note(
                "ignoring the TF_CONFIG that this script sets: the job is already running and keeps its "
                "workers and replicas"
            )
        return
    if text is not None and text not in _followed:
        try:
            _follow_first(text)
        except LockstepError as error:
            _end_in_one_line(error)
            raise
    _followed.add(text)


def take_part_with_servers() -> None:
    """Follow the `TF_CONFIG` of this process, which may be an evaluator, in a script with parameter servers.

    Raises:
        ConfigError: `TF_CONFIG` is invalid, or has other tasks that train, which only the command starts.
    """
    text = tf_config_now()
    if text is None or job.is_worker() or (config := parse(text)).environment == RUN:
        return
    if config.task_type not in (*TRAINING, "ps"):
        job.current().task = config.task_type
    elif "ps" in config.cluster.jobs or _has_others(config):
        refusal = _only_the_command_starts(config)
        _end_in_one_line(refusal)
        raise refusal


def _only_the_command_starts(config: TaskConfig) -> ConfigError:
    if "ps" not in config.cluster.jobs:
        return ConfigError(
            "TF_CONFIG has several tasks that train, but no task ps, which a ParameterServerStrategy needs: "
            "add one, or use MultiWorkerMirroredStrategy"
        )
    servers = len(config.cluster.task_indices("ps"))
    return ConfigError(
        "TF_CONFIG has parameter servers: start each of its tasks with `lockstep run --tf-config "
        f"--ps {servers} SCRIPT`"
    )


def _follow_first(text: str) -> None:
    """Follow a `TF_CONFIG` if no strategy has been created yet."""
    config = parse(text)
    if not _followed:
        _follow(config, text)
    elif _has_others(config):
        raise ConfigError(
            "TF_CONFIG was set after the first strategy was created, so this process is a job of one "
            "worker; set TF_CONFIG before creating a strategy"
        )


def _end_in_one_line(refusal: LockstepError) -> None:
    """Let Python end with only the message of this error, if the script does not handle it.

    The cause is the way in which the task was started, so a traceback would hide the message.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is refusal:
            note(with_code(refusal))
        else:
            before(kind, error, trace)

    sys.excepthook = show


def _has_others(config: TaskConfig) -> bool:
    return config.environment != RUN and len(training_tasks(config.cluster)) > 1


def _follow(config: TaskConfig, text: str) -> None:
    if config.environment == RUN:
        # A worker of `lockstep run` started this process, which is not one of its tasks.
        return
    if config.task_type == "ps":
        note("a parameter server has nothing to do: the workers hold the whole state")
        sys.exit(0)
    if config.task_type not in TRAINING:
        job.current().task = config.task_type
    elif _has_others(config):
        _become_worker(config, text)


def _become_worker(config: TaskConfig, text: str) -> NoReturn:
    """Wait until the job admits this process, and restart its script as a worker."""
    tasks = tuple(
        Task(kind, index, address, resolve(address, f"{kind} {index}"))
        for kind, index, address in training_tasks(config.cluster)
    )
    mine = config.task_type, config.task_id
    slot = next(at for at, task in enumerate(tasks) if (task.kind, task.index) == mine)
    here = _tasks_here(tasks, slot)
    if not here or slot != here[0]:
        # Over hosts, the agent of this host listens at the address of its first task.
        check_free(tasks[slot].place, tasks[slot].name)
    program, choice = _program(), _backend()
    script = Script.parse(program.command)
    arrival = Arrival(
        tasks=tasks,
        slot=slot,
        version=__version__,
        backend=choice.backend,
        cores=usable_cores(),
        gpus=visible_gpus(),
        target=script.target,
        module=script.module,
        here=here,
    )
    _check_size(arrival)
    admitted, connection = _meet(arrival)
    why = "the job is running" if admitted.joins else "all workers are connected"
    note(f"{why}; {tasks[slot].name} restarts the script as worker {admitted.worker}, {choice}")
    if hash_seed := replaced_hash_seed(admitted.seed, environment_at_start()):
        note(f"workers get PYTHONHASHSEED from the job's seed, {admitted.seed}, instead of {hash_seed}")
    worker = WorkerIdentity(
        worker=admitted.worker,
        run_dir=Path(admitted.run_dir),
        agent=admitted.coordinator,
        control=connection,
        joins=admitted.joins,
        by_hand=True,
        device_users=admitted.device_users,
    )
    os.set_inheritable(connection, True)
    flush_streams()
    arguments = (*program.options, "-P", "-m", "lockstep.launcher.worker_main", *program.command)
    environment = _environment(worker, admitted, text, choice.backend)
    os.execve(sys.executable, (sys.executable, *arguments), environment)


def _tasks_here(tasks: Sequence[Task], slot: int) -> tuple[int, ...]:
    """Return the indices of the tasks of this host, or an empty tuple if all tasks are on it.

    Raises:
        ConfigError: the task of this process is on another host, hosts cannot reach each other, or there is
            no key.
        UnfitError: an address cannot be used.
    """
    task = tasks[slot]
    here = tuple(at for at, task in enumerate(tasks) if has_place(task.place, task.name))
    if len(here) == len(tasks):
        return ()
    other = next(task for at, task in enumerate(tasks) if at not in here)
    if slot not in here:
        raise ConfigError(
            f"{task.name}'s address {task.address} is not one of this host: start this task on the host that "
            "has the address, or correct the address in every TF_CONFIG"
        )
    for task in tasks:
        if is_loopback(split_address(task.place)[0]):
            at = "" if task.place == task.address else f", which is {task.place} here,"
            raise ConfigError(
                f"{task.name}'s address {task.address}{at} cannot be reached from other hosts, such as that "
                f"of {other.name} ({other.address}); give it an address that all hosts reach"
            )
    from lockstep.transport.keys import JobKey, key_needed

    path = key_file()
    if path is None:
        raise key_needed(f"{other.name} ({other.address}) is on another host")
    JobKey.read(path)
    return here


def _check_size(arrival: Arrival) -> None:
    try:
        size = len(encode(arrival))
    except ValueError:
        size = MOST_OF_ARRIVAL + 1
    if size > MOST_OF_ARRIVAL:
        raise ConfigError(
            f"TF_CONFIG has {len(arrival.tasks)} tasks that train, too many for processes that are "
            f"started by hand: their addresses take more than {MOST_OF_ARRIVAL} bytes in a message. Use "
            "fewer tasks, or `lockstep run --replicas` with fewer workers than replicas"
        )


def _environment(worker: WorkerIdentity, admitted: Admitted, text: str, backend: str) -> dict[str, str]:
    """Return the environment of the worker, with the user's own settings."""
    before = environment_at_start() | {"TF_CONFIG": text}
    gpus = ",".join(visible_gpus()) or None
    shared = job_environment(admitted.seed, admitted.threads, before, backend=backend)
    after = worker_environment(worker, shared, cluster=text, devices=gpus)
    after.pop("CUDA_VISIBLE_DEVICES", None)
    return after | {name: before[name] for name in _OWN if name in before}


def _meet(arrival: Arrival) -> tuple[Admitted, int]:
    """Wait to be admitted; return the admission, and the descriptor of the socket."""
    name = arrival.task.name
    waiting = RendezvousWait(name)
    for _ in range(_MOST_COORDINATORS):
        with _connect(arrival) as connection:
            # A coordinator that has ended does not answer.
            with contextlib.suppress(ConnectionError):
                socket.send_fds(connection, [encode(arrival)], _terminal())
            if admitted := waiting.answer(connection):
                return admitted, connection.detach()
    raise UnfitError(f"{name} has lost {_MOST_COORDINATORS} coordinators of the job; restart all its tasks")


def _terminal() -> tuple[int, ...]:
    """Return the descriptor of stderr, for notes, if it is open."""
    try:
        os.fstat(2)
    except OSError:
        return ()
    return (2,)


def _program() -> Invocation:
    program = current_program()
    if program is None:
        raise ConfigError(
            "TF_CONFIG makes this process one of several workers, which restart their script when all "
            "are connected, but it has no script: it is interactive, a notebook, `python -c`, or forked by "
            "another process. Put the program into a file, use `lockstep run`, or call lockstep.launch"
        )
    Script.parse(program.command).check()
    return program


def _backend() -> Choice:
    # By now, the environment has the settings of the script.
    refuse_legacy_keras(legacy_keras())
    variable, configured = keras_backend()
    wishes = Wishes(variable=variable, configured=configured)
    return choose_backend(wishes, lambda name: importlib.util.find_spec(name) is not None, sys.executable)


def _connect(arrival: Arrival) -> socket.socket:
    """Return a connection to the coordinator; start one if there is none."""
    places = [arrival.tasks[slot].place for slot in arrival.local]
    begun = said = time.monotonic()
    while (now := time.monotonic()) - begun < _PATIENCE:
        claimed = claim(places)
        if isinstance(claimed, str):
            connection = connect(claimed)
        else:
            # Connect before the coordinator starts: it ends when it has no connections.
            connection = connect(places[0])
            _start_coordinator(arrival, claimed)
        if connection is not None:
            return connection
        if now - said >= GATHERING_NOTE_EVERY:
            said = now
            note(f"{arrival.task.name} waits for {holder(str(claimed))} to accept a connection at {claimed}")
        # The process that has the name is about to listen, or to end.
        time.sleep(_PAUSE)
    raise UnfitError(
        f"{holder(str(claimed))} holds {claimed} but has accepted no connection for "
        f"{_PATIENCE:g} s; stop it, or give other ports in TF_CONFIG"
    )


def _start_coordinator(arrival: Arrival, listeners: list[socket.socket]) -> None:
    descriptors, path = [listener.fileno() for listener in listeners], key_file()
    words = (encode(arrival).decode(), *map(str, descriptors))
    try:
        started = subprocess.run(
            command_of("lockstep.rendezvous.coordinator_main", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment_at_start() | ({KEY_FILE: str(path.absolute())} if path is not None else {}),
            pass_fds=descriptors,
            start_new_session=True,
            check=False,
        )
    finally:
        for listener in listeners:
            listener.close()
    if started.returncode:
        raise UnfitError(f"the coordinator of the job exited with status {started.returncode}")
