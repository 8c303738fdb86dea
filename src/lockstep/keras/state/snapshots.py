"""Snapshots of the whole state at the end of a step: taking, saving and restoring them."""

import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.values import pack, unpack
from lockstep.errors import ChangedError, CheckpointError
from lockstep.keras import assignments
from lockstep.keras.backends.contract import Backend, TrainingState
from lockstep.keras.backends.growth import Growths, set_growths
from lockstep.keras.backends.logs import mapped
from lockstep.keras.host_report import libraries, report_for_joiners
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.python_replicas import saved_python, set_python
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.keras.state.callback_states import (
    callback_states,
    lasting,
    listed,
    listeners,
    set_callback_states,
)
from lockstep.keras.state.matching import build_optimizers
from lockstep.keras.state.models import CompiledModels, below
from lockstep.keras.state.resumable_calls import ResumableCalls
from lockstep.keras.state.settings import (
    Settings,
    differences,
    settings_of_call,
    settings_of_model,
    settings_of_parts,
)
from lockstep.keras.variables import assign, step_state
from lockstep.keras.verification import verifications_of
from lockstep.observability.events import LastStepEnded, TrainingResumed
from lockstep.system.notes import note
from lockstep.worker.job import Job
from lockstep.worker.program_sources import own_sources

_LAST_SECONDS = 60.0


class ApartState(NamedTuple):
    """The part of the chief's state that a worker needs to join a call in which processes are apart.

    Attributes:
        random: the random states from which a worker continues.
        peers: the facts about the processes; see `Mesh.peers`.
        values: variables of the model of the call, with their values at some time within the call.
    """

    random: Mapping[str, Any]
    peers: Mapping[str, Any]
    values: Sequence[tuple[Any, Any]] = ()


