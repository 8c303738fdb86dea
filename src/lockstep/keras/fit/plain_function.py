"""Plain Keras's own function for a step, as the reference of a comparison.

It knows nothing of replicas. Its logs also have the gradients, layers and casts compute in single precision,
and the last bits of inputs and outputs may be changed, which shows how far rounding goes.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np

from lockstep.keras.backends.multi_update import Update, UpdateCall, overrides_apply_gradients
from lockstep.keras.private.common import layers_of, mask_of, set_mask, trained_by
from lockstep.keras.variables import optimizers_of
from lockstep.worker.patch_registry import replaced
from lockstep.worker.tf_distribute_shim import is_library

HALF_TYPES = ("float16", "bfloat16")

GRADIENT = "lockstep gradient"
"""The beginning of the names of gradients in the logs, before the numbers of update and variable."""


def moved_bits(number: int, epsilon: float) -> Callable[[Any], Any]:
    """Return a function that changes the last bits of arrays, differently for each number."""
    generator = np.random.default_rng(number)

    def moved(array: Any) -> Any:
        if array is None or array.dtype.kind != "f":
            return array
        return (array * (1 + 2 * epsilon * generator.choice([-1.0, 1.0], array.shape))).astype(array.dtype)

    return moved


def computes_in_half(model: Any) -> bool:
    """Whether a layer of a model computes in half precision."""
    return any(layer.compute_dtype in HALF_TYPES for layer in layers_of(model))


@contextmanager
def single_precision(model: Any) -> Iterator[list[bool]]:
    """Within the block, layers and casts of the program to half precision compute in single precision.

    Rounding to half precision would hide differences of some percent. Casts of other threads, such as those
    that read data ahead, are not changed. Yields a list with an element for each of these layers and casts.
    """
    policies = [
        (layer, layer.dtype_policy) for layer in layers_of(model) if layer.compute_dtype in HALF_TYPES
    ]
    # A policy of quantized weights has more than a type, and several layers share a map of policies.
    policies = [(layer, policy) for layer, policy in policies if type(policy) is keras.DTypePolicy]
    original, thread, computed = keras.ops.cast, threading.get_ident(), [True] * len(policies)

    def cast(x: Any, dtype: Any) -> Any:
        half = threading.get_ident() == thread and keras.backend.standardize_dtype(dtype) in HALF_TYPES
        if not half or is_library(sys._getframe(1).f_globals):
            return original(x, dtype)
        computed.append(True)
        return original(x, "float32")

    try:
        for layer, _ in policies:
            layer.dtype_policy = keras.DTypePolicy("float32")
        with replaced(keras.ops, "cast", cast):
            yield computed
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


@contextmanager
def rounded_outputs(model: Any, size: float) -> Iterator[None]:
    """Within the block, the outputs of layers differ in the last bits, each element differently.

    So equal outputs, such as the scores of two equal rows, become different, as may happen in a batch of
    another size. Whole numbers remain, because they may be indices.

    Args:
        model: the model.
        size: the largest change, relative to an element. The negative size makes the opposite changes.
    """
    ops = keras.ops

    def moved(output: Any) -> Any:
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(output.dtype)):
            return output
        place = ops.zeros(())
        for number in range(len(output.shape)):
            along = ops.arange(ops.shape(output)[number], dtype="float32")
            place = place[..., None] + (number + 1.7) * along
        changes = ops.cast(size * ops.sin(ops.square(place + 0.5)), output.dtype)
        rounded = output * (1 + changes)
        rounded = ops.where(ops.equal(output, ops.round(output)), output, rounded)
        if (mask := mask_of(output)) is not None:
            set_mask(rounded, mask)
        return rounded

    def rounding(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def rounded(*args: Any, **options: Any) -> Any:
            return keras.tree.map_structure(
                lambda leaf: moved(leaf) if keras.ops.is_tensor(leaf) else leaf, call(*args, **options)
            )

        return rounded

    with ExitStack() as stack:
        for layer in layers_of(model):
            stack.enter_context(replaced(layer, "call", rounding(layer.call)))
        yield


class FunctionWithGradients:
    """Keras's function for a step, whose logs also have the gradients that the optimizers get.

    Attributes:
        made: the function, once it exists.
        updated: the updates, once the step has been traced or has run.
        has_occurrences: whether a gradient is a list of occurrences, like that of an Embedding on TensorFlow.
        only_half: whether the program, and so the function, can compute only in half precision.
    """

    def __init__(self, model: Any) -> None:
        self.made: Any = None
        self.updated: list[Update] = []
        self.has_occurrences = False
        self.only_half = False
        self._model = model
        self._jax = keras.backend.backend() == "jax"
        self._recorded: dict[str, Any] = {}
        # A function of Keras may keep these, so there is one of each for all of its calls.
        self._replacements = [(model, "train_step", self._step(model.train_step))]
        for optimizer in optimizers_of(model):
            if self._jax:
                replacement = self._stateless(optimizer)
                self._replacements.append((optimizer, "stateless_apply", replacement))
            else:
                self._replacements.append((optimizer, "apply", self._stateful(optimizer)))
                if overrides_apply_gradients(optimizer):
                    self._replacements.append((optimizer, "apply_gradients", self._overridden(optimizer)))

    @contextmanager
    def adding_gradients(self) -> Iterator[None]:
        """Within the block, the logs have the gradients."""
        with ExitStack() as stack:
            for owner, name, replacement in self._replacements:
                stack.enter_context(replaced(owner, name, replacement))
            yield

    def _note(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        number = len(self.updated)
        self.updated.append(Update(optimizer, list(variables), plain=True))
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                self._recorded[f"{GRADIENT} {number} {position}"] = self._dense(gradient)

    def _dense(self, gradient: Any) -> Any:
        if type(gradient).__name__ != "IndexedSlices":
            # The step may change it afterwards, as PyTorch's zero_grad does.
            return gradient if self._jax else keras.ops.copy(gradient)
        import tensorflow as tf

        self.has_occurrences = True
        return tf.convert_to_tensor(gradient)

    def _stateless(self, optimizer: Any) -> Callable[..., Any]:
        original = optimizer.stateless_apply

        def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            self._note(optimizer, list(grads), self._model.trainable_variables)
            return original(optimizer_variables, grads, trainable_variables)

        return stateless_apply

    def _stateful(self, optimizer: Any) -> Callable[..., Any]:
        original = optimizer.apply

        def apply(*args: Any, **kwargs: Any) -> Any:
            call = UpdateCall.of("apply", original, args, kwargs)
            gradients, variables = call.gradients_and_variables
            variables = trained_by(optimizer) if variables is None else variables
            self._note(optimizer, gradients, variables)
            return call(gradients, variables)

        return apply

    def _overridden(self, optimizer: Any) -> Callable[..., Any]:
        """Return the program's own `apply_gradients`, which also records gradients before it changes them."""
        apply, original = optimizer.apply, optimizer.apply_gradients

        def apply_gradients(*args: Any, **kwargs: Any) -> Any:
            call = UpdateCall.of("apply_gradients", original, args, kwargs)
            self._note(optimizer, *call.gradients_and_variables)
            with replaced(optimizer, "apply", apply):
                return call(*call.gradients_and_variables)

        return apply_gradients

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any) -> Any:
            self._recorded.clear()
            self.updated.clear()
            result = original(*args)
            logs = result[0] if self._jax else result
            if isinstance(logs, dict):
                logs = {**logs, **self._recorded}
            return (logs, *result[1:]) if self._jax else logs

        return train_step
