"""The random states from which a script may draw, and random numbers that do not affect them."""

import _random
import copy
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import xxhash

from lockstep.data.digest import digest_arrays
from lockstep.keras.private.common import (
    global_generator,
    random_seed_dtype,
    script_seed,
    set_global_generator,
    set_script_seed,
)
from lockstep.worker import job
from lockstep.worker.private_modules import (
    TENSORFLOW_CONTEXT,
    set_tensorflow_random_state,
    tensorflow_random_state,
)
from lockstep.worker.script_seed import noted_script_seed

_FRAMEWORKS = (TENSORFLOW_CONTEXT, "torch")
"""Modules with their own random states, which a script may import at any time."""

Result = TypeVar("Result")


def seed_of_script() -> int | None:
    """Return the seed that the script has passed to `keras.utils.set_random_seed`, or None.

    `keras.utils.clear_session` makes Keras forget the seed, but not the random states that it has seeded.
    """
    keras_seed = script_seed()
    return noted_script_seed() if keras_seed is None else keras_seed


def script_seeds(job_seed: int) -> tuple[Any, ...]:
    """Return the seeds that the script has set in Keras, TensorFlow and PyTorch, and the job's.

    If the script has not set one in TensorFlow or PyTorch, imported or not, the job's seed replaces it. The
    seed that the script has set in Keras is also TensorFlow's, installed or not.
    """
    torch, seed = sys.modules.get("torch"), seed_of_script()
    return (
        seed,
        tensorflow_random_state()[0]
        if TENSORFLOW_CONTEXT in sys.modules
        else (job_seed if seed is None else seed),
        job_seed if torch is None else torch.initial_seed(),
        job_seed,
    )


class OperationNumbers:
    """Replaces Keras's generator of operations without a seed, without a variable."""

    def __init__(self) -> None:
        self._seed = 0
        self.draws = 0

    def seed(self, seed: int) -> None:
        """Begin the numbers of another seed."""
        self._seed = seed
        self.draws = 0

    def next(self, ordered: bool = True) -> Any:
        """Return the seed of the next operation."""
        self.draws += 1
        words = xxhash.xxh3_64_digest(struct.pack("<2Q", self._seed, self.draws))
        dtype = random_seed_dtype()
        return keras.ops.convert_to_tensor(np.frombuffer(words, "uint32").astype(dtype), dtype)


