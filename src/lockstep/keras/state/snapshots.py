"""The whole state of a training at the end of a step: taking it, and going on from it."""

import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep.checkpoint.store import Contents
from lockstep.checkpoint.values import pack, unpack
from lockstep.errors import ChangedError, CheckpointError, DisagreementError, LockstepError
from lockstep.keras.backends.contract import Backend, Held, Kind
from lockstep.keras.backends.logs import mapped
from lockstep.keras.call_stack import CallStack, KerasCall
from lockstep.keras.consistency import ADVICE_ON_CALLS
from lockstep.keras.replica_run import assignments
from lockstep.keras.state.callback_states import (
    callback_states,
    lasting,
    listed,
    listeners,
    set_callback_states,
)
from lockstep.keras.state.failures import described
from lockstep.keras.state.journal import FinishedCall, Journal
from lockstep.keras.state.matching import build_optimizers
from lockstep.keras.state.randomness import random_states, set_random_states
from lockstep.keras.state.settings import (
    Settings,
    differences,
    settings_of_call,
    settings_of_model,
    settings_of_parts,
)
from lockstep.keras.state.variables import all_variables, assign, named_arrays, step_state
from lockstep.observability.events import LastStepEnded, TrainingResumed
from lockstep.system.notes import note
from lockstep.worker.job import Job
from lockstep.worker.program_sources import own_sources

_LAST_SECONDS = 60.0
_PARTS: Mapping[str, type] = {
    "journal": dict,
    "steps": int,
    "methods": dict,
    "inner": dict,
    "taken": int,
    "logs": dict,
    "callbacks": list,
    "random": dict,
}
"""What a checkpoint says of a training, besides what versions of Lockstep before this one did not keep."""


class Superseded(Exception):
    """The members have finished the call in which this worker was about to join them."""


@dataclass
class Resumption:
    """Where a training goes on.

    Attributes:
        contents: of the checkpoint.
        journal: the calls that were finished.
        steps: how many steps of the call in progress had been taken; 0 where none was in progress.
        looks: how often a batch of its data had been looked at before it began.
        passes: over its examples that had begun.
        states: the random states with which the last of them had begun.
        call: the call that was in progress, or had just finished; empty where that is not known.
        joined: whether the other workers are there already.
    """

    contents: Contents
    journal: Journal
    steps: int
    looks: int
    passes: int
    states: Mapping[str, Any]
    call: str = ""
    joined: bool = False