class Snapshots:
    """Takes the state of a process's models, callbacks and random generators, and restores it.

    Attributes:
        models: the models whose state is included.
        resumable: the finished calls of the script and the one in progress.
    """

    def __init__(self, job: Job, backend: Backend, calls: NumberedCalls) -> None:
        self.models = CompiledModels(backend)
        self.resumable = ResumableCalls(job, calls)
        self._job = job
        self._backend = backend
        self._calls = calls
        self._described: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()

    def adopt(self, model: Any) -> None:
        """Include `model`, which was just compiled, in the state."""
        self._described.pop(model, None)
        self.models.add(model)

    def end_step(self, take_snapshot: Callable[[bool], Contents]) -> None:
        """Let workers join and leave, and save a checkpoint, if due; exit if this worker was asked to.

        Args:
            take_snapshot: `self.take` for the completed step.
        """
        self._job.between_steps(lambda whole: self._for_joiners(take_snapshot(whole)))
        scheduler = self._job.checkpoints.scheduler
        if scheduler is not None and not self._job.is_chief:
            scheduler.follow(self._calls.taken)
        elif scheduler is not None:
            scheduler.after_step(self._calls.taken, lambda: take_snapshot(True))
            if scheduler.leaving:
                self._job.events.publish(LastStepEnded(self._calls.taken))
                scheduler.close(_LAST_SECONDS)
                sys.exit(128 + signal.SIGTERM)

    def change_workers(self, take_snapshot: Callable[[bool], Contents]) -> None:
        """Let workers join and leave before a step that is taken again; see `Verifications.doubt`."""
        self._job.change_workers(lambda whole: self._for_joiners(take_snapshot(whole)))

    def _for_joiners(self, contents: Contents) -> Contents:
        manifest = {**contents.manifest, "host": report_for_joiners(self._job)}
        return replace(contents, manifest=manifest)

    def hold(self, take_snapshot: Callable[[], Contents]) -> None:
        """Hold the state that `take_snapshot` returns, to be saved if no further step follows."""
        if self._job.checkpoints.scheduler is not None and self._job.is_chief:
            self._job.checkpoints.scheduler.hold(self._calls.taken, take_snapshot)

    def hold_late(self, take_snapshot: Callable[[], Contents]) -> None:
        """Work like `hold`, but call `take_snapshot` only before the state may change."""
        scheduler = self._job.checkpoints.scheduler
        if scheduler is not None and self._job.is_chief and len(self._calls.stack) == 2:
            call = self._calls.current

            def take_late() -> Contents:
                with self._calls.again_in(call):
                    return take_snapshot()

            scheduler.hold_late(self._calls.taken, take_late)
            assignments.install()
            assignments.before_next(scheduler.settle)

    def take(
        self,
        whole: bool,
        model: Any,
        logs: Any,
        program: TrainingState | None = None,
        state: Any = None,
        *,
        callbacks_done: bool = False,
    ) -> Contents:
        """Return the state at the end of a step of `model`, or of a call without `program`.

        The next step may change the arrays. If not `whole`, return only the position. With `callbacks_done`,
        callbacks have processed the end of the step, and the state is in the variables of `model`.
        """
        call = self._calls.current
        doubt = verifications_of(self._job).packed_doubt
        position = {
            "journal": self.resumable.journal.packed(),
            # A worker that joins for a step that is taken again goes up to it, past the callbacks before it.
            "steps": call.steps + bool(doubt) if program is not None else 0,
            "looks": call.samples,
            "passes": call.passes,
            "states": dict(call.states),
            "turn": self.resumable.turns.key,
            "growths": self.models.growths,
        }
        if not whole:
            return Contents(self._calls.taken, *self._packed(position, {}))
        values_of_model = program.named_state(state) if program is not None else _values(step_state(model))
        arrays = {f"current/{name}": value for name, value in values_of_model.items()}
        arrays |= self.models.values(apart_from=model)
        callbacks = listeners(call.callbacks, model) if program is not None else []
        training = position | {
            "methods": dict(self._calls.methods),
            "inner": dict(call.inner),
            "taken": self._calls.taken,
            "since": self.resumable.since,
            "call": call.name,
            "logs": mapped(lambda value: np.asarray(self._backend.to_numpy(value)), logs or {}),
            "callbacks": callback_states(callbacks, call.callback_hashes),
            "settings": self._settings(model, program),
            "sources": own_sources(),
            "random": self.resumable.journal.states
            if program is None
            else random_states(call.held_by_validation),
            "heard": callbacks_done,
            "stops": callbacks_done and bool(model.stop_training),
            "verified": verifications_of(self._job).packed,
            "built": self.models.built,
            "python": saved_python(model),
            **({"doubt": doubt} if doubt else {}),
        }
        packed, converted = self._packed(training, arrays)
        manifest = {"job": self.job_facts(), **packed}
        if (verifications := verifications_of(self._job)).plan.verification.every:
            manifest["verified"] = verifications.up_to
        return Contents(self._calls.taken, manifest, converted)

    def take_apart(
        self, whole: bool, apart_state: Callable[[], ApartState], model: Any = None, steps: int = 0
    ) -> Contents:
        """Return the state for workers that join while the others do not wait for each other.

        Args:
            whole: whether to return the whole state; otherwise only the position.
            apart_state: returns the chief's state.
            model: the model of the call in progress; None between two entries of the log of a call.
            steps: number of completed steps of the call in progress, 1 or more.
        """
        call = self._calls.current
        training: dict[str, Any] = {
            "journal": self.resumable.journal.packed(),
            "steps": steps,
            "growths": self.models.growths,
        }
        if model is None:
            training["schedules"] = True
        else:
            training |= {"looks": call.samples, "call": call.name, "turn": self.resumable.turns.key}
        arrays: dict[str, Any] = {}
        if whole:
            apart = apart_state()
            training |= {"built": self.models.built, "random": dict(apart.random), "peers": dict(apart.peers)}
            if model is not None:
                values = {id(variable): value for variable, value in apart.values}
                named = step_state(model).items()
                arrays = {f"current/{name}": values[id(v)] for name, v in named if id(v) in values}
                arrays |= self.models.values(apart_from=model)
                training |= {"methods": dict(self._calls.methods), "taken": self._calls.taken}
        return self._for_joiners(Contents(self._calls.taken, *self._packed(training, arrays)))

    def join_apart(self, call: str, model: Any = None) -> Mapping[str, Any]:
        """Restore the state that `take_apart` has returned, and return the facts about the processes.

        Args:
            call: names the call in progress.
            model: as for `take_apart`.
        """
        resumption = self.resumable.resumption
        assert resumption is not None
        arrays = resumption.contents.arrays
        training = unpack(resumption.contents.manifest["training"], arrays)
        self.models.load(arrays)
        self.models.were_built(training["built"])
        if model is not None:
            assign(model, below("current/", arrays))
            self._calls.move_to(training["methods"], training["taken"])
        set_random_states(training["random"], self._calls.current.held_by_inputs)
        self.resumable.arrive()
        self._calls.current.skipped = 0
        where = f"step {resumption.steps} of {call}" if resumption.steps else call
        self._job.events.publish(TrainingResumed(where, self._calls.taken))
        return dict(training["peers"])

    def _packed(
        self, training: Mapping[str, Any], arrays: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the manifest and the arrays of contents."""
        packed, values = pack(dict(training), "training")
        converted = {
            name: value if isinstance(value, np.ndarray) else self._backend.to_numpy(value)
            for name, value in arrays.items()
        }
        return {"training": packed}, {**converted, **values}

    def values_of_models(self) -> dict[str, Any]:
        """Return the values of all compiled models, by name, as arrays of NumPy."""
        tensors = self.models.values(None)
        return {name: np.array(self._backend.to_numpy(tensor)) for name, tensor in tensors.items()}

    def job_facts(self) -> dict[str, Any]:
        """Return the facts, besides the script, on which the bits of the results depend."""
        job = self._job
        return {
            "replicas": job.view.replicas,
            "seed": job.settings.seed,
            "threads": job.settings.threads,
            "input": "joint" if job.settings.joint_input else "divided",
            "backend": keras.backend.backend(),
            "libraries": libraries(),
        }

    def restore(self, model: Any, program: TrainingState | None = None, state: Any = None) -> tuple[Any, Any]:
        """Restore everything from the resumption, and return (logs, the state for steps of `program`)."""
        resumption = self.resumable.resumption
        assert resumption is not None
        contents = resumption.contents
        training = unpack(contents.manifest["training"], contents.arrays)
        if not resumption.joined:
            self.compare_settings(contents.step, training, model, program)
        self.models.load(contents.arrays)
        self.models.were_built(training.get("built", {}))
        for tried in self.models.tried:
            # Since this process took over what trials have shown, members may have tried the model again.
            if (growths := self.growths(tried)) is not None:
                set_growths(tried, growths)
        current = below("current/", contents.arrays)
        if model is not None:
            # Some steps build optimizers when they apply them.
            build_optimizers(model, current)
        if program is not None:
            state = program.load(state, current)
        else:
            assign(model, current, whole=True)
        call = self._calls.current
        self._calls.move_to(training["methods"], training["taken"])
        verifications_of(self._job).unpack(
            training.get("verified", ()), training["taken"], training.get("doubt", b"")
        )
        try:
            if program is not None:
                call.inner = dict(training["inner"])
                set_callback_states(listeners(call.callbacks, model), training["callbacks"])
            set_python(model, training.get("python", ()))
            # A process that skips steps reads the examples again, but validates nothing.
            set_random_states(training["random"], call.held_by_validation)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot read the callbacks and random states in the checkpoint of step {contents.step}: "
                f"{error!r}"
            ) from error
        self.resumable.arrive()
        if training.get("heard"):
            call.processed, model.stop_training = call.steps, training["stops"]
        if self._job.checkpoints.scheduler is not None and not resumption.joined:
            self._job.checkpoints.scheduler.resumed(self._calls.taken)
        where = f"step {call.steps} of {call.name}" if program is not None else call.name
        self._job.events.publish(TrainingResumed(where, self._calls.taken))
        return training["logs"], state

    def growths(self, model: Any) -> Growths | None:
        """Return, once, what trials of a model have shown before this process has resumed or joined.

        None means that the model has to be tried, also because the program has changed. A later call returns
        None, because the other workers have forgotten it, too, when the program has added a layer.

        Raises:
            CheckpointError: the state with which this process has begun cannot be read.
        """
        training = self.resumable.begun_with
        if self._job.checkpoints.accepts_changes or _changed_sources(training):
            return None
        try:
            return self.models.taken_growths(training.get("growths", {}), model)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"cannot read the trials of models in the checkpoint: {error!r}") from error

    def note_settings(self, model: Any) -> None:
        """Record the settings of the `fit` that begins, if checkpoints are saved."""
        if self._job.checkpoints.scheduler is not None:
            own_sources()
            self._described.pop(model, None)
            call = self._calls.current
            callbacks = lasting(listed(call.callbacks))
            call.settings = settings_of_call(model, callbacks, first=self._calls.outermost == 1)

    def _settings(self, model: Any, program: TrainingState | None) -> Settings:
        if model is None:
            return settings_of_parts(getattr(program, "parts", {}))
        call_settings = self._calls.current.settings or settings_of_call(model, (), first=False)
        if model not in self._described:
            self._described[model] = settings_of_model(model)
        local = self._job.local_steps
        of_job = {} if local is None else {"local steps": local.text}
        if self._job.exact_batch:
            of_job["exact batch"] = "true"
        return {**call_settings, **self._described[model], **of_job}

    def compare_settings(
        self, step: int, training: Mapping[str, Any], model: Any, program: TrainingState | None
    ) -> None:
        """Reject a checkpoint with other settings, and name source files that have changed.

        Raises:
            ChangedError: settings differ, and the user has not accepted that.
        """
        sources = _changed_sources(training)
        changed = f" ({', '.join(sources)} changed)" if sources else ""
        changes = ""
        if "settings" in training:
            changes = differences(training["settings"], self._settings(model, program))
        if changes and not self._job.checkpoints.accepts_changes:
            raise ChangedError(
                f"the script has other settings than the checkpoint of step {step}{changed}: {changes}. Undo "
                "the change for the bits of an uninterrupted run, give --accept-changes to resume with the "
                "new settings, or start over in another folder"
            )
        if (changes or sources) and self._job.is_chief:
            how = f"with other settings: {changes}" if changes else "with the same settings"
            note(f"resuming from the checkpoint of step {step}{changed} {how}")


def _changed_sources(training: Mapping[str, Any]) -> list[str]:
    """Return the source files of the program that have changed since a state of the training was saved."""
    texts = own_sources()
    return [name for name, text in training.get("sources", {}).items() if texts.get(name, text) != text]


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: variable.value for name, variable in variables.items()}