class RandomNumbers:
    """Random numbers separate from the program's: they depend only on a seed.

    They cover Python, NumPy and Keras, and TensorFlow and PyTorch except for TensorFlow's functions and
    PyTorch's devices.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] | None = None
        self._draws: Any = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Use these random numbers within the block, continuing where the last block stopped.

        Afterwards, the previous states are restored. A framework that the block has imported gets the states
        that it has after an import.
        """
        before, drawn_states = current_states(), self._states or {}
        restore_states(
            drawn_states if drawn_states.keys() >= before.keys() else _seeded(self._seed) | drawn_states
        )
        try:
            with self._operations_drawn():
                yield
        finally:
            self._states = current_states()
            if self._states.keys() != before.keys():
                before = _seeded(job.current().settings.seed) | before
            restore_states(before)

    def make(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function` with the first of these numbers.

        If the function has imported a framework, whose state could not be set before the import, it is called
        again.
        """
        while True:
            imported, self._states, self._draws = imported_frameworks(), None, None
            with self.drawn():
                made = function()
            if imported_frameworks() == imported:
                return made

    def _operations_drawn(self) -> AbstractContextManager[None]:
        """Return a context in which TensorFlow's operations draw numbers derived from the seed."""
        if TENSORFLOW_CONTEXT not in sys.modules:
            return nullcontext()
        from lockstep.keras.tf_random_ops import EagerDraws, drawn_from

        self._draws = self._draws or EagerDraws(self._seed)
        return drawn_from(self._draws)


@contextmanager
def random_numbers(seed: int, generator: Any = None) -> Iterator[None]:
    """Use random numbers derived from `seed` within the block: the first of `RandomNumbers(seed)`.

    It seeds the states, which takes less time than setting copies of them.

    Args:
        seed: the seed of the numbers.
        generator: the generator of Keras for layers without their own; None for a new one.
    """
    before, imported = current_states(), imported_frameworks()
    _set_seeds(seed, generator)
    try:
        with RandomNumbers(seed)._operations_drawn():
            yield
    finally:
        if imported_frameworks() != imported:
            before = _seeded(job.current().settings.seed) | before
        restore_states(before)


@contextmanager
def plain_random_numbers(seed: int) -> Iterator[None]:
    """Within the block, Python, NumPy and PyTorch draw numbers derived from `seed`. Restore their states.

    Unlike `random_numbers`, this does not use the generators of Keras and TensorFlow, which may be in a
    graph.
    """
    torch = sys.modules.get("torch")
    before = _python_state(), _numpy_state(), None if torch is None else torch.get_rng_state()
    _set_plain_seeds(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        _set_numpy_state(before[1])
        if torch is not None:
            torch.set_rng_state(before[2])


def _replica_generator(seed: int) -> Any:
    # The name keeps Keras from counting the generator.
    return keras.random.SeedGenerator(seed % 10**9, name="replica")


def _set_seeds(seed: int, generator: Any) -> None:
    """Set the states of `_seeded`."""
    _set_plain_seeds(seed)
    set_global_generator(_replica_generator(seed) if generator is None else generator)
    if TENSORFLOW_CONTEXT in sys.modules:
        set_tensorflow_random_state(seed, random.Random(seed))


def _set_plain_seeds(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed % 2**64)


def current_states() -> dict[str, Any]:
    """Return the states of imported modules; states that are only ever replaced are not copied.

    If two results have the same object, the state of Python or NumPy has not changed.
    """
    states = {
        "python": _python_state(),
        "numpy": _numpy_state(),
        "keras": (script_seed(), global_generator()),
    }
    if TENSORFLOW_CONTEXT in sys.modules:
        states["tensorflow"] = tensorflow_random_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
    return states


def _seeded(seed: int) -> dict[str, Any]:
    """Return states derived from `seed`, including those of modules that are not imported."""
    numbers = np.random.RandomState(seed % 2**32)
    states = {
        "python": random.Random(seed).getstate(),
        "numpy": numbers.get_state(),
        "keras": (script_seed(), _replica_generator(seed)),
        "tensorflow": (seed, random.Random(seed)),
    }
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.Generator().manual_seed(seed % 2**64).get_state()
    return states


def restore_states(states: Mapping[str, Any]) -> None:
    """Restore the result of `current_states`."""
    random.setstate(states["python"])
    _set_numpy_state(states["numpy"])
    seed, generator = states["keras"]
    set_script_seed(seed)
    set_global_generator(generator)
    if TENSORFLOW_CONTEXT in sys.modules:
        set_tensorflow_random_state(*states["tensorflow"])
    if (torch := sys.modules.get("torch")) is not None and not torch.equal(
        torch.get_rng_state(), states["torch"]
    ):
        torch.set_rng_state(states["torch"])


class _Seen(NamedTuple):
    """The last copied state of a generator, because copying takes 10 to 90 times as long as comparing.

    Attributes:
        generator: the generator. Its memory has its state, except for the second of two normal numbers.
        memory: the memory of the generator.
        words: the contents of the memory with this state.
        state: the state of the generator.
    """

    generator: Any
    memory: Any
    words: bytes
    state: Any


_seen_python: _Seen | None = None
_seen_numpy: _Seen | None = None


def _python_state() -> Any:
    """Return Python's state; copy it only if it has changed."""
    global _seen_python
    generator: Any = random._inst
    seen = _seen_python
    if seen is None or seen.generator is not generator:
        if type(random._inst) is not random.Random or not _memory_shows_state():
            return random.getstate()
        memory = _memory_of(generator)
    elif seen.memory.raw == seen.words and seen.state[2] == generator.gauss_next:
        return seen.state
    else:
        memory = seen.memory
    _seen_python = _Seen(generator, memory, memory.raw, random.getstate())
    return _seen_python.state


def _numpy_state() -> Any:
    """Return NumPy's state; copy it only if it has changed, or if it has the second of two normal numbers."""
    global _seen_numpy
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    seen = _seen_numpy
    if _has_second_number():
        return np.random.get_state()
    if seen is None or seen.generator is not generator:
        if type(generator) is not np.random.MT19937:
            return np.random.get_state()
        memory = (ctypes.c_char * _NUMPY_WORDS).from_address(generator.ctypes.state_address)
    elif seen.memory.raw == seen.words and not seen.state[3]:
        return seen.state
    else:
        memory = seen.memory
    _seen_numpy = _Seen(generator, memory, memory.raw, np.random.get_state())
    return _seen_numpy.state


def _has_second_number() -> bool:
    """Whether NumPy's global generator may hold the second of two normal numbers, which is in its object.

    It does not if the object's memory equals, except for pointers, that of a generator without one.
    """
    parts = _second_number()
    return parts is None or any(memory.raw != empty for memory, empty in parts)


@cache
def _second_number() -> list[tuple[Any, bytes]] | None:
    """Return the parts of the object of NumPy's global generator that change with a second number, and their
    contents without one; None if a second number does not change them."""
    trial = np.random.RandomState(0)
    size, start = type(trial).__basicsize__, object.__basicsize__

    def contents(generator: Any) -> Any:
        return (ctypes.c_char * (size - start)).from_address(id(generator) + start)

    without = contents(trial).raw
    trial.normal()
    with_one = contents(trial).raw
    changed = [i for i, (old, new) in enumerate(zip(without, with_one, strict=True)) if old != new]
    trial.normal()
    if not changed or contents(trial).raw != without:
        return None
    global_generator = np.random.mtrand._rand
    base = id(global_generator) + start
    return [((ctypes.c_char * 1).from_address(base + i), without[i : i + 1]) for i in changed]


@cache
def _memory_shows_state() -> bool:
    """Whether the memory of Python's generators contains their state, as in CPython."""
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(1)
    generator.random()
    _, (*words, index), _ = generator.getstate()
    memory = _memory_of(generator).raw
    return struct.pack(f"={len(words)}I", *words) in memory and struct.pack("=i", index) in memory


def _memory_of(generator: random.Random) -> Any:
    """Return the memory that CPython's class of generators adds to that of an object."""
    start = object.__basicsize__
    return (ctypes.c_char * (_random.Random.__basicsize__ - start)).from_address(id(generator) + start)


def _set_numpy_state(state: Any) -> None:
    global _seen_numpy
    seen = _seen_numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if seen is not None and seen.state is state and seen.generator is generator and not state[3]:
        # Seeding drops the second of two normal numbers. This takes a tenth of the time of `set_state`.
        np.random.seed(0)
        seen.memory.raw = seen.words
        return
    np.random.set_state(state)
    _seen_numpy = None


_NUMPY_WORDS = 625 * 4
"""Bytes of a Mersenne Twister in memory: 624 words and the index of the next word."""


def global_generators() -> list[Any]:
    """Return the generators of Python and NumPy whose states are those of this module's functions."""
    return [random._inst, np.random.mtrand._rand, np.random.get_bit_generator()]  # type: ignore[attr-defined]


def imported_frameworks() -> list[str]:
    """Return the imported modules that have random states and that a script may import at any time."""
    return [name for name in _FRAMEWORKS if name in sys.modules]


def is_in_variable(generator: Any) -> bool:
    """Whether the state of a generator is in a variable, as Keras's and TensorFlow's are."""
    return hasattr(getattr(generator, "state", None), "assign")


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy, PyTorch, Keras or TensorFlow.

    Its parts are of types that a checkpoint can hold. Objects with the methods of `random.Random` also count.
    """
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator_state(generator.bit_generator)
    if isinstance(generator, np.random.BitGenerator):
        return copy.deepcopy(generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    if is_in_variable(generator):
        return np.array(keras.ops.convert_to_numpy(generator.state))
    return generator.get_state().numpy().copy()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a result of `generator_state`."""
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif is_in_variable(generator):
        generator.state.assign(state)
    else:
        generator.set_state(sys.modules["torch"].from_numpy(np.array(state)))


def random_states(held: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the states of Python and NumPy, and of Keras, TensorFlow and PyTorch if they are in use.

    Args:
        held: other generators, by name, whose states are included.
    """
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    generator = global_generator()
    if generator is not None:
        states["keras"] = np.asarray(generator.state.numpy())
    if TENSORFLOW_CONTEXT in sys.modules:
        seed, numbers = tensorflow_random_state()
        if type(seed) is int:
            states["tensorflow"] = seed, numbers.getstate()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().copy()
    if held:
        states["held"] = {name: generator_state(generator) for name, generator in held.items()}
    return states


def digest_of_states(names: Sequence[str]) -> str:
    """Return a hash of some of the states that `random_states` returns."""
    states = random_states()
    leaves = keras.tree.flatten([states[name] for name in names])
    return digest_arrays(map(np.asarray, leaves)).hex()[:16]


def set_random_states(states: Mapping[str, Any], held: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Restore the result of `random_states`."""
    for name, state in states.get("held", {}).items():
        if name in held:
            set_generator_state(held[name], state)
    random.setstate(states["python"])
    _set_numpy_state(states["numpy"])
    if "keras" in states:
        generator = global_generator()
        if generator is None:
            generator = keras.random.SeedGenerator(0)
            set_global_generator(generator)
        generator.state.assign(states["keras"])
    if "tensorflow" in states and TENSORFLOW_CONTEXT in sys.modules:
        seed, state = states["tensorflow"]
        numbers = random.Random()
        numbers.setstate(state)
        set_tensorflow_random_state(seed, numbers)
    if "torch" in states and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))


def same_states(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two results of `random_states` are equal."""
    return left.keys() == right.keys() and not changed_states(left, right)


def changed_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the states in `now` that differ from those in `before`, or are new."""
    return frozenset(
        name for name, state in now.items() if name not in before or not same_state(before[name], state)
    )


def same_state(left: Any, right: Any) -> bool:
    """Whether two states of one generator are equal."""
    if left is right:
        return True
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(part, right[key]) for key, part in left.items())
    if isinstance(left, tuple) and any(isinstance(part, np.ndarray) for part in left):
        return len(left) == len(right) and all(map(same_state, left, right))
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and bool(np.array_equal(left, right))
    torch = sys.modules.get("torch")
    return bool(left.equal(right) if torch is not None and isinstance(left, torch.Tensor) else left == right)
