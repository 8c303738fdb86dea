"""The messages of workers besides partials: facts that must be equal, decisions of the chief, results.

A comparison that fails names the workers that differ, and the cause.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Communicator
from lockstep.data.digest import digest_arrays
from lockstep.errors import DisagreementError
from lockstep.keras.host_report import compare_reports, hosts_of, own_report
from lockstep.topology import View
from lockstep.worker.job import Job

Facts = Mapping[str, str]
"""Named facts about the next action of a worker, in the order in which differences are reported."""

Array = npt.NDArray[Any]

Packed = tuple[str, str, list[int], bytes]
"""An array in a message between workers: its name, dtype, shape and bytes."""

_Gathered = tuple[int, list[tuple[str, str]], bytes]
"""A worker's id, its facts, and its blob."""

CHECK_EVERY = 100
"""Steps between two comparisons of the workers' states."""

_ROUNDING = 0.05
"""The largest distance of two arrays, relative to their norm, in `CHECK_EVERY` steps of rounding."""

_TAKEN = "memory that a step has reused"
"""Replaces the value of a variable whose memory, shared with another variable, was donated to a JAX step.

Keras fails when it reads such a variable. A comparison, which reads more than the program, tolerates it.
"""

ADVICE_ON_CALLS = (
    "all workers must make the same calls in the same order; look for code that depends on the worker"
)
_DATA = (
    "the workers read different examples: look for a shuffle or a generator without a seed, such as "
    "numpy.random.default_rng(), which differs in each process (give it a seed: "
    "numpy.random.default_rng(0)), or for files that depend on the worker, which belong in "
    "strategy.distribute_datasets_from_function"
)
_FILES = (
    "the data files may differ between {} and {}: compare them first, for example with sha256sum; if they "
    "are equal, "
)
_OF_FILES = ("data", "validation")
_MODEL = (
    "the models differ: look for weights that come from an unseeded generator, from a file, or from code "
    "that depends on the worker or on the time"
)
_SETTING = (
    "the workers build different models: look for hyperparameters that come from an unseeded generator, or "
    "from code that depends on the worker"
)
_OPTUNA = (
    "; Optuna's samplers draw different trials in each worker unless they have a seed, as in "
    "optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))"
)
_ORDER = (
    "the workers have drawn different random numbers, and the order of the examples depends on them: give "
    "code that runs on some workers only its own generator, as in numpy.random.default_rng(0)"
)
_BACKUP = (
    "keras.callbacks.BackupAndRestore reads its folder on each host, and these hosts have different backups: "
    "copy one to all hosts, or remove it on all; lockstep run --checkpoint copies checkpoints itself"
)
_ADVICE = {
    "backup": _BACKUP,
    "data": _DATA,
    "order": _ORDER,
    "validation": _DATA,
    "variable": _MODEL,
    "setting": _SETTING,
}


def agree(job: Job, label: str, facts: Facts) -> None:
    """Check that every worker calls this with equal facts.

    Raises:
        DisagreementError: facts differ. Every worker raises it, with two workers and the first difference.
    """
    job.exchange(lambda _, communicator: compare_all(job, communicator, label, facts))


def compare_all(job: Job, communicator: Communicator, label: str, facts: Facts) -> None:
    """Check in one call of the exchange that all hosts can compute equal bits, and that facts are equal.

    Raises:
        DisagreementError: as for `agree`, or hosts differ.
    """
    gathered = _gather(job.worker, communicator, label, facts, own_report(job))
    # Facts may differ because the hosts do.
    reports = [report for _, _, report in gathered]
    compare_reports(job, label, reports, texts_of_all(communicator, label))
    _compare(label, gathered, hosts_of(reports))


def texts_of_all(communicator: Communicator, label: str) -> Callable[[str], list[str]]:
    """Return a function that gathers a text of each worker in a call of the exchange."""
    return lambda text: [blob.decode() for blob in communicator.gather(text.encode(), what=label)]


def chiefs_state(
    job: Job, label: str, to_numpy: Callable[[Any], Array], arrays: Mapping[str, Any]
) -> dict[str, Array] | None:
    """Return the chief's state if this worker's state differs from it by rounding; otherwise None.

    Hosts that compute different bits need this, because their states diverge although all apply the same
    totals.

    Args:
        job: the job of this worker.
        label: names the call.
        to_numpy: converts an array of the backend to NumPy.
        arrays: the state of this worker by variable name.

    Raises:
        DisagreementError: the states differ by more than rounding. Every worker raises it.
    """
    state = {name: to_numpy(value) for name, value in arrays.items()}
    packed = [pack(name, array) for name, array in state.items()]

    def receive(_: View, communicator: Communicator) -> dict[str, Array]:
        blob = msgspec.msgpack.encode(packed) if job.is_chief else b""
        chief_blob = next(blob for blob in communicator.gather(blob, what=label) if blob)
        return dict(map(unpack, msgspec.msgpack.decode(chief_blob, type=list[Packed])))

    chiefs = job.exchange(receive)
    far = [name for name, array in state.items() if not (name in chiefs and _is_near(array, chiefs[name]))]
    agree(job, label, {f"variable {name}": "far from the chief's" for name in far[:1]})
    equal = all(array.tobytes() == chiefs[name].tobytes() for name, array in state.items())
    return None if equal else chiefs


