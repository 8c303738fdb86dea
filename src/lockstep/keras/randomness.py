"""The random states from which a script may draw, and random numbers that do not affect them."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.utils import rng_utils

from lockstep.data.digest import digest_arrays
from lockstep.worker import job

_GLOBAL_SEED_GENERATOR = "global_seed_generator"
"""The name under which Keras stores the generator of random operations without a seed."""

_TENSORFLOW = "tensorflow.python.eager.context"
"""The module that holds the random states of TensorFlow's eager operations."""

_FRAMEWORKS = (_TENSORFLOW, "torch")
"""Modules with their own random states, which a script may import at any time."""

Result = TypeVar("Result")


def global_generator() -> Any:
    """Return the generator of Keras's random operations without a seed; None if there is none yet."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: Any) -> None:
    """Make Keras use `generator` for random operations without a seed."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def script_seed() -> int | None:
    """Return the seed that the script has passed to `keras.utils.set_random_seed`; None without one."""
    seed: int | None = rng_utils.get_random_seed()
    return seed


def script_seeds(job_seed: int) -> tuple[Any, ...]:
    """Return the seeds that the script has set in Keras, TensorFlow and PyTorch, and the job's.

    If the script has set none in TensorFlow or PyTorch, imported or not, the job's seed takes its place. The
    seed that the script has set in Keras is also TensorFlow's, installed or not.
    """
    torch, seed = sys.modules.get("torch"), script_seed()
    return (
        seed,
        _tensorflow()._seed if _TENSORFLOW in sys.modules else job_seed if seed is None else seed,
        job_seed if torch is None else torch.initial_seed(),
        job_seed,
    )


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
        """Use these random numbers within the block, from where the last block stopped.

        Restore the previous states afterwards; a framework that the block has imported gets its states after
        an import.
        """
        before, own = _states(), self._states or {}
        _set_states(own if own.keys() >= before.keys() else _seeded(self._seed) | own)
        try:
            with self._operations():
                yield
        finally:
            self._states = _states()
            if self._states.keys() != before.keys():
                before = _seeded(job.current().context.seed) | before
            _set_states(before)

    def make(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function` with the first of these numbers.

        It is called again if it has imported a framework, whose state could not be set before.
        """
        while True:
            known, self._states, self._draws = _imported(), None, None
            with self.drawn():
                made = function()
            if _imported() == known:
                return made

    def _operations(self) -> AbstractContextManager[None]:
        """Return a context in which TensorFlow's operations draw numbers derived from the seed."""
        if _TENSORFLOW not in sys.modules:
            return nullcontext()
        from lockstep.keras.tf_random_ops import EagerDraws, drawn_from

        self._draws = self._draws or EagerDraws(self._seed)
        return drawn_from(self._draws)


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Use random numbers derived from `seed` within the block."""
    with RandomNumbers(seed).drawn():
        yield


def _states() -> dict[str, Any]:
    """Return the states of imported modules, without copying those that are only replaced."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "keras": (script_seed(), global_generator()),
    }
    if _TENSORFLOW in sys.modules:
        context = _tensorflow()
        states["tensorflow"] = context._seed, context.__dict__.get("_rng")
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
    return states


def _seeded(seed: int) -> dict[str, Any]:
    """Return states derived from `seed`, also for modules that are not imported."""
    # The name keeps Keras from counting the generator.
    generator = keras.random.SeedGenerator(seed % 10**9, name="replica")
    numbers = np.random.RandomState(seed % 2**32)
    states = {
        "python": random.Random(seed).getstate(),
        "numpy": numbers.get_state(),
        "keras": (script_seed(), generator),
        "tensorflow": (seed, random.Random(seed)),
    }
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.Generator().manual_seed(seed % 2**64).get_state()
    return states


def _set_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    seed, generator = states["keras"]
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
    set_global_generator(generator)
    if _TENSORFLOW in sys.modules:
        context = _tensorflow()
        context._seed, context._rng = states["tensorflow"]
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(states["torch"])


def _imported() -> list[str]:
    return [name for name in _FRAMEWORKS if name in sys.modules]


def _tensorflow() -> Any:
    """Return the object with the random states of TensorFlow's eager operations."""
    return sys.modules[_TENSORFLOW].context()


def random_states() -> dict[str, Any]:
    """Return the states of Python and NumPy, and of Keras, TensorFlow and PyTorch if they are in use."""
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    generator = global_generator()
    if generator is not None:
        states["keras"] = np.asarray(generator.state.numpy())
    if _TENSORFLOW in sys.modules and type(_tensorflow()._seed) is int:
        states["tensorflow"] = _tensorflow()._seed, _tensorflow()._rng.getstate()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().copy()
    return states


def digest_of_states(names: Sequence[str]) -> str:
    """Return a hash of some of the states that `random_states` returns."""
    states = random_states()
    leaves = keras.tree.flatten([states[name] for name in names])
    return digest_arrays(map(np.asarray, leaves)).hex()[:16]


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the result of `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "keras" in states:
        generator = global_generator()
        if generator is None:
            generator = keras.random.SeedGenerator(0)
            set_global_generator(generator)
        generator.state.assign(states["keras"])
    if "tensorflow" in states and _TENSORFLOW in sys.modules:
        context = _tensorflow()
        context._seed, state = states["tensorflow"]
        context._rng = random.Random()
        context._rng.setstate(state)
    if "torch" in states and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))


def same_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results of `random_states` are equal."""
    return one.keys() == other.keys() and all(_same(state, other[name]) for name, state in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and any(isinstance(part, np.ndarray) for part in one):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
