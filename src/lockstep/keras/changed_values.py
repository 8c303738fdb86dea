"""Values of Python outside of models that the callbacks and steps of a `fit` change.

They are in the variables that functions of the model and of its callbacks name: global ones, those of
enclosing functions, and those of classes; and in containers and objects there. A process that skips steps
also skips these changes, so it takes over what has changed since the call began. What the script itself sets
is its own: an edited constant counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.keras.python_state import ObjectGraph, graph_of, is_value, saved_values, text_of
from lockstep.system.notes import note


class ChangedValues:
    """The values that a `fit` has changed.

    Args:
        model: the model, built.
        callbacks: those of the call.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any]) -> None:
        self._model, self._callbacks = model, list(callbacks)
        self._begun: list[ObjectGraph] = []
        self.note_beginning()

    def note_beginning(self) -> None:
        """Note the present values, before or after `on_train_begin`, as for attributes of callbacks."""
        self._begun.append(self._graph())

    def _graph(self) -> ObjectGraph:
        return graph_of(self._model, named=True, callbacks=self._callbacks)

    def places(self) -> list[tuple[str, str]]:
        """Return the places that have changed, as `lockstep.keras.python_state.Changes.places` does."""
        changed = [place for graph in self._begun for place in graph.changes().places()]
        return list(dict.fromkeys(changed))

    def packed(self) -> dict[str, Any]:
        """Return the values for `set_values`, with the texts of those before, and the names of others."""
        places, graph = self.places(), self._graph()
        before = {place: text_of(value) for place, value in self._begun[0].values_at(places).items()}
        values, others = saved_values(graph.values_at(places))
        return {
            "values": [[*saved, before.get((saved[0], saved[1]), "")] for saved in values],
            "others": [_name(place) for place in others if graph.is_variable(*place)],
        }


def set_values(model: Any, callbacks: Sequence[Any], packed: Mapping[str, Any], *, is_edited: bool) -> None:
    """Take over `ChangedValues.packed` of another process.

    Args:
        model: the model of the call.
        callbacks: those of the call.
        packed: the values.
        is_edited: whether files of the script have changed since then. Then a note names each value that the
            script sets otherwise now.
    """
    if not packed:
        return
    graph = graph_of(model, named=True, callbacks=list(callbacks))
    for path, name, value, before in packed["values"]:
        if is_edited and graph.is_variable(path, name):
            own = graph.values_at([(path, name)]).get((path, name))
            if is_value(own) and text_of(own) != before:
                note(
                    f"{_name((path, name))} is {text_of(own)} in the script, and was {before}: the value "
                    "that it had during training counts, because a callback or a step had changed it"
                )
        graph.set_saved(path, name, value)
    for name in packed["others"]:
        note(
            f"{name} changed during training, but a checkpoint cannot hold its value: it starts with the "
            "value that the script sets; keep it in numbers, texts, arrays, or lists and dicts of them"
        )


def _name(place: tuple[str, str]) -> str:
    return ".".join(filter(None, place))
