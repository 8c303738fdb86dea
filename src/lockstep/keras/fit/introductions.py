"""The first batch of a compiled model: trials show which parts replicas compute differently from one process.

The program may change Python values that decide which of its code runs, such as `model.use_contrast`. A model
is tried again before the first step that uses changed values: see `Introductions.follow`.

Notes name these parts. A job that only checks the script also compares a step with plain Keras there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from lockstep.data.batch import Batch, GlobalBatch, LocalBatches
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.backends.growth import (
    Growths,
    choices_of,
    growths_of,
    made_choices,
    parts_digest,
    runs_python,
    set_growths,
)
from lockstep.keras.fit.adoption import settings_text
from lockstep.keras.fit.exactness import (
    introduction,
    kinds_per_replica,
    occurrences_note,
    per_replica_note,
    summed_occurrences,
    tried_parts,
    whole_batch_note,
)
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.fit.trainer import TrainerParts
from lockstep.keras.fit.trials import Trial
from lockstep.keras.fit.tried_rows import TriedBatch
from lockstep.keras.fit.witness import Witness
from lockstep.keras.nests import Nest
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.reached_objects import unchanged
from lockstep.system.notes import note

_MOST_CHOICES = 16
"""The most combinations of values of Python with which a model is tried."""


class Introductions:
    """Tries each model once for each kind of step.

    Args:
        parts: the parts of the trainer.
        new_step: returns a new step of a model.
        tries: whether a model may be called as often as a trial needs.
        divides_training: whether the workers divide the batches of training.
    """

    def __init__(
        self,
        parts: TrainerParts,
        new_step: Callable[[Any, StepKind], GlobalStep],
        tries: Callable[[Any], bool],
        *,
        divides_training: bool,
    ) -> None:
        self._parts, self._job, self._models = parts, parts.job, parts.models
        self._new_step = new_step
        self._tries, self._divides_training = tries, divides_training
        self._introduced = False
        self._told: set[str] = set()
        self._compared_steps: tuple[Any, dict[StepKind, GlobalStep]] = (None, {})
        self._witness = Witness(
            parts.job,
            parts.backend,
            self._compared_step,
            parts.functions.made_by_keras,
            parts.models.step_context,
        )

    def introduce(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        read: Callable[[], Any],
        weighs: Callable[[], bool],
    ) -> None:
        """Try a model, and compare a step of it if the job checks the script.

        Args:
            call: the call in progress.
            model: the model, built.
            kind: the kind of the step.
            read: returns the first batch.
            weighs: returns whether the batches have sample weights.

        Raises:
            ModelError: a metric does not add up over replicas.
        """
        with self.compared(call, model, kind, read):
            self.measure(call, model, kind, read, weighs)

    def compared(
        self, call: NumberedCall, model: Any, kind: StepKind, read: Callable[[], Any]
    ) -> AbstractContextManager[None]:
        """Return a context in which to try a model. A job that checks the script compares a step in it."""
        checks = self._job.settings.checks
        compilation = self._models.compilation(model)
        if not checks or (checks != "every-fit" and kind in compilation.witnessed):
            return nullcontext()
        compilation.witnessed.add(kind)
        return self._witness.compared(call.name, model, kind, read(), lambda: self._named(model))

    @staticmethod
    def _named(model: Any) -> list[str]:
        """Return the names of the parts of a model that differ from one process."""
        return [*growths_of(model).names, *summed_occurrences(model)]

    def _compared_step(self, model: Any, kind: StepKind) -> GlobalStep:
        """Return the step of a model to compare, which lasts as long as the step of Keras's loops.

        The two steps differ, because the compared one draws constants. In an earlier call, both may have
        learned facts about the model that are wrong in this call, and a comparison must detect that.
        """
        compared, steps = self._compared_steps
        if compared is not model:
            _, steps = self._compared_steps = (model, {})
        if kind not in steps or getattr(model, f"{kind}_function") is None:
            steps[kind] = self._new_step(model, kind)
        return steps[kind]

    def measure(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        read: Callable[[], Any],
        weighs: Callable[[], bool],
    ) -> None:
        """Measure how replicas combine the results of a model's step, and name each part that is per replica.

        This is done once for a compiled model, and again at the first sample weights, which a loss or metric
        of the program may use, or when the program has added or removed layers or metrics. The first note
        says that a script without a strategy is distributed.
        """
        adopts_all = self._models.adopts_all
        measured = growths_of(model)
        fits = bool(measured.tried) and measured.parts == parts_digest(model)
        # A process that joins or resumes may have different rows from those of the first trial.
        growths = measured if fits else self._parts.snapshots.growths(model) or measured
        if kind != "predict" and fits and kind not in growths.tried:
            # There may have been trials with other Python values since.
            growths = _earlier(growths, choices_of(model, kind, growths), kind) or growths
        tries = not growths.has_tried(model, kind) or (growths.unweighted and weighs())
        if growths is measured and not tries:
            return
        with unchanged(model):
            if tries:
                growths = self._tried(call, model, kind, TriedBatch(read), growths)
            elif growths.tried[kind] == call.number:
                # Reading may change the input.
                read()
            set_growths(model, growths)
            kinds = kinds_per_replica(model) if adopts_all and kind != "predict" else []
            occurrences = summed_occurrences(model) if kind == "train" else []
        self._tell(call, model, kinds, growths.names, introduces=kind != "predict")
        if (new := [part for part in occurrences if part not in self._told]) and self._notes_here:
            note(occurrences_note(new))
        self._told.update(occurrences)
        self._tell_exact(model, growths)

    def follow(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        batch: Batch,
        published: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Before a step, try the model again if the step uses Python values unlike those of the last trial.

        Results of earlier trials count again when their values return. All workers do the same, because it
        depends only on the state before the step. The reduce would detect differences.

        Args:
            call: the call in progress.
            model: the model, built.
            kind: the kind of the step.
            batch: the batch of the step.
            published: returns a context in which the variables of the model have their values.
        """
        growths = growths_of(model)
        if not any(growths.tried.values()):
            return
        choices = choices_of(model, kind, growths)
        if runs_python(model):
            self._name_counts(call, model)
        elif kind not in growths.traced:
            growths = replace(growths, traced={**growths.traced, kind: choices})
            set_growths(model, growths)
        if choices == growths.choices and kind in growths.tried:
            return
        if (earlier := _earlier(growths, choices, kind)) is not None:
            set_growths(model, earlier)
        elif len(growths.others) >= _MOST_CHOICES:
            self._name_values(call, model, f"values of Python in more than {_MOST_CHOICES} combinations")
        elif (rows := _rows(batch)) is None:
            self._name_values(call, model, "values of Python that change, where replicas have datasets")
        else:
            with published(), unchanged(model):
                tried = self._tried(call, model, kind, TriedBatch(rows), replace(growths, tried={}))
                # A worker that joins in this call reads what `measure` has read.
                numbers = {each: growths.tried.get(each, 0) for each in tried.tried}
                set_growths(model, replace(tried, tried=numbers, others=_others(growths, choices)))
            self._tell(call, model, (), tried.names, introduces=False)
            self._tell_exact(model, tried)

    def _name_counts(self, call: NumberedCall, model: Any) -> None:
        """Name the whole numbers that the program has changed, whose later values are not tried."""
        counts = sorted({place.partition("#")[0] for place in made_choices(model).counts})
        self._name_values(call, model, *(f"later values of {count}" for count in counts))

    def _name_values(self, call: NumberedCall, model: Any, *values: str) -> None:
        growths = growths_of(model)
        names = [f"what depends on {value} (possibly: it could not be tested)" for value in values]
        if new := [name for name in names if name not in growths.names]:
            set_growths(model, replace(growths, names=(*growths.names, *new)))
            self._tell(call, model, (), new, introduces=False)

    def _tried(
        self, call: NumberedCall, model: Any, kind: StepKind, batch: TriedBatch, before: Growths
    ) -> Growths:
        """Try a model; return the results of this and earlier trials."""
        parts, digest = self._parts, parts_digest(model)
        choices = choices_of(model, kind, before)
        earlier = before.tried if before.parts == digest else {}
        # Both have the same parts that are computed from the whole batch.
        both = kind == "train" or (kind == "test" and "train" in before.tried)
        kinds: list[StepKind] = ["train", "test"] if both else [kind]
        trial = Trial(
            self._job,
            parts.backend,
            model,
            batch,
            self._models.step_context(model),
            tries=self._tries(model),
            divides_training=self._divides_training,
        )
        if kind == "predict":
            # A trial of training has tried the same layers.
            if not earlier or has_own(model, "predict_step"):
                trial.name_predictions()
            names, growths = trial.names, before
        else:
            trial.measure(kinds)
            names = [*(tried_parts(model, batch) if self._models.adopts_all else ()), *trial.names]
            unweighted = trial.may_use_weights and batch.was_read and not batch.weighs
            growths = replace(
                growths_of(model),
                unweighted=unweighted,
                choices=choices,
                others=_others(before, choices),
                traced=before.traced,
            )
        return replace(
            growths,
            tried={**earlier, **dict.fromkeys(kinds, call.number if batch.was_read else 0)},
            parts=digest,
            names=tuple(dict.fromkeys([*before.names, *names])),
            exact=tuple(dict.fromkeys([*before.exact, *trial.exact])),
        )

    def _tell_exact(self, model: Any, growths: Growths) -> None:
        """Print which parts of a model are computed from the whole batch, each once."""
        if (new := [part for part in growths.exact if part not in self._told]) and self._notes_here:
            note(f"model {model.name!r}: {whole_batch_note(new)}")
        self._told.update(growths.exact)

    @property
    def _notes_here(self) -> bool:
        """Whether this worker shows the notes of the current position."""
        return self._job.is_chief and not self._parts.resumable.catches_up

    def _tell(
        self, call: NumberedCall, model: Any, kinds: Sequence[str], parts: Sequence[str], *, introduces: bool
    ) -> None:
        """Print which parts of a model are per replica: layer classes once, others once for equal models.

        Args:
            call: the call in progress.
            model: the model of the call.
            kinds: the classes of layers.
            parts: the other parts of the model.
            introduces: whether the first note says that a script without a strategy is distributed.
        """
        alike = settings_text(model) if parts else ""
        named = [*((kind, kind) for kind in kinds), *((f"{alike}{part}", part) for part in parts)]
        text = ""
        if introduces and self._models.adopts_all and not self._introduced:
            self._introduced = True
            text = introduction(call.name.partition(" ")[0], self._job.view, [part for _, part in named])
        elif new := [part for key, part in named if key not in self._told]:
            text = f"model {model.name!r}: {per_replica_note(new)}"
        self._told |= {key for key, _ in named}
        if text and self._notes_here:
            note(text)


def _others(growths: Growths, choices: str) -> dict[str, Growths]:
    """Return the results of trials with other choices than these."""
    latest = {growths.choices: replace(growths, others={}, traced={})} if growths.tried else {}
    return {key: other for key, other in {**growths.others, **latest}.items() if key != choices}


def _earlier(growths: Growths, choices: str, kind: StepKind) -> Growths | None:
    """Return the results of earlier trials of a kind of step with some choices, or None."""
    earlier = growths.others.get(choices)
    if earlier is None or kind not in earlier.tried:
        return None
    if (earlier.parts, earlier.unweighted) != (growths.parts, growths.unweighted):
        return None
    others = _others(growths, choices)
    return replace(earlier, others=others, traced=growths.traced, names=growths.names, exact=growths.exact)


def _rows(batch: Batch) -> Callable[[], Nest] | None:
    """Return a function that reads the rows to try; None with datasets of replicas.

    A worker would read the dataset of another worker's replica from its beginning.
    """
    if isinstance(batch, LocalBatches):
        batch = batch.batches[0]
    return batch.whole if isinstance(batch, GlobalBatch) else None
