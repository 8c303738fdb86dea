"""What workers on different hosts must have in common to compute equal bits from the same program."""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import keras
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.errors import DisagreementError
from lockstep.observability.events import HostsDiffer
from lockstep.system.processor import (
    CHOOSING_VARIABLES,
    instruction_set,
    limit_of,
    processor_features,
    processor_model,
    smallest,
)
from lockstep.worker.job import Job
from lockstep.worker.program_sources import own_sources

Array = npt.NDArray[np.float32]

_NAMES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
_MULTIPLIER = 2654435761
_SHAPES = (96, 160), (160, 128), (4, 20, 20, 8), (3, 3, 8, 16)


class HostReport(msgspec.Struct, frozen=True):
    """What a worker has imported on its host, and what it computes there.

    Attributes:
        worker: its id.
        host: the name of the host.
        processor: the kind of its processor.
        instructions: the largest instruction set of its processor.
        flags: the environment variables with which libraries choose their code for a processor.
        backend: the Keras backend.
        bits: a hash of the results of a fixed small program.
        libraries: versions of the imported libraries.
        sources: hashes of the program's own source files that it has imported, by path.
    """

    worker: int
    host: str
    processor: str
    instructions: str
    flags: dict[str, str]
    backend: str
    bits: str
    libraries: dict[str, str]
    sources: dict[str, str]


def own_report(job: Job) -> bytes:
    """Return the packed report of this worker; empty if the view has one host."""
    return b"" if len(job.view.hosts) == 1 else msgspec.msgpack.encode(host_report(job))


def report_for_joiners(job: Job) -> dict[str, Any]:
    """Return the report of this worker as JSON data; empty if the job has one host."""
    found: dict[str, Any] = msgspec.to_builtins(host_report(job)) if job.context.over_hosts else {}
    return found


def compare_with_member(job: Job, report: Mapping[str, Any]) -> None:
    """Compare this worker, which joins, with a member that has sent `report`; do nothing if it is empty.

    Raises:
        DisagreementError: their hosts differ; names them and what differs.
    """
    if report:
        _compare(job, "joining", [msgspec.convert(report, HostReport), host_report(job)])


def host_report(job: Job) -> HostReport:
    """Return the report of this worker."""
    return HostReport(
        job.worker,
        job.context.host or socket.gethostname(),
        processor_model(),
        instruction_set(processor_features()),
        {name: os.environ[name] for name in CHOOSING_VARIABLES if name in os.environ},
        keras.backend.backend(),
        computed_bits(),
        libraries(),
        own_sources(),
    )


def compare_reports(job: Job, what: str, packed: Sequence[bytes]) -> None:
    """Compare the reports of all workers of a view; do nothing if they are empty.

    Args:
        job: of this worker.
        what: names the call, for messages.
        packed: the reports.

    Raises:
        DisagreementError: hosts differ; raised on every worker, names the hosts and what differs.
    """
    if not all(packed):
        return
    _compare(job, what, [msgspec.msgpack.decode(report, type=HostReport) for report in packed])


def _compare(job: Job, what: str, reports: Sequence[HostReport]) -> None:
    for look in (_other_library, _other_source):
        found = {own.worker: text for own in reports if (text := look(reports[0], own))}
        if found:
            raise DisagreementError(f"{what}: {next(iter(found.values()))}", tuple(found))
    first = (reports[0].backend, reports[0].bits)
    others = [own for own in reports if (own.backend, own.bits) != first]
    if others:
        refuse_unlike(job, what, "a fixed small program", reports[0], others)


def refuse_unlike(job: Job, what: str, program: str, first: HostReport, others: Sequence[HostReport]) -> None:
    """Refuse hosts that compute other bits than the first, or publish a note if the user allows them.

    Args:
        job: of this worker.
        what: names the call.
        program: whose results differ, for people.
        first: the report of a host.
        others: reports of those that differ from it.

    Raises:
        DisagreementError: names the hosts, and what makes them equal.
    """
    other = others[0]
    backend = _NAMES.get(other.backend, other.backend)
    differs = (
        f"{first.host} and {other.host} compute different bits in {program} with {backend}"
        f"{_why_other_bits(first, other)}"
    )
    if not job.context.allow_unlike:
        remedy = "run on hosts of one kind" + _limits(first, other)
        allow = "--allow-unlike accepts a result that depends on which host computes which replica"
        raise DisagreementError(f"{what}: {differs}; {remedy}; {allow}", tuple(one.worker for one in others))
    if job.is_chief:
        job.events.publish(HostsDiffer(f"{differs}; the result depends on which host computes which replica"))


