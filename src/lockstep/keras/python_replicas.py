"""Python attributes that steps change while Python runs in each step: R replicas change them once.

Each replica begins with the values before the step. The values after the step are those that every replica
leaves. They are part of the round's form, which all replicas must have in common. An attribute that a step
only writes, such as the last loss or a list of activations, is not state. It may differ between replicas, and
afterwards has the value of one of them. A measurement shows whether a step reads an attribute: a replica
computes again with other values there, and with the value from before the first step.

Global variables, variables of enclosing functions and the clock are out of reach. So in the first two steps
of a program, replica 0 is computed twice, and once with fewer examples. State out of reach is refused by name
if it changes bits, and so are values that depend on the number of examples. Changes that `predict` makes in
Python are undone.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.values import pack
from lockstep.data.digest import digest_arrays
from lockstep.errors import ModelError
from lockstep.keras.backends.common import without_summaries
from lockstep.keras.backends.contract import Partial
from lockstep.keras.private.common import CHANGED_PLACES
from lockstep.keras.python_state import Changes, Kept, Key, ObjectGraph
from lockstep.keras.python_values import decoded, disturbed, encoded, text_of
from lockstep.keras.reached_objects import graph_of, graph_of_function

_TRIED_STEPS = 2
"""The first steps of a program in which replica 0 is computed twice."""
_LONGEST = 40
"""The most characters of a value in a message."""
_TESTS = 8
"""The most attributes that a step tests."""

_ADVICE = (
    "look for a global variable, a variable of an enclosing function, the clock, or random numbers of a "
    "generator that is not an attribute; what changes from step to step belongs in an attribute of the model "
    "or of a layer"
)
_REMEDY = (
    "keep it in a metric or in a variable of a layer (add_weight), or return it from train_step as a log"
)


class PythonOfReplicas:
    """The Python state of the steps of one model, in one program, or of a function of `strategy.run`.

    Args:
        graph: the objects whose attributes count.
        places: receives the places that change, and whether a step has changed them.
        to_numpy: returns an array of the backend as NumPy sees it.
        trains: whether the program trains; otherwise, nothing is computed twice.
    """

    def __init__(
        self,
        graph: ObjectGraph,
        places: dict[tuple[str, str], bool],
        to_numpy: Callable[[Any], npt.NDArray[Any]],
        *,
        trains: bool,
    ) -> None:
        self._graph = graph
        self._places = places
        self._to_numpy = to_numpy
        self._trains = trains
        self._steps = 0
        self._changes = Changes(self._graph, {}, {})
        self._outputs: set[Key] = set()
        self._ignored: set[Key] = set()
        self._state: set[Key] = set()
        self._new: set[Key] = set()
        self._due: list[Key] = []
        self._divided: set[Key] = set()
        self._before: dict[Key, Any] = {}
        self._left: dict[int, dict[Key, str]] = {}
        self._began: list[str] = []

    @classmethod
    def of_model(
        cls, model: Any, to_numpy: Callable[[Any], npt.NDArray[Any]], *, trains: bool
    ) -> "PythonOfReplicas":
        """Return the Python state of a model's steps."""
        return cls(graph_of(model), _places(model), to_numpy, trains=trains)

    @classmethod
    def of_function(cls, function: Any, to_numpy: Callable[[Any], npt.NDArray[Any]]) -> "PythonOfReplicas":
        """Return the Python state of a function of `strategy.run`."""
        return cls(graph_of_function(function), {}, to_numpy, trains=False)

    def begin(self) -> None:
        """Begin a step. Changes that the program has made since the last step belong to the baseline."""
        for changed_place in self._graph.refresh().places(without=self._outputs):
            self._places.setdefault(changed_place, False)
        self._ignore_outputs()
        self._steps += 1
        # A worker that joins learns from the members which attributes are state. It must not announce them
        # again.
        self._state.update(key for key in (*self._due, *self._new) if self._is_told(key))
        self._due = [key for key in (*self._due, *sorted(self._new)) if key not in self._state]
        self._new.clear()
        self._left.clear()
        self._began.clear()

    def compute(
        self, run: Callable[[int], Partial], replica: int, rows: int, label: str, *, first_round: bool
    ) -> Partial:
        """Compute a replica with the values before the step, which it leaves unchanged.

        Args:
            run: computes the replica with a number of its examples.
            replica: the replica that computes.
            rows: the number of its examples.
            label: names the step.
            first_round: whether this is the first round of the step.

        Raises:
            ModelError: the replica depends on state that Lockstep cannot restore, or changes attributes
                depending on the number of its examples.
        """
        tested = self._due[:_TESTS] if first_round else []
        tried = {key: self._with_other_values(run, rows, key) for key in tested}
        twice = replica == 0 and self._steps <= _TRIED_STEPS and first_round and self._repeats()
        before = self._again(run, rows) if twice else None
        partial, changes = self._once(run, rows)
        self._changes = changes
        if before is not None and (differing := self._differing(before, (partial, changes))):
            names = list(dict.fromkeys(name.partition(" = ")[0] for name in differing))
            raise ModelError(
                f"{label}: computed twice from the same state and examples, replica 0 gives different bits "
                f"({', '.join(names[:3])}): {_ADVICE}"
            )
        for key, others in tried.items():
            self._due.remove(key)
            if others and not any(self._differing(other, (partial, changes)) for other in others):
                self._outputs.add(key)
            else:
                self._state.add(key)
                self._begin_with(key, label)
        self._note_new(run, replica, rows, (partial, changes))
        if twice and self._steps == _TRIED_STEPS and rows > 1 and self._texts(changes):
            self._refuse_counts(run, rows, changes, label)
        return partial

    def computes_once(self, replica: int, *, first_round: bool) -> bool:
        """Whether `compute` does not make trials, which compute the replica several times."""
        return not first_round or not (self._due or (replica == 0 and self._steps <= _TRIED_STEPS))

    @property
    def has_written(self) -> bool:
        """Whether the last computation has changed an attribute, including attributes that no step reads."""
        return bool(self._changes)

    def form(self) -> str:
        """Return the changes of the last computation, which must be equal for all replicas."""
        return "; ".join([*self._began, *self._texts(self._changes)])

    @property
    def has_changed(self) -> bool:
        """Whether the last computation has changed attributes that later ones may read."""
        return bool(self._changes.texts(without=self._outputs))

    def end(self) -> None:
        """End a step: make the changes of its replicas once."""
        for key in self._new:
            before = text_of(self._graph.baseline_value(key))
            values = {texts.get(key, before) for texts in self._left.values()}
            self._divided.update([key] if len(values) > 1 else ())
        self._graph.adopt(self._changes)
        for changed_place in self._changes.places(without=self._untold):
            self._places[changed_place] = True
        if self._steps == _TRIED_STEPS:
            self._graph.stop_watching()
        self._changes = Changes(self._graph, {}, {})

    def unchanged(self) -> Kept:
        """Return a context at whose end all changes of Python attributes are undone."""
        return Kept(self._graph)

    def undo(self) -> None:
        """End a step, or an attempt to compute a replica, without its changes, such as one that predicts."""
        self._graph.restore()
        self._changes = Changes(self._graph, {}, {})

    def _repeats(self) -> bool:
        """Whether a step that is computed twice should have equal bits."""
        torch = sys.modules.get("torch")
        if not self._trains or torch is None or keras.backend.backend() != "torch":
            return self._trains
        warns = torch.is_deterministic_algorithms_warn_only_enabled() and torch.cuda.is_available()
        return bool(torch.are_deterministic_algorithms_enabled()) and not warns

    def _begin_with(self, key: Key, label: str) -> None:
        """Count a value that the step reads as state, so that all replicas must begin with it."""
        name = self._graph.name_of(key)
        if key in self._divided:
            raise ModelError(
                f"{label}: the step reads {name}, and replicas have left different values there: {_REMEDY}"
            )
        self._began.append(f"{name} was {text_of(self._graph.baseline_value(key))}")

    def _is_told(self, key: Key) -> bool:
        """Whether a step, perhaps of another process, has told replicas the value of an attribute."""
        return self._places.get(self._path_and_name(key), False)

    def _path_and_name(self, key: Key) -> tuple[str, str]:
        return self._graph.nodes[key[0]].path, key[1]

    @property
    def _untold(self) -> set[Key]:
        """The attributes whose values may differ, because no step is known to read them."""
        return {*self._outputs, *self._new, *self._due}

    def _texts(self, changes: Changes) -> list[str]:
        return changes.texts(without=self._untold)

    def _once(self, run: Callable[[int], Partial], rows: int) -> tuple[Partial, Changes]:
        try:
            partial = run(rows)
        finally:
            changes = self._graph.restore()
        return partial, changes

    def _again(self, run: Callable[[int], Partial], rows: int) -> tuple[Partial, Changes]:
        with without_summaries():
            return self._once(run, rows)

    def _note_new(
        self, run: Callable[[int], Partial], replica: int, rows: int, results: tuple[Partial, Changes]
    ) -> None:
        """Note the places where a replica has left a different value, which may or may not be state."""
        changes = results[1]
        values = changes.values
        self._state.update(key for key in values if self._is_told(key))
        for key in values:
            if key in self._state or key in self._untold:
                continue
            before = changes.value_before(key)
            if isinstance(before, list) and self._adds_to(run, rows, key, before, results):
                self._state.add(key)
                continue
            self._new.add(key)
            self._before[key] = before
        self._left[replica] = {key: text_of(changes.value(key)) for key in self._new}

    def _adds_to(
        self,
        run: Callable[[int], Partial],
        rows: int,
        key: Key,
        before: list[Any],
        results: tuple[Partial, Changes],
    ) -> bool:
        """Whether a step leaves a different list if the list has one more element before the step."""
        longer = self._computed_with(run, rows, key, [*before, before[-1] if before else 0.0])
        return longer is None or bool(self._differing(longer, results))

    def _ignore_outputs(self) -> None:
        """Forget the objects to which only outputs refer, because each step leaves different ones."""
        for key in self._outputs - self._ignored:
            if key[0] in self._graph.nodes:
                self._graph.ignore(key)
                self._places.pop(self._path_and_name(key), None)
        self._ignored = set(self._outputs)
        for keys in (self._outputs, self._ignored, self._state, self._new, self._divided):
            keys.intersection_update([key for key in keys if key[0] in self._graph.nodes])
        self._due = [key for key in self._due if key[0] in self._graph.nodes]

    def _with_other_values(
        self, run: Callable[[int], Partial], rows: int, key: Key
    ) -> list[tuple[Partial, Changes]]:
        """Compute with other values at a place; return an empty list if that is not possible."""
        other, before = disturbed(self._graph.baseline_value(key)), self._before.pop(key)
        if other is None:
            return []
        results = [self._computed_with(run, rows, key, value) for value in (other, before)]
        return [] if None in results else [result for result in results if result is not None]

    def _computed_with(
        self, run: Callable[[int], Partial], rows: int, key: Key, value: Any
    ) -> tuple[Partial, Changes] | None:
        """Compute with another value at a place; return None if the step then raises an exception."""
        try:
            with self._graph.with_value(key, value):
                return self._again(run, rows)
        except Exception:
            return None

    def _differing(self, left: tuple[Partial, Changes], right: tuple[Partial, Changes]) -> list[str]:
        """Return the names of the arrays and changes that differ."""
        (first, changed), (second, changed_too) = left, right
        names = sorted({*first, *second})
        differing = [
            name
            for name in names
            if name not in first or name not in second or self._bits(first[name]) != self._bits(second[name])
        ]
        ours, theirs = (set(side.texts(without=self._outputs)) for side in (changed, changed_too))
        return differing + sorted(ours ^ theirs)

    def _bits(self, array: Any) -> bytes:
        return digest_arrays([self._to_numpy(array)])

    def _refuse_counts(self, run: Callable[[int], Partial], rows: int, changes: Changes, label: str) -> None:
        """Raise ModelError if changes depend on the number of a replica's examples."""
        try:
            _, fewer = self._again(run, rows - 1)
        except Exception:
            return
        if differing := sorted(set(self._texts(changes)) - set(self._texts(fewer))):
            name, _, value = differing[0].partition(" = ")
            shown = f" = {value}" if len(value) <= _LONGEST else ""
            raise ModelError(
                f"{label}: the step leaves {name}{shown} after {rows} examples of a replica, and another "
                f"value after fewer: it depends on the examples, which replicas divide; {_REMEDY}"
            )


