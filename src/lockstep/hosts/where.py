"""The places of a job's workers, read once from the options of `lockstep run`. Pure.

Another scheduler is a file such as `slurm_role.py`, which returns the role of a task, and a row of
`SCHEDULERS`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.errors import ConfigError
from lockstep.hosts import slurm_role, tf_config_role
from lockstep.hosts.host_list import parse_hosts
from lockstep.hosts.task_place import TaskPlace
from lockstep.protocol.job_spec import JobHost
from lockstep.protocol.rendezvous import Task
from lockstep.system.environment import tf_config_given
from lockstep.transport.addresses import split_address, with_port

if TYPE_CHECKING:
    from lockstep.hosts.engine_link import EngineLink

GATHERING = 600.0
"""Seconds for which the hosts of a job, or the tasks of a cluster, wait for each other before it begins."""

_ENGINE = re.compile(r"ray|ray://\S+:[0-9]+")


@dataclass(frozen=True)
class Scheduler:
    """A scheduler, which starts the same command once on each host, as a task of a cluster.

    Attributes:
        help: the help of its option.
        place: returns the place of this process, given the number of processes of the job (if the user has
            chosen it), of each task, and of parameter servers.
        starts_all: whether it starts all tasks together: they share a terminal and get the same signals, the
            names of their hosts are known, and `-n` workers are divided among them. Otherwise each task runs
            one worker, or `--workers-here`.
    """

    help: str
    place: Callable[[int | None, int, int], TaskPlace]
    starts_all: bool


SCHEDULERS = {
    "tf_config": Scheduler(
        "Take the role of this process in the job from TF_CONFIG, which a TFJob sets in each pod: one "
        "worker per task, or --workers-here, started by this command on each host.",
        lambda processes, here, servers: tf_config_role.find_place(tf_config_given(), here, servers),
        starts_all=False,
    ),
    "slurm": Scheduler(
        "Take the role of this process from the variables of Slurm: srun starts this command once on each "
        "host, and -n workers are divided among them, by default one each. Needs a key: see lockstep key.",
        lambda processes, here, servers: slurm_role.own_place(processes),
        starts_all=True,
    ),
}
"""The schedulers, by the parameters of their options."""


@dataclass(frozen=True)
class Here:
    """On this machine. By default, the GPUs determine the number of processes."""

    processes: int | None
    devices: str | None = None


@dataclass(frozen=True)
class Hosts:
    """On hosts that the user names. `ssh` starts their agents."""

    hosts: tuple[JobHost, ...]

    @property
    def processes(self) -> int:
        """The number of processes of the job."""
        return sum(host.workers for host in self.hosts)


@dataclass(frozen=True)
class Listen:
    """On the hosts whose agents join this one.

    Attributes:
        processes: the processes of the job.
        address: HOST:PORT of this host; port 0 means any free one.
        here: the number of processes on this host; 0 if it only coordinates.
        patience: seconds after which the job stops waiting.
        retries: whether a name that cannot be resolved yet is tried again.
        task: the name of this process in its cluster, for a note; empty without a cluster.
        tasks: see `HostOffer`.
        engine: the engine that has started this process, and starts the agents, if any.
    """

    processes: int
    address: str
    here: int = 1
    patience: float = GATHERING
    retries: bool = False
    task: str = ""
    tasks: tuple[Task, ...] = ()
    engine: "EngineLink | None" = None


@dataclass(frozen=True)
class ScheduledTask:
    """On the hosts of a scheduler; this process is one of its tasks.

    Attributes:
        scheduler: the scheduler that has started the task.
        processes: the processes of the job, if the user has chosen.
        here: the processes of each task, unless the scheduler starts all tasks together.
    """

    scheduler: Scheduler
    processes: int | None
    here: int


@dataclass(frozen=True)
class Engine:
    """On hosts that an engine finds.

    Attributes:
        address: the address of the engine.
        processes: the processes of the job.
        cpus: the CPUs of each worker.
        gpus: the GPUs of each worker.
        resources: other resources of each worker, as NAME=AMOUNT.
        detached: whether the job runs without this command.
    """

    address: str
    processes: int
    cpus: float
    gpus: float
    resources: tuple[str, ...]
    detached: bool


Where = Here | Hosts | Listen | ScheduledTask | Engine

_WAYS = {
    "hosts": "--hosts",
    "listen": "--listen",
    **{name: f"--{name.replace('_', '-')}" for name in SCHEDULERS},
    "engine": "--on",
}
"""The options that say where workers run, by their parameters."""
_PODS = {name for name, scheduler in SCHEDULERS.items() if not scheduler.starts_all}

PLACING = (
    *("workers", "here", "devices", "cpus", "gpus", "resources", "detached", "ui"),
    *_WAYS,
)
"""The parameters of `run` that say where workers run, and `--ui`; `lockstep export` sets them itself."""


class _Refusal(NamedTuple):
    """Why an option must, or must not, be set with some ways to place workers; None is this machine."""

    option: str
    ways: Collection[str | None]
    why: str
    is_missing: bool = False


def _except(*ways: str | None) -> set[str | None]:
    return {None, *_WAYS}.difference(ways)


_OF_ENGINES = "applies to workers on an engine; give --on too"
_REFUSALS = (
    _Refusal(
        "restart_job",
        _except(None, "hosts"),
        "--restart-job cannot be combined with {way}: there, several commands or an engine start the job",
    ),
    _Refusal(
        "detached",
        _except(None, "hosts", "listen", "engine"),
        "--detach cannot be combined with {way}: the scheduler starts each task without a terminal, and "
        "waits for its end",
    ),
    _Refusal(
        "standby",
        _except("hosts", "listen", *SCHEDULERS),
        "--standby is for jobs on several hosts without an engine; give --hosts, --listen, --tf-config or "
        "--slurm too",
    ),
    _Refusal("plain", (None,), "--plain is for jobs on several hosts; give {ways} too"),
    _Refusal(
        "ui",
        ("engine",),
        "--ui shows the run folder, which with --on is on a node of the cluster; run lockstep ui there",
    ),
    _Refusal("workers", ("engine",), "--on needs the number of workers; give -n too", is_missing=True),
    _Refusal("cpus", _except("engine"), f"--cpus-per-worker {_OF_ENGINES}"),
    _Refusal("gpus", _except("engine"), f"--gpus-per-worker {_OF_ENGINES}"),
    _Refusal("resources", _except("engine"), f"--resource-per-worker {_OF_ENGINES}"),
    _Refusal(
        "metrics_port",
        ("engine",),
        "--metrics-port cannot be combined with --on: it serves on this machine alone, and the engine "
        "chooses where the coordinator runs",
    ),
    _Refusal("devices", _WAYS, "--devices is for one host; with {way}, set CUDA_VISIBLE_DEVICES on each"),
    _Refusal(
        "here",
        _except("listen", *_PODS),
        "--workers-here is for jobs that other hosts join; give --listen or --tf-config too",
    ),
    _Refusal(
        "workers", ("listen",), "--listen needs the number of all workers; give -n too", is_missing=True
    ),
    _Refusal(
        "workers",
        _PODS,
        "-n cannot be combined with {way}: each task of TF_CONFIG runs one worker, or --workers-here",
    ),
)


def parse_where(options: Mapping[str, Any], others: int) -> Where:
    """Return the place of a job's workers.

    Args:
        options: the options of `lockstep run`, by their parameters.
        others: the number of processes that are not workers.

    Raises:
        ConfigError: the options contradict each other, or one is malformed.
    """
    # Zero restarts mean that the option is not set, unlike port 0 and 0 GPUs.
    options = {**options, "restart_job": options["restart_job"] or None}
    ways = [way for way in _WAYS if _is_given(options, way)]
    if len(ways) > 1:
        names = " and ".join(_WAYS[way] for way in ways)
        raise ConfigError(f"{names} cannot be combined: each one says where the workers run")
    way = ways[0] if ways else None
    for refusal in _REFUSALS:
        if way in refusal.ways and _is_given(options, refusal.option) != refusal.is_missing:
            *most, last = _WAYS.values()
            raise ConfigError(refusal.why.format(way=way and _WAYS[way], ways=f"{', '.join(most)} or {last}"))
    if (standby := options["standby"]) and not split_address(standby)[1]:
        raise ConfigError(f"--standby {standby} needs a fixed port, such as 7001")
    if standby and options["restart_job"]:
        raise ConfigError(
            "--restart-job cannot be combined with --standby: the job may continue on another host when this "
            "command ends"
        )
    workers, here = options["workers"], options["here"] or 1
    processes = workers and workers + others
    match way:
        case None:
            return Here(processes, options["devices"])
        case "hosts":
            return Hosts(parse_hosts(options["hosts"], processes))
        case "listen":
            address = with_port(options["listen"])
            if here > processes:
                raise ConfigError(f"--workers-here {here} is more than the {processes} workers of the job")
            return Listen(processes, address, here)
        case "engine":
            return _engine(options, processes)
        case _:
            return ScheduledTask(SCHEDULERS[way], processes, here)


def _is_given(options: Mapping[str, Any], option: str) -> bool:
    value = options[option]
    return not (value is None or value is False or value == ())


def _engine(options: Mapping[str, Any], processes: int) -> Engine:
    address = options["engine"]
    if not _ENGINE.fullmatch(address):
        raise ConfigError(f"--on {address} is not an engine: give ray, or ray://HOST:PORT")
    cpus, gpus = options["cpus"] or 1, options["gpus"] or 0
    return Engine(address, processes, cpus, gpus, options["resources"], options["detached"])
