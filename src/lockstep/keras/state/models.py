"""The models that a script has compiled: their variables, and values to load from a checkpoint."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.keras.backends.contract import Backend, StepKind
from lockstep.keras.backends.growth import Growths, growths_of, made_choices, parts_digest
from lockstep.keras.backends.traces import Traces, traces_of
from lockstep.keras.state.matching import build_optimizers
from lockstep.keras.variables import all_variables, assign, named_arrays


class CompiledModels:
    """The models of a process whose state is saved, in the order of compilation.

    Values of a checkpoint for a model that is not built are kept until it is.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._models: list[weakref.ref[Any]] = []
        self._built: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._built_before: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._compilations: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, Mapping[str, Any]] = {}

    def add(self, model: Any) -> None:
        """Add `model`, which was just compiled."""
        self._compilations[model] = self._compilations.get(model, 0) + 1
        for built in (self._built, self._built_before):
            built.pop(model, None)
        if all(reference() is not model for reference in self._models):
            self._models.append(weakref.ref(model))

    def build(self, model: Any, kind: StepKind, batch: Callable[[], Any]) -> None:
        """Create the variables that a step of `model` needs, and load the pending values.

        Args:
            model: the model, compiled.
            kind: the kind of the step.
            batch: reads a batch to build the model with.
        """
        self._backend.build(model, kind, batch)
        self._built[model] = self._built.get(model, False) or kind != "predict"
        self.load_waiting(model)

    def was_built_by_keras(self, model: Any) -> None:
        """Note that Keras has built `model` and its metrics, as it does itself with one replica."""
        self._built[model] = True

    def is_built(self, model: Any) -> bool:
        """Whether `model` has its variables. Unlike Keras's `built`, this includes a model without a call."""
        return model is not None and (model.built or model in self._built)

    def has_built(self, model: Any, kind: StepKind) -> bool:
        """Whether `build` has created the variables for a step of `model` since the last compilation."""
        return model in self._built and (kind == "predict" or self._built[model])

    @property
    def built(self) -> dict[int, bool]:
        """The models that calls of the script have built, by number: whether their metrics are built, too."""
        built_models = {**self._built_before, **self._built}
        return {
            index: built_models[model]
            for index, reference in enumerate(self._models)
            if (model := reference()) in built_models
        }

    @property
    def tried(self) -> list[Any]:
        """The models that this process has tried, or whose trial results it has taken over."""
        models = (reference() for reference in self._models)
        return [model for model in models if model is not None and growths_of(model).tried]

    @property
    def growths(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """The growths of the models that were tried, by number, with the number of the last compilation."""
        models = ((index, reference()) for index, reference in enumerate(self._models))
        return {
            index: (self._compilations[model], {**growths.packed(model), "moved": made_choices(model).moved})
            for index, model in models
            if model is not None and (growths := growths_of(model)).tried
        }

    def traces(self, places: Sequence[tuple[str, str]]) -> dict[int, tuple[int, dict[str, Any]]]:
        """The values with which the models' steps were traced, by number, with the compilation's number.

        Args:
            places: further places whose values count; see `Traces.saved`.
        """
        models = ((index, reference()) for index, reference in enumerate(self._models))
        return {
            index: (self._compilations[model], {kind: each.saved(places) for kind, each in traces.items()})
            for index, model in models
            if model is not None and (traces := traces_of(model))
        }

    def begin_traces(self, packed: Mapping[int, Any], model: Any) -> None:
        """Begin the traces of a model, which has none yet, with another process's value of `traces`."""
        for index, reference in enumerate(self._models):
            if reference() is not model or index not in packed:
                continue
            compilation, saved = packed[index]
            for kind in saved if compilation == self._compilations[model] else ():
                traces_of(model).setdefault(kind, Traces(model, kind)).begin_with(saved[kind])

    def arrive_at_traces(self, packed: Mapping[int, Any]) -> None:
        """Begin the traces of all models, when this process has the other values of the state."""
        for model in (reference() for reference in self._models):
            if model is not None and self.is_built(model):
                self.begin_traces(packed, model)
                for traces in traces_of(model).values():
                    traces.begin()

    def taken_growths(self, packed: dict[int, Any], model: Any) -> Growths | None:
        """Take a model's growths out of another process's value of `growths`.

        None means that the value lacks them, or that they are from before the model was compiled again, or
        before the program added or removed a layer.
        """
        for index, reference in enumerate(self._models):
            if reference() is model and index in packed:
                compilation, values = packed.pop(index)
                if compilation == self._compilations[model] and values.get("parts") == parts_digest(model):
                    made_choices(model).adopt(values.get("moved", {}))
                    return Growths.unpacked(model, values)
        return None

    def were_built(self, built: Mapping[int, bool]) -> None:
        """Note the models that skipped calls have built: the value of `built` in another process."""
        for index, reference in enumerate(self._models):
            if index in built and (model := reference()) is not None:
                self._built_before[model] = built[index]

    def was_built(self, model: Any, kind: StepKind) -> bool:
        """Whether a call that this process has skipped has built a step's variables of `model`."""
        return self._built_before.get(model, False) or (kind == "predict" and model in self._built_before)

    def awaits(self, model: Any) -> bool:
        """Whether values are pending until `model` is built."""
        return any(i in self._waiting and reference() is model for i, reference in enumerate(self._models))

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Load the result of `values` into all models, now or when they are built."""
        for index, reference in enumerate(self._models):
            if values := below(f"model {index}/", arrays):
                self._waiting[index] = values
                self.load_waiting(reference())

    def load_waiting(self, model: Any) -> None:
        """Load the pending values into a model, if it is built."""
        for index, reference in enumerate(self._models):
            if index in self._waiting and reference() is model and self.is_built(model):
                values = self._waiting.pop(index)
                # The calls that built its optimizers were skipped.
                build_optimizers(model, values)
                assign(model, values)

    def values(self, apart_from: Any) -> dict[str, Any]:
        """Return the values of all models except one, without variables shared with it.

        Args:
            apart_from: a model, or None.
        """
        shared = set() if apart_from is None else {id(variable) for variable in all_variables(apart_from)}
        values_by_name: dict[str, Any] = {}
        for index, reference in enumerate(self._models):
            other = reference()
            if other is not None and other is not apart_from and self.is_built(other):
                variables = [variable for variable in all_variables(other) if id(variable) not in shared]
                arrays = named_arrays(variables, variables)
                values_by_name |= {f"model {index}/{name}": v.value for name, v in arrays.items()}
        return values_by_name


def below(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