def _places(model: Any) -> dict[tuple[str, str], bool]:
    """Return the places of a model's Python state that have changed, and whether a step has changed them."""
    places: dict[tuple[str, str], bool] = vars(model).setdefault(CHANGED_PLACES, {})
    return places


def python_facts(model: Any) -> dict[str, str]:
    """Return a text for each value that steps of a model have changed, by name. It is equal on all workers.

    Variables of TensorFlow that are not Keras's are included.
    """
    places = [changed_place for changed_place, by_step in _places(model).items() if by_step]
    if not (places or keras.backend.backend() == "tensorflow"):
        return {}
    graph = graph_of(model)
    return {
        f"attribute {path}.{name}" if name else f"attribute {path}": text_of(value)
        for (path, name), value in graph.values_at(sorted(places)).items()
    } | {f"variable {path}": text_of(variable.numpy()) for path, variable in graph.variables.items()}


def plain_variables(model: Any) -> list[Any]:
    """Return the variables of TensorFlow that are not Keras's, which steps of a model may change."""
    if not isinstance(model, keras.Model) or keras.backend.backend() != "tensorflow":
        return []
    return list(graph_of(model).variables.values())


def saved_python(model: Any) -> list[list[Any]]:
    """Return the changed values of a model's Python state for `set_python`: path, attribute, value.

    Values that a checkpoint cannot hold are omitted. For a variable of TensorFlow, the attribute is empty.
    """
    saved: list[list[Any]] = []
    if model is None or not (_places(model) or keras.backend.backend() == "tensorflow"):
        return saved
    graph, places = graph_of(model), _places(model)
    for (path, name), value in graph.values_at(sorted(places)).items():
        try:
            plain = encoded(value)
            pack(plain, path)
        except TypeError:
            continue
        saved.append([path, name, places[path, name], plain])
    return saved + [
        [path, "", True, np.asarray(variable.numpy())] for path, variable in graph.variables.items()
    ]


def set_python(model: Any, saved: Sequence[Sequence[Any]]) -> None:
    """Restore the result of `saved_python`, perhaps of another process."""
    if model is None or not saved:
        return
    graph = graph_of(model)
    for path, name, by_step, value in saved:
        if path in graph.variables:
            graph.variables[path].assign(value)
        elif graph.set_at(path, name, decoded(value)):
            _places(model)[path, name] = by_step
