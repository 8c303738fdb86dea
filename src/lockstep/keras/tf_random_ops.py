"""Random numbers of TensorFlow's own operations, such as `tf.random.normal`, in a replica's computation.

Such an operation counts its runs in the process. While a replica computes, a stateless operation replaces the
original. Its numbers are derived from the step's seed, the replica, the number of the operation in the
function (or the seed that the program gives it), and the number of its runs in this step. So they do not
depend on the worker.

The counter of the runs is a variable that starts from zero for each replica, so loops draw new numbers.
Everywhere else, TensorFlow's own operations run. Operations that cannot be replaced are refused by name.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import keras
import tensorflow as tf

from lockstep.errors import ModelError
from lockstep.keras.private.common import explicit_seed
from lockstep.keras.private.tensorflow import (
    GENERATED_RANDOM_OPERATIONS,
    GET_SEED,
    MAKE_FUNCTION_CONTEXT,
    PFOR,
    RANDOM_WITHOUT_EQUIVALENT,
    counters_of_loops,
    definition_of,
    entered_graphs,
    uncounted_variable,
    with_own_graphs,
)
from lockstep.keras.seeds import GOLDEN, seed_of
from lockstep.system.thread_value import ThreadValue
from lockstep.worker.patch_registry import PATCHES

_TIMES = 1 << 31
"""The maximum runs of an operation in a step."""

_PROGRAM_SEED = 1 << 62
"""Distinguishes the seeds that the program gives operations from the numbers of operations."""

Seed = Any
"""Two integers as a tensor of int64, the seed of a stateless operation."""


class Draws(Protocol):
    """The source of the seeds of a function's operations."""

    def seed(self, program_seed: int | None) -> Seed | None:
        """Return the seed of an operation that is being created, or None if it is outside of the function.

        Args:
            program_seed: the seed that the program passes to the operation, if any. Operations with equal
                seeds draw equal numbers, as TensorFlow's do.
        """


class EagerDraws:
    """The draws of a function that runs eagerly."""

    def __init__(self, seed: int) -> None:
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Begin the draws of another seed."""
        self._key = signed(seed)
        self._operations = 0
        self._times: Counter[int] = Counter()

    def seed(self, program_seed: int | None) -> Seed | None:
        """Return a new seed."""
        if not tf.executing_eagerly():
            return None
        if program_seed is None:
            self._operations += 1
            return tf.constant([self._key, self._operations * _TIMES], tf.int64)
        self._times[program_seed] += 1
        return tf.constant([self._key, _start_of(program_seed) + self._times[program_seed]], tf.int64)

    @property
    def used(self) -> bool:
        """Whether an operation has drawn."""
        return bool(self._operations or self._times)


class GraphDraws:
    """The draws of a function that is being traced. A variable counts the runs of each operation.

    Attributes:
        number: the number of the next operation.
    """

    def __init__(self) -> None:
        self.number = 0
        self._depth = len(entered_graphs())

    def restart(self) -> None:
        """Number the operations that run eagerly as in the first run."""
        self.number = 0

    @property
    def in_function(self) -> bool:
        """Whether operations that are created now belong to the function, and are not in `tf.init_scope`."""
        return all(graph.is_building_function for graph in entered_graphs()[self._depth :])

    def seed(self, program_seed: int | None) -> Seed | None:
        """Add operations to the graph that compute another seed whenever they run."""
        if not self.in_function:
            return None
        number, self.number = self.number, self.number + 1
        times = _counter(number)
        start = number * _TIMES if program_seed is None else _start_of(program_seed)
        seed = tf.stack([_variable("key").read_value(), times.read_value() + start])
        times.assign_add(1)
        return seed


class ElementDraws:
    """The draws of a function that is being traced to map a dataset's elements, each with its own seed.

    They also replace the numbers of Keras's generators, which are neither read nor advanced.

    Args:
        seed: the seed of the element, a tensor of the function.
        number: the number of the function, among the functions with the element's seed.
        drawn: how often these functions draw from each of Keras's generators, by the generator's id.
    """

    def __init__(self, seed: Seed, number: int, drawn: Counter[int]) -> None:
        self._seed = seed
        self._number = number
        self._drawn = drawn
        self._operations = 0

    def seed(self, program_seed: int | None) -> Seed:
        """Add operations to the graph that mix the element's seed with the operation's number and loop runs.

        Raises:
            ModelError: the operation runs while the function is traced.
        """
        values = (self._number, self._operations) if program_seed is None else (program_seed,)
        self._operations += program_seed is None
        return self._mixed(values)

    def seed_from(self, generator: keras.random.SeedGenerator, ordered: bool) -> Seed:
        """Add operations to the graph that compute the next seed of one of Keras's generators.

        Generators with equal seeds from the program yield equal seeds, as Keras's do. Layers that augment an
        image and its mask depend on that.

        Raises:
            ModelError: the operation runs while the function is traced.
        """
        generator_seed = explicit_seed(generator)
        if generator_seed is None or not ordered:
            return self.seed(None)
        self._drawn[id(generator)] += 1
        return self._mixed(("generator", generator_seed, self._drawn[id(generator)]))

    def _mixed(self, values: tuple[Any, ...]) -> Seed:
        if tf.executing_eagerly():
            raise ModelError("it draws random numbers in tf.init_scope, where they become constants")
        seed = tf.bitwise.bitwise_xor(self._seed, tf.constant([signed(seed_of(*values)), 0], tf.int64))
        for runs in counters_of_loops(tf.compat.v1.get_default_graph()):
            seed = tf.random.experimental.stateless_fold_in(seed, runs)
        return seed


class VectorizedDraws:
    """The draws of a function that computes several elements at once, which would all get the same seed."""

    def seed(self, program_seed: int | None) -> Seed | None:
        """Raise ModelError."""
        raise ModelError(
            "the step draws random numbers in tf.vectorized_map, where all elements would get the same: draw "
            "them for all elements before it, or use tf.map_fn"
        )


class _ProgramSeed(int):
    """The second seed of an operation to which the program has given a seed."""


_draws: ThreadValue[Draws | None] = ThreadValue(None)
_variables: dict[str, tf.Variable] = {}
_counters: list[tf.Variable] = []
_lock = threading.Lock()


@contextmanager
def drawn_from(draws: Draws | None) -> Iterator[None]:
    """Make TensorFlow's operations draw from `draws` within the block; None leaves them unchanged."""
    _install()
    with _draws.within(draws):
        yield


