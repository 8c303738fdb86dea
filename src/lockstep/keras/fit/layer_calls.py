"""The calls of layers for rows of a batch: what they compute, and whether a row depends on the others."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.common import without_summaries
from lockstep.keras.backends.growth import tolerance_of
from lockstep.keras.fit.random_rows import equal_draws
from lockstep.keras.private.common import kept_losses, layers_of, modules_of
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]


class LayerCalls:
    """The calls of a layer in one trial.

    Attributes:
        calls: the arrays of its inputs and of its outputs in each call.
        added: the values that it added to the loss.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[Array], list[Array]]] = []
        self.added: list[Array] = []

    @contextmanager
    def recording(self, layer: Any, note: Callable[[Any], object] = lambda layer: None) -> Iterator[None]:
        """Within the block, record the calls of a layer; `note` gets it after each call."""
        call, add = layer.call, getattr(layer, "add_loss", None)

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            note(layer)
            self.calls.append((arrays_of((args, kwargs)), arrays_of(outputs)))
            return outputs

        def added(loss: Any) -> None:
            # Keras adds up the elements.
            self.added.extend(np.sum(array, keepdims=True) for array in arrays_of(loss))
            assert add is not None
            add(loss)

        adding = nullcontext() if add is None else replaced(layer, "add_loss", added)
        with replaced(layer, "call", recorded), adding:
            yield


@contextmanager
def neutral(model: Any, note: Callable[[str], object], *, constant: bool = False) -> Iterator[None]:
    """Within the block, random numbers and statistics do not make a row of a batch depend on the others.

    Args:
        model: the model whose layers compute in the block.
        note: gets the name of each function of the program that draws random numbers.
        constant: whether all draws are equal, including those of several replicas.
    """
    with (
        equal_draws(note, constant=constant),
        constant_statistics(model),
        without_summaries(),
        # A failed step leaves losses that layers have added, and the next step would add them up too.
        kept_losses(layers_of(model)),
    ):
        yield


def rows_are_equal(parts: Sequence[Sequence[Array]], counts: Sequence[int]) -> bool:
    """Whether the rows of a whole batch's arrays equal, up to rounding, those of its parts' arrays.

    Args:
        parts: the arrays of the whole batch, then those of each part.
        counts: the numbers of rows of the whole batch and of each part; an array with another number of rows
            is not compared.
    """
    for leaf, *pieces in zip(*parts, strict=True):
        shapes = [piece.shape for piece in (leaf, *pieces)]
        if not all(shape[:1] == (count,) for shape, count in zip(shapes, counts, strict=True)):
            continue
        if len({shape[1:] for shape in shapes}) > 1:
            return False
        joined = np.concatenate(pieces)
        if joined.shape != leaf.shape:
            return False
        if leaf.dtype.kind != "f":
            if not np.array_equal(leaf, joined):
                return False
        elif not np.allclose(leaf, joined, 0, 10 * tolerance_of(leaf) * largest_of(leaf), equal_nan=True):
            return False
    return True


@contextmanager
def constant_statistics(model: Any) -> Iterator[None]:
    """Within the block, BatchNormalization uses its averages, even in training.

    PyTorch modules, which have state of their own, get their earlier state back.
    """
    modules = [module for layer in layers_of(model) for module in modules_of(layer)]
    with ExitStack() as stack:
        if modules:
            from lockstep.keras.fit.torch_modules import constant_modules

            stack.enter_context(constant_modules(modules))
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(replaced(layer, "call", _without_statistics(layer.call)))
        yield


def _without_statistics(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def constant(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return call(inputs, training=False, mask=mask)

    return constant


def arrays_of(nest: Any) -> list[Array]:
    """Return the tensors of a nest as arrays."""
    leaves = keras.tree.flatten(nest)
    return [keras.ops.convert_to_numpy(leaf) for leaf in leaves if keras.ops.is_tensor(leaf)]


def largest_of(array: Array) -> float:
    """Return the largest absolute value in an array, without NaN."""
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0))
