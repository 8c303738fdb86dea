"""What a step reports: results of the model's metrics, and figures of its own.

A replica's metrics start from zero, so their results are reported from the total. A tensor tells by itself
whether it is a metric's result: a program may report it under any name, and in dictionaries within the logs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from lockstep.keras.backends.steps import replaced

_Path = tuple[str, ...]


class StepResults:
    """The results that metrics gave while a step ran.

    Attributes:
        names: under which the model reports them.
    """

    def __init__(self) -> None:
        # The values are kept, so that no other one gets their ids.
        self._found: dict[int, tuple[Any, Any, _Path]] = {}
        self.names: set[str] = set()

    def note(self, metric: Any, result: Any) -> Any:
        """Note a result of `metric`, which is returned."""
        self.names.update(result if isinstance(result, Mapping) else [metric.name])
        for path, value in _leaves(result):
            if keras.ops.is_tensor(value):
                self._found[id(value)] = value, metric, path
        return result

    def note_all(self, results: dict[str, Any]) -> dict[str, Any]:
        """Note what the model makes of all results, which is returned."""
        self.names.update(results)
        return results

    def find(self, value: Any) -> tuple[Any, _Path] | None:
        """Return the metric that gave `value`, and where in its result it is."""
        found = self._found.get(id(value))
        return None if found is None else found[1:]


@contextmanager
def noted_results(model: Any) -> Iterator[StepResults]:
    """Within the block the results that the model's metrics give are noted."""
    results, everything = StepResults(), model.get_metrics_result
    with ExitStack() as stack:
        for metric in {id(metric): metric for metric in model.metrics}.values():

            def result(metric: Any = metric, original: Callable[..., Any] = metric.result) -> Any:
                return results.note(metric, original())

            stack.enter_context(replaced(metric, "result", result))
        stack.enter_context(replaced(model, "get_metrics_result", lambda: results.note_all(everything())))
        yield results


class LogReport:
    """The logs of one step of `model`, to be put together again from totals.

    Attributes:
        figures: those of the step's own, by the names under which partials have them.
    """

    def __init__(self, model: Any, logs: Mapping[str, Any], results: StepResults) -> None:
        self._model = model
        self._logs = logs
        self._metrics: dict[_Path, tuple[Any, _Path]] = {}
        self._named: set[_Path] = set()
        self.figures: dict[str, Any] = {}
        for path, value in _leaves(logs):
            if (found := results.find(value)) is not None:
                self._metrics[path] = found
            elif len(path) == 1 and path[0] in results.names:
                # Made of a metric's result, as by rounding it.
                self._named.add(path)
            elif value is not None:
                self.figures[_name(path)] = value
        self._logs = mapped(lambda value: None, logs)

    def assembled(self, total: Mapping[str, Any]) -> dict[str, Any]:
        """Return the logs, with the results that the metrics have now and the figures that `total` has."""
        named = self._model.get_metrics_result() if self._named else {}
        results: dict[int, Any] = {}

        def value(path: _Path) -> Any:
            if path in self._named:
                return named[path[0]]
            if path in self._metrics:
                metric, inner = self._metrics[path]
                if id(metric) not in results:
                    results[id(metric)] = metric.result()
                return _within(results[id(metric)], inner)
            return total.get(_name(path))

        logs: dict[str, Any] = _mapped_paths(value, self._logs, ())
        return logs


def mapped(function: Callable[[Any], Any], logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs with `function` of each value, also of those in dictionaries within."""
    return {
        name: mapped(function, value) if isinstance(value, Mapping) else function(value)
        for name, value in logs.items()
    }


def _mapped_paths(function: Callable[[_Path], Any], logs: Mapping[str, Any], path: _Path) -> dict[str, Any]:
    return {
        name: _mapped_paths(function, value, (*path, name))
        if isinstance(value, Mapping)
        else function((*path, name))
        for name, value in logs.items()
    }


def _leaves(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _within(result: Any, path: _Path) -> Any:
    for name in path:
        result = result[name]
    return result


def _name(path: _Path) -> str:
    # Of names with a slash, no two paths have the same.
    return "log/" + "/".join(name.replace("/", "//") for name in path)
