"""Snapshots of the whole state at the end of a step: taking, saving and restoring them."""

import signal
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.values import pack
from lockstep.errors import ChangedError, CheckpointError
from lockstep.keras import assignments
from lockstep.keras.backends.contract import Backend, TrainingState
from lockstep.keras.backends.growth import Growths, set_growths
from lockstep.keras.backends.logs import mapped
from lockstep.keras.changed_values import set_values
from lockstep.keras.host_report import libraries, report_for_joiners
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
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
from lockstep.keras.state.resumable_calls import ResumableCalls, Resumption
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

_POSITION = ("journal", "steps", "looks", "passes", "states", "turn", "growths", "traces")
"""The parts of the state that a process needs before it arrives."""
_OMITTED = ("settings", "sources")
"""Parts that take long, and do not change in a step; workers that join do not compare settings."""


class Part(NamedTuple):
    """A part of the state.

    Attributes:
        take: returns its entry in a snapshot: plain values and arrays of NumPy.
        join: continues with the entry of another process. `Resumption` reads the parts without it.
    """

    take: Callable[[], Any]
    join: Callable[[Any], object] = lambda entry: None


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
        """Let workers join and leave, and save a checkpoint if due; exit if this worker was asked to.

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
                scheduler.close()
                sys.exit(128 + signal.SIGTERM)

    def change_workers(self, take_snapshot: Callable[[bool], Contents]) -> None:
        """Let workers join and leave before a repeated step; see `Verifications.doubt`."""
        self._job.change_workers(lambda whole: self._for_joiners(take_snapshot(whole)))

    def kept(self, program: TrainingState, state: Any) -> Contents:
        """Return the state before a step, for `admit`. The step may change the values of other models."""
        contents = self._for_joiners(self.take(True, None, None, program, state, omitted=_OMITTED))
        arrays = contents.arrays.items()
        return replace(
            contents, arrays={k: v if k.startswith("current/") else np.array(v) for k, v in arrays}
        )

    def admit(self, kept: Contents) -> None:
        """Let a worker join within a step and begin before that step; see `Verifications.admit`."""
        late = {"doubt": verifications_of(self._job).packed_doubt, "sources": own_sources()}
        entries, arrays = pack(late, "training")
        manifest = {**kept.manifest, "training": {**kept.manifest["training"], **entries}}
        contents = replace(kept, manifest=manifest, arrays={**kept.arrays, **arrays})
        self._job.change_workers(lambda whole: contents)

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
        omitted: Collection[str] = (),
    ) -> Contents:
        """Return the state at the end of a step of `model`, or of a call without `program`.

        The next step may change the arrays. If not `whole`, return only the position. With `callbacks_done`,
        callbacks have processed the end of the step, and the state is in the variables of `model`. Parts with
        names in `omitted` are left out.
        """
        parts = self._parts(model, program, logs, callbacks_done)
        if not whole:
            return Contents(self._calls.taken, *self._packed(parts, _POSITION, {}))
        values_of_model = program.named_state(state) if program is not None else _values(step_state(model))
        arrays = {f"current/{name}": value for name, value in values_of_model.items()}
        # Before a call for a single batch is repeated, `load_models` has these values.
        apart = None if program is not None and self._calls.current.at_end else model
        names = [name for name in parts if name not in omitted]
        packed, converted = self._packed(parts, names, arrays | self.models.values(apart_from=apart))
        manifest = {"job": self.job_facts(), **packed}
        if (verifications := verifications_of(self._job)).plan.verification.every:
            manifest["verified"] = verifications.up_to
        return Contents(self._calls.taken, manifest, converted)

    def _parts(
        self, model: Any, program: TrainingState | None, logs: Any = None, heard: bool = False
    ) -> dict[str, Part]:
        """Return the parts of the state, by name, in the order in which a process joins them; see `take`.

        The values of variables are arrays instead, because loading them returns the state for the next step.
        """
        call, calls, models, resumable = self._calls.resumable, self._calls, self.models, self.resumable
        verified, to_numpy = verifications_of(self._job), self._backend.to_numpy
        callbacks = listeners(call.callbacks, call.model) if program is not None else []
        # A process that skips steps reads the examples again, but does not validate.
        held = call.held_by_validation
        # A worker that joins for a repeated step advances to it, past the earlier callbacks.
        validation = calls.current if verified.doubt is not None and calls.current is not call else None
        steps = call.steps + (verified.doubt is not None and validation is None) if program is not None else 0
        heard = heard or validation is not None
        return {
            "journal": Part(resumable.journal.packed),
            "steps": Part(lambda: steps),
            "looks": Part(lambda: call.samples),
            "passes": Part(lambda: call.passes),
            "states": Part(lambda: dict(call.states)),
            "turn": Part(lambda: resumable.turns.key),
            "call": Part(lambda: call.name),
            "since": Part(lambda: resumable.since),
            "settings": Part(lambda: self._settings(model, program)),
            "sources": Part(own_sources),
            "logs": Part(lambda: mapped(lambda value: np.asarray(to_numpy(value)), logs or {})),
            "growths": Part(lambda: models.growths, lambda _: self._set_growths()),
            "built": Part(lambda: models.built, models.were_built),
            "methods": Part(lambda: dict(calls.methods), lambda methods: calls.move_to(methods, calls.taken)),
            "taken": Part(lambda: calls.taken, lambda taken: setattr(calls, "taken", taken)),
            "verified": Part(lambda: verified.packed, lambda steps: verified.unpack(steps, calls.taken)),
            "doubt": Part(lambda: verified.packed_doubt, verified.unpack_doubt),
            "validation": Part(lambda: _position_in(validation)),
            "outputs": Part(lambda: call.outputs, lambda outputs: setattr(call, "outputs", outputs)),
            "inner": Part(lambda: dict(call.inner), lambda inner: setattr(call, "inner", inner)),
            "callbacks": Part(
                lambda: callback_states(callbacks, call.callback_hashes),
                lambda states: set_callback_states(callbacks, states),
            ),
            "heard": Part(lambda: heard, lambda was: setattr(call, "processed", call.steps if was else None)),
            "stops": Part(lambda: heard and bool(model.stop_training), partial(_stop_if, model)),
            "values": Part(
                lambda: {} if call.values is None else call.values.packed(),
                lambda packed: set_values(model, listed(call.callbacks), packed),
            ),
            "python": Part(partial(saved_python, model), partial(set_python, model)),
            "traces": Part(
                lambda: models.traces(() if call.values is None else call.values.places()),
                models.arrive_at_traces,
            ),
            "random": Part(
                lambda: resumable.journal.states if program is None else random_states(held),
                lambda states: set_random_states(states, held),
            ),
        }

    def take_apart(
        self, whole: bool, others: dict[str, Part], values: Sequence[tuple[Any, Any]] = (), model: Any = None
    ) -> Contents:
        """Return the state for workers that join while the others do not wait for each other.

        Args:
            whole: whether to return the whole state; otherwise only the position.
            others: the other parts: the chief's random states, its `Mesh.peers`, and the completed steps.
            values: variables of the model, with their values at some time within the call.
            model: the model of the call in progress; None between two entries of the log of a call.
        """
        parts = self._parts(model, None) | {"schedules": Part(lambda: model is None)} | others
        names, arrays = [*_POSITION, "call", "schedules"], dict[str, Any]()
        if whole:
            names += ["built", "random", "peers"]
        if whole and model is not None:
            names += ["methods", "taken"]
            by_variable = {id(variable): value for variable, value in values}
            named = step_state(model).items()
            arrays = {f"current/{name}": by_variable[id(v)] for name, v in named if id(v) in by_variable}
            arrays |= self.models.values(apart_from=model)
        return self._for_joiners(Contents(self._calls.taken, *self._packed(parts, names, arrays)))

    def join_apart(self, call: str, model: Any = None) -> Mapping[str, Any]:
        """Restore the state that `take_apart` has returned, and return the facts about the processes.

        Args:
            call: names the call in progress.
            model: as for `take_apart`.
        """
        resumption, current = self.resumable.resumption, self._calls.current
        assert resumption is not None
        self.models.load(resumption.contents.arrays)
        if model is not None:
            assign(model, below("current/", resumption.contents.arrays))
        random = Part(dict, lambda states: set_random_states(states, current.held_by_inputs))
        where = f"step {resumption.steps} of {call}" if resumption.steps else call
        self._join(self._parts(model, None) | {"random": random}, resumption, where)
        current.skipped = 0
        return dict(resumption.entries["peers"])

    def _packed(
        self, parts: Mapping[str, Part], names: Iterable[str], arrays: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the manifest and the arrays of contents."""
        entries = {name: parts[name].take() for name in names}
        for name in ("doubt", "validation", "outputs"):
            if not entries.get(name, True):
                del entries[name]
        packed, values = pack(entries, "training")
        converted = {
            name: value if isinstance(value, np.ndarray) else self._backend.to_numpy(value)
            for name, value in arrays.items()
        }
        return {"training": packed}, {**converted, **values}

    def _join(self, parts: Mapping[str, Part], resumption: Resumption, where: str) -> None:
        """Continue with the parts of another process. A process of an earlier version lacks some."""
        entries = resumption.entries
        try:
            for name in (name for name in parts if name in entries):
                parts[name].join(entries[name])
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot read {name!r} in the checkpoint of step {resumption.contents.step}: {error!r}"
            ) from error
        self.resumable.arrive()
        self._job.events.publish(TrainingResumed(where, self._calls.taken))

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

    def metrics_of(self, model: Any) -> dict[str, Any]:
        """Return the values of the metrics of a model, by name, as arrays of NumPy."""
        state = self._backend.training_state(model)
        lasting = state.lasting_variables()
        values = {name: value for name, value in state.named_state(None).items() if name not in lasting}
        return {name: np.array(self._backend.to_numpy(value)) for name, value in values.items()}

    def restore(self, model: Any, program: TrainingState | None = None, state: Any = None) -> tuple[Any, Any]:
        """Restore everything from the resumption, and return (logs, the state for steps of `program`).

        If the resumption is in a validation, this restores only the parts that Keras needs to begin it. A
        second call there restores the rest.
        """
        resumption = self.resumable.resumption
        assert resumption is not None
        call, arrays = self._calls.current, resumption.contents.arrays
        if not resumption.joined:
            self.compare_settings(resumption.contents.step, resumption.entries, model, program)
        self.models.load(arrays)
        current = below("current/", arrays)
        before_validation = "validation" in resumption.entries and call is self._calls.resumable
        if before_validation:
            current = {**current, **resumption.entries["validation"]["metrics"]}
        if model is not None:
            # Some steps build optimizers when they apply them.
            build_optimizers(model, current)
        if program is not None:
            shared = self._job.context.state_pool if resumption.joined else None
            state = program.load(state, current, in_place=resumption.joined, shared=shared)
        else:
            assign(model, current, whole=True)
        if before_validation:
            inner = resumption.entries["inner"]
            call.processed, call.inner = call.steps, {**inner, "validation": inner["validation"] - 1}
            _stop_if(model, resumption.entries["stops"])
            return resumption.entries["logs"], state
        where = f"step {call.steps} of {call.name}" if program is not None else call.name
        self._join(self._parts(model, program), resumption, where)
        if self._calls.resumable is not call:
            # The other workers hold the state at the end of the epoch, and one of them may be lost.
            self._calls.resumable.skipped = self._calls.resumable.steps - 1
        if (scheduler := self._job.checkpoints.scheduler) is not None:
            (scheduler.follow if resumption.joined else scheduler.resumed)(self._calls.taken)
        return resumption.entries["logs"], state

    def load_models(self) -> None:
        """Give all models the values with which the next call resumes: the script may read them before."""
        assert self.resumable.resumption is not None
        self.models.load(self.resumable.resumption.contents.arrays)

    def _set_growths(self) -> None:
        for tried in self.models.tried:
            # Members may have tried the model again since this process took over the results of trials.
            if (growths := self.growths(tried)) is not None:
                set_growths(tried, growths)

    def growths(self, model: Any) -> Growths | None:
        """Return, once, the results of a model's trials before this process resumed or joined.

        None means that the model has to be tried, for example because the program has changed. A later call
        returns None, because the other workers also forget the results when the program adds a layer.

        Raises:
            CheckpointError: the state with which this process began cannot be read.
        """
        training = self.resumable.begun_with
        self.models.begin_traces(training.get("traces", {}), model)
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
        call_settings = self._calls.resumable.settings or settings_of_call(model, (), first=False)
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
                f"the script has different settings from the checkpoint of step {step}{changed}: {changes}. "
                "Undo the change for the bits of an uninterrupted run, give --accept-changes to resume with "
                "the new settings, or start over in another folder"
            )
        if (changes or sources) and self._job.is_chief:
            how = f"with other settings: {changes}" if changes else "with the same settings"
            note(f"resuming from the checkpoint of step {step}{changed} {how}")


def _changed_sources(training: Mapping[str, Any]) -> list[str]:
    """Return the source files of the program that have changed since a state of training was saved."""
    texts = own_sources()
    return [name for name, text in training.get("sources", {}).items() if texts.get(name, text) != text]


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: variable.value for name, variable in variables.items()}


def _position_in(validation: NumberedCall | None) -> dict[str, Any]:
    """Return the position in a validation whose next step is in doubt; empty without one."""
    if validation is None:
        return {}
    return {"steps": validation.steps + 1, "states": validation.states, "metrics": validation.metrics}


def _stop_if(model: Any, stops: bool) -> None:
    if stops:
        model.stop_training = True
