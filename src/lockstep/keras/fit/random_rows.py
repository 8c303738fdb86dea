"""Random numbers that are equal for all rows, so that a batch and its parts draw the same ones."""

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FrameType
from typing import Any

import keras

from lockstep.keras.private.common import BACKEND_RANDOM, RANDOM_MODULES
from lockstep.worker.patch_registry import replaced

Draw = Callable[..., Any]


_BETWEEN = ("lockstep.", *RANDOM_MODULES, "jax.", "tensorflow.", "torch.")
"""The modules between an operation and the function of the program, or the layer, that draws with it."""

_DROPOUT = "torch.nn.modules.dropout"
"""The module of PyTorch's layers that draw numbers, which the note names by their classes."""


@contextmanager
def equal_draws(note: Callable[[str], object], *, constant: bool) -> Iterator[None]:
    """Within the block, operations that draw an array draw one row of it and repeat the row.

    These are the operations of Keras, which its layers use, and the usual ones of the backend. An operation
    that the program has replaced with a function of its own is not changed, because its arguments may differ.
    `note` gets the name of each function of the program that draws numbers, but not those of layers or
    modules of a library. Draws of other threads, such as those that read data ahead, are not changed.

    Args:
        note: receives the names.
        constant: whether all draws of an operation are equal, so that they do not depend on a seed, and
            dropout does not drop anything.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        for name, mean in _MEANS.items() if constant else ():
            draw = getattr(BACKEND_RANDOM, name)

            def most_likely(*args: Any, draw: Draw = draw, mean: Draw = mean, **kwargs: Any) -> Any:
                return (mean if threading.get_ident() == thread else draw)(*args, **kwargs)

            stack.enter_context(replaced(BACKEND_RANDOM, name, most_likely))
        for owner, name, wrap in (*_of_keras(), *_of_backend()):
            draw = getattr(owner, name)
            if not _is_original(owner, draw):
                continue
            repeated = wrap(_constant(owner, name, draw) if constant else draw)

            def noted(*args: Any, draw: Draw = draw, repeated: Draw = repeated, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:
                    return draw(*args, **kwargs)
                if (drawing := _drawing_function()) is not None:
                    note(drawing)
                return repeated(*args, **kwargs)

            stack.enter_context(replaced(owner, name, noted))
        yield


def _drawing_function() -> str | None:
    """Return the name of the program's function that draws numbers, or None if a library's layer does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == _DROPOUT or (module.startswith("keras.") and not f"{module}.".startswith(_BETWEEN)):
            return None
        if not f"{module}.".startswith(_BETWEEN):
            parts = getattr(frame.f_locals.get("self"), "__dict__", {}).values()
            generator = any(isinstance(part, keras.random.SeedGenerator) for part in parts)
            # A layer with a generator is named by its class elsewhere.
            return None if generator else frame.f_code.co_qualname
        frame = frame.f_back
    return None


def _filled(shape: Any, value: Any, dtype: Any) -> Any:
    return keras.ops.cast(keras.ops.broadcast_to(value, _sizes(shape)), dtype or keras.config.floatx())


def _most_likely(logits: Any, num_samples: int, dtype: Any = "int32", seed: Any = None) -> Any:
    best = keras.ops.argmax(logits, axis=-1, keepdims=True)
    return keras.ops.cast(keras.ops.repeat(best, num_samples, axis=-1), dtype)


_MEANS: dict[str, Callable[..., Any]] = {
    "gamma": lambda shape, alpha, dtype=None, seed=None: _filled(shape, alpha, dtype),
    "beta": lambda shape, alpha, beta, dtype=None, seed=None: _filled(shape, alpha / (alpha + beta), dtype),
    "binomial": lambda shape, counts, probabilities, dtype=None, seed=None: _filled(
        shape, counts * probabilities, dtype
    ),
    "categorical": _most_likely,
    "shuffle": lambda x, axis=0, seed=None: x,
}
"""The replacements, if draws are constant, of Keras's operations that draw a number for each row from
parameters of the row."""

_SEED, _PRIME = 1337, 1009


def _is_original(owner: Any, draw: Draw) -> bool:
    """Return whether an operation is that of its library, not a function that the program has put there."""
    # A function with `functools.wraps` claims the module of the function that it calls.
    module = getattr(draw, "__globals__", {}).get("__name__") or draw.__module__
    # A function in C may have no module.
    return module is None or module.partition(".")[0] == owner.__name__.partition(".")[0]


def _constant(owner: Any, name: str, draw: Draw) -> Draw:
    """Return an operation that draws the same numbers each time. For dropout, it returns its input.

    The numbers of an operation of Keras are equal on all backends.

    Args:
        owner: the module that has the operation.
        name: its name there.
        draw: the operation.
    """
    backend = keras.backend.backend()
    if name == "dropout":
        return lambda inputs, *args, **kwargs: inputs
    if owner is BACKEND_RANDOM:
        return _constant_of_keras(name, draw)
    if backend == "jax":
        return lambda key, *args, **kwargs: draw(sys.modules["jax"].random.key(_SEED), *args, **kwargs)
    if backend == "torch":
        torch = sys.modules["torch"]

        def seeded(*args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_SEED)
                return draw(*args, **kwargs)

        return seeded
    stateless = getattr(owner, f"stateless_{name}")
    parameters = inspect.signature(draw)

    def of_tensorflow(*args: Any, **kwargs: Any) -> Any:
        arguments = parameters.bind(*args, **kwargs).arguments
        return stateless(**{**arguments, "seed": (_SEED, 0)})

    return of_tensorflow


