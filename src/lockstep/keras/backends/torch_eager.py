"""Functions of `strategy.run` on PyTorch: its tensors are mutable, and backward passes add to gradients.

While a replica computes, PyTorch's passes are observed. The gradients to which a backward pass would add are
set aside, and the buffers of modules are copied before a forward pass. Afterwards both are as before.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import ModelError
from lockstep.keras.backends.eager_contract import Tensors
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.backends.torch import only_reads_gradients, random_numbers
from lockstep.keras.backends.torch_tensors import borrowed, copied, enable_determinism, to_numpy
from lockstep.keras.private.common import stored_value
from lockstep.keras.private.torch import versions
from lockstep.system.thread_value import ThreadValue
from lockstep.worker import job
from lockstep.worker.patch_registry import PATCHES


class TorchEagerBackend:
    """The `lockstep.keras.backends.eager_contract.EagerBackend` of PyTorch, whose tensors are mutable."""

    def __init__(self) -> None:
        _observe_passes()
        enable_determinism(job.current().settings.threads)

    @contextmanager
    def isolated(self, seed: int) -> Iterator[None]:
        """Within the block a replica computes, without gradients at first."""
        effects = _SideEffects()
        with _effects.within(effects):
            try:
                with random_numbers(seed):
                    yield
                effects.refuse_own_changes()
            finally:
                effects.restore()

    def saved_value(self, variable: Any) -> Any:
        """Return a copy of the value of a variable."""
        return stored_value(variable).detach().clone()

    def to_tensor(self, leaf: Any) -> Any:
        """Return a copy of a leaf, since the script may write to the original."""
        return copied(leaf)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it: in place on a CPU, otherwise a copy."""
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        array = array.detach()
        return to_numpy(array if array.layout == torch.strided else array.to_dense())

    def custom_gradient(
        self, leaves: Tensors, merge: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `merge(leaves)`, for which `gradient` computes the gradients."""
        return list(_CustomGradient.apply(merge, gradient, *leaves))

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update, which reads the gradients in place."""
        pairs = zip(update.variables, gradients, strict=True)
        tensors = [None if g is None else borrowed(g, variable.value.device) for variable, g in pairs]
        if not only_reads_gradients(update.optimizer):
            tensors = [None if tensor is None else tensor.clone() for tensor in tensors]
        with torch.no_grad():
            update.apply(tensors)
        if _effects.value is not None:
            _effects.value.note_update(update.variables)


class _CustomGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, merge: Any, gradient: Any, *leaves: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(merge(leaves))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(upstream))


class _SideEffects:
    """The effects of a replica's computation on gradients and buffers, which are not variables of Keras."""

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._buffers: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._weights: dict[int, tuple[torch.Tensor, int]] = {}

    def begin_backward(self, roots: Iterable[Any]) -> None:
        """Set aside the gradients to which the first backward pass from `roots` would add."""
        for leaf in _differentiated_leaves(roots):
            # Those of scheduled functions come from the servers.
            if isinstance(leaf, torch.nn.Parameter) and not job.current().context.has_servers:
                self._weights.setdefault(id(leaf), (leaf, *versions([leaf])))
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def begin_forward(self, module: torch.nn.Module) -> None:
        """Copy the buffers of a module, because not all writes change their version counters."""
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in self._buffers:
                copy = buffer.detach().clone()
                self._buffers[id(buffer)] = f"{type(module).__name__}.{name}", buffer, copy

    def note_update(self, variables: Iterable[Any]) -> None:
        """Note that an optimizer of Keras has updated variables."""
        for weight in (variable.value for variable in variables):
            if id(weight) in self._weights:
                self._weights[id(weight)] = weight, *versions([weight])

    def refuse_own_changes(self) -> None:
        """Raise ModelError if the computation has changed weights, or the state of a PyTorch module."""
        for weight, version in self._weights.values():
            if versions([weight]) != [version]:
                raise ModelError(
                    "the function passed to strategy.run changes a weight in place, of the shape "
                    f"{tuple(weight.shape)}, as optimizers of PyTorch do, with the gradients of one replica; "
                    "use the apply of an optimizer of Keras, or return the gradients and change the weight "
                    "outside of the function"
                )
        for name, buffer, copy in self._buffers.values():
            if not torch.equal(buffer, copy):
                raise ModelError(
                    f"the function passed to strategy.run changes {name}, the state of a PyTorch module, "
                    "which replicas share only in model.fit; use a layer of Keras instead "
                    "(keras.layers.BatchNormalization), or put the module into evaluation mode"
                )

    def restore(self) -> None:
        """Restore the gradients of tensors and the state of modules."""
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        with torch.no_grad():
            for _, buffer, copy in self._buffers.values():
                buffer.copy_(copy)


_effects: ThreadValue[_SideEffects | None] = ThreadValue(None)


def _observe_passes() -> None:
    """Observe PyTorch's backward and forward passes while a replica computes."""
    if not PATCHES.has(__name__):
        PATCHES.wrap(__name__, torch.autograd, "backward", _observed_backward)
    _hook_forward()


def _observed_backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    if _effects.value is not None:
        _effects.value.begin_backward([tensors] if isinstance(tensors, torch.Tensor) else tensors)
    original(tensors, *args, **kwargs)


@functools.cache
def _hook_forward() -> None:
    """Observe forward passes, for which PyTorch has a hook."""

    def forward(module: torch.nn.Module, inputs: Any) -> None:
        if _effects.value is not None:
            _effects.value.begin_forward(module)

    torch.nn.modules.module.register_module_forward_pre_hook(forward)


def _differentiated_leaves(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors whose gradients a backward pass from `roots` computes."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
