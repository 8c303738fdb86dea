"""Verification: in some steps, a second worker computes a part again, before the step counts.

A partial is a function of the state, the examples, the seed and the earlier totals. So two workers that
compute a replica get equal bits, unless a processor, a memory or a library of one of them is at fault, or the
step is not deterministic. A comparison of states cannot show this, because a total with wrong bits, of a
partial or of the sum itself, enters the state of all workers in the same way.

In a verified step, `VerificationPlan` draws replicas. The owner of each and a second worker, its checker,
hash the partial that each has computed. If the hashes differ, both compute it again, a third worker computes
it once, and `judge` decides from these answers. All workers get all answers, so they all decide the same.

Then the workers sum. The bytes of a total are divided into R parts, and those with the numbers of the drawn
replicas are verified: all owners send their summands of such a part to its checker, which adds them up along
the tree. If changes are sent as small integers, the total includes the sums of limits, from which their
scales follow (see `lockstep.keras.scaled_sums`). No sum that can be computed from the total alone would do:
floating-point addition rounds, so a checksum of a total is not the sum of the checksums of its summands. All
workers compare their hashes of the total, as each of them has it, with the checker's. If they differ, another
worker adds up the part, too, and `judge_sum` decides. The checker of a replica also computes its limits and
small integers once more.

All workers also compare their hashes of the other parts with each other's, and verify a part in which they
differ. So all updates follow from one total, and workers that agree in an update can outvote another one (see
`lockstep.keras.state_verification`). Otherwise the workers of a host could, which may have the same wrong
total.

Of two workers that insist on different bits, a third one decides. In a step before which a worker can join,
the workers keep the answers as `Doubt`, and go back to the state before the step. There, a new worker takes
the place of one of the two. It gets the doubt with the state, and they take the step again: the new answers
and those of the worker that has left are three. Two that agree prove nothing if they share a host or a GPU
that the other does not use; see `judge_again`.
"""

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import numpy as np

from lockstep.collectives.adder import Adder, flat
from lockstep.collectives.contract import Bytes, Communicator, Span
from lockstep.collectives.layout import Layout, Piece, allocate
from lockstep.collectives.network.lane_reduce import summer_of
from lockstep.collectives.plan import Sum
from lockstep.data.digest import digest_array
from lockstep.errors import DisagreementError, WrongStateError
from lockstep.keras.backends.contract import Total
from lockstep.keras.host_report import HostReport, host_report, refuse_unlike
from lockstep.keras.rounds import ExchangeCall, Round
from lockstep.keras.seeds import seed_at
from lockstep.keras.worker_exchange import Facts, agree, compare_all, texts_of_all
from lockstep.observability.events import ReplicasVerified, VerificationFailed
from lockstep.protocol.job_spec import Verification
from lockstep.system.cuda import LISTED
from lockstep.system.notes import note
from lockstep.system.prose import count, name_workers
from lockstep.topology import View
from lockstep.worker.job import Job

_MOST_WRONG_CHECKS = 3
"""The most checks of one sum or of its summands that are wrong once while it is right: then the job stops."""
_NAMED = 3
"""How many arrays that differ a message names."""
_HOSTS_EVERY = 1000
"""Steps between two comparisons of all hosts, which may have joined meanwhile."""
_HASH = 8
"""Bytes of the hash of an array."""
_HEAD = 16
"""Bytes before a summand that is sent: the number of its part, and its replica."""
_ROOM = 1 << 26
"""Bytes of the summands that are sent at once, if they are of several parts."""
_SUM = "the sum over all replicas"

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
    "step of one": "computed again from the same state and examples, {who} got other bits in {shown}: the "
    "processor, the memory or a library of its host is at fault, or the step is not deterministic; look for "
    "random numbers that no seed of Keras determines, for the time, and for operations that are not "
    "deterministic",
    "everyone": "{who} get different bits in {shown}: the step depends on the worker; look for random "
    "numbers that no seed of Keras determines, for the time, and for hosts that differ",
    "sum": "it is wrong in {shown}, twice: the memory that the workers of a host share is at fault",
}

Hashes = bytes
"""The hashes of the arrays of a partial, one after the other; empty for a replica without examples."""

_FromHost = tuple[list[Hashes], HostReport]
"""The hashes that the first worker of a host has computed, and its report."""


@dataclass(frozen=True)
class VerificationPlan:
    """Which replicas are verified in which steps. Pure.

    Each cycle of `replicas` verified steps verifies all replicas, in an order that the seed determines. So a
    fault that lasts is found within `every * replicas` steps.

    Attributes:
        seed: the job's seed.
        replicas: R.
        verification: the job's setting.
    """

    seed: int
    replicas: int
    verification: Verification

    def drawn(self, step: int) -> tuple[int, ...]:
        """Return the replicas to verify in training step `step`, counted from 1 over the whole job."""
        every = self.verification.every
        if not every or step % every:
            return ()
        if self.verification.all:
            return tuple(range(self.replicas))
        cycle, index = divmod(self._number(step), self.replicas)

        def position(replica: int) -> int:
            return seed_at(self.seed, cycle, replica)

        return (sorted(range(self.replicas), key=position)[index],)

    def turn(self, step: int) -> int:
        """Return a number that is another one in each cycle, so that other workers check."""
        return self._number(step) // (1 if self.verification.all else self.replicas)

    def _number(self, step: int) -> int:
        return step // self.verification.every - 1