def _constant_of_keras(name: str, draw: Draw) -> Draw:
    signature = inspect.signature(draw)

    @wraps(draw)
    def of_keras(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        fractions = _fractions(arguments["shape"])
        if name.endswith("normal"):
            # A truncated distribution has no numbers beyond two standard deviations.
            within = math.erf(math.sqrt(2)) if name == "truncated_normal" else 1.0
            units = math.sqrt(2) * keras.ops.erfinv(within * (2 * fractions - 1))
            numbers = arguments["mean"] + arguments["stddev"] * units
        else:
            low, high = arguments["minval"], arguments["maxval"]
            numbers = low + (high - low) * fractions
            numbers = keras.ops.floor(numbers) if name == "randint" else numbers
        return keras.ops.cast(numbers, arguments["dtype"] or keras.config.floatx())

    return of_keras


def _fractions(shape: Any) -> Any:
    """Return numbers between 0 and 1, which are equal on all backends."""
    places = keras.ops.zeros((), "int32")
    for size in _sizes(shape):
        places = (31 * places[..., None] + 17 * keras.ops.arange(size, dtype="int32") + 5) % _PRIME
    return (keras.ops.cast(places, "float32") + 0.5) / _PRIME


def _of_keras() -> Iterator[tuple[Any, str, Callable[[Draw], Draw]]]:
    for name in ("normal", "uniform", "randint", "truncated_normal"):
        yield BACKEND_RANDOM, name, _with_shape_first
    yield BACKEND_RANDOM, "dropout", _keras_dropout


def _of_backend() -> Iterator[tuple[Any, str, Callable[[Draw], Draw]]]:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        random = sys.modules["tensorflow"].random
        for name in ("normal", "uniform", "truncated_normal"):
            yield random, name, _with_shape_first
    elif backend == "jax":
        random = sys.modules["jax"].random
        for name in ("normal", "uniform"):
            yield random, name, partial(_of_jax, 0)
        yield random, "truncated_normal", partial(_of_jax, 2)
    elif backend == "torch":
        torch = sys.modules["torch"]
        for name in ("randn", "rand"):
            yield torch, name, _of_torch
        for name in ("randn_like", "rand_like"):
            yield torch, name, _like
        yield torch.nn.functional, "dropout", _torch_dropout


def _with_shape_first(draw: Draw) -> Draw:
    def repeated(shape: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = _sizes(shape)
        return _repeated(sizes, draw((1, *sizes[1:]) if sizes else shape, *args, **kwargs))

    return repeated


def _of_jax(shape_at: int, draw: Draw) -> Draw:
    def repeated(key: Any, *args: Any, **kwargs: Any) -> Any:
        rest = list(args)
        named = kwargs if "shape" in kwargs or len(rest) <= shape_at else None
        shape = kwargs.get("shape", ()) if named is not None else rest[shape_at]
        sizes = _sizes(shape)
        if not sizes:
            return draw(key, *args, **kwargs)
        if named is not None:
            kwargs = {**kwargs, "shape": (1, *sizes[1:])}
        else:
            rest[shape_at] = (1, *sizes[1:])
        return _repeated(sizes, draw(key, *rest, **kwargs))

    return repeated


def _of_torch(draw: Draw) -> Draw:
    def repeated(*shape: Any, **kwargs: Any) -> Any:
        # Keras passes it by name.
        shape = (kwargs.pop("size"),) if "size" in kwargs else shape
        sizes = _sizes(shape[0] if len(shape) == 1 else shape)
        return _repeated(sizes, draw((1, *sizes[1:]) if sizes else (), **kwargs))

    return repeated


def _like(draw: Draw) -> Draw:
    def repeated(tensor: Any, **kwargs: Any) -> Any:
        return draw(tensor[:1], **kwargs).expand(tensor.shape) if tensor.ndim else draw(tensor, **kwargs)

    return repeated


def _keras_dropout(dropout: Draw) -> Draw:
    def repeated(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        return dropout(inputs, rate, (1, *list(noise_shape or inputs.shape)[1:]), seed)

    return repeated


def _torch_dropout(dropout: Draw) -> Draw:
    def repeated(tensor: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        ones = sys.modules["torch"].ones_like(tensor[:1])
        return tensor * dropout(ones, p, training)

    return repeated


def _sizes(shape: Any) -> tuple[Any, ...]:
    """Return the numbers of elements along each axis. Sizes that are only known in a graph are tensors."""
    if getattr(shape, "ndim", None) == 0 or isinstance(shape, int):
        return (int(shape),)
    sizes = keras.ops.unstack(shape) if keras.ops.is_tensor(shape) else shape
    return tuple(size if keras.ops.is_tensor(size) else int(size) for size in sizes)


def _repeated(sizes: tuple[Any, ...], row: Any) -> Any:
    return keras.ops.broadcast_to(row, sizes) if sizes else row
