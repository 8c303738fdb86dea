"""What replicas need of PyTorch itself: tensors over others' memory, equal bits, random states."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch


def copied(leaf: Any) -> Any:
    """Return an input's rows (or None) as a tensor of Keras's device and dtypes, in memory of its own.

    PyTorch aligns its memory always alike, NumPy and a slice do not: the bits of a matrix product may depend
    on it.
    """
    if leaf is None:
        return None
    if isinstance(leaf, torch.Tensor):
        return keras.ops.convert_to_tensor(leaf.detach().clone(memory_format=torch.contiguous_format))
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufc":
        return keras.ops.convert_to_tensor(leaf)
    return keras.ops.convert_to_tensor(borrowed(np.asarray(array, order="C")).clone(), dtype=array.dtype.name)


def borrowed(array: npt.NDArray[Any], device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor over the memory of `array`, which may be read-only, or a copy on another device.

    It must not be written to.
    """
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return borrowed(array.view(np.int16), device).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(_Writable(array))).to(device)


def on_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """View a tensor's memory in place (on a CPU), or copy it to the host."""
    tensor = tensor.detach().cpu()
    viewed: npt.NDArray[Any]
    if tensor.dtype == torch.bfloat16:
        viewed = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        viewed = tensor.numpy()
    return viewed


def int32(value: int) -> int:
    """Return the lower 32 bits as a signed number: PyTorch has no unsigned seeds."""
    return (value + 2**31) % 2**32 - 2**31


def figure(value: Any) -> Any:
    """Return a figure of the logs as Python's own float, or a tensor of its own if it has a shape."""
    if isinstance(value, np.ndarray):
        value = borrowed(value)
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.clone()
    return float(value)


def weighted(gradients: list[Any], variables: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
    """Return the dense gradients of `variables` times `weight`, zeros for None.

    What the backward pass left in a variable is overwritten.
    """
    pairs: list[tuple[Any, torch.Tensor]] = list(zip(gradients, variables, strict=True))
    if weight == 1.0:
        return [_dense(g, v) for g, v in pairs]
    if own := [v.grad for g, v in pairs if g is not None and g is v.grad]:
        torch._foreach_mul_(own, weight)
    return [_dense(g, v) if g is None or g is v.grad else _dense(g, v) * weight for g, v in pairs]


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written to."""
    return [tensor._version for tensor in tensors]


def promise_equal_bits(threads: int) -> None:
    """Switch PyTorch to computing the same bits each time, with that many threads (0: as it is)."""
    # Without it, threads add what falls on one element (the gradient of indexing) in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It comes with filling all new memory, which finds reads of what nobody wrote, and costs a pass.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # It would choose algorithms by how long they take.
    torch.backends.cudnn.benchmark = False
    # The number of threads decides in which order sums are added.
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block PyTorch's global random states follow from `seed`."""
    state = torch.get_rng_state()
    on_gpu = torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if on_gpu else []
    # Not torch.manual_seed, which formats a stack for devices that are not there.
    torch.default_generator.manual_seed(seed % 2**64)
    if on_gpu:
        torch.cuda.manual_seed_all(seed % 2**64)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if on_gpu:
            torch.cuda.set_rng_state_all(devices)


def _dense(gradient: Any, variable: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(variable, requires_grad=False)
    dense: torch.Tensor = gradient.detach()
    return (dense if dense.layout == torch.strided else dense.to_dense()).contiguous()


class _Writable:
    """An array's memory, said to be writable: PyTorch has no read-only tensors and warns of such arrays."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
