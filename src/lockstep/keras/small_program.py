"""A fixed small program on the backend, whose bits and time depend on the processor and its limits.

    python -P -m lockstep.keras.small_program

As a program, it measures the time that this takes.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.system.child_process import command_of
from lockstep.system.processor import limited
from lockstep.system.programs import ProbeProgram

Array = npt.NDArray[np.float32]
Compute = Callable[[], list[Any]]
"""Computes the results on the CPU, as arrays of NumPy."""

_MULTIPLIER = 2654435761
_SMALL = (96, 160), (160, 128), (4, 20, 20, 8), (3, 3, 8, 16)
_LARGER = (512, 512), (512, 512), (16, 32, 32, 16), (3, 3, 16, 32)
_MEASURED = 1.0
_PATIENCE = 60.0


@cache
def computed_bits() -> str:
    """Return a hash of the results of a fixed small program on the backend.

    It has the operations whose bits depend on the processor: products of matrices, convolutions, elementary
    functions and sums. It does not change random states.
    """
    return _hash(_program(_SMALL)())


def repeatable_bits(kind: int) -> Callable[[], str]:
    """Return a function that computes a larger program with inputs of a kind, and hashes the results."""
    compute = _program(_LARGER, kind)
    return lambda: _hash(compute())


def _hash(arrays: Iterable[Any]) -> str:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def cost_of_limit(limit: str, patience: float = _PATIENCE) -> float | None:
    """Return the time of the program with a limit, relative to the time without it, or None if unknown.

    This takes seconds, because each of two processes imports the backend.

    Args:
        limit: the environment variables of the limit, as `lockstep.system.processor.limit_of` returns them.
        patience: the most seconds that it may take; at most a minute.
    """
    # One thread, because threads of other programs would delay several threads more than one.
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend(), "OMP_NUM_THREADS": "1"}
    # At the same time, so that other programs disturb both alike.
    with ThreadPoolExecutor() as threads:
        measure = partial(_seconds, min(patience, _PATIENCE))
        without, with_limit = threads.map(measure, (environment, limited(environment, limit)))
    return with_limit / without if without and with_limit else None


def _seconds(patience: float, environment: Mapping[str, str]) -> float:
    """Return the time of the program in a process with an environment; 0 if it fails."""
    try:
        program = ProbeProgram.start(command_of("lockstep.keras.small_program"), environment)
        ended = program.result(time.monotonic() + patience)
        return float(ended.output.split()[-1]) if ended.status == 0 else 0.0
    except (OSError, ValueError, IndexError):
        return 0.0


def main() -> None:
    """Write the least time of many computations to stdout, in seconds."""
    compute, times = _program(_LARGER), list[float]()
    # The first computation may compile.
    compute()
    began = time.perf_counter()
    while time.perf_counter() - began < _MEASURED:
        before = time.perf_counter()
        compute()
        times.append(time.perf_counter() - before)
    print(min(times))


def _program(shapes: Sequence[Sequence[int]], kind: int = 0) -> Compute:
    make = {"jax": _in_jax, "tensorflow": _in_tensorflow, "torch": _in_torch}[keras.backend.backend()]
    return make(*(_numbers(shape, kind) for shape in shapes))


def _numbers(shape: Sequence[int], kind: int) -> Array:
    """Return numbers between -0.5 and 0.5, with equal bits on every processor."""
    first = 1 + kind * np.prod(shape)
    counts = np.arange(first, first + np.prod(shape), dtype=np.uint64)
    counts = counts * np.uint64(_MULTIPLIER) % np.uint64(2**24)
    return (counts.astype(np.float32) / np.float32(2**24) - np.float32(0.5)).reshape(shape)


def _in_jax(*inputs: Array) -> Compute:
    import jax
    from jax import lax
    from jax import numpy as jnp

    def program(rows: Any, weights: Any, images: Any, kernel: Any) -> Any:
        hidden = jnp.tanh(rows @ weights)
        scaled = jnp.exp(hidden) * lax.rsqrt(1.0 + (hidden * hidden).sum(1, keepdims=True))
        layout = ("NHWC", "HWIO", "NHWC")
        convolved = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)
        return scaled, convolved, convolved.sum((0, 1, 2))

    compiled = jax.jit(program).lower(*inputs).compile()
    return lambda: [np.asarray(result) for result in compiled(*inputs)]


def _in_tensorflow(*inputs: Array) -> Compute:
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

    def compute() -> list[Any]:
        with tf.init_scope():
            return [result.numpy() for result in compiled(*tensors)]

    return compute


def _in_torch(*inputs: Array) -> Compute:
    import torch

    # The device that Keras uses.
    device = keras.ops.zeros(()).device
    rows, weights, images, kernel = (torch.from_numpy(array).to(device) for array in inputs)

    def compute() -> list[Any]:
        with torch.no_grad():
            hidden = torch.tanh(rows @ weights)
            scaled = torch.exp(hidden) * torch.rsqrt(1.0 + (hidden * hidden).sum(1, keepdim=True))
            layout = images.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)
            convolved = torch.nn.functional.conv2d(*layout, padding=1)
            return [result.cpu().numpy() for result in (scaled, convolved, convolved.sum((0, 2, 3)))]

    return compute


if __name__ == "__main__":
    main()