def _why_other_bits(first: HostReport, other: HostReport) -> str:
    for name in CHOOSING_VARIABLES:
        ours, theirs = first.flags.get(name, "not set"), other.flags.get(name, "not set")
        if ours != theirs:
            return f" ({name} is {ours} and {theirs})"
    ours, theirs = (
        (f"{one.processor} with {one.instructions}".removesuffix(" with ")) for one in (first, other)
    )
    return f" ({ours} and {theirs})" if ours != theirs else ""


def _limits(first: HostReport, other: HostReport) -> str:
    """Return how to limit hosts to the instructions that all have; empty if that is unknown."""
    if first.flags != other.flags:
        return " and with one environment"
    common = smallest((first.instructions, other.instructions))
    return f", or set {limit_of(first.backend, common)}" if common and first.backend == other.backend else ""


def _other_library(first: HostReport, other: HostReport) -> str:
    for name, version in first.libraries.items():
        if other.libraries.get(name, version) != version:
            return (
                f"{first.host} has {name} {version}, and {other.host} has {other.libraries[name]}; install "
                "the same version on all hosts"
            )
    return ""


def _other_source(first: HostReport, other: HostReport) -> str:
    # A worker may import more than others, such as what only the chief needs.
    for path, text in first.sources.items():
        if other.sources.get(path, text) != text:
            return f"{path} differs between {first.host} and {other.host}; copy the same file to all hosts"
    return ""


def libraries() -> dict[str, str]:
    """Return the versions of the imported libraries that affect training."""
    names = ("keras", keras.backend.backend(), "jaxlib", "numpy", "lockstep")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    # PyTorch's version is of a subclass of str.
    return {module.__name__: str(module.__version__) for module in modules}


@cache
def computed_bits() -> str:
    """Return a hash of the results of a fixed small program on the backend.

    It has the operations whose bits depend on the processor: products of matrices, convolutions, elementary
    functions and sums. It changes no random state.
    """
    compute = {"jax": _in_jax, "tensorflow": _in_tensorflow, "torch": _in_torch}[keras.backend.backend()]
    digest = xxhash.xxh3_128()
    for array in compute(*map(_numbers, _SHAPES)):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _numbers(shape: Sequence[int]) -> Array:
    """Return numbers between -0.5 and 0.5, with equal bits on every processor."""
    counts = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(_MULTIPLIER) % np.uint64(2**24)
    return (counts.astype(np.float32) / np.float32(2**24) - np.float32(0.5)).reshape(shape)


def _in_jax(*inputs: Array) -> list[Any]:
    import jax
    from jax import lax
    from jax import numpy as jnp

    def program(rows: Any, weights: Any, images: Any, kernel: Any) -> Any:
        hidden = jnp.tanh(rows @ weights)
        scaled = jnp.exp(hidden) * lax.rsqrt(1.0 + (hidden * hidden).sum(1, keepdims=True))
        layout = ("NHWC", "HWIO", "NHWC")
        convolved = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)
        return scaled, convolved, convolved.sum((0, 1, 2))

    return [np.asarray(result) for result in jax.jit(program).lower(*inputs).compile()(*inputs)]


def _in_tensorflow(*inputs: Array) -> list[Any]:
    import tensorflow as tf

    def program(rows: Any, weights: Any, images: Any, kernel: Any) -> Any:
        hidden = tf.tanh(rows @ weights)
        scaled = tf.exp(hidden) * tf.math.rsqrt(1.0 + tf.reduce_sum(hidden * hidden, 1, keepdims=True))
        convolved = tf.nn.conv2d(images, kernel, 1, "SAME")
        return scaled, convolved, tf.reduce_sum(convolved, (0, 1, 2))

    compile: Callable[..., Any] = tf.function
    with tf.init_scope():
        tensors = [tf.constant(array) for array in inputs]
        compiled = compile(program, jit_compile=True, autograph=False)
        return [result.numpy() for result in compiled(*tensors)]


def _in_torch(*inputs: Array) -> list[Any]:
    import torch

    # The device that Keras uses.
    device = keras.ops.zeros(()).device
    with torch.no_grad():
        rows, weights, images, kernel = (torch.from_numpy(array).to(device) for array in inputs)
        hidden = torch.tanh(rows @ weights)
        scaled = torch.exp(hidden) * torch.rsqrt(1.0 + (hidden * hidden).sum(1, keepdim=True))
        layout = images.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)
        convolved = torch.nn.functional.conv2d(*layout, padding=1)
        return [result.cpu().numpy() for result in (scaled, convolved, convolved.sum((0, 2, 3)))]
