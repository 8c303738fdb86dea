"""PyTorch's tensors over memory that it does not own, determinism, and random states."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from lockstep.keras.nests import declared_writable
from lockstep.keras.private.torch import scale_in_place
from lockstep.system.environment import cublas_is_deterministic


def copied(leaf: Any) -> Any:
    """Return a copy of an array as a tensor with Keras's device and dtypes, or None for None.

    The bits of a matrix product may depend on the alignment of memory. PyTorch aligns its memory, but the
    memory of NumPy's arrays and of slices may be unaligned.
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
    """Return a tensor that shares the memory of `array`, or a copy on another device.

    Do not write to the tensor: the array may be read-only.
    """
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return borrowed(array.view(np.int16), device).view(torch.bfloat16)
    return torch.from_numpy(declared_writable(array)).to(device)


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as NumPy sees it: in place on a CPU, otherwise a copy."""
    tensor = tensor.detach().cpu()
    viewed: npt.NDArray[Any]
    if tensor.dtype == torch.bfloat16:
        viewed = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        viewed = tensor.numpy()
    return viewed


def int32(value: int) -> int:
    """Return the lower 32 bits as a signed number, because PyTorch's seeds are signed."""
    return (value + 2**31) % 2**32 - 2**31


def log_value(value: Any) -> Any:
    """Return a value of the logs as a float, or as a copied tensor if it has a shape, or None for None."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = borrowed(value)
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.clone()
    return float(value)


def weighted(gradients: list[Any], variables: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
    """Return the dense gradients of `variables`, multiplied by `weight`; zeros for None.

    Gradients that the backward pass has stored in variables are overwritten.
    """
    pairs: list[tuple[Any, torch.Tensor]] = list(zip(gradients, variables, strict=True))
    if weight == 1.0:
        return [_dense(g, v) for g, v in pairs]
    if stored := [v.grad for g, v in pairs if g is not None and g is v.grad]:
        scale_in_place(stored, weight)
    return [_dense(g, v) if g is None or g is v.grad else _dense(g, v) * weight for g, v in pairs]


def enable_determinism(threads: int) -> None:
    """Make PyTorch compute equal bits each time, with this number of threads (0: unchanged).

    From then on, operations on GPUs that cannot do so raise a `RuntimeError` of PyTorch that names them.
    """
    # Otherwise threads add to one element in any order, as in the gradient of indexing. With warnings instead
    # of errors, the gradient of attention on GPUs would remain nondeterministic.
    strict = torch.cuda.is_available() and cublas_is_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # By default, this option also fills new memory. That costs a pass over the memory, and helps only to find
    # reads of it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # The benchmark chooses algorithms by their speed.
    torch.backends.cudnn.benchmark = False
    # The number of threads determines the order of sums.
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block, PyTorch's global random states are derived from `seed`."""
    state, devices = torch.get_rng_state(), device_random_states()
    # torch.manual_seed would format a stack trace for absent devices.
    torch.default_generator.manual_seed(seed % 2**64)
    if devices:
        torch.cuda.manual_seed_all(seed % 2**64)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        set_device_random_states(devices)


def device_random_states() -> list[torch.Tensor]:
    """Return the random states of the GPUs, or an empty list before PyTorch uses one."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_device_random_states(states: list[torch.Tensor]) -> None:
    """Restore the result of `device_random_states`."""
    if states:
        torch.cuda.set_rng_state_all(states)


def _dense(gradient: Any, variable: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(variable, requires_grad=False)
    dense: torch.Tensor = gradient.detach()
    return (dense if dense.layout == torch.strided else dense.to_dense()).contiguous()