class Snapshots:
    """Takes the state of a process's models, callbacks and random generators, and restores it.

    Attributes:
        journal: the calls that have finished.
        resumption: where this process goes on, until it is there.
        since: how many calls the script had made when it asked for checkpoints itself; None if it has not.
    """

    def __init__(self, job: Job, backend: Backend, calls: CallStack) -> None:
        self._job = job
        self._backend = backend
        self._calls = calls
        self._models: list[weakref.ref[Any]] = []
        self._built: weakref.WeakSet[Any] = weakref.WeakSet()
        self._described: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
        self._pending: dict[int, Mapping[str, Any]] = {}
        self.journal = Journal()
        self.resumption: Resumption | None = None
        self.since: int | None = None
        self._refusal: LockstepError | None = None
        self._again: BaseException | None = None

    def adopt(self, model: Any) -> None:
        """Count `model`, which was just compiled, among those whose state is taken."""
        self._described.pop(model, None)
        if all(known() is not model for known in self._models):
            self._models.append(weakref.ref(model))

    @property
    def behind(self) -> bool:
        """Whether the script has not come yet to where the training is."""
        return self.resumption is not None or self._job.joins

    @property
    def catches_up(self) -> bool:
        """Whether the other workers are further than this one's script, and make none of its calls."""
        return self._job.joins or (self.resumption is not None and self.resumption.joined)

    def end_step(self, take: Callable[[bool], Contents]) -> None:
        """Let workers in and out, and keep a checkpoint, if it is time; end if this worker was told to.

        Args:
            take: `self.take` for the step that has ended.
        """
        self._job.between_steps(take)
        scheduler = self._job.scheduler
        if scheduler is not None and not self._job.is_chief:
            scheduler.follow(self._calls.taken)
        elif scheduler is not None:
            scheduler.after_step(self._calls.taken, lambda: take(True))
            if scheduler.leaving:
                self._job.events.publish(LastStepEnded(self._calls.taken))
                scheduler.close(_LAST_SECONDS)
                sys.exit(128 + signal.SIGTERM)

    def hold(self, take: Callable[[], Contents]) -> None:
        """Have the state that `take` returns kept if no step follows the one that has ended."""
        if self._job.scheduler is not None and self._job.is_chief:
            self._job.scheduler.hold(self._calls.taken, take)

    def hold_late(self, take: Callable[[], Contents]) -> None:
        """Do as `hold`, and call `take` only before something may change the state."""
        scheduler = self._job.scheduler
        if scheduler is not None and self._job.is_chief and len(self._calls.stack) == 2:
            call = self._calls.current

            def take_late() -> Contents:
                with self._calls.again_in(call):
                    return take()

            scheduler.hold_late(self._calls.taken, take_late)
            assignments.install()
            assignments.before_next(scheduler.settle)

    def _leave_what_is_held(self, method: str) -> None:
        """Copy the state that is held late before a call of `method` that may change it."""
        scheduler = self._job.scheduler
        if scheduler is not None and self._calls.current.number == 0:
            if method == "train_on_batch":
                scheduler.drop()
            else:
                scheduler.settle()

    @contextmanager
    def call(self, method: str) -> Iterator[KerasCall]:
        """Number a call of `method`, and make it the current one for the block; note an error that ends it.

        Raises:
            LockstepError: the training could not go on in an earlier call, and the script has caught that.
        """
        if self._refusal is not None:
            raise self._refusal
        self._leave_what_is_held(method)
        with self._calls.enter(method) as call:
            try:
                yield call
            except BaseException as error:
                if len(self._calls.stack) == 2:
                    self._fail(call, error)
                raise

    def finish(self, result: Any) -> None:
        """Note that the call in progress, outside of any other, has returned `result`.

        Raises:
            CheckpointError: it should have come to where the training goes on.
        """
        call = self._calls.current
        if self.resumption is not None:
            raise CheckpointError(self._not_there(call, f"it has ended after {call.steps}"))
        kept = result if call.leaves is None else call.leaves(call)
        self.journal.add(kept, self._calls.methods, self._calls.taken)
        if self._job.scheduler is not None:
            self._job.scheduler.end_call()

    def _fail(self, call: KerasCall, error: BaseException) -> None:
        """Note the error that ends the call in progress: the script may catch it."""
        if self.resumption is None:
            if len(self.journal) < self._calls.outermost:
                kept = None if call.leaves is None else call.leaves(call)
                self.journal.add(kept, self._calls.methods, self._calls.taken, described(error, call.name))
        elif self._calls.outermost > len(self.resumption.journal) or isinstance(error, Exception):
            if isinstance(error, LockstepError) and error is not self._again:
                self._refusal = error
            elif error is not self._again:
                self._refusal = CheckpointError(self._not_there(call, f"it has ended with {error!r}"))

    def _not_there(self, call: KerasCall, how: str) -> str:
        assert self.resumption is not None
        return (
            f"the training goes on after step {self.resumption.steps} of {call.name}, and in this script "
            f"{how}: the script is another one, or reads other data, than the one that kept the checkpoint; "
            "take the change back, or begin in another folder"
        )

    def finished(self) -> FinishedCall | None:
        """Return what the call that begins had left before this process began, if it had finished.

        If it had not, its first steps are not taken again.

        Raises:
            DisagreementError: the call is none that the members of the job have made.
            CheckpointError: the call is not the one that was made in this place.
        """
        if len(self._calls.stack) > 2:
            return None
        if self.resumption is None and self._job.joins:
            self._follow(self._job.membership.position())
        if self.resumption is None:
            return None
        if self._calls.outermost <= len(self.resumption.journal):
            return self.replayed()
        if self._job.joins and not self.resumption.steps:
            raise DisagreementError(
                f"{self._calls.current.name} of this worker, which is to join, is a call that the others "
                f"have not made; {ADVICE_ON_CALLS}"
            )
        if self.resumption.steps:
            self._refuse_another(self.resumption.call)
        self._calls.current.skipped = self.resumption.steps
        return None

    def replayed(self) -> FinishedCall:
        """Return what the call in progress had left, and set what counts calls to its end.

        Raises:
            CheckpointError: the call is not the one that was made in this place, or had ended with an error
                that cannot be raised again.
        """
        assert self.resumption is not None
        finished = self.resumption.journal.replay(self._calls.outermost - 1)
        self._again = finished.error
        own = self._calls.methods
        self._refuse_another(
            next((f"{name} {n}" for name, n in finished.methods.items() if own.get(name) != n), "")
        )
        self._calls.methods.clear()
        self._calls.methods.update(finished.methods)
        self._calls.taken = finished.taken
        return finished

    def _refuse_another(self, call: str) -> None:
        """Refuse that the call in progress is not `call`, if that is known."""
        own = self._calls.current.name
        if call and call != own:
            raise CheckpointError(
                f"call {self._calls.outermost} of this script is {own}, and was {call} when the checkpoint "
                "was kept: undo the change, or begin in another folder"
            )

    def join(self) -> bool:
        """Become a member of the job; return whether the call in progress is one that has finished.

        If it has not, its steps up to the one at whose end the state was given are passed over.
        """
        self._follow(self._job.join())
        assert self.resumption is not None
        self.resumption.joined = True
        if self._calls.outermost <= len(self.resumption.journal):
            return True
        self._calls.current.skipped = self.resumption.steps
        return False

    @property
    def at_its_end(self) -> bool:
        """Whether the call in progress is the last finished one, and the training goes on behind it."""
        resumption = self.resumption
        return (
            resumption is not None
            and resumption.steps == 0
            and self._calls.outermost == len(resumption.journal)
        )

    def begin(self, contents: Contents) -> None:
        """Go on from `contents` when the script comes to its calls.

        Raises:
            CheckpointError: the script asks for checkpoints at another place than the one that kept it, or no
                training kept it.
        """
        facts = unpack(contents.manifest.get("training"), contents.arrays)
        if not isinstance(facts, dict):
            raise CheckpointError(f"the checkpoint of step {contents.step} was not kept by a training")
        if facts.get("since", self.since) != self.since:
            raise CheckpointError(
                f"the checkpoint of step {contents.step} was kept by {_origin(facts['since'])}, and the job "
                f"goes on with {_origin(self.since)}, where other calls have finished: ask for checkpoints "
                "as before, or begin in another folder"
            )
        if wrong := [name for name, kind in _PARTS.items() if not isinstance(facts.get(name), kind)]:
            raise CheckpointError(
                f"the checkpoint of step {contents.step} lacks what a training keeps, or has something else "
                f"in its place: {', '.join(wrong)}; remove it, to go on from the one before"
            )
        try:
            self._go_on(contents, facts)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"what the checkpoint of step {contents.step} says of finished calls is not understood: "
                f"{error!r}"
            ) from error

    def _follow(self, contents: Contents) -> None:
        """Go on from what the members of the job have given, wherever checkpoints are asked for."""
        self._go_on(contents, unpack(contents.manifest["training"], contents.arrays))

    def _go_on(self, contents: Contents, facts: Mapping[str, Any]) -> None:
        journal = Journal.unpacked(facts["journal"])
        self.resumption = Resumption(
            contents,
            journal,
            facts["steps"],
            facts.get("looks", 0),
            facts.get("passes", 0),
            facts.get("states", {}),
            facts.get("call", ""),
        )

    def take(
        self,
        whole: bool,
        model: Any,
        logs: Any,
        program: Held | None = None,
        state: Any = None,
        *,
        heard: bool = False,
    ) -> Contents:
        """Return everything, at the end of a step of `model`, or of a call without `program`.

        The arrays may be those that the next step changes. If not `whole`, it is only the position. With
        `heard`, callbacks have heard of the end of the step, and the state is in the variables of `model`.
        """
        call = self._calls.current
        position = {
            "journal": self.journal.packed(),
            "steps": call.steps if program is not None else 0,
            "looks": call.looks,
            "passes": call.passes,
            "states": dict(call.states),
        }
        if not whole:
            packed, values = pack(position, "training")
            return Contents(self._calls.taken, {"training": packed}, values)
        own = program.named_state(state) if program is not None else _values(step_state(model))
        arrays = {f"current/{name}": value for name, value in own.items()}
        for index, other in self._others(model):
            arrays |= {f"model {index}/{name}": value for name, value in other.items()}
        hear = listeners(call.callbacks, model) if program is not None else []
        facts = position | {
            "methods": dict(self._calls.methods),
            "inner": dict(call.inner),
            "taken": self._calls.taken,
            "since": self.since,
            "call": call.name,
            "logs": mapped(lambda value: np.asarray(self._backend.concrete(value)), logs or {}),
            "callbacks": callback_states(hear, call.marks),
            "settings": self._settings(model, program),
            "sources": own_sources(),
            "random": random_states() if program is not None else self.journal.states,
            "heard": heard,
            "stops": heard and bool(model.stop_training),
        }
        packed, values = pack(facts, "training")
        concrete = {
            name: value if isinstance(value, np.ndarray) else self._backend.concrete(value)
            for name, value in arrays.items()
        }
        manifest = {"job": self.facts(), "training": packed}
        return Contents(self._calls.taken, manifest, {**concrete, **values})

    def facts(self) -> dict[str, Any]:
        """Return what the bits of the training depend on, besides the script."""
        job = self._job
        return {
            "replicas": job.view.replicas,
            "seed": job.seed,
            "threads": job.threads,
            "backend": keras.backend.backend(),
            "libraries": libraries(),
        }

    def restore(self, model: Any, program: Held | None = None, state: Any = None) -> tuple[Any, Any]:
        """Set everything to what the resumption says; return (logs, the state for steps of `program`)."""
        resumption = self.resumption
        assert resumption is not None
        contents = resumption.contents
        facts = unpack(contents.manifest["training"], contents.arrays)
        if not resumption.joined:
            self.compare_settings(contents.step, facts, model, program)
        for index, known in enumerate(self._models):
            if values := _below(f"model {index}/", contents.arrays):
                self._pending[index] = values
                self.load_pending(known())
        current = _below("current/", contents.arrays)
        if program is not None:
            state = program.load(state, current)
        else:
            assign(model, current, whole=True)
        call = self._calls.current
        self._calls.methods.clear()
        self._calls.methods.update(facts["methods"])
        self._calls.taken = facts["taken"]
        try:
            if program is not None:
                call.inner = dict(facts["inner"])
                set_callback_states(listeners(call.callbacks, model), facts["callbacks"])
            set_random_states(facts["random"])
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"what the checkpoint of step {contents.step} says of callbacks and random states is not "
                f"understood: {error!r}"
            ) from error
        self.journal, self.resumption = resumption.journal, None
        if facts.get("heard"):
            call.heard, model.stop_training = call.steps, facts["stops"]
        if self._job.scheduler is not None and not resumption.joined:
            self._job.scheduler.resumed(self._calls.taken)
        where = f"step {call.steps} of {call.name}" if program is not None else call.name
        self._job.events.publish(TrainingResumed(where, self._calls.taken))
        return facts["logs"], state

    def note_settings(self, model: Any) -> None:
        """Note how the `fit` that begins trains, if checkpoints are kept."""
        if self._job.scheduler is not None:
            own_sources()
            self._described.pop(model, None)
            call = self._calls.current
            heard = lasting(listed(call.callbacks))
            call.settings = settings_of_call(model, heard, first=self._calls.outermost == 1)

    def _settings(self, model: Any, program: Held | None) -> Settings:
        if model is None:
            return settings_of_parts(getattr(program, "parts", {}))
        own = self._calls.current.settings or settings_of_call(model, (), first=False)
        if model not in self._described:
            self._described[model] = settings_of_model(model)
        return {**own, **self._described[model]}

    def compare_settings(self, step: int, facts: Mapping[str, Any], model: Any, program: Held | None) -> None:
        """Refuse to go on from a checkpoint with other settings; name files that have another text.

        Raises:
            ChangedError: settings differ, and the person has not accepted that.
        """
        texts = own_sources()
        sources = [name for name, text in facts.get("sources", {}).items() if texts.get(name, text) != text]
        changed = f" ({', '.join(sources)} changed)" if sources else ""
        found = differences(facts["settings"], self._settings(model, program)) if "settings" in facts else ""
        if found and not self._job.accepts_changes:
            raise ChangedError(
                f"the script has other settings than the checkpoint of step {step}{changed}: {found}. Undo "
                "the change for the bits of an undisturbed run, give --accept-changes to resume with the new "
                "settings, or begin in another folder"
            )
        if (found or sources) and self._job.is_chief:
            what = f"with other settings: {found}" if found else "with the same settings"
            note(f"resuming from the checkpoint of step {step}{changed} {what}")

    def awaits(self, model: Any) -> bool:
        """Whether a model that is not built yet should have values already."""
        return any(index in self._pending and known() is model for index, known in enumerate(self._models))

    def looks(self, model: Any) -> bool:
        """Whether a look at the data of the call that begins with `model` is one that every process takes.

        A model that was built by earlier calls is not built yet in a process in which those were passed over.
        That process looks at the data once more, and a stream must not notice.
        """
        call = self._calls.current
        if self.awaits(model) or (self.resumption is not None and call.looks >= self.resumption.looks):
            return False
        call.looks += 1
        return True

    def begin_pass(self) -> None:
        """Note the random states with which a pass over the examples of the call in progress begins.

        They decide in which order it visits them. If the training goes on within this pass, they are first
        set to those that it began with: what a process draws until then is not what others have drawn.
        """
        call, resumption = self._calls.current, self.resumption
        call.passes += 1
        if resumption is not None and call.steps < call.skipped and call.passes == resumption.passes:
            set_random_states(resumption.states)
        call.states = random_states()

    def build(self, model: Any, kind: Kind, batch: Callable[[], Any]) -> None:
        """Make the variables that a step of `model` needs; give them the values that they should have.

        Args:
            model: is compiled.
            kind: of the step.
            batch: reads a batch to build the model with.
        """
        self._backend.build(model, kind, batch)
        self._built.add(model)
        self.load_pending(model)

    def is_built(self, model: Any) -> bool:
        """Whether `model` has its variables. Keras does not know it of one that is never called."""
        return model is not None and (model.built or model in self._built)

    def load_pending(self, model: Any) -> None:
        """Give a model that is built now the values that it should have had already."""
        for index, known in enumerate(self._models):
            if index in self._pending and known() is model and self.is_built(model):
                values = self._pending.pop(index)
                # The calls that have built its optimizers were passed over.
                build_optimizers(model, values)
                assign(model, values)

    def _others(self, model: Any) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the values of the other models, apart from what they share with `model`."""
        own = set() if model is None else {id(variable) for variable in all_variables(model)}
        found: list[tuple[int, Mapping[str, Any]]] = []
        for index, known in enumerate(self._models):
            other = known()
            if other is not None and other is not model and self.is_built(other):
                variables = [variable for variable in all_variables(other) if id(variable) not in own]
                found.append((index, _values(named_arrays(variables, variables))))
        return found


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that training depends on, of those that are imported."""
    names = ("keras", keras.backend.backend(), "jaxlib", "numpy", "lockstep")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    # PyTorch's is a string of its own kind.
    return {module.__name__: str(module.__version__) for module in modules}


def _origin(since: int | None) -> str:
    if since is None:
        return "--checkpoint"
    return f"a lockstep.callbacks.Checkpoint in call {since + 1} of the script"


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: variable.value for name, variable in variables.items()}


def _below(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
