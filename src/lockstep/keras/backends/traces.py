"""Keeps the changes in Python of only one trace of a step, although each form of examples needs a trace.

A worker that computes replicas of unlike sizes traces more often than others, and a worker that joins traces
later. So each trace of a program begins with the same state and draws the same random numbers, and only the
changes of one trace last.

The state before the first trace includes global variables and closures that the program's functions name.
Numbers of Python's and NumPy's global generators that are drawn while tracing are not those of one process.
They follow from the seeds at the time of `compile`, the model and the kind of the step, so that a worker that
joins or resumes later traces the same program. Other state out of reach, such as a global list, is not made
equal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.keras.backends.contract import StepKind
from lockstep.keras.private.common import TRACE_SEED
from lockstep.keras.python_state import ObjectGraph, graph_of
from lockstep.keras.randomness import plain_random_numbers, script_seeds
from lockstep.keras.seeds import seed_of
from lockstep.worker import job


class Traces:
    """The traces of one program, a step of one kind of one model."""

    def __init__(self, model: Any, kind: StepKind) -> None:
        self._model = model
        self._seed = seed_of(vars(model).get(TRACE_SEED), kind)
        self._graph: ObjectGraph | None = None
        self._lasts = False

    @contextmanager
    def trace(self, is_whole: Callable[[], bool]) -> Iterator[None]:
        """Within the block, the backend traces a step, or a round of it.

        The first trace that runs the step to its end changes Python attributes.

        Args:
            is_whole: returns after the block whether the trace has run the step to its end.
        """
        if self._graph is None:
            self._graph = graph_of(self._model, named=True)
        graph = self._graph
        present = graph.restore()
        try:
            with plain_random_numbers(self._seed):
                yield
        finally:
            changes = graph.restore()
            graph.make(present)
        if not self._lasts and is_whole():
            self._lasts = True
            graph.make(changes)
            graph.stop_watching()


def seed_traces(model: Any, subject: str) -> None:
    """Set the seed of the random numbers of the traces of a model, which was just compiled.

    A worker that joins the job compiles it at the same place of the script.

    Args:
        model: the compiled model.
        subject: identifies the model on all workers.
    """
    vars(model)[TRACE_SEED] = seed_of(script_seeds(job.current().settings.seed), subject)