def draw_from(draws: Draws | None) -> Draws | None:
    """Make TensorFlow's operations on this thread draw from `draws`, and return the source until now.

    The first call replaces functions of TensorFlow. Without draws, they work like the originals.
    """
    _install()
    before, _draws.value = _draws.value, draws
    return before


def stateless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, to be traced, with stateless operations."""

    def traced(*args: Any) -> Any:
        with drawn_from(GraphDraws()):
            return function(*args)

    return traced


def is_counter(variable: tf.Variable) -> bool:
    """Whether a variable counts the runs of an operation in a step."""
    return any(variable is counter for counter in _counters)


def is_own(variable: tf.Variable) -> bool:
    """Whether a variable belongs to this module."""
    return any(variable is each for each in own_variables())


def own_variables() -> list[tf.Variable]:
    """Return the variables of this module, from which the operations of all graphs draw."""
    return [*_variables.values(), *_counters]


def set_seed(seed: Any) -> None:
    """Set the seed of traced functions: 64 bits, or a tensor of int64."""
    if _counters:
        _variable("seed").assign(signed(seed) if isinstance(seed, int) else seed)


def begin(counters: Sequence[tf.Variable], replica: Any) -> None:
    """Begin a replica's computation, in which `counters` count the runs of operations."""
    if counters:
        key = tf.bitwise.bitwise_xor(_variable("seed").read_value(), replica * signed(GOLDEN))
        _variable("key").assign(key)
    for counter in counters:
        counter.assign(0)


def state_of_graphs() -> list[tuple[tf.Variable, Any]]:
    """Return the variables from which the operations of all graphs draw, with their values."""
    return [(variable, variable.read_value()) for variable in own_variables()]


def begin_all(seed: int) -> None:
    """Begin a computation outside of replicas. All operations draw the first numbers of `seed`."""
    set_seed(seed)
    begin(_counters, tf.constant(0, tf.int64))