class Roles(NamedTuple):
    """The workers that compute a replica that is verified.

    Attributes:
        owner: computes it for the total.
        checker: computes it a second time; None if the view has no other worker: then the owner does.
        third: decides if they differ; None if the view has no further worker.
    """

    owner: int
    checker: int | None
    third: int | None

    @classmethod
    def of(cls, view: View, replica: int, turn: int) -> "Roles":
        """Return the roles in a view; the checker is another worker in each turn."""
        owner = view.owners[replica]
        position = view.workers.index(owner)
        others = view.workers[position + 1 :] + view.workers[:position]
        if not others:
            return cls(owner, None, None)
        first = turn % len(others)
        others = others[first:] + others[:first]
        return cls(owner, others[0], others[1] if len(others) > 1 else None)


class Answer(NamedTuple):
    """The hashes that a worker has computed for a replica.

    Attributes:
        worker: its id.
        attempts: the hashes of each attempt.
        places: names of its host and its GPUs, each of which may be at fault.
    """

    worker: int
    attempts: tuple[Hashes, ...]
    places: tuple[str, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Whether all attempts have the same bits."""
        return len(set(self.attempts)) == 1


class Answers(NamedTuple):
    """The answers of all workers for a replica."""

    owner: Answer
    checker: Answer | None = None
    third: Answer | None = None

    @property
    def present(self) -> tuple[Answer, ...]:
        """The answers that exist, the owner's first."""
        return tuple(answer for answer in self if answer is not None)

    @property
    def are_equal(self) -> bool:
        """Whether all attempts of all workers have the same bits."""
        return len({hashes for answer in self.present for hashes in answer.attempts}) == 1


class Verdict(NamedTuple):
    """The conclusion from the answers for a part of a step.

    Attributes:
        kind: `equal`; `worker`: the `workers` are at fault; `undecided`: some of them are; `step`: the step
            is not deterministic; `everyone`: each worker computes something else; `sum`: all workers have
            the same wrong sum; `repeated`: likewise, or something that one computation made was wrong
            (a check, a copy, a hash), and it is made again; `third`: some of them are at fault, and another
            worker decides.
        workers: see above.
        why: the reason, for people; follows the names of the workers at fault. If `undecided`: why a third
            worker has not decided; empty if there is none.
    """

    kind: Literal["equal", "worker", "undecided", "step", "everyone", "sum", "repeated", "third"]
    workers: tuple[int, ...] = ()
    why: str = ""

    def accusation(self, label: str, shown: str) -> str:
        """Return a message on the workers at fault; `shown` names the arrays. See `Verifications.follow`."""
        return (
            f"{label}, computed on {name_workers(self.workers)}, has the wrong bits in {shown}: "
            f"{self.why}; its processor, its memory or a library of its host is at fault"
        )


def _ending(verdict: Verdict, part: str) -> str:
    """Return the key of the text with which a verdict on a part of a step ends the job."""
    if part == "sum" and verdict.kind == "undecided":
        return "undecided sum"
    if verdict.kind == "step" and len(verdict.workers) == 1:
        return "step of one"
    return verdict.kind


def judge(answers: Sequence[Answer]) -> Verdict:
    """Decide which workers are at fault. Pure.

    Args:
        answers: of different workers: two attempts of each, or one of a worker that decides between others.
    """
    if len({hashes for answer in answers for hashes in answer.attempts}) == 1:
        return Verdict("equal")
    steady = [answer for answer in answers if answer.is_steady]
    shaky = [answer for answer in answers if not answer.is_steady]
    alike: dict[Hashes, list[Answer]] = {}
    for answer in steady:
        alike.setdefault(answer.attempts[0], []).append(answer)
    groups = sorted(alike.values(), key=len, reverse=True)
    if len(shaky) > len(steady) or (shaky and len(groups) > 1):
        return Verdict("step", _workers(answers if steady else shaky))
    if shaky:
        again = f"its second computation gave other bits, and {_agree(steady)}"
        return Verdict("worker", _workers(shaky), again)
    first, second, *_ = groups
    if len(first) > len(second):
        others = [answer for answer in steady if answer not in first]
        return Verdict("worker", _workers(others), _agree(first))
    divided = len(answers) == 2 or len(first) > 1
    return Verdict("undecided" if divided else "everyone", _workers(answers))


def judge_sum(
    readings: Mapping[int, Hashes],
    first: tuple[int, Hashes],
    again: Mapping[int, Hashes],
    summer: int | None = None,
) -> Verdict:
    """Decide which workers are at fault for a part of a total. Pure.

    A worker that has checked the part wrongly once is not named: what another one has sent may be wrong.

    Args:
        readings: by worker, the hash of the part as that worker has it.
        first: the worker that has added up the summands, and the hash of what it got.
        again: by worker, the hash of what it got from summands that were sent once more: this worker, and
            another one.
        summer: the worker whose sum all workers read; None if each has added up this part itself.
    """
    sums, read = set(again.values()), set(readings.values())
    if len(sums) == 1:
        wrong = tuple(worker for worker, hashes in readings.items() if hashes not in sums)
        if not wrong:
            return Verdict("repeated")
        if len(wrong) == len(readings):
            return Verdict("sum")
        return Verdict("worker", wrong, "added up twice more, it has other bits")
    checker, hashes = first
    others = {worker for worker, got in again.items() if {got} == read}
    if not read.intersection({hashes, again.get(checker)}) and others and others != {summer}:
        return Verdict("worker", (checker,), "all workers have another sum")
    return Verdict("undecided", tuple(sorted(again)))


def judge_again(answers: Sequence[Answer], earlier: Sequence[Answer] = ()) -> Verdict:
    """Decide as `judge` does, also from the answers of workers that have left. Pure.

    If those that agree share a host or a GPU that the other one does not use, they prove nothing: that host
    or that GPU may be at fault.

    Args:
        answers: see `judge`.
        earlier: the answers of the workers that have insisted on different bits before; empty if none have.
    """
    answers = with_earlier(answers, earlier)
    verdict = judge(answers)
    guilty = [answer for answer in answers if answer.worker in verdict.workers]
    if not earlier or verdict.kind != "worker" or not all(answer.is_steady for answer in guilty):
        return verdict
    others = [answer for answer in answers if answer.worker not in verdict.workers]
    elsewhere = {place for answer in guilty for place in answer.places}
    first, *rest = others
    for place in first.places:
        if place not in elsewhere and all(place in answer.places for answer in rest):
            return Verdict("undecided", _workers(earlier), f" ({_agree(others)}, but they share {place})")
    return verdict


def with_earlier(answers: Sequence[Answer], earlier: Sequence[Answer]) -> list[Answer]:
    """Return answers, and the earlier ones of workers that have left since."""
    present = {answer.worker for answer in answers}
    return [*answers, *(answer for answer in earlier if answer.worker not in present)]


def _workers(answers: Sequence[Answer]) -> tuple[int, ...]:
    return tuple(sorted(answer.worker for answer in answers))


def _agree(answers: Sequence[Answer]) -> str:
    workers = _workers(answers)
    if len(workers) == 1:
        return f"worker {workers[0]} computed the same bits twice"
    return f"{name_workers(workers)} agree"


class StepWithdrawn(Exception):
    """The step in progress has to be taken again, from the state before it, with another worker."""


class Doubt(msgspec.Struct, frozen=True):
    """The answers of workers that insist on different bits of a part of a step, until another one decides.

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
        plan: which replicas are verified in which steps.
        step: the step in progress, of training or of an evaluation; 0 if nothing is verified in it.
        trains: whether it is a training step.
        count: number of partials that this process knows to be verified.
        compares_hosts: whether each host computes a replica of the step in progress.
        can_repeat: whether all workers can take the step in progress again with another worker.
        doubt: the reason for which they take it again; None without one.
    """

    def __init__(self, job: Job) -> None:
        self.plan = VerificationPlan(job.settings.seed, job.view.replicas, job.settings.verification)
        self.step = 0
        self.trains = False
        self.count = 0
        self.compares_hosts = False
        self.can_repeat = False
        self.doubt: Doubt | None = None
        self._job = job
        self._told = 0
        self._taken_over = 0
        self._compared: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._verified = [0] * self.plan.replicas
        self._before = list(self._verified)
        self._newest = 0
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
        return self.plan.turn(self.step)

    @property
    def drawn(self) -> tuple[int, ...]:
        """The replicas to verify in the step in progress."""
        return self.plan.drawn(self.step) if self.step else ()

    @property
    def up_to(self) -> int:
        """The last step at which, or after which, each replica has been verified; 0 before."""
        return min(self._verified)

    @property
    def covers_earlier_steps(self) -> bool:
        """Whether the steps before that in progress were verified, of training and of its evaluation."""
        if self.trains:
            return self._up_to_before >= self.step - 1
        # The job has computed nothing before if it begins with an evaluation.
        begins = self.step == 1 and not (self._taken_over or any(self._before))
        return begins or self.plan.verification == Verification(1, all=True)

    @property
    def _up_to_before(self) -> int:
        """What `up_to` was before the step in progress, of which some rounds may be verified."""
        return min(self._before)

    @property
    def packed_doubt(self) -> bytes:
        """The doubt, for `unpack_doubt`; empty if there is none."""
        return b"" if self.doubt is None else msgspec.msgpack.encode(self.doubt)

    @property
    def packed(self) -> list[int]:
        """The last verified step of each replica, for `unpack`."""
        return list(self._verified)

    def unpack(self, packed: Sequence[int], step: int) -> None:
        """Continue from what another process has packed after `step`, whose state this worker has."""
        self._verified = list(packed)
        self._taken_over = step

    def unpack_doubt(self, packed: bytes) -> None:
        """Continue with the doubt of another process, which is empty if it has none."""
        self.doubt = msgspec.msgpack.decode(packed, type=Doubt) if packed else None

    def compared(self, owners: Sequence[Any]) -> int:
        """Return the last step after which this worker has known that all have equal states of some objects.

        Args:
            owners: models, optimizers and the like, which have the state.
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
            step: its number, counted from 1: over the whole job, or in its evaluation; 0 for another step.
            first: whether it is the first one of its program.
            trains: whether it is a training step.
        """
        self.step = step
        self.trains = trains
        self._before = list(self._verified)
        self._newest = max(self._newest, step if trains else 0)
        self.can_repeat = False
        self.compares_hosts = self._job.context.over_hosts and (
            first or bool(step and step % _HOSTS_EVERY == 0)
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the step in progress, in which the script or a callback makes another call in the block."""
        step, trains, before = self.step, self.trains, self._before
        try:
            yield
        finally:
            self.step, self.trains, self._before = step, trains, before

    def note_files(self, paths: Iterable[str]) -> None:
        """Note the files that callbacks of a call write, which has begun."""
        self._files |= dict.fromkeys(paths)

    def end_call(self) -> None:
        """Publish how much is verified: a call ends."""
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
        """Repeat a step with another worker if its workers insist on their bits, and no other has decided.

        Args:
            verdict: equal on all workers.
            names: the names of the arrays that differ.
            part: the part of the step; see `Doubt`.
            answers: the answers of the workers of the view.
            replica: see `Doubt`.
            number: the number of the round.

        Raises:
            StepWithdrawn: all workers repeat it.
        """
        doubt, self.doubt = self.doubt, None
        if verdict.kind == "undecided" and doubt is None and self._all_can_repeat():
            self.doubt = Doubt(self.step, part, replica, number, tuple(answers))
            self._verified = list(self._before)
            published = "gradient" if part == "rounding" else part
            self.publish(Verdict("third", verdict.workers), names, published, replica)
            raise StepWithdrawn

    def _all_can_repeat(self) -> bool:
        """Return whether no worker has a reason, such as a callback of its own, not to repeat the step."""
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
            verdict: equal on all workers.
            label: names what workers have computed.
            names: the names of the arrays that differ.
            part: the part of the step: "gradient", "sum" or "update".
            replica: the number of the replica, or of the part of a total; -1 for the state.
            lasts: whether a worker at fault may also have computed wrongly in earlier steps.

        Raises:
            DisagreementError: the verdict names nobody.
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
            # The chief has published this before a worker leaves, whose end would interrupt it.
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

        If they differ, a wrong state may have been the origin of gradients, as in a verified step.

        Args:
            label: names the call.
            state: the facts.
            taken: the number of training steps so far.
            owners: see `compared`.
            whole: whether the facts are about the whole state of the owners.

        Raises:
            DisagreementError: facts differ. Every worker raises it.
            WrongStateError: likewise, steps since the last comparison of states may be wrong, and there is a
                checkpoint from before.
        """
        if not self.plan.verification.every:
            agree(self._job, label, state)
            return

        def compare(_: View, communicator: Communicator) -> DisagreementError | None:
            try:
                compare_all(self._job, communicator, label, state)
            except DisagreementError as differs:
                # Also if only workers differ that have joined: the others have used their gradients.
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
            # No gradient is from a wrong state: workers that have joined end, and the others continue.
            agree(self._job, label, state)
        self.step = taken
        self.publish(Verdict("undecided", differs.workers), (), "memory")
        self.roll_back(str(differs), differs.workers, since)

    def roll_back(self, message: str, workers: tuple[int, ...], since: int) -> NoReturn:
        """End the job, whose state may be wrong; it starts again from the newest checkpoint before that.

        All workers call this.

        Args:
            message: what is wrong.
            workers: those at fault.
            since: the last step after which the state is known to be right.

        Raises:
            WrongStateError: there is a checkpoint of this step, or of an earlier one.
            DisagreementError: there is none.
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
                f"{message}, and there is no checkpoint from before{removed}; start over", workers
            )
        raise WrongStateError(
            f"{message}{written}; later checkpoints are removed, and the job continues from that of step "
            f"{left}",
            workers,
        )

    def _remove_later(self, step: int, view: View, communicator: Communicator) -> int:
        """Remove checkpoints that are later than a step; return the step of the chief's newest one, or -1.

        All workers wait until this is done. If a view ends before, the next one repeats it.
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
        """Note that the step in progress has verified `replicas`."""
        self.count += len(replicas)
        for replica in replicas if self.trains else ():
            self._verified[replica] = self.step


@dataclass
class _Attempts:
    """The attempts of this worker in the round in progress, by replica.

    Attributes:
        round_: the round.
        hashes: the hashes of each attempt.
        newest: the partial of the last attempt, which shows whether the round has a newer one.
    """

    round_: Round
    hashes: dict[int, list[Hashes]] = field(default_factory=dict)
    newest: dict[int, Any] = field(default_factory=dict)

    def made(self, replica: int, number: int) -> list[Hashes]:
        """Compute a replica until there are `number` attempts; return their hashes.

        If the computation is interrupted by an exception, a second call continues it.
        """
        hashes, started = self.hashes.setdefault(replica, []), self.round_.started
        while len(hashes) < number:
            if hashes and started.get(replica) is self.newest[replica]:
                started.pop(replica, None)
            self.round_.begin([replica])
            hashes.append(_hashes_of(self.round_, replica))
            self.newest[replica] = started.get(replica)
        return hashes


class _SumAnswer(NamedTuple):
    """What a worker knows of the verified parts of a total.

    Attributes:
        worker: its id.
        readings: by part, also by those that nobody adds up, the hash of the total as this worker has it.
        sums: by part for which it is the checker, the hash of the sum that it has computed, and the first
            byte of the total at which its own total differs from that sum; -1 if none does.
        changed: by verified replica that it owns, the hashes of its partial, if they are others by now.
        places: see `Answer`.
    """

    worker: int
    readings: dict[int, Hashes]
    sums: dict[int, tuple[Hashes, int]]
    changed: dict[int, Hashes]
    places: tuple[str, ...]


class _Fault(NamedTuple):
    """A wrong total, or a wrong partial in it.

    Attributes:
        verdict: who is at fault.
        label: names what is wrong.
        names: the names of the arrays that are wrong.
        part: the part of the step; see `follow`.
        replica: the number of the replica, or of the part of the total.
        lasts: see `follow`.
        byte: the first one of the total that is wrong; -1 if it is not known.
        answers: what workers have added up, if they differ.
    """

    verdict: Verdict
    label: str
    names: Sequence[str]
    part: str
    replica: int
    lasts: bool = False
    byte: int = -1
    answers: Sequence[Answer] = ()


class _Total:
    """A copy of the limits and sums of a round, which later calls of the exchange leave as it is.

    Attributes:
        layout: the layout of both.
        memory: all of them, with zeros between them.
    """

    def __init__(self, limits: Sequence[Any], sums: Sequence[Any]) -> None:
        self._limits = Layout.of(limits)
        self._sums = Layout.of(sums)
        sums = [*limits, *sums]
        self.layout = Layout.of(sums)
        self.memory = allocate(self.layout.size)
        self.memory.fill(0)
        self._leaves = self.layout.views(self.memory)
        for leaf, array in zip(self._leaves, flat(sums), strict=True):
            np.copyto(leaf, array)

    @property
    def limits(self) -> Sequence[Any]:
        """The limits, in their shapes."""
        return self.layout.shaped(self._leaves)[: len(self._limits.shapes)]

    @property
    def sums(self) -> Sequence[Any]:
        """The sums, in their shapes."""
        return self.layout.shaped(self._leaves)[len(self._limits.shapes) :]

    def summer_of(self, view: View, byte: int) -> int | None:
        """Return the worker that has summed a byte; see `lockstep.collectives.network.lane_reduce`."""
        of_sums = byte - self._limits.size
        return summer_of(self._limits, view, byte) if of_sums < 0 else summer_of(self._sums, view, of_sums)


@dataclass(frozen=True)
class TotalPart:
    """One of R parts of a total, and its sum from the summands of all replicas. Pure.

    Attributes:
        layout: the layout of the total.
        replicas: R.
        number: the number of the part, in place of a replica's id.
    """

    layout: Layout
    replicas: int
    number: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The bytes of the total that belong to it."""
        return self.layout.bounds(self.replicas)[self.number]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The elements of the leaves that belong to it."""
        return self.layout.pieces(*self.bounds)

    def of(self, leaves: Sequence[Any]) -> list[Bytes]:
        """Return the bytes of the pieces in flat leaves."""
        return [leaves[leaf][start:stop].view(np.uint8) for leaf, start, stop in self.pieces]

    def sum(self, summands: Mapping[int, Bytes], adder: Adder) -> Bytes:
        """Return the bytes of the part of the total.

        Args:
            summands: the joined bytes of the pieces of each replica.
            adder: adds.
        """
        start, stop = self.bounds
        of_replicas = [allocate(stop - start) for _ in range(self.replicas)]
        total = allocate(stop - start)
        total.fill(0)
        plan = Sum.of(Span(0, self.replicas), [Span(r, r + 1) for r in range(self.replicas)])
        end = 0
        for piece in self.pieces:
            dtype = self.layout.dtypes[piece.leaf]
            size = (piece.stop - piece.start) * dtype.itemsize
            place = self.layout.offsets[piece.leaf] + piece.start * dtype.itemsize - start
            for replica, memory in enumerate(of_replicas):
                memory[place : place + size] = summands[replica][end : end + size]
            operands = [memory[place : place + size].view(dtype) for memory in of_replicas]
            with np.errstate(all="ignore"):
                adder.add(plan, operands, total[place : place + size].view(dtype))
            end += size
        return total


class Verifier:
    """Verifies the partials of rounds before they are summed, and then their sums.

    Args:
        exchange: makes calls between the workers.
        job: the job of this worker.
        verifications: what the job verifies.
        describe: names an array of a partial for people.
    """

    def __init__(
        self,
        exchange: ExchangeCall,
        job: Job,
        verifications: Verifications,
        describe: Callable[[str], str] = str,
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._verifications = verifications
        self._describe = describe
        self._attempts: _Attempts | None = None
        self._verified: dict[int, Hashes] = {}
        self._adder = Adder()

    def sum(self, round_: Round) -> Total:
        """Return the total of a round, as `Round.sum` does; verify its partials and the sum, if that is due.

        A worker that is at fault ends here, and the others verify the round again without it.

        Raises:
            DisagreementError: workers compute different bits, and it is unknown which are right.
        """
        drawn = self.verify(round_)
        total = self._exchange(round_.sum, round_.catching_up)
        parts = self._verifications.drawn
        if parts and round_.sums and not self._job.joins:
            total = self._verified_total(round_, parts)
        self._verifications.note(drawn)
        return total

    def verify(self, round_: Round) -> Sequence[int]:
        """Verify the drawn partials of a round, unless they are verified; return their replicas.

        Raises:
            DisagreementError: workers compute different bits, and it is unknown which are right.
        """
        if round_.verified:
            return ()
        self._verified = {}
        drawn, compares_hosts = self._verifications.drawn, self._verifications.compares_hosts
        if not (drawn or compares_hosts) or not round_.anywhere or self._job.joins:
            return ()
        if self._attempts is None or self._attempts.round_ is not round_:
            self._attempts = _Attempts(round_)
        if compares_hosts:
            self._exchange(partial(self._compare_hosts, round_), round_.catching_up)
        if drawn:
            self._verify(round_, drawn)
        round_.verified, self._attempts = True, None
        return drawn

    def _compare_hosts(self, round_: Round, view: View, communicator: Communicator) -> None:
        """Let the first worker of each host compute replica 0, with all operations of the program."""
        round_.entered()
        worker = self._job.worker
        round_.begin(view.replicas_of(worker))
        leads = any(host[0] == worker for host in view.hosts)
        from_here = (self._made(0, 1), host_report(self._job)) if leads else None
        round_.settle()
        label = f"the comparison of hosts in {round_.label}"
        blobs = communicator.gather(msgspec.msgpack.encode(from_here), what=label)
        of_workers = [msgspec.msgpack.decode(blob, type=_FromHost | None) for blob in blobs]
        (hashes, first), *others = filter(None, of_workers)
        unlike = [(made, report) for made, report in others if made != hashes]
        if unlike:
            made, other = unlike[0]
            answers = (Answer(first.worker, tuple(hashes)), Answer(other.worker, tuple(made)))
            shown = listed(self._differing(round_, answers))
            reports = (first, *(report for _, report in unlike))
            refuse_unlike(self._job, round_.label, shown, reports, texts_of_all(communicator, label))

    def _verify(self, round_: Round, drawn: Sequence[int]) -> None:
        """Return once all answers for the replicas of a round are equal."""
        while fault := self._partial_fault(round_, drawn, self._made, "gradient"):
            # The others follow if they still differ without the worker at fault.
            self._follow(fault)

    def _follow(self, fault: _Fault) -> None:
        """See `Verifications.follow`."""
        self._verifications.follow(
            fault.verdict, fault.label, fault.names, fault.part, fault.replica, lasts=fault.lasts
        )

    def _partial_fault(
        self, round_: Round, replicas: Sequence[int], made: Callable[[int, int], list[Hashes]], part: str
    ) -> _Fault | None:
        """Return the first fault in replicas of a round, or None without one.

        Args:
            round_: the round.
            replicas: the replicas.
            made: see `_answers`.
            part: see `Doubt`.

        Raises:
            StepWithdrawn: another worker decides.
        """
        verifications, number = self._verifications, round_.number
        act = partial(self._answers, round_, replicas, 1, made)
        answers_of = self._exchange(act, round_.catching_up)
        doubted = [replica for replica in replicas if verifications.answers_before(part, replica, number)]
        differing = [replica for replica, answers in answers_of.items() if not answers.are_equal]
        if not (doubted or differing):
            if part == "gradient":
                self._verified = {r: answers.owner.attempts[0] for r, answers in answers_of.items()}
            return None
        replica = [*doubted, *differing][0]
        act = partial(self._answers, round_, [replica], 2, made)
        answers = self._exchange(act, round_.catching_up)[replica].present
        earlier = verifications.answers_before(part, replica, number)
        present = with_earlier(answers, earlier)
        verdict, names = judge_again(answers, earlier), self._differing(round_, present)
        label = f"{round_.label}: replica {replica}"
        verifications.withdraw_step(verdict, names, part, answers, replica, number)
        guilty = [answer for answer in (*present, *earlier) if answer.worker in verdict.workers]
        lasts = any(answer.is_steady and len(answer.attempts) > 1 for answer in guilty)
        return _Fault(verdict, label, names, "gradient", replica, lasts)

    def _answers(
        self,
        round_: Round,
        replicas: Sequence[int],
        attempts: int,
        made: Callable[[int, int], list[Hashes]],
        view: View,
        communicator: Communicator,
    ) -> dict[int, Answers]:
        """Compute what this worker has to, and return the answers of all workers, by replica.

        Args:
            round_: the round.
            replicas: the replicas to compute.
            attempts: how often their owners and checkers do.
            made: computes a replica a number of times, and returns the hashes.
            view: the view of the exchange.
            communicator: its communicator.
        """
        round_.entered()
        worker, turn = self._job.worker, self._verifications.turn
        round_.begin(view.replicas_of(worker))
        made_here: list[tuple[int, str, list[Hashes]]] = []
        for replica in replicas:
            roles = Roles.of(view, replica, turn)
            if worker == roles.owner:
                # A worker without others checks itself.
                number = max(attempts, 2) if roles.checker is None else attempts
                made_here.append((replica, "owner", made(replica, number)))
            elif worker == roles.checker:
                made_here.append((replica, "checker", made(replica, attempts)))
            elif worker == roles.third and attempts > 1:
                made_here.append((replica, "third", made(replica, 1)))
        round_.settle()
        blob = msgspec.msgpack.encode((worker, self._verifications.places, made_here))
        answers_of: dict[int, dict[str, Answer]] = {replica: {} for replica in replicas}
        # With several hosts, they may be of an earlier view, in which the workers had other roles.
        for other in communicator.gather(blob, what=f"the verification of {round_.label}"):
            sender, places, made_there = msgspec.msgpack.decode(
                other, type=tuple[int, tuple[str, ...], list[tuple[int, str, list[Hashes]]]]
            )
            for replica, role, hashes in made_there:
                answers_of[replica][role] = Answer(sender, tuple(hashes), places)
        return {replica: Answers(**answers) for replica, answers in answers_of.items()}

    def _made(self, replica: int, number: int) -> list[Hashes]:
        assert self._attempts is not None
        return self._attempts.made(replica, number)[:number]

    def _rounded(self, round_: Round, replica: int, number: int) -> list[Hashes]:
        """Round a partial to small integers a number of times; return the hashes."""
        round_.begin([replica])
        replicas = self._verifications.plan.replicas
        return [_rounded_hashes_of(round_, replica, replicas) for _ in range(number)]

    def _verified_total(self, round_: Round, parts: Sequence[int]) -> Total:
        """Return the total of a round that was summed, once its `parts` are right."""
        was_wrong, wrong_checks = False, 0
        while True:
            total = _Total(round_.limits, round_.sums)
            fault = self._fault(round_, total, parts)
            assert round_.layout is not None
            if fault is None and round_.layout.scaled:
                # The sum of what owners send does not show integers that an owner always rounds wrongly.
                fault = self._partial_fault(round_, parts, partial(self._rounded, round_), "rounding")
            if fault is None:
                return round_.total_of(total.sums, total.limits, self._verifications.plan.replicas)
            verdict, lasts, everyone = fault.verdict, fault.lasts, self._job.view.workers
            if fault.answers:
                self._verifications.withdraw_step(
                    verdict, fault.names, "sum", fault.answers, fault.replica, round_.number
                )
            if verdict.kind == "sum":
                summer = total.summer_of(self._job.view, fault.byte)
                workers = () if summer is None else (summer,)
                if was_wrong and workers and workers != everyone:
                    verdict = Verdict("worker", workers, "others add up the same summands to another sum")
                    lasts = True
                elif not was_wrong:
                    # Nobody knows whether the sum, or a summand on its way, was wrong.
                    verdict = Verdict("repeated", workers)
                was_wrong = True
            elif fault.part == "gradient" and verdict.kind == "worker" and verdict.workers == everyone:
                round_.started.pop(fault.replica)
                verdict, wrong_checks = Verdict("repeated", verdict.workers), wrong_checks + 1
            elif verdict.kind in ("equal", "repeated"):
                # Only the first of two sums or of two roundings was wrong.
                verdict, wrong_checks = Verdict("repeated"), wrong_checks + 1
            if wrong_checks > _MOST_WRONG_CHECKS:
                verdict = Verdict("undecided" if fault.part == "sum" else "step", everyone)
            self._follow(fault._replace(verdict=verdict, lasts=lasts))
            self._exchange(round_.sum, round_.catching_up)

    def _fault(self, round_: Round, total: _Total, parts: Sequence[int]) -> _Fault | None:
        """Return the first fault in a total, or in a verified partial, or None without one.

        In other parts than `parts`, this finds only differences between workers.
        """
        size = max(1, _ROOM // max(1, total.layout.size))
        others = [part for part in range(self._verifications.plan.replicas) if part not in parts]
        for start in range(0, len(parts), size):
            summed = parts[start : start + size]
            read = summed if start else [*summed, *others]
            answers = self._sum_answers(round_, total, summed, read)
            for answer in answers:
                for replica, hashes in answer.changed.items():
                    names = self._part_names(round_)
                    names = differing_names(names, [self._verified[replica], hashes])
                    verdict = Verdict("worker", (answer.worker,), "it has changed since it was computed")
                    label = f"{round_.label}: replica {replica}"
                    return _Fault(verdict, label, names, "gradient", replica)
            doubted = [part for part in read if self._sums_before(round_, part)]
            for part in (*doubted, *read):
                got = {answer.readings[part] for answer in answers}
                got |= {answer.sums[part][0] for answer in answers if part in answer.sums}
                if len(got) > 1 or part in doubted:
                    if part in others:
                        answers = self._sum_answers(round_, total, [part], [part])
                    again = self._sum_answers(round_, total, [part], [part], again=True)
                    return self._judged(round_, total, part, answers, again)
        return None

    def _judged(
        self,
        round_: Round,
        total: _Total,
        part: int,
        answers: Sequence[_SumAnswer],
        others: Sequence[_SumAnswer],
    ) -> _Fault | None:
        """Return the fault in a part of a total, about which some answers differ."""
        checks = [[answer for answer in some if part in answer.sums] for some in (answers, others)]
        byte = max(answer.sums[part][1] for some in checks for answer in some)
        (first, *_), again = checks
        added_up = [Answer(answer.worker, (answer.sums[part][0],), answer.places) for answer in again]
        sums = {answer.worker: answer.sums[part][0] for answer in again}
        if earlier := self._sums_before(round_, part):
            verdict, lasts = judge_again(added_up, earlier), True
        else:
            verdict = judge_sum(
                {answer.worker: answer.readings[part] for answer in others},
                (first.worker, first.sums[part][0]),
                sums,
                total.summer_of(self._job.view, byte),
            )
            # A worker that always checks wrongly may also have summed wrongly.
            lasts = len(set(sums.values())) > 1 and sums.get(first.worker) == first.sums[part][0]
        names = [self._describe(_name_at(round_, total.layout, byte))] if byte >= 0 else []
        label = f"{round_.label}: {_SUM}"
        return _Fault(verdict, label, names, "sum", part, lasts=lasts, byte=byte, answers=added_up)

    def _sums_before(self, round_: Round, part: int) -> tuple[Answer, ...]:
        return self._verifications.answers_before("sum", part, round_.number)

    def _sum_answers(
        self,
        round_: Round,
        total: _Total,
        parts: Sequence[int],
        read: Sequence[int],
        *,
        again: bool = False,
    ) -> list[_SumAnswer]:
        """Return the answers of all workers.

        Args:
            round_: the round.
            total: its total, as this worker has it.
            parts: the parts to add up.
            read: the parts to hash: these, and perhaps others.
            again: whether other workers add up, too.
        """
        worker, label = self._job.worker, f"the verification of the sum of {round_.label}"
        for _ in range(_MOST_WRONG_CHECKS + self._verifications.plan.replicas):
            summands = self._exchange(
                partial(self._summands, round_, total.layout, parts, again), round_.catching_up
            )
            readings, sums = {}, {}
            for number in read:
                part = TotalPart(total.layout, self._verifications.plan.replicas, number)
                start, stop = part.bounds
                reading = total.memory[start:stop]
                readings[number] = digest_array(reading)
                if len(summands.get(number, ())) == part.replicas:
                    summed = part.sum(summands[number], self._adder)
                    differs = np.flatnonzero(summed != reading)[:1]
                    sums[number] = (digest_array(summed), start + int(differs[0]) if differs.size else -1)
            changed = {
                replica: hashes
                for replica, verified in self._verified.items()
                if replica in self._job.view.replicas_of(worker)
                and (hashes := _hashes_of(round_, replica)) != verified
            }
            answer = _SumAnswer(worker, readings, sums, changed, self._verifications.places)
            blob = msgspec.msgpack.encode(answer)

            def gather(_: View, communicator: Communicator, blob: bytes = blob) -> list[bytes]:
                return communicator.gather(blob, what=label)

            blobs = self._exchange(gather, round_.catching_up)
            answers = [msgspec.msgpack.decode(other, type=_SumAnswer) for other in blobs]
            needed = min(2, len(answers)) if again else 1
            if all(sum(number in answer.sums for answer in answers) >= needed for number in parts):
                return answers
            # A checker was lost in between, or a summand was, whose head had a wrong bit.
        workers, names = self._job.view.workers, self._part_names(round_)
        label = f"{round_.label}: {_SUM}"
        self._verifications.follow(Verdict("undecided", workers), label, names, "sum", parts[0])
        raise AssertionError

    def _summands(
        self,
        round_: Round,
        layout: Layout,
        parts: Sequence[int],
        again: bool,
        view: View,
        communicator: Communicator,
    ) -> dict[int, dict[int, Bytes]]:
        """Send the summands of this worker to the checkers; return what it gets, by part and replica."""
        round_.entered()
        owned, replicas = view.replicas_of(self._job.worker), view.replicas
        round_.begin(owned)
        partials = round_.partials(owned)
        limits, summands = round_.limits_of(partials), round_.summands(partials, replicas)
        leaves = {replica: flat([*limits[replica], *summands[replica]]) for replica in owned}
        sent: dict[int, list[Bytes]] = {worker: [] for worker in view.workers}
        sizes = {}
        for number in parts:
            part = TotalPart(layout, replicas, number)
            roles = Roles.of(view, number, self._verifications.turn)
            checkers = {roles.owner if roles.checker is None else roles.checker}
            if again:
                checkers.add(roles.owner if roles.third is None else roles.third)
            for replica in owned:
                pieces = part.of(leaves[replica])
                sizes[number] = sum(piece.size for piece in pieces)
                # With several hosts, the call may have completed in an earlier view.
                for checker in checkers:
                    sent[checker] += [np.array([number, replica], np.int64).view(np.uint8), *pieces]
        label = f"the summands of {round_.label}"
        received: dict[int, dict[int, Bytes]] = {}
        for data in communicator.all_to_all([sent[worker] for worker in view.workers], what=label):
            for number, replica, summand in summands_in(data, sizes, replicas):
                received.setdefault(number, {})[replica] = summand
        return received

    def _differing(self, round_: Round, answers: Sequence[Answer]) -> list[str]:
        """Return the names of the arrays that two attempts differ in."""
        attempts = [hashes for answer in answers for hashes in answer.attempts]
        return differing_names(self._part_names(round_), attempts)

    def _part_names(self, round_: Round) -> list[str]:
        assert round_.layout is not None
        parts, computed = round_.named_parts(round_.layout.zeros), next(iter(round_.started), -1)
        names = [self._describe(name) for name in (*parts, *round_.layout.limited)]
        return [*names, *round_.outputs_of(computed)]


def _hashes_of(round_: Round, replica: int) -> Hashes:
    """Return the hashes of the arrays of a replica, or none if it contributes nothing."""
    if replica not in round_.started:
        return b""
    (arrays,) = round_.partials([replica]).values()
    parts = [*round_.named_parts(arrays).values(), *round_.outputs_of(replica).values()]
    return b"".join(map(digest_array, parts))


def _rounded_hashes_of(round_: Round, replica: int, replicas: int) -> Hashes:
    """Return the hashes of the arrays of one of R replicas, some as small integers, and of its limits."""
    assert round_.layout is not None
    partials = round_.partials([replica])
    (arrays,), (limits,) = partials.values(), round_.limits_of(partials).values()
    (summands,) = round_.summands(partials, replicas).values()
    rounded, scaled = dict(zip(round_.summed, summands, strict=True)), round_.layout.scaled
    pairs = zip(round_.layout.names, arrays, strict=True)
    parts = round_.named_parts([rounded[name] if name in scaled else array for name, array in pairs])
    return b"".join(map(digest_array, [*parts.values(), *limits]))


def summands_in(data: Bytes, sizes: Mapping[int, int], replicas: int) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the parts, replicas and summands in what a worker has sent, up to a head with wrong bits.

    Args:
        data: what it has sent.
        sizes: the bytes of a summand, by part.
        replicas: R.
    """
    end = 0
    while end + _HEAD <= data.size:
        number, replica = map(int, data[end : end + _HEAD].copy().view(np.int64))
        start, end = end + _HEAD, end + _HEAD + sizes.get(number, data.size)
        if end > data.size or not 0 <= replica < replicas:
            return
        yield number, replica, data[start:end]


def _name_at(round_: Round, layout: Layout, byte: int) -> str:
    """Return the name of the part of the total that has a byte."""
    assert round_.layout is not None
    leaf = max(leaf for leaf, start in enumerate(layout.offsets) if start <= byte)
    limited = round_.layout.limited
    if leaf < len(limited):
        return limited[leaf]
    name, dtype = round_.summed[leaf - len(limited)], layout.dtypes[leaf]
    element = (byte - layout.offsets[leaf]) // dtype.itemsize
    if name in round_.layout.equal or name in round_.layout.scalars:
        return name
    marked = np.zeros(layout.shapes[leaf], dtype)
    marked.reshape(-1)[element : element + 1] = 1
    return next((part for part, array in round_.parts({name: marked}).items() if array.any()), name)


def differing_names(names: Sequence[str], attempts: Sequence[Hashes]) -> list[str]:
    """Return the names of the arrays whose hashes differ in two attempts."""
    other = next((hashes for hashes in attempts if hashes != attempts[0]), attempts[0])
    pairs = zip(names, _parts(attempts[0]), _parts(other), strict=False)
    return [name for name, first, second in pairs if first != second]


def _parts(hashes: Hashes) -> list[Hashes]:
    return [hashes[start : start + _HASH] for start in range(0, len(hashes), _HASH)]


def listed(names: Sequence[str], otherwise: str = "its examples") -> str:
    """Return the first names of arrays, and how many more there are; `otherwise` if there are none."""
    if not names:
        return otherwise
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {count(rest, 'other array')}" if rest > 0 else "")


_current: list[tuple[Job, Verifications]] = []


def verifications_of(job: Job) -> Verifications:
    """Return the parts of a job that this process verifies."""
    if not _current or _current[0][0] is not job:
        _current[:] = [(job, Verifications(job))]
        # A loop that neither `fit` nor `strategy.steps` drives has no end that is known before.
        job.at_exit(_current[0][1].end_call)
    return _current[0][1]
