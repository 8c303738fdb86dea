"""Verification: in some steps, a second worker repeats a part of the computation before the step counts.

A partial is a function of the state, the examples, the seed and the earlier totals. So two workers that
compute a replica get equal bits, unless the processor, memory or a library of one of them is at fault, or the
step is not deterministic. A comparison of states cannot show this, because a total with wrong bits, of a
partial or of the sum itself, enters the state of all workers in the same way.

In a verified step, `VerificationPlan` draws replicas. Workers compute these again, and add up parts of the
total (`lockstep.keras.round_verification`), and compare their states before and after the update
(`lockstep.keras.state_verification`). All workers get all answers, and make the same decision on who is at
fault (`lockstep.keras.verdicts`). This module has the consequences: a worker ends, the job goes back or
stops, or another worker decides.

If two workers repeat different bits, a third one decides. If a worker can join before the step, the workers
keep the answers as a `Doubt`, and go back to the state before the step. There, a new worker replaces one of
the two. It gets the doubt with the state, and they repeat the step: with those of the worker that has left,
there are now three answers. A step of a loop of `strategy.steps` is code of the script, which only the new
worker can run again. There, the others wait for it in the first round of the step. Two workers that agree do
not prove anything if they share a host or a GPU that the other does not use; see `judge_again`.
"""

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import msgspec

from lockstep.collectives.contract import Communicator
from lockstep.errors import DisagreementError, WrongStateError
from lockstep.keras.verdicts import Answer, Verdict, VerificationPlan, listed
from lockstep.keras.worker_exchange import Facts, agree, compare_all
from lockstep.observability.events import ReplicasVerified, VerificationFailed
from lockstep.protocol.job_spec import Verification
from lockstep.system.cuda import LISTED
from lockstep.system.notes import note
from lockstep.system.prose import name_workers
from lockstep.topology import View
from lockstep.worker.job import Job

_HOSTS_EVERY = 1000
"""Steps between two comparisons of all hosts, which may have joined meanwhile."""

_ENDS = {
    "undecided": "{who} get different bits in {shown}, each time the same, and no third worker can decide "
    "which are right{why}: the processor, the memory or a library of one of their hosts is at fault, or the "
    "step depends on the worker; check them with lockstep doctor --burn-in, or start three workers",
    "undecided sum": "the same summands, added up again on {who}, gave different bits in {shown}, and "
    "nothing tells which are right: the processor, the memory or a library of one of these hosts is at "
    "fault; check them with lockstep doctor --burn-in, or start three workers",
    "step": "the step is not deterministic: computed again from the same state and examples, {who} got other "
    "bits in {shown}; look for random numbers that no seed of Keras determines, for the time, and for "
    "operations that are not deterministic",
    "step of one": "computed again from the same state and examples, {who} got different bits in {shown}: "
    "the processor, the memory or a library of its host is at fault, or the step is not deterministic; look "
    "for random numbers that no seed of Keras determines, for the time, and for operations that are not "
    "deterministic",
    "everyone": "{who} get different bits in {shown}: the step depends on the worker; look for random "
    "numbers that no seed of Keras determines, for the time, for hosts that differ, and for examples that a "
    "worker cannot read from the beginning, such as those of a generator",
    "sum": "it is wrong in {shown}, twice: the memory that the workers of a host share is at fault",
}


def _ending(verdict: Verdict, part: str) -> str:
    """Return the key of the text with which a verdict on a part of a step ends the job."""
    if part == "sum" and verdict.kind == "undecided":
        return "undecided sum"
    if verdict.kind == "step" and len(verdict.workers) == 1:
        return "step of one"
    return verdict.kind


class StepWithdrawn(Exception):
    """The step in progress has to be repeated, from the state before it, with another worker."""


class Doubt(msgspec.Struct, frozen=True):
    """The answers of workers that repeat different bits of a part of a step, until another one decides.

    Attributes:
        step: the step.
        part: "gradient", "rounding", "sum" or "update".
        replica: the replica, or the part of the total; -1 for an update.
        round: the number of the round in its step.
        answers: the answers.
    """

    step: int
    part: str
    replica: int
    round: int
    answers: tuple[Answer, ...]


