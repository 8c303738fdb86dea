"""Fused kernels of the backends for Keras's Adam, which make one pass over the memory.

Keras's update has several operations, each a pass over the weights and the optimizer's variables, and on a
CPU these passes are its cost. The formula is the same (Kingma and Ba, 2015, section 2, the order of
operations at its end), but the rounding differs. So only updates of all replicas use a kernel, never those of
plain Keras.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras

from lockstep.keras.private.common import UPDATE_STEP, adam_moments
from lockstep.worker.patch_registry import replaced

Kernel = Callable[[Any, Sequence[Any], Sequence[Any], Any], None]
"""Replaces `UPDATE_STEP` of Keras's optimizers; its arguments begin with the optimizer."""


@contextmanager
def fused(optimizer: Any, kernel: Kernel | None) -> Iterator[None]:
    """Within the block, `optimizer` updates with `kernel`, if there is one."""
    if kernel is None:
        yield
        return
    with replaced(optimizer, UPDATE_STEP, partial(kernel, optimizer)):
        yield


def kernel_of(optimizer: Any, variables: Sequence[Any]) -> Kernel | None:
    """Return the kernel for the update of `variables` on a CPU, if there is one."""
    kernel = _KERNELS.get(keras.backend.backend())
    if kernel is None or not _is_adam(type(optimizer)):
        return None
    if optimizer.amsgrad or optimizer.gradient_accumulation_steps:
        return None
    is_plain = all(v.dtype == "float32" and "cpu" in str(v.value.device).lower() for v in variables)
    return kernel if is_plain else None


def _is_adam(optimizer_class: type) -> bool:
    # Keras's own class for this backend, which on PyTorch is a subclass of the public one.
    return optimizer_class.__name__ in ("Adam", "AdamW") and optimizer_class.__module__.startswith("keras.")


def _adam_of_tensorflow(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
    import tensorflow as tf

    step = tf.cast(optimizer.iterations.value + 1, tf.float32)
    powers = {f"beta{i}_power": tf.pow(b, step) for i, b in ((1, optimizer.beta_1), (2, optimizer.beta_2))}
    moments = adam_moments(optimizer, variables)
    for gradient, variable, first, second in zip(grads, variables, *moments, strict=True):
        state = {"var": _native(variable), "m": first, "v": second}
        tf.raw_ops.ResourceApplyAdam(
            **{name: _handle(value) for name, value in state.items()},
            **powers,
            lr=tf.cast(rate, tf.float32),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            epsilon=optimizer.epsilon,
            grad=gradient,
        )


def _handle(variable: Any) -> Any:
    """Return the handle of a TensorFlow variable, and let the graph track the variable."""
    import tensorflow as tf

    if not tf.executing_eagerly():
        tf.compat.v1.get_default_graph().watch_variable(variable)
    return variable.handle


def _adam_of_torch(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
    import torch
    from torch.optim.adam import adam

    first, second = adam_moments(optimizer, variables)
    before = float(optimizer.iterations.value)
    operands = [[_native(variable) for variable in variables], list(grads), first, second]
    # The kernel pairs elements by their places in memory, and some initializers transpose what they draw.
    contiguous = [[tensor.detach().contiguous() for tensor in tensors] for tensors in operands]
    adam(
        *contiguous,
        [],
        [torch.tensor(before) for _ in first],
        fused=True,
        amsgrad=False,
        maximize=False,
        weight_decay=0.0,
        lr=float(rate),
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        # PyTorch adds epsilon after the correction of the second moment, Keras before.
        eps=optimizer.epsilon / math.sqrt(1 - optimizer.beta_2 ** (before + 1)),
    )
    for tensors, contiguous_tensors in zip(operands, contiguous, strict=True):
        for tensor, changed in zip(tensors, contiguous_tensors, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(changed)


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


_KERNELS: dict[str, Kernel] = {"tensorflow": _adam_of_tensorflow, "torch": _adam_of_torch}
