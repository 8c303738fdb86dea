"""Keeps the changes in Python of only one trace of a step, although each form of examples needs a trace.

A worker that computes replicas of different sizes traces more often than others, and a worker that joins
traces later. So each trace of a program begins with the same state and draws the same random numbers, and
only the changes of one trace last.

The state before the first trace includes the variables that the program's functions name: global variables,
those of enclosing functions, and those of classes. A process that joins or resumes takes over the values of
these that have changed since then, and traces with them. Numbers of Python's and NumPy's global generators
that are drawn while tracing are not those of one process. They follow from the seeds at the time of
`compile`, the model and the kind of the step, so that a worker that joins or resumes later traces the same
program.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.keras.backends.contract import StepKind
from lockstep.keras.backends.growth import forget_trace
from lockstep.keras.private.common import TRACE_SEED, TRACES
from lockstep.keras.python_state import ObjectGraph
from lockstep.keras.python_values import SavedValue, saved_values
from lockstep.keras.randomness import plain_random_numbers, script_seeds
from lockstep.keras.reached_objects import graph_of
from lockstep.keras.seeds import seed_of
from lockstep.worker import job


class Traces:
    """The traces of the programs of one step, of one kind of one model.

    Attributes:
        has_begun: whether this process has traced the step.
    """

    def __init__(self, model: Any, kind: StepKind) -> None:
        self._model = model
        self._seed = seed_of(vars(model).get(TRACE_SEED), kind)
        self._graph: ObjectGraph | None = None
        self._lasts = False
        self._first: Sequence[SavedValue] = ()
        self.has_begun = False

    def saved(self, others: Sequence[tuple[str, str]]) -> list[SavedValue]:
        """Return values before the first trace, for `begin_with`.

        These are the values that have changed since then, and values at other places, which another process
        may not yet have when it traces.
        """
        if self._graph is None:
            return list(self._first)
        changed = self._graph.changes().places()
        return saved_values(self._graph.values_at({**dict.fromkeys(changed), **dict.fromkeys(others)}))

    def begin_with(self, first: Sequence[SavedValue]) -> None:
        """Begin the first trace with the values of another process."""
        self._first = first

    def begin(self) -> ObjectGraph:
        """Exclude later changes from the traces of this process, as if it had already traced the step."""
        if self._graph is None:
            self._graph = graph_of(self._model, named=True)
            self._graph.begin_with(self._first)
        return self._graph

    @contextmanager
    def beginning(self) -> Iterator[ObjectGraph]:
        """Within the block, the state is that before the first trace."""
        graph = self.begin()
        present = graph.restore()
        try:
            yield graph
        finally:
            graph.restore()
            graph.make(present)

    @contextmanager
    def trace(self, is_whole: Callable[[], bool]) -> Iterator[None]:
        """Within the block, the backend traces a step, or a round of it.

        The first trace that runs the step to its end changes Python attributes.

        Args:
            is_whole: returns after the block whether the trace has run the step to its end.
        """
        with self.beginning() as graph:
            self.has_begun = True
            with plain_random_numbers(self._seed):
                yield
            changes = graph.changes()
        if not self._lasts and is_whole():
            self._lasts = True
            # Changes that another process has made since its trace remain.
            graph.make_where_unchanged(changes)
            graph.stop_watching()


def traces_of(model: Any) -> dict[StepKind, Traces]:
    """Return the traces of the steps of a compiled model, by their kinds."""
    traces: dict[StepKind, Traces] = vars(model).setdefault(TRACES, {})
    return traces


def new_traces(model: Any, kind: StepKind) -> Traces:
    """Return the traces of a step of a compiled model, whose function is being made.

    Traces that another process has begun continue. Traces of an earlier function are forgotten.
    """
    traces = traces_of(model)
    if kind in traces and traces[kind].has_begun:
        forget_trace(model, kind)
        del traces[kind]
    return traces.setdefault(kind, Traces(model, kind))


def seed_traces(model: Any, subject: str) -> None:
    """Forget the traces of a model, which was just compiled, and set the seed of their random numbers.

    A worker that joins the job compiles it at the same place in the script.

    Args:
        model: the compiled model.
        subject: identifies the model on all workers.
    """
    vars(model)[TRACES] = {}
    vars(model)[TRACE_SEED] = seed_of(script_seeds(job.current().settings.seed), subject)