class Verifications:
    """A record of what the job has verified so far.

    Attributes:
        plan: the replicas to verify in each step.
        step: the step in progress, of training or of an evaluation; 0 if nothing is verified in it.
        trains: whether it is a training step.
        count: number of partials that this process knows to be verified.
        compares_hosts: whether each host computes a replica of the step in progress.
        can_repeat: whether all workers can repeat the step in progress with another worker.
        admit: lets another worker join within the step in progress; None if the others go back before it.
        doubt: the reason to repeat it, if any.
    """

    def __init__(self, job: Job) -> None:
        self.plan = VerificationPlan(job.settings.seed, job.view.replicas, job.settings.verification)
        self.step = 0
        self.trains = False
        self.count = 0
        self.compares_hosts = False
        self.can_repeat = False
        self.admit: Callable[[], None] | None = None
        self.doubt: Doubt | None = None
        self._job = job
        self._told = 0
        self._taken_over = 0
        self._compared: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._verified = [0] * self.plan.replicas
        self._before = list(self._verified)
        self._newest = 0
        self._exchanges = 0
        self._number = 0
        self._evaluated = 0
        self._files: dict[str, int | None] = {}

    @property
    def places(self) -> tuple[str, ...]:
        """See `Answer`, for this worker."""
        host = f"host {self._job.context.host or socket.gethostname()}"
        gpus = os.environ.get(LISTED, "").split(",")
        return (host, *(f"GPU {gpu.strip()} of {host}" for gpu in gpus if gpu.strip()))

    @property
    def turn(self) -> int:
        """See `VerificationPlan.turn`, for the step in progress."""
        return self.plan.turn(self._number)

    @property
    def drawn(self) -> tuple[int, ...]:
        """The replicas to verify in the step in progress."""
        return self.plan.drawn(self._number) if self._number else ()

    @property
    def up_to(self) -> int:
        """The last step at which, or after which, each replica has been verified; 0 before."""
        return min(self._verified)

    @property
    def covers_earlier_steps(self) -> bool:
        """Whether the steps before that in progress were verified, of training and of its evaluation."""
        if self.trains:
            return self._up_to_before >= self.step - 1
        # If the job begins with an evaluation, it has not computed anything before.
        begins = self.step == 1 and not (self._taken_over or any(self._before))
        return begins or self.plan.verification == Verification(1, all=True)

    @property
    def _up_to_before(self) -> int:
        """The value of `up_to` before the step in progress, some rounds of which may be verified."""
        return min(self._before)

    @property
    def packed_doubt(self) -> bytes:
        """The doubt, for `unpack_doubt`; empty if there is none."""
        return b"" if self.doubt is None else msgspec.msgpack.encode(self.doubt)

    @property
    def packed(self) -> list[int]:
        """The last verified step of each replica, and the number of steps of evaluations, for `unpack`."""
        return [*self._verified, self._evaluated]

    def unpack(self, packed: Sequence[int], step: int) -> None:
        """Continue from another process's `packed` after `step`, whose state this worker has."""
        # A checkpoint of an earlier version lacks the number.
        self._verified, evaluated = list(packed[: self.plan.replicas]), packed[self.plan.replicas :]
        self._evaluated = sum(evaluated)
        self._taken_over = step

    def unpack_doubt(self, packed: bytes) -> None:
        """Continue with the doubt of another process, which is empty if it has none."""
        self.doubt = msgspec.msgpack.decode(packed, type=Doubt) if packed else None

    def compared(self, owners: Sequence[Any]) -> int:
        """Return the last step after which this worker knows that all have equal states of some objects.

        Args:
            owners: objects with the state, such as models and optimizers.
        """
        steps = []
        for owner in owners:
            reference, step = self._compared.get(id(owner), (None, 0))
            # Another object may have had this id.
            steps.append(step if reference is not None and reference() is owner else self._taken_over)
        return min(steps, default=self._taken_over)

    def note_compared(self, owners: Sequence[Any], step: int) -> None:
        """Note that all workers have equal states of some objects after a step."""
        for owner in owners:
            self._compared[id(owner)] = weakref.ref(owner), step

    def begin(self, step: int, *, first: bool = False, trains: bool = True) -> None:
        """Begin a step.

        Args:
            step: its number, counted from 1 over the whole job, or in its evaluation; 0 for other steps.
            first: whether it is the first one of its program.
            trains: whether it is a training step.
        """
        self.step = step
        self.trains = trains
        # Evaluations may be shorter than the distance of verified steps.
        self._evaluated += not trains and step > 0
        self._number = step if trains or not step else self._evaluated
        self._before = list(self._verified)
        self._newest = max(self._newest, step if trains else 0)
        self.can_repeat, self.admit = False, None
        self.compares_hosts = self._job.context.over_hosts and (
            first or bool(step and step % _HOSTS_EVERY == 0)
        )

    def admit_within(self, admit: Callable[[], None]) -> None:
        """Let another worker join in the first round of the step that begins; see `admit`."""
        self.can_repeat, self.admit = True, admit
        self._exchanges = self._job.exchanges

    def begin_round(self) -> None:
        """Begin a round of a loop of the script. A worker cannot join after another call of the exchange."""
        if self.admit is not None and self._job.exchanges > self._exchanges:
            self.can_repeat = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Set the step in progress aside while the script or a callback makes another call in the block."""
        step, trains, before, number = self.step, self.trains, self._before, self._number
        try:
            yield
        finally:
            self.step, self.trains, self._before, self._number = step, trains, before, number

    def note_files(self, paths: Iterable[str]) -> None:
        """Note the files that callbacks of a call, which has begun, write."""
        self._files |= dict.fromkeys(paths)

    def end_call(self) -> None:
        """Publish how much has been verified, because a call ends."""
        self.step = 0
        self._files = {path: self._newest if last is None else last for path, last in self._files.items()}
        if self.count > self._told and self._job.is_chief:
            self._told = self.count
            self._job.events.publish(ReplicasVerified(self.count, self.up_to))

    def answers_before(self, part: str, replica: int = -1, number: int = 0) -> tuple[Answer, ...]:
        """Return the answers for a part of the step from before it was repeated; see `Doubt`."""
        doubt = self.doubt
        if doubt is None or (doubt.step, doubt.part) != (self.step, part):
            return ()
        return doubt.answers if (doubt.replica, doubt.round) == (replica, number) else ()

    def withdraw_step(
        self,
        verdict: Verdict,
        names: Sequence[str],
        part: str,
        answers: Sequence[Answer],
        replica: int = -1,
        number: int = 0,
    ) -> None:
        """Repeat a step with another worker if its workers repeat their bits, and no other has decided.

        Args:
            verdict: the verdict, equal on all workers.
            names: the names of the arrays that differ.
            part: the part of the step; see `Doubt`.
            answers: the answers of the workers of the view.
            replica: see `Doubt`.
            number: the number of the round.

        Raises:
            StepWithdrawn: all workers repeat it, or its round, if `admit` is not None.
        """
        doubt, self.doubt = self.doubt, None
        if verdict.kind == "undecided" and doubt is None and self._all_can_repeat():
            self.doubt = Doubt(self.step, part, replica, number, tuple(answers))
            self._verified = list(self._before)
            self._evaluated -= not self.trains
            published = "gradient" if part == "rounding" else part
            self.publish(Verdict("third", verdict.workers), names, published, replica)
            raise StepWithdrawn

    def _all_can_repeat(self) -> bool:
        """Return whether no worker has a reason, such as its own callback, not to repeat the step."""
        blob = b"repeats" if self.can_repeat else b""
        blobs = self._job.exchange(lambda _, communicator: communicator.gather(blob, what="a repeated step"))
        return all(map(len, blobs))

    def follow(
        self,
        verdict: Verdict,
        label: str,
        names: Sequence[str],
        part: str,
        replica: int = -1,
        *,
        lasts: bool = False,
    ) -> None:
        """Publish a verdict; end the workers at fault, or all; return on the others.

        Args:
            verdict: the verdict, equal on all workers.
            label: the name of the workers' result.
            names: the names of the arrays that differ.
            part: the part of the step: "gradient", "sum" or "update".
            replica: the number of the replica, or of the part of a total; -1 for the state.
            lasts: whether a worker at fault may also have computed wrongly in earlier steps.

        Raises:
            DisagreementError: the verdict does not name a worker.
            WrongStateError: the fault lasts, and not all earlier steps were verified; see `roll_back`.
        """
        if verdict.kind == "equal":
            return
        self.publish(verdict, names, part, replica)
        shown = listed(names, "some of its arrays" if part == "sum" else "its examples")
        if verdict.kind == "worker" and lasts and not self.covers_earlier_steps:
            self.roll_back(verdict.accusation(label, shown), verdict.workers, self._up_to_before)
        if verdict.kind == "worker" and self._job.is_chief and not self._is_present(verdict.workers):
            note(f"{verdict.accusation(label, shown)}; it has left")
        who = name_workers(verdict.workers) if verdict.workers else ""
        if verdict.kind == "worker":
            # The chief has published this before a worker leaves, because the end of that worker would
            # interrupt it.
            self._job.exchange(lambda _, communicator: communicator.gather(b"", what=label))
            if self._job.worker in verdict.workers:
                message = verdict.accusation(label, shown)
                self._job.membership.end_differing(DisagreementError(message, verdict.workers))
        elif verdict.kind != "repeated":
            end = _ENDS[_ending(verdict, part)].format(who=who, shown=shown, why=verdict.why)
            raise DisagreementError(f"{label}: {end}{self._advice()}")

    def _is_present(self, workers: tuple[int, ...]) -> bool:
        return not set(workers).isdisjoint(self._job.view.workers)

    def publish(self, verdict: Verdict, names: Sequence[str], part: str, replica: int = -1) -> None:
        """Publish a verdict, on the chief; see `follow`."""
        if self._job.is_chief:
            self._job.events.publish(
                VerificationFailed(
                    step=self.step,
                    part=part,
                    replica=replica,
                    arrays=tuple(names),
                    workers=verdict.workers,
                    verdict=verdict.kind,
                )
            )

    def agree(
        self, label: str, state: Facts, taken: int, owners: Sequence[Any], *, whole: bool = False
    ) -> None:
        """Check that all workers call this with equal facts about their states, outside of a verified step.

        If they differ, gradients may come from a wrong state, as in a verified step.

        Args:
            label: names the call.
            state: the facts.
            taken: the number of training steps so far.
            owners: see `compared`.
            whole: whether the facts are about the whole state of the owners.

        Raises:
            DisagreementError: facts differ. Every worker raises it.
            WrongStateError: likewise, steps since the last comparison of states may be wrong, and there is an
                earlier checkpoint.
        """
        if not self.plan.verification.every:
            agree(self._job, label, state)
            return

        def compare(_: View, communicator: Communicator) -> DisagreementError | None:
            try:
                compare_all(self._job, communicator, label, state)
            except DisagreementError as differs:
                # This applies even if only joined workers differ, because the others have used their
                # gradients.
                return differs
            return None

        differs = self._job.exchange(compare)
        if differs is None:
            if whole:
                self.note_compared(owners, taken)
            return
        blob = msgspec.msgpack.encode(self.compared(owners))
        blobs = self._job.exchange(lambda _, communicator: communicator.gather(blob, what=label))
        since = min(msgspec.msgpack.decode(other, type=int) for other in blobs)
        if since >= taken:
            # No gradient comes from a wrong state: joined workers end, and the others continue.
            agree(self._job, label, state)
        self.step = taken
        self.publish(Verdict("undecided", differs.workers), (), "memory")
        self.roll_back(str(differs), differs.workers, since)

    def roll_back(self, message: str, workers: tuple[int, ...], since: int) -> NoReturn:
        """End the job, whose state may be wrong; it restarts from the newest checkpoint before that.

        All workers call this.

        Args:
            message: a description of the fault.
            workers: the workers at fault.
            since: the last step after which the state is known to be correct.

        Raises:
            WrongStateError: there is a checkpoint of this step, or of an earlier one.
            DisagreementError: there is no such checkpoint.
        """
        left, removed = -1, ""
        if self._job.checkpoints.scheduler is not None:
            left = self._job.exchange(partial(self._remove_later, since))
            removed = ": those that may be wrong now have names with suspect-, and no job resumes from them"
        when = f"after step {since}, the last one after which it was found right" if since else "in any step"
        message = f"{message}; the state of all workers may be wrong {when}"
        files = [path for path, last in self._files.items() if last is None or last > since]
        written = ", and so may files that callbacks have written since"
        written += f" ({', '.join(files)})" if files else ""
        if left < 0:
            message = f"{message}{written if files else ''}"
            raise DisagreementError(
                f"{message}, and there is no earlier checkpoint{removed}; start over", workers
            )
        raise WrongStateError(
            f"{message}{written}; later checkpoints are removed, and the job continues from that of step "
            f"{left}",
            workers,
        )

    def _remove_later(self, step: int, view: View, communicator: Communicator) -> int:
        """Remove checkpoints that are later than a step; return the step of the chief's newest one, or -1.

        All workers wait until this is done. If the view ends first, the next one repeats it.
        """
        left = -1
        scheduler = self._job.checkpoints.scheduler
        if scheduler is not None and any(host[0] == self._job.worker for host in view.hosts):
            left = scheduler.roll_back(step, is_chief=self._job.is_chief)
        blob = msgspec.msgpack.encode(left) if self._job.is_chief else b""
        blobs = communicator.gather(blob, what="the removal of checkpoints")
        return next(msgspec.msgpack.decode(other, type=int) for other in blobs if other)

    def _advice(self) -> str:
        if self._job.checkpoints.scheduler is None:
            return ""
        return (
            f"; the steps up to {self._up_to_before} are verified: remove the checkpoints of later steps "
            "before you resume the job"
            if self._up_to_before
            else "; no step is verified yet: start over"
        )

    def note(self, replicas: Sequence[int]) -> None:
        """Note that `replicas` have been verified in the step in progress."""
        self.count += len(replicas)
        for replica in replicas if self.trains else ():
            self._verified[replica] = self.step


_current: list[tuple[Job, Verifications]] = []


def verifications_of(job: Job) -> Verifications:
    """Return the parts of a job that this process verifies."""
    if not _current or _current[0][0] is not job:
        _current[:] = [(job, Verifications(job))]
        # The end of a loop that neither `fit` nor `strategy.steps` drives is not known in advance.
        job.at_exit(_current[0][1].end_call)
    return _current[0][1]
