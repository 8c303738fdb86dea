"""PyTorch, where functions always run eagerly; see `lockstep.keras.replica_run.eager.Eager`."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import ModelError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.backends.tensors import borrowed, copied, on_host, promise_equal_bits
from lockstep.keras.backends.torch import only_reads_gradients, random_numbers
from lockstep.keras.replica_run.eager import Tensors
from lockstep.worker import job
from lockstep.worker.patching import PATCHES


class EagerTorch:
    """Tensors of PyTorch, which anybody may write to."""

    def __init__(self) -> None:
        _install()
        promise_equal_bits(job.current().context.threads)

    @contextmanager
    def apart(self, seed: int) -> Iterator[None]:
        """Within the block a replica computes; it begins without gradients."""
        before, _running.computation = _running.computation, _Computation()
        try:
            with random_numbers(seed):
                yield
            _running.computation.refuse_changed_buffers()
        finally:
            _running.computation.restore()
            _running.computation = before

    def kept(self, variable: Any) -> Any:
        """Return a copy of the value of a variable."""
        return variable._value.detach().clone()

    def own(self, leaf: Any) -> Any:
        """Return a copy of a leaf."""
        return copied(leaf)

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor's memory in place (on a CPU), or copy it to the host."""
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        array = array.detach()
        return on_host(array if array.layout == torch.strided else array.to_dense())

    def through(
        self, leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `meet(leaves)`, for which gradients are computed by `gradient`."""
        return list(_Through.apply(meet, gradient, *leaves))

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update, reading the gradients where they are."""
        pairs = zip(update.variables, gradients, strict=True)
        tensors = [None if g is None else borrowed(g, variable.value.device) for variable, g in pairs]
        if not only_reads_gradients(update.optimizer):
            tensors = [None if tensor is None else tensor.clone() for tensor in tensors]
        with torch.no_grad():
            update.apply(tensors)


class _Through(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, meet: Any, gradient: Any, *leaves: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(meet(leaves))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(upstream))


class _Computation:
    """What one replica's computation does to tensors past Keras."""

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._buffers: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}

    def begin_backward(self, roots: Iterable[Any]) -> None:
        """Put the gradients aside that a backward pass from `roots` would add to, where none was before."""
        for leaf in _leaves_behind(roots):
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def begin_forward(self, module: torch.nn.Module) -> None:
        """Keep the buffers that a module may be about to change; not all of its writes leave a trace."""
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in self._buffers:
                kept = buffer.detach().clone()
                self._buffers[id(buffer)] = f"{type(module).__name__}.{name}", buffer, kept

    def refuse_changed_buffers(self) -> None:
        """Raise ModelError if a module of PyTorch's own keeps state of what it has computed."""
        for name, buffer, kept in self._buffers.values():
            if not torch.equal(buffer, kept):
                raise ModelError(
                    f"the function passed to strategy.run changes {name}, the state of a module of "
                    "PyTorch's own, which replicas share only in model.fit; use a layer of Keras instead "
                    "(keras.layers.BatchNormalization), or put the module into evaluation mode"
                )

    def restore(self) -> None:
        """Let tensors have the gradients, and modules the state, that they had before."""
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        with torch.no_grad():
            for _, buffer, kept in self._buffers.values():
                buffer.copy_(kept)


class _ReplicaThread(threading.local):
    computation: _Computation | None = None


_running = _ReplicaThread()


def _install() -> None:
    """Learn of passes of PyTorch while a replica computes."""
    if not PATCHES.has(__name__):
        PATCHES.replace(__name__, torch.autograd, "backward", _noticed)
    _listen()


def _noticed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _running.computation is not None:
            _running.computation.begin_backward([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        original(tensors, *args, **kwargs)

    return backward


@functools.cache
def _listen() -> None:
    """Learn of forward passes: PyTorch has a hook for them."""

    def forward(module: torch.nn.Module, inputs: Any) -> None:
        if _running.computation is not None:
            _running.computation.begin_forward(module)

    torch.nn.modules.module.register_module_forward_pre_hook(forward)


def _leaves_behind(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward pass from `roots` gives gradients to."""
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
