"""How a model is tried: the same attempt for all rows and for each part, and with changed rows and values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError, PeerError
from lockstep.keras.assignments import reads_observed_by
from lockstep.keras.backends.contract import Backend
from lockstep.keras.backends.growth import HALF_TOLERANCE, MEAN, measured_growth, runs_python, tolerance_of
from lockstep.keras.fit.layer_calls import neutral
from lockstep.keras.fit.other_values import Change, bounded, changed, other_values
from lockstep.keras.fit.part_names import DRAWS, FIGURE, LIBRARIES, METRIC, UNTRIED
from lockstep.keras.fit.plain_function import computes_in_half, single_precision
from lockstep.keras.fit.tried_rows import TriedBatch, TriedRows
from lockstep.keras.private.common import loss_tracker
from lockstep.keras.randomness import current_states, random_numbers
from lockstep.keras.reached_objects import unchanged
from lockstep.keras.variables import flat_metrics
from lockstep.worker.job import Job

NOTHING = object()
"""Represents the growth of a value that is zero for all rows and for each part, or not a number."""

_FEW = 8
"""The most numbers that get other values one by one after the program has failed with all of them."""

Array = npt.NDArray[Any]
Result = TypeVar("Result")


class TriedModel:
    """A model, the rows with which it is tried, and the names of the parts that compare examples.

    Args:
        job: the job in which the model trains.
        backend: the backend of the model.
        model: the model, built and compiled.
        batch: the rows to try. They are read only if the program has parts to try.
        tries: whether the model may be called. Otherwise, the parts to try are named.

    Attributes:
        names: the names of the parts of the program that compare examples, or could not be tried.
        failed: whether an attempt has failed.
        changes_values: whether an attempt runs with other rows, or other values of numbers.
        precision: returns the context of an attempt, in which layers and casts compute in single precision.
        runs_python: whether the program's Python runs in each step. In a compiled step, it runs once.
    """

    def __init__(self, job: Job, backend: Backend, model: Any, batch: TriedBatch, *, tries: bool) -> None:
        self.job = job
        self.backend = backend
        self.model = model
        self.batch = batch
        self.tries = tries
        self.names: list[str] = []
        self.failed = False
        self.changes_values = False
        # Rounding to half precision would hide how values grow.
        self.precision: Callable[[], AbstractContextManager[object]] = partial(single_precision, model)
        self._computed: object = None
        self.runs_python = runs_python(model)

    @property
    def weights(self) -> list[float]:
        """The fractions of the rows to try that the parts of the batch have."""
        return [part.weight for part in self.batch.parts]

    def results(self, names: Sequence[str], attempt: Callable[[], list[Any]]) -> list[Any]:
        """Return the result of a trial; if it fails, name the parts of the program that it should measure."""
        try:
            if self.tries:
                # Reading may draw random numbers, which a trial would undo.
                if self.batch.count < 2:
                    return []
                try:
                    results, read = self._once(attempt)
                except (DataError, PeerError):
                    raise
                except Exception:
                    if not self._computed:
                        raise
                    # A layer may have made constants in half precision, which cannot be combined with other
                    # types.
                    precision, self.precision = self.precision, nullcontext
                    try:
                        results, read = self._once(attempt)
                    except BaseException:
                        self.precision = precision
                        raise
                return [*results, *self._with_other_rows(attempt), *self._repeated(attempt, read)]
        except (DataError, PeerError):  # Workers may read the batch together.
            raise
        except Exception:  # The program may call its parts differently from the trial.
            pass
        self.failed = True
        for name in names:
            self.name(name, tried=False)
        return []

    def _once(self, attempt: Callable[[], list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the results of a trial, and the variables of Keras that it has read."""
        read: dict[int, Any] = {}
        with self.undisturbed(), reads_observed_by(lambda v: read.setdefault(id(v), v)):
            return attempt(), list(read.values())

    def _with_other_rows(self, attempt: Callable[[], list[Any]]) -> list[Any]:
        """Return the results of a trial with some padded rows, and with other labels.

        Rows without padding do not show a mean over the elements that the program's own mask keeps.
        """
        batch = self.batch
        results: list[Any] = []
        for rows in (batch.padded(), batch.with_extremes()):
            if rows is not None:
                self.changes_values, self.batch = True, rows
                try:
                    # The program may not be made for padding.
                    with suppress(Exception, SystemExit), self.undisturbed(), bounded():
                        results += attempt()
                finally:
                    self.changes_values, self.batch = False, batch
        return results

    def _repeated(self, attempt: Callable[[], list[Any]], read: Sequence[Any]) -> list[Any]:
        """Return the results of a trial with other values of the numbers that the program may change.

        Args:
            attempt: the trial.
            read: the variables of Keras that it has read.
        """
        results: list[Any] = []

        def succeeds(changes: Sequence[Change]) -> bool:
            # The program may expect one of the values.
            with suppress(Exception, SystemExit), self.undisturbed(), changed(changes), bounded():
                results.extend(attempt())
                return True
            return False

        self.changes_values = True
        try:
            for changes in other_values(self.model, read, runs_python=self.runs_python):
                if not succeeds(changes) and 1 < len(changes) <= _FEW:
                    for change in changes:
                        succeeds([change])
        finally:
            self.changes_values = False
        return results

    def stays_half(self) -> bool:
        """Whether layers compute in half precision even in a trial."""
        with self.precision():
            return computes_in_half(self.model)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within the block, random numbers, statistics or rounding do not make rows depend on each other."""
        with random_numbers(0), neutral(self.model, self._name_draws), self.precision() as self._computed:
            yield

    def each(self, compute: Callable[[TriedRows], Result]) -> list[Result]:
        """Return the results for all rows, and for each part, from equal random states."""
        results = []
        for part in (self.batch.whole, *self.batch.parts):
            with random_numbers(0), unchanged(self.model), self.global_draws_named():
                results.append(compute(part))
        return results

    def _name_draws(self, function: str) -> None:
        self.name(f"{DRAWS}{function}")

    @contextmanager
    def global_draws_named(self) -> Iterator[None]:
        """Name the global generators of Python and NumPy if the block draws from them."""
        before = current_states()
        yield
        after = current_states()
        for library in LIBRARIES:
            if after[library.lower()] is not before[library.lower()]:
                self._name_draws(library)

    def growth(self, values: Sequence[Array], weights: Sequence[float] = (), *, half: bool = False) -> Any:
        """Return the growth of a value, from its values for all rows and for the parts.

        It is `NOTHING` for zeros, and for a value that is not a number.

        Args:
            values: the values for all rows, then for each part.
            weights: the weights of the parts.
            half: whether the value is computed in half precision, whatever its own type is.
        """
        whole, *parts = values
        if not any(np.any(value) for value in values) or not np.any(np.isfinite(whole)):
            return NOTHING
        tolerance = HALF_TOLERANCE if half else tolerance_of(whole)
        return measured_growth(whole, parts, weights or self.weights, tolerance)

    def name(self, name: str, tried: bool = True) -> None:
        """Add the name of a part, with a remark if it could not be tried."""
        name = name if tried else f"{name}{UNTRIED}"
        if name not in self.names:
            self.names.append(name)

    def name_array(self, name: str, owners: "ArrayOwners", step: str, *, tried: bool = True) -> None:
        """Name the part of the program to which an array of a partial belongs."""
        kind, _, rest = name.partition("/")
        owner = owners.owner(name)
        if kind == "metric" and (owner is None or owner is not loss_tracker(self.model)):
            self.name(f"{METRIC}{owner.name if owner is not None else rest}", tried)
        elif kind == "log":
            figure = f"{FIGURE}{rest.replace('//', '/')} of"
            if f"{figure} compute_metrics" not in self.names:
                self.name(f"{figure} {step}", tried)
        else:
            self.name(f"{step} of {type(self.model).__name__}", tried)


class ArrayOwners:
    """The metrics of a model, to which the arrays of a partial belong."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._metrics = {id(v): metric for metric in flat_metrics(model.metrics) for v in metric.variables}

    def owner(self, name: str) -> Any:
        """Return the metric to which an array of a partial belongs, or None if it belongs to none."""
        kind, _, rest = name.partition("/")
        return self._metrics.get(id(self._model.metrics_variables[int(rest)])) if kind == "metric" else None

    def unlike_means(self, growths_by_name: Mapping[str, Any]) -> dict[str, int]:
        """Return the growths other than `MEAN`, by the names of the arrays of a partial.

        If a sum of a metric is zero in the trial, such as its number of correct answers, it has the growth of
        the metric's other sums.
        """
        growths = dict(growths_by_name)
        for name, growth in growths_by_name.items():
            if growth is NOTHING and (owner := self.owner(name)) is not None:
                of_metric = {g for n, g in growths_by_name.items() if self.owner(n) is owner}
                others = of_metric - {NOTHING}
                growths[name] = others.pop() if len(others) == 1 else NOTHING
        return {n: g for n, g in growths.items() if g is not NOTHING and g != MEAN}
