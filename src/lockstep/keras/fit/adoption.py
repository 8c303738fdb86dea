"""The models whose calls the job computes: compiled in a strategy's scope, or in a script without one."""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.backends.traces import seed_traces
from lockstep.keras.state.settings import settings_of_call, settings_of_model

Entered = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which a strategy, its value, is the current one."""


@dataclass
class Compilation:
    """The last compilation of an adopted model, and what later calls have shown about it.

    Attributes:
        subject: the name of the model in the keys of calls of threads, equal on all workers.
        entered: returns a context with the strategy that adopted the model, its value, as the current
            strategy.
        options: how that strategy trains; None if it has no options.
        compared: the kinds of steps for which workers have compared the model, in calls for single batches.
        witnessed: the kinds of steps that have been compared with plain Keras.
        batches: in a job that only checks the script, the results of the calls for single batches that have
            taken steps, and None for each later call. The keys are the method and whether it returns a dict.
        trained: the variables that its training function updates; None before the function is made.
    """

    subject: str
    entered: Entered
    options: Any
    compared: set[StepKind] = field(default_factory=set)
    witnessed: set[StepKind] = field(default_factory=set)
    batches: dict[tuple[str, bool], list[Any]] = field(default_factory=dict)
    trained: list[Any] | None = None


class AdoptedModels:
    """The adopted models of a process.

    Attributes:
        adopts_all: whether models outside of all scopes are adopted, too, because the script has no strategy.
    """

    def __init__(self) -> None:
        self.adopts_all = False
        self._compilations: weakref.WeakKeyDictionary[Any, Compilation] = weakref.WeakKeyDictionary()
        self._scopes: list[tuple[Entered, Any]] = []
        self._numbered = 0

    def __contains__(self, model: Any) -> bool:
        return model in self._compilations

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._compilations))

    @contextmanager
    def scope(self, entered: Entered, options: Any = None) -> Iterator[None]:
        """Adopt models that are compiled within the block, the scope of a strategy.

        Args:
            entered: returns a context in which the strategy, its value, is the current one.
            options: how the strategy trains, if it has options.
        """
        self._scopes.append((entered, options))
        try:
            yield
        finally:
            self._scopes.pop()

    def compiled(self, model: Any) -> bool:
        """Note that a model was just compiled, and return whether it is adopted now."""
        earlier = self._compilations.get(model)
        if self._scopes or self.adopts_all:
            subject = self._new_subject(model) if earlier is None else earlier.subject
            entered, options = self._scopes[-1] if self._scopes else (nullcontext, None)
            self._compilations[model] = Compilation(subject, entered, options)
            seed_traces(model, subject)
            return True
        if earlier is not None:
            self._compilations[model] = Compilation(earlier.subject, earlier.entered, earlier.options)
        return False

    def compilation(self, model: Any) -> Compilation:
        """Return the last compilation of an adopted model."""
        return self._compilations[model]

    def subject(self, model: Any) -> str:
        """Return the name of an adopted model in the keys of calls of threads, equal on all workers."""
        return self._compilations[model].subject

    def options(self, model: Any) -> Any:
        """Return the options of the strategy in whose scope a model was compiled, or None if it has none."""
        return self._compilations[model].options if model in self._compilations else None

    def strategy(self, model: Any) -> Any:
        """Return the strategy in whose scope a model was compiled, or is now, or None if there is none."""
        entered: Entered = self._scopes[-1][0] if self._scopes else nullcontext
        if model in self._compilations:
            entered = self._compilations[model].entered
        with entered() as strategy:
            return strategy

    def step_context(self, model: Any) -> Entered:
        """Return a function that returns the context of the program's own `train_step`, with its strategy.

        Keras's own step must not see a strategy, because it would divide losses by the number of replicas.
        """
        return self._compilations[model].entered if has_own(model, "train_step") else nullcontext

    def _new_subject(self, model: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            self._numbered += 1
            return f"model {self._numbered} ({model.name})"
        # Threads on other workers may compile, number and name their models in a different order.
        digest = hashlib.sha256(settings_text(model).encode()).hexdigest()
        return f"a {type(model).__name__} #{digest[:8]}"


def settings_text(model: Any) -> str:
    """Return the settings of a model as a text. Models with equal settings have equal texts."""
    return repr({**settings_of_call(model, (), first=True), **settings_of_model(model)})