def _is_near(array: Array, chiefs_array: Array) -> bool:
    if array.shape != chiefs_array.shape or array.dtype != chiefs_array.dtype:
        return False
    if array.dtype.kind in "biu":
        return bool((array == chiefs_array).all())
    values, chiefs_values = array.astype("float64"), chiefs_array.astype("float64")
    return bool(np.linalg.norm(values - chiefs_values) <= _ROUNDING * (np.linalg.norm(chiefs_values) + 1e-6))


def chiefs_decision(job: Job, label: str, decision: bool) -> bool:
    """Return the chief's `decision` on every worker."""

    def receive(_: View, communicator: Communicator) -> bool:
        # The chief is the first worker of the view in which the call completes.
        return gather(job.worker, communicator, label, {}, bytes([decision]))[0] == bytes([True])

    return job.exchange(receive)


def gather(worker: int, communicator: Communicator, label: str, facts: Facts, blob: bytes) -> list[bytes]:
    """Return the blobs of all workers, in the order of the workers of the view in which the call completes.

    Args:
        worker: the id of this worker, which is sent with its facts, because the view may be an earlier one.
        communicator: the communicator of the current view.
        label: names the call.
        facts: the facts that must be equal on all workers.
        blob: the blob of this worker.

    Raises:
        DisagreementError: the workers differ in `label` or in `facts`. Every worker raises it.
    """
    gathered = _gather(worker, communicator, label, facts, blob)
    _compare(label, gathered)
    return [gathered_blob for _, _, gathered_blob in gathered]


def _gather(
    worker: int, communicator: Communicator, label: str, facts: Facts, blob: bytes
) -> list[_Gathered]:
    message = msgspec.msgpack.encode((worker, list({"call": label, **facts}.items()), blob))
    return [
        msgspec.msgpack.decode(answer, type=_Gathered) for answer in communicator.gather(message, what=label)
    ]


def _compare(label: str, gathered: Sequence[_Gathered], hosts: Sequence[str] = ()) -> None:
    workers, facts = [worker for worker, _, _ in gathered], [dict(heading) for _, heading, _ in gathered]
    if difference := describe_difference(workers, facts, hosts):
        others = tuple(
            worker
            for worker, facts_of_worker in zip(workers, facts, strict=True)
            if facts_of_worker != facts[0]
        )
        raise DisagreementError(f"{label}: {difference}", others)


def describe_difference(
    workers: Sequence[int], gathered: Sequence[Facts], hosts: Sequence[str] = ()
) -> str | None:
    """Compare every worker's facts with those of the first one, and return the first difference, if any.

    Args:
        workers: the ids of the workers.
        gathered: the facts of each worker.
        hosts: the name of the host of each worker; empty if all are on one host.
    """
    first = gathered[0]
    for position, (worker, facts) in enumerate(zip(workers, gathered, strict=True)):
        for name in [*first, *(name for name in facts if name not in first)]:
            ours, theirs = first.get(name, "nothing"), facts.get(name, "nothing")
            if ours != theirs and _TAKEN not in (ours, theirs):
                subject = name.split(" ")[0]
                files = (
                    _FILES.format(hosts[0], hosts[position]) if hosts and hosts[position] != hosts[0] else ""
                )
                return (
                    f"worker {workers[0]} has {name} = {ours} where worker {worker} has {theirs}; "
                    f"{files if subject in _OF_FILES else ''}"
                    f"{_ADVICE.get(subject, ADVICE_ON_CALLS)}{_suspect()}"
                )
    return None


def _suspect() -> str:
    """Return a hint about an imported library whose results differ between workers."""
    return _OPTUNA if "optuna" in sys.modules else ""


def pack(name: str, array: Array) -> Packed:
    """Return an array of numbers or strings in a form for messages."""
    strings = array.dtype.kind == "O"
    data = msgspec.msgpack.encode(array.ravel().tolist()) if strings else array.tobytes()
    return name, str(array.dtype), list(array.shape), data


def unpack(packed: Packed) -> tuple[str, Array]:
    """Return the arguments of `pack`."""
    name, dtype, shape, data = packed
    if dtype != "object":
        return name, np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    strings = msgspec.msgpack.decode(data, type=list[Any])
    return name, np.array(strings, object).reshape(shape)


def setting_facts(settings: Mapping[str, str]) -> dict[str, str]:
    """Return a fact for each setting of a model, its optimizer and its loss."""
    return {f"setting {name}": text for name, text in settings.items()}


def state_facts(to_numpy: Callable[[Any], npt.NDArray[Any]], arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return a fact for each variable, with its shape, dtype and value.

    Args:
        to_numpy: converts an array of the backend to NumPy.
        arrays: the values by variable name.
    """
    facts = {}
    for name, value in arrays.items():
        if getattr(value, "is_deleted", bool)():
            facts[f"variable {name}"] = _TAKEN
            continue
        array = to_numpy(value)
        facts[f"variable {name}"] = f"{array.dtype}{list(array.shape)} #{digest_arrays([array]).hex()[:16]}"
    return facts