def refuse_random_operations(graph: Any) -> None:
    """Raise ModelError if random numbers in a graph depend on how often this process ran the operations."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    for node in (node for part in nodes for node in part):
        if counts_its_runs(node):
            _refuse(node.op, f" ({node.name})")


def counts_its_runs(node: Any) -> bool:
    """Whether the random numbers of an operation in a graph depend on how often this process ran it."""
    definition = definition_of(node.op)
    names = {attribute.name for attribute in definition.attr} if definition is not None else set()
    if "seed" not in names:
        return False
    if node.op.startswith("Fractional"):
        return not node.attr["deterministic"].b
    if node.op.startswith("CudnnRNN"):
        return bool(definition.is_stateful and node.attr["dropout"].f > 0)
    return bool(definition.is_stateful)


def _refuse(operation: str, name: str = "") -> NoReturn:
    raise ModelError(
        f"the step draws random numbers with the operation {operation}{name}, whose numbers depend on other "
        "computations of this process, and which no stateless operation can replace here; draw with "
        "tf.random.normal and similar functions in Python, not in a loaded graph, or with keras.random and a "
        "generator that the model owns: self.seed = keras.random.SeedGenerator(1), "
        "keras.random.normal(shape, seed=self.seed)"
    )


def signed(seed: int) -> int:
    """Return the lower 64 bits as a number of int64."""
    return (seed + 2**63) % 2**64 - 2**63


def _start_of(program_seed: int) -> int:
    return _PROGRAM_SEED + program_seed * _TIMES


def _variable(name: str) -> tf.Variable:
    if name not in _variables:
        _variables[name] = _made(name)
    return _variables[name]


def _counter(number: int) -> tf.Variable:
    """Return the variable that counts the runs of operation `number`. Functions use it in turn."""
    if number == len(_counters):
        _variable("seed")
        _counters.append(_made("counter"))
    return _counters[number]


def _made(name: str) -> tf.Variable:
    with tf.init_scope():
        return uncounted_variable(0, tf.int64, f"lockstep_{name}")


def _multinomial(seed: Seed, logits: Any, num_samples: Any, output_dtype: Any = tf.int64) -> Any:
    return tf.random.stateless_categorical(logits, num_samples, seed, output_dtype)


def _gamma(seed: Seed, shape: Any, alpha: Any) -> Any:
    return tf.random.stateless_gamma(tf.concat([shape, tf.shape(alpha)], 0), seed, alpha, dtype=alpha.dtype)


def _poisson(seed: Seed, shape: Any, rate: Any, dtype: Any = tf.int64) -> Any:
    rate = tf.convert_to_tensor(rate)
    return tf.random.stateless_poisson(tf.concat([shape, tf.shape(rate)], 0), seed, rate, dtype)


_EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "random_uniform": lambda seed, shape, dtype: tf.random.stateless_uniform(shape, seed, dtype=dtype),
    "random_uniform_int": lambda seed, shape, minval, maxval: tf.random.stateless_uniform(
        shape, seed, minval, maxval, minval.dtype
    ),
    "random_standard_normal": lambda seed, shape, dtype: tf.random.stateless_normal(shape, seed, dtype=dtype),
    "truncated_normal": lambda seed, shape, dtype: tf.random.stateless_truncated_normal(
        shape, seed, dtype=dtype
    ),
    "random_shuffle": lambda seed, value: tf.random.experimental.stateless_shuffle(
        tf.convert_to_tensor(value), seed
    ),
    "multinomial": _multinomial,
    "random_gamma": _gamma,
    "random_poisson_v2": _poisson,
}
"""The replacements of functions of `GENERATED_RANDOM_OPERATIONS`. Their first argument is the seed."""


def _install() -> None:
    """Replace TensorFlow's functions, once per process."""
    with _lock:
        if PATCHES.has(__name__):
            return
        for name, equivalent in _EQUIVALENTS.items():
            PATCHES.replace(__name__, GENERATED_RANDOM_OPERATIONS, name, partial(_drawn, equivalent))
        for module, name in RANDOM_WITHOUT_EQUIVALENT:
            PATCHES.replace(__name__, module, name, partial(_refused, name))
        PATCHES.replace(__name__, *GET_SEED, _noted)
        PATCHES.replace(__name__, keras.random.SeedGenerator, "next", _by_element)
        PATCHES.replace(__name__, *MAKE_FUNCTION_CONTEXT, _apart)
        PATCHES.replace(__name__, *PFOR, _vectorized)


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the seeds of operations to which the program has given one."""

    def get_seed(program_seed: Any) -> Any:
        first, second = original(program_seed)
        marked = program_seed is not None and _draws.value is not None
        return (first, _ProgramSeed(second) if marked else second)

    return get_seed


def _by_element(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let Keras's generators in a function that is traced for elements draw by the element."""

    def next_seed(generator: Any, ordered: bool = True) -> Any:
        if isinstance(_draws.value, ElementDraws) and isinstance(generator.state.value, tf.Variable):
            return tf.cast(_draws.value.seed_from(generator, ordered), generator.state.dtype)
        return original(generator, ordered)

    return next_seed


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace the functions that a traced function calls separately for it.

    Graphs from elsewhere have operations that count their runs, and the counters of this function apply only
    to it.
    """

    def make_function_context(*args: Any, **options: Any) -> Any:
        context = original(*args, **options)
        if isinstance(_draws.value, GraphDraws) and _draws.value.in_function:
            return with_own_graphs(context, _draws.value)
        if isinstance(_draws.value, ElementDraws):
            # Each call draws different numbers.
            return with_own_graphs(context, object())
        return context

    return make_function_context


def _vectorized(original: Callable[..., Any]) -> Callable[..., Any]:
    def pfor(*args: Any, **options: Any) -> Any:
        draws = _draws.value
        traced = isinstance(draws, GraphDraws | ElementDraws)
        if draws is None or not (traced or tf.config.functions_run_eagerly()):
            return original(*args, **options)
        with drawn_from(VectorizedDraws()):
            return original(*args, **options)

    return pfor


def _drawn(equivalent: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, seed: Any = 0, seed2: Any = 0, name: Any = None, **options: Any) -> Any:
        program_seed = int(seed2) if isinstance(seed2, _ProgramSeed) else None
        stateless_seed = None if _draws.value is None else _draws.value.seed(program_seed)
        if stateless_seed is None:
            return original(*args, seed=seed, seed2=seed2, name=name, **options)
        return equivalent(stateless_seed, *args, **options)

    return draw


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse an operation that runs eagerly. In a graph, `refuse_random_operations` finds it."""

    def refuse(*args: Any, **options: Any) -> Any:
        if (
            isinstance(_draws.value, EagerDraws)
            and tf.executing_eagerly()
            and not options.get("deterministic")
        ):
            _refuse(name)
        return original(*args, **options)

    return refuse
