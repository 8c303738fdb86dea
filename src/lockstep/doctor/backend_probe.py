"""Tests whether a backend works on this machine, in a process that may crash or hang.

    python -m lockstep.doctor.backend_probe BACKEND

It writes each result to stdout at once, one JSON object per line, so that the last line shows the progress of
the process: `{"built": {"version", "cuda", "cudnn"}}`, `{"devices": [...]}`, and for each device `{"device",
"fault", "same"}`: the error of the computation, empty if there was none, and whether the same computation
gave the same bits.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.system.cuda import cuda_of, version_of

Array = npt.NDArray[np.float32]
_SIZE = 256
_ROWS = 4096
"""Many rows for few sums, so that a nondeterministic order of additions changes the result."""


class Probe(Protocol):
    """A backend."""

    def built(self) -> dict[str, str | None]:
        """Return its version, and the versions of CUDA and cuDNN that it was built for, if any."""

    def devices(self) -> Sequence[Any]:
        """Return its devices, the CPU first."""

    def compute(self, device: Any, matrix: Array, indices: npt.NDArray[np.int32]) -> Array:
        """Return sums of rows of `tanh(matrix @ matrix)`: an index selects a row and the sum to add it to."""


class JaxProbe:
    """JAX."""

    def __init__(self) -> None:
        self._jax = importlib.import_module("jax")

    def built(self) -> dict[str, str | None]:
        """See `Probe`. JAX uses CUDA through a plugin, whose requirements name the cuDNN version."""
        cuda = cuda_of("jax")
        cudnn = version_of(f"nvidia-cudnn-cu{cuda}") if cuda else None
        return {"version": self._jax.__version__, "cuda": cuda, "cudnn": cudnn}

    def devices(self) -> Sequence[Any]:
        """See `Probe`."""
        cpus = self._jax.devices("cpu")[:1]
        return [*cpus, *(device for device in self._jax.devices() if device.platform != "cpu")]

    def compute(self, device: Any, matrix: Array, indices: npt.NDArray[np.int32]) -> Array:
        """See `Probe`."""
        numpy = self._jax.numpy

        def sums(matrix: Any, indices: Any) -> Any:
            rows = numpy.tanh(matrix @ matrix)[indices % _SIZE]
            return numpy.zeros_like(matrix).at[indices // 2 % _SIZE].add(rows)

        arguments = [self._jax.device_put(array, device) for array in (matrix, indices)]
        return np.asarray(self._jax.jit(sums)(*arguments))


class TensorFlowProbe:
    """TensorFlow."""

    def __init__(self) -> None:
        self._tf = importlib.import_module("tensorflow")

    def built(self) -> dict[str, str | None]:
        """See `Probe`."""
        info = self._tf.sysconfig.get_build_info()
        return {
            "version": self._tf.__version__,
            "cuda": info.get("cuda_version"),
            "cudnn": info.get("cudnn_version"),
        }

    def devices(self) -> Sequence[Any]:
        """See `Probe`."""
        return [
            device.name for kind in ("CPU", "GPU") for device in self._tf.config.list_logical_devices(kind)
        ]

    def compute(self, device: Any, matrix: Array, indices: npt.NDArray[np.int32]) -> Array:
        """See `Probe`."""
        tf = self._tf
        with tf.device(device):
            factor = tf.constant(matrix)
            rows = tf.gather(tf.tanh(factor @ factor), indices % _SIZE)
            sums = tf.math.unsorted_segment_sum(rows, indices // 2 % _SIZE, _SIZE)
        return np.asarray(sums)


class TorchProbe:
    """PyTorch."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.use_deterministic_algorithms(True, warn_only=not self._torch.cuda.is_available())

    def built(self) -> dict[str, str | None]:
        """See `Probe`."""
        torch = self._torch
        cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
        return {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": None if cudnn is None else str(cudnn),
        }

    def devices(self) -> Sequence[Any]:
        """See `Probe`."""
        return ["cpu", *(f"cuda:{number}" for number in range(self._torch.cuda.device_count()))]

    def compute(self, device: Any, matrix: Array, indices: npt.NDArray[np.int32]) -> Array:
        """See `Probe`."""
        torch = self._torch
        factor, chosen = (torch.from_numpy(array).to(device) for array in (matrix, indices.astype(np.int64)))
        rows = torch.tanh(factor @ factor)[chosen % _SIZE]
        sums = torch.zeros_like(factor).index_add_(0, chosen // 2 % _SIZE, rows)
        return np.asarray(sums.cpu().numpy())


PROBES: dict[str, Callable[[], Probe]] = {
    "jax": JaxProbe,
    "tensorflow": TensorFlowProbe,
    "torch": TorchProbe,
}


def probe(backend: Probe, report: Callable[[dict[str, Any]], None]) -> None:
    """Report on a backend, as the docstring of the module describes."""
    report({"built": backend.built()})
    devices = backend.devices()
    report({"devices": [str(device) for device in devices]})
    for device in devices:
        report({"device": str(device), **compute_twice(backend, device)})


def compute_twice(backend: Probe, device: Any) -> dict[str, Any]:
    """Compute twice on a device; return the error, if any, and whether the bits were equal."""
    generator = np.random.default_rng(0)
    # The numbers have few digits, because GPUs may round the factors of a matrix product to 11 bits (TF32).
    matrix = (np.rint(8 * generator.standard_normal((_SIZE, _SIZE))) / 8).astype(np.float32)
    indices = generator.integers(0, 64, _ROWS, np.int32)
    try:
        first, second = (backend.compute(device, matrix, indices) for _ in range(2))
    except Exception as error:
        # Each backend raises its own exceptions.
        return {"fault": f"{type(error).__name__}: {error}", "same": False}
    if not np.allclose(first, _expected(matrix, indices), rtol=1e-2, atol=1e-1):
        return {"fault": "its results differ from those of NumPy", "same": False}
    return {"fault": "", "same": first.tobytes() == second.tobytes()}


def main(name: str) -> None:
    """Probe the backend `name` in this process."""
    # Frameworks may write to stdout, so only this function has the original descriptor.
    stdout = os.dup(1)
    os.dup2(2, 1)

    def report(result: dict[str, Any]) -> None:
        os.write(stdout, json.dumps(result).encode() + b"\n")

    probe(PROBES[name](), report)


def _expected(matrix: Array, indices: npt.NDArray[np.int32]) -> Array:
    sums = np.zeros_like(matrix)
    np.add.at(sums, indices // 2 % _SIZE, np.tanh(matrix @ matrix)[indices % _SIZE])
    return sums


if __name__ == "__main__":
    main(sys.argv[1])
