"""The rounds of a step of Keras's loops: what a replica computes in each, and with which program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy.typing as npt

from lockstep.data.batch import Batch, Share
from lockstep.errors import LockstepError
from lockstep.keras.backends.common import refuse_misfit
from lockstep.keras.backends.contract import Backend, Partial, Program, StepKind, Total
from lockstep.keras.backends.growth import growths_of
from lockstep.keras.backends.traces import Traces
from lockstep.keras.backends.whole_batch import updating
from lockstep.keras.fit.local_steps import LocalProgram
from lockstep.keras.fit.outputs import leaves_by_path
from lockstep.keras.nests import repeated, structure_of
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.python_replicas import PythonOfReplicas
from lockstep.keras.rounds import PartialLayout, Round
from lockstep.keras.seeds import seed_at
from lockstep.keras.step_digests import RecordedStep
from lockstep.worker.job import Job

_ADVICE = (
    "all replicas must take the same path and leave equal values in Python attributes. A condition may "
    "depend on weights and callbacks, not on examples: keep values that do in a metric or a variable of a "
    "layer (add_weight), or return them from train_step as a log"
)


def repeated_share(share: Share, count: int) -> Share:
    """Return a share with another number of examples: the same ones, repeated from the beginning."""
    return share._replace(examples=count, data=lambda: repeated(share.data(), share.examples, count))


class StepPrograms:
    """The programs of the steps of one model, of one kind, and the common parts of these steps' rounds.

    Attributes:
        traces: the traces of all programs.
        context: returns the context in which replicas compute.
        local: the local steps of replicas; None if replicas take each step together.
        program: computes a replica's part of a step, and applies the total.
        python: the Python attributes that the steps change.
        layouts: the layouts of the partials, by the number of the round and the names of the arrays.
        gathering: the numbers of the rounds that have ended at a call of `gather`.
    """

    def __init__(
        self,
        *,
        job: Job,
        backend: Backend,
        model: Any,
        kind: StepKind,
        calls: NumberedCalls,
        context: Callable[[], AbstractContextManager[None]],
        traces: Traces,
    ) -> None:
        self.job = job
        self.backend = backend
        self.model = model
        self.kind = kind
        self.calls = calls
        self.context = context
        self.traces = traces
        # A check compares a step with one process, so it takes no local steps.
        self.local = job.local_steps if kind == "train" and not job.settings.checks else None
        self._make()
        self.python = PythonOfReplicas.of_model(model, backend.to_numpy, trains=kind == "train")

    def _make(self) -> None:
        """Make a program that knows the growths of the model at its first step."""
        self._growths = b""
        self.program: Program = self.backend.program(self.model, self.kind, self.traces.trace)
        if self.local is not None:
            self.program = LocalProgram(self.program, self.backend, self.model, self.local)
        self._by_structure: dict[str, Program] = {}
        self.layouts: dict[int, dict[frozenset[str], PartialLayout]] = {}
        self.gathering: set[int] = set()

    def follow_growths(self) -> None:
        """Make another program if the model has been tried again, because traces have the earlier growths."""
        growths = growths_of(self.model).digest(self.kind)
        if self._growths not in (b"", growths):
            self._make()
        self._growths = growths

    def for_data(self, data: Any) -> Program:
        """Return the program for examples like these: its effects may depend on which inputs they have.

        A program that trains has the same inputs in each step, and keeps what it has learned of its updates.
        """
        if self.kind == "train" or self.program.varies:
            return self.program
        structure = structure_of(data)
        if structure not in self._by_structure:
            first = not self._by_structure
            new = self.program if first else self.backend.program(self.model, self.kind, self.traces.trace)
            self._by_structure[structure] = new
        self.program = self._by_structure[structure]
        return self.program

    @property
    def traced(self) -> int:
        """The number of times that the backend has traced a replica's computation."""
        return sum(program.traced for program in self._by_structure.values() or [self.program])


