"""Functions of `strategy.run` on PyTorch: its tensors are mutable, and backward passes add to gradients.

While a replica computes, PyTorch's passes are observed. The gradients to which a backward pass would add are
set aside, and the buffers of modules are copied before a forward pass. Afterwards both are as before.

Weights that a replica changes without Keras are refused. The version counters of all parameters show it,
including parameters in no backward pass, such as the weights of a teacher. Writes through `data` do not count
there, so they are observed.
"""

import functools
import gc
import weakref
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
    def isolated(self, seed: int, assigned: Callable[[], Iterable[Any]] = tuple) -> Iterator[None]:
        """Within the block a replica computes, without gradients at first."""
        # A scheduled function gets its weights from the servers.
        effects = _SideEffects([] if job.current().context.has_servers else list(_parameters.values()))
        with _effects.within(effects):
            try:
                try:
                    with random_numbers(seed):
                        yield
                finally:
                    effects.count_writes()
                effects.refuse_own_changes(assigned())
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
            _effects.value.note_update(update.changed)


class _CustomGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, merge: Any, gradient: Any, *leaves: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(merge(leaves))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(upstream))


class _SideEffects:
    """The effects of a replica's computation on gradients, buffers and weights, except through Keras.

    Args:
        weights: the weights that exist before the computation.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._buffers: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._weights = {id(weight): (weight, *versions([weight])) for weight in weights}
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._replaced: list[torch.Tensor] = []

    def begin_backward(self, roots: Iterable[Any]) -> None:
        """Set aside the gradients to which the first backward pass from `roots` would add."""
        for leaf in _differentiated_leaves(roots):
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def begin_forward(self, module: torch.nn.Module) -> None:
        """Copy the buffers of a module, because not all writes change their version counters."""
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in self._buffers:
                copy = buffer.detach().clone()
                self._buffers[id(buffer)] = f"{type(module).__name__}.{name}", buffer, copy

    def note_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Note that the program has read `tensor.data`, to which it may write."""
        # A tensor with a history is of this computation.
        if tensor.grad_fn is None and _counts_writes(data):
            owner = self._aliases[id(tensor)][0] if id(tensor) in self._aliases else tensor
            self._aliases[id(data)] = owner, data, *versions([data])

    def note_replaced_data(self, tensor: torch.Tensor) -> None:
        """Note that the program has set `tensor.data`."""
        if _counts_writes(tensor):
            self._replaced.append(tensor)

    def count_writes(self) -> None:
        """Count writes through `data` in the version counters of the tensors."""
        written = [owner for owner, data, version in self._aliases.values() if versions([data]) != [version]]
        torch.autograd.graph.increment_version([*written, *self._replaced])
        self._aliases.clear()
        self._replaced.clear()

    def note_update(self, variables: Iterable[Any]) -> None:
        """Note that an optimizer of Keras has updated variables."""
        self.count_writes()
        for weight in map(stored_value, variables):
            if id(weight) in self._weights:
                self._weights[id(weight)] = weight, *versions([weight])

    def refuse_own_changes(self, assigned: Iterable[Any]) -> None:
        """Raise ModelError if the computation has changed weights, or the state of a PyTorch module.

        Args:
            assigned: the variables of Keras that it has assigned.
        """
        through_keras = {id(stored_value(variable)) for variable in assigned}
        for weight, version in self._weights.values():
            if versions([weight]) != [version] and id(weight) not in through_keras:
                raise ModelError(
                    "the function passed to strategy.run changes a weight in place, of the shape "
                    f"{tuple(weight.shape)}, as optimizers of PyTorch and writes to data do; replicas do not "
                    "combine that: use the apply of an optimizer of Keras, or return gradients and change "
                    "the weight outside of the function"
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
        PATCHES.put(__name__, torch.Tensor, "data", property(_observed_data, _set_observed_data))
        for kind in (torch.nn.Parameter, torch.nn.UninitializedParameter):
            PATCHES.wrap(__name__, kind, "__new__", _listed)
        list_existing_parameters()
    _hook_forward()


_parameters: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""The parameters of this process, which include the values of Keras's variables."""

_DATA: Any = vars(torch.Tensor.__base__)["data"]


def list_existing_parameters() -> None:
    """List the parameters that the program has created before anything was replaced in PyTorch."""
    for value in gc.get_objects():
        if issubclass(type(value), torch.nn.Parameter) and _counts_writes(value):
            _parameters[id(value)] = value


def _listed(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a new parameter, which `_parameters` lists."""
    parameter = original(*args, **kwargs)
    if _counts_writes(parameter):
        _parameters[id(parameter)] = parameter
    return parameter


def _counts_writes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a version counter. One that was created in inference mode has none."""
    try:
        versions([tensor])
    except RuntimeError:
        return False
    return True


def _observed_data(tensor: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(tensor)
    if _effects.value is not None:
        _effects.value.note_data(tensor, data)
    return data


def _set_observed_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    _DATA.__set__(tensor, data)
    if _effects.value is not None:
        _effects.value.note_replaced_data(tensor)


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
