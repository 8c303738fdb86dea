"""A Slurm job step, from the variables that `srun` sets for each of its tasks. Pure."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product

from lockstep.errors import ConfigError
from lockstep.system.environment import slurm_variable
from lockstep.system.prose import count

Hosts = tuple[tuple[str, int], ...]
"""The hosts of a step in Slurm's order, with the number of tasks on each."""

Variable = Callable[[str], str | None]
"""Returns the value of a variable, named without its prefix `SLURM_`; None if it is not set."""

STEP_VARIABLES = (
    *("JOB_ID", "STEP_ID", "PROCID", "NODEID"),
    *("STEP_NODELIST", "STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"),
)
"""The variables that `SlurmTask.read` needs, without their prefix."""


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step.

    Attributes:
        job: the id of Slurm's job.
        step: the number of the step in it.
        rank: the rank of the task, among all tasks of the step.
        node: the index of its host in `hosts`.
        hosts: the hosts of the step.
    """

    job: int
    step: int
    rank: int
    node: int
    hosts: Hosts

    @classmethod
    def read(cls, variable: Variable = slurm_variable) -> "SlurmTask":
        """Return the task of this process.

        Raises:
            ConfigError: this is not a task of a job step, or its variables do not fit together.
        """
        job, step, rank, node = (number(name, variable) for name in ("JOB_ID", "STEP_ID", "PROCID", "NODEID"))
        hosts = hosts_of_step(variable)
        nodes, tasks = number("STEP_NUM_NODES", variable), number("STEP_NUM_TASKS", variable)
        started = sum(tasks for _, tasks in hosts)
        if nodes != len(hosts) or node >= nodes:
            raise ConfigError(
                f"SLURM_NODEID {node} of SLURM_STEP_NUM_NODES {nodes} does not fit the "
                f"{count(len(hosts), 'host')} of SLURM_STEP_NODELIST"
            )
        if tasks != started or rank >= tasks:
            raise ConfigError(
                f"SLURM_PROCID {rank} of SLURM_STEP_NUM_TASKS {tasks} does not fit the "
                f"{count(started, 'task')} of SLURM_STEP_TASKS_PER_NODE"
            )
        return cls(job, step, rank, node, hosts)


def hosts_of_step(variable: Variable = slurm_variable) -> Hosts:
    """Return the hosts of the step, with the number of tasks on each.

    Raises:
        ConfigError: this is not a task of a job step, or its variables are invalid or do not fit together.
    """
    names = expand_hosts(required("STEP_NODELIST", variable))
    tasks = expand_counts(required("STEP_TASKS_PER_NODE", variable))
    if len(tasks) != len(names):
        raise ConfigError(
            f"SLURM_STEP_NODELIST has {count(len(names), 'host')}, SLURM_STEP_TASKS_PER_NODE has "
            f"{len(tasks)}: start the command with `srun`, which sets both"
        )
    return tuple(zip(names, tasks, strict=True))


def required(name: str, variable: Variable = slurm_variable) -> str:
    """Return the value of a variable.

    Raises:
        ConfigError: the variable is not set.
    """
    value = variable(name)
    if value is None:
        raise ConfigError(
            f"SLURM_{name} is not set: this is not a task of a Slurm job step; start the command with `srun`"
        )
    return value


def number(name: str, variable: Variable = slurm_variable) -> int:
    """Return the value of a variable that is a whole number.

    Raises:
        ConfigError: the variable is not set, or is not a whole number.
    """
    text = required(name, variable)
    if not (text.isascii() and text.isdigit() and len(text) < 11):
        raise ConfigError(f"SLURM_{name} is {text!r}, expected a whole number, 0 or more")
    return int(text)


_MAX_ENTRIES = 65536
_NAME = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `node[01-03,7]`, in its order: node01, node02, node03, node7.

    The numbers of a range have at least as many digits as its first one. If a name has several brackets, the
    last one varies fastest.

    Raises:
        ConfigError: the text is not a list of hosts, or has more than 65,536.
    """
    names = _split(text)
    hosts = list(islice((host for name in names for host in _expand(text, name)), _MAX_ENTRIES + 1))
    if len(hosts) > _MAX_ENTRIES:
        raise _invalid(text, f"has more than {_MAX_ENTRIES} hosts")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a list such as `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ConfigError: the text is not a list of numbers, or has more than 65,536.
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    runs = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if len(runs) != len(matches) or sum(times for _, times in runs) > _MAX_ENTRIES:
        raise ConfigError(
            f"Slurm's list of tasks is {text!r}, expected the tasks on each host, such as '2(x3),1'"
        )
    return [number for number, times in runs for _ in range(times)]


def _split(text: str) -> list[str]:
    names = _NAME.findall(text)
    if not names or ",".join(names) != text:
        raise _invalid(text, "is not a list of hosts")
    return names


def _expand(text: str, name: str) -> Iterator[str]:
    pieces, count = [], 1
    for match in _PIECE.finditer(name):
        pieces.append(_numbers(text, match[1]) if match[2] is None else [match[2]])
        count *= len(pieces[-1])
        if count > _MAX_ENTRIES:
            raise _invalid(text, f"has more than {_MAX_ENTRIES} hosts")
    return map("".join, product(*pieces))


def _numbers(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or first > last:
            raise _invalid(text, f"has {part!r} in brackets")
        if len(numbers) + last - first >= _MAX_ENTRIES:
            raise _invalid(text, f"has more than {_MAX_ENTRIES} hosts")
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers


def _invalid(text: str, fault: str) -> ConfigError:
    return ConfigError(
        f"Slurm's list of hosts, {text[:120]!r}, {fault}: expected a list such as 'node[01-03,7],gpu1'"
    )
