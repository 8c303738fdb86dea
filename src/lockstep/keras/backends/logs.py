"""The logs of a step: results of the model's metrics, and values that the step computes itself.

A replica's metrics start from zero, so the logs contain the metrics' results for the total. The identity of a
tensor shows whether it is a metric's result: a step may log it under any name, even in nested dictionaries.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from lockstep.keras.backends.contract import LOGS
from lockstep.worker.patch_registry import replaced

_Path = tuple[str, ...]


class MetricResults:
    """The results that metrics have returned while a step ran.

    Attributes:
        names: the names under which the model logs them.
    """

    def __init__(self) -> None:
        # The values are stored so that their ids remain unique.
        self._sources: dict[int, tuple[Any, Any, _Path]] = {}
        self.names: set[str] = set()

    def record(self, metric: Any, result: Any) -> Any:
        """Record a result of `metric`, and return it."""
        self.names.update(result if isinstance(result, Mapping) else [metric.name])
        for path, value in _leaves(result):
            if keras.ops.is_tensor(value):
                self._sources[id(value)] = value, metric, path
        return result

    def record_all(self, results: dict[str, Any]) -> dict[str, Any]:
        """Record the names of the model's results, and return the results."""
        self.names.update(results)
        return results

    def find(self, value: Any) -> tuple[Any, _Path] | None:
        """Return (the metric that has returned `value`, the path of `value` in its result), or None."""
        source = self._sources.get(id(value))
        return None if source is None else source[1:]


@contextmanager
def recorded_results(model: Any) -> Iterator[MetricResults]:
    """Within the block, record the results that the model's metrics return."""
    results, model_results = MetricResults(), model.get_metrics_result
    with ExitStack() as stack:
        for metric in {id(metric): metric for metric in model.metrics}.values():

            def result(metric: Any = metric, original: Callable[..., Any] = metric.result) -> Any:
                return results.record(metric, original())

            stack.enter_context(replaced(metric, "result", result))
        stack.enter_context(
            replaced(model, "get_metrics_result", lambda: results.record_all(model_results()))
        )
        yield results


class LogTemplate:
    """The structure of the logs of one step of `model`, to be filled in from totals.

    Attributes:
        values: the values that the step computes itself, by their names in partials.
    """

    def __init__(self, model: Any, logs: Mapping[str, Any], results: MetricResults) -> None:
        self._model = model
        self._logs = logs
        self._metrics: dict[_Path, tuple[Any, _Path]] = {}
        self._named: set[_Path] = set()
        self.values: dict[str, Any] = {}
        for path, value in _leaves(logs):
            if (source := results.find(value)) is not None:
                self._metrics[path] = source
            elif len(path) == 1 and path[0] in results.names:
                # It is derived from a metric's result, for example by rounding.
                self._named.add(path)
            elif value is not None:
                self.values[_name(path)] = value
        self._logs = mapped(lambda value: None, logs)

    @property
    def text(self) -> str:
        """The structure and its metrics as a text."""
        names = {path: metric.name for path, (metric, _) in self._metrics.items()}
        return repr([(path, names.get(path)) for path, _ in _leaves(self._logs)])

    def assembled(self, total: Mapping[str, Any]) -> dict[str, Any]:
        """Return the logs with the present results of the metrics, and with the other values from `total`."""
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
    """Return logs with `function` applied to each value, including values in nested dictionaries."""
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
    # Doubled slashes keep the names of different paths distinct.
    return LOGS + "/".join(name.replace("/", "//") for name in path)