class StepRound(Round):
    """The round of a step that follows the rounds with the totals `earlier`.

    Replicas without examples contribute nothing. A worker that has only such replicas also computes
    replica 0 to learn the layout of a partial: in the first step, and where steps vary, in each.

    Args:
        programs: the programs of the step.
        state: the state at the beginning of the step.
        batch: the batch of the step.
        earlier: the totals of the earlier rounds.
        record: the record of the step.
        examples: receives the examples of each replica, by its id, if the step takes another round.

    Attributes:
        shares: the shares that this worker has computed, of a program that predicts.
        outputs: the outputs of these replicas.
    """

    advice = _ADVICE

    def __init__(
        self,
        programs: StepPrograms,
        state: Any,
        batch: Batch,
        earlier: Sequence[Total] = (),
        record: RecordedStep | None = None,
        examples: dict[int, Any] | None = None,
    ) -> None:
        layouts = programs.layouts.setdefault(len(earlier), {})
        varies = programs.program.varies or programs.kind != "train"
        layout = None if varies else next(iter(layouts.values()), None)
        if layout is not None and layout.joined:
            # Sample weights are gathered only where there are some.
            layout = None
        super().__init__(
            programs.calls.where(),
            programs.job.worker,
            number=len(earlier),
            layout=layout,
            layouts=layouts,
            to_numpy=programs.backend.to_numpy,
            # The last update reads its totals in place.
            settle=programs.backend.settle,
            lap=programs.job.timer.lap,
        )
        call = programs.calls.current
        self._seed = seed_at(call.seed, call.number, call.steps)
        self._programs = programs
        self._state = state
        self._batch = batch
        self._earlier = earlier
        self._record = record
        self._examples = {} if examples is None else examples
        self.shares: dict[int, Share] = {}
        self.outputs: dict[int, Any] = {}

    def _share(self, replica: int) -> Share:
        return self._batch.share(replica, self._seed)

    def contributes(self, replica: int) -> bool:
        """Whether the replica has examples."""
        return self._share(replica).examples > 0

    def counts(self, replica: int) -> bool:
        """Whether values that the replica sets count."""
        return self._batch.is_counted(replica)

    def compute(self, replica: int) -> Partial:
        """Compute a replica with the program; the computation may still continue afterwards."""
        programs, share, timer = self._programs, self._share(replica), self._programs.job.timer
        if (data := self._examples.get(replica)) is None:
            data = (timer.charging("input", share.data) if timer.running else share.data)()
        share = share._replace(data=lambda: data)
        # A replica that this worker only verifies is recorded by its owner.
        if self._record is not None and replica in programs.job.view.replicas_of(self.worker):
            self._record.read(replica, data)
            self._record.rows = self._batch.examples

        def run(rows: int) -> Partial:
            first = share if rows == share.examples else _first_rows(share, rows)
            return programs.program.compute(self._state, first, self._earlier)

        try:
            with programs.context():
                if programs.program.varies:
                    partial = self._compute_in_python(run, share)
                else:
                    partial = programs.for_data(data).compute(self._state, share, self._earlier)
        except LockstepError:
            raise
        except Exception as error:
            self._explain(error, share)
            raise
        if programs.kind == "predict":
            self.shares[replica] = share
            self.outputs.update(programs.program.outputs())
        if programs.program.is_last(self.number):
            self._examples.pop(replica, None)
        else:
            self._examples[replica] = data
        return partial

    def _compute_in_python(self, run: Callable[[int], Partial], share: Share) -> Partial:
        # Rounds that gather run only a part of the step.
        program, python, replica = self._programs.program, self._programs.python, share.replica
        first_round = not updating(self._earlier) and self.number not in self._programs.gathering
        program.keep_passes(python.computes_once(replica, first_round=first_round))
        partial = python.compute(run, replica, share.examples, self.label, first_round=first_round)
        if python.has_written:
            # A round without a forward pass would not write it.
            program.keep_passes(False)
        return partial

    def form(self) -> str | None:
        """Return the form of the last computation, if steps of the program vary."""
        program, python, kind = self._programs.program, self._programs.python, self._programs.kind
        if not program.varies:
            return None
        changed = python.form() if kind != "predict" and program.is_last(self.number) else ""
        return f"{changed}; {program.form(self.number)}" if changed else program.form(self.number)

    def digest_of_inputs(self) -> bytes:
        """Return a hash of the batch and of the results of trials."""
        return self._batch.check() + growths_of(self._programs.model).digest(self._programs.kind)

    def parts(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial or a total by their names in the program."""
        return self._programs.program.parts(self.number, arrays)

    def outputs_of(self, replica: int) -> Mapping[str, npt.NDArray[Any]]:
        """Return the outputs of a replica if the program predicts."""
        if replica not in self.outputs:
            return {}
        leaves = leaves_by_path(self.outputs[replica], self._programs.backend.to_numpy)
        return {f"output {path}".strip(): array for path, array in leaves}

    def catching_up(self) -> AbstractContextManager[None]:
        """Within the block, the variables have the values from before the step."""
        return self._programs.program.published(self._state)

    def _explain(self, error: Exception, share: Share) -> None:
        """Raise ModelError if a replica has failed because its program expects the rows of the whole batch.

        Repeating the replica's rows up to the batch's number shows it.
        """
        programs, whole = self._programs, self._batch.examples
        if share.examples == whole:
            return
        try:
            with programs.context():
                programs.program.compute(self._state, repeated_share(share, whole), self._earlier)
        except Exception:
            return
        located = programs.program.located(error, self._state, share, self._earlier)
        refuse_misfit(programs.model, share.examples, whole, located)


def _first_rows(share: Share, rows: int) -> Share:
    """Return a share with fewer examples: the first ones."""

    def data() -> Any:
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:rows], share.data())

    return share._replace(examples=rows, data=data)
