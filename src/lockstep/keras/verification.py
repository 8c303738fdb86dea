"""Verification: now and then a second worker computes a partial again, before the total is applied.

A partial is a function of the state, the examples, the seed and the earlier totals. So two workers that
compute a replica get equal bits, unless a processor, a memory or a library of one of them is at fault, or the
step is not deterministic. Comparing states cannot show that: a total enters the state of all workers alike.

In a verified step, `VerificationPlan` draws replicas. The owner of each and a second worker, its checker,
hash the partial that each has computed. If the hashes differ, both compute it again, a third worker computes
it once, and `judge` decides from these answers. All workers get all answers, so all decide alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from lockstep.collectives.contract import Communicator
from lockstep.data.digest import digest_array
from lockstep.errors import DisagreementError
from lockstep.keras.host_report import HostReport, host_report, refuse_unlike
from lockstep.keras.rounds import ExchangeCall, Round
from lockstep.keras.seeds import seed_at
from lockstep.keras.worker_exchange import texts_of_all
from lockstep.observability.events import ReplicasVerified, VerificationFailed
from lockstep.protocol.job_spec import Verification
from lockstep.system.prose import count, name_workers
from lockstep.topology import View
from lockstep.worker.job import Job

_NAMED = 3
"""How many arrays that differ a message names."""
_HOSTS_EVERY = 1000
"""Steps between two comparisons of all hosts, which may have joined meanwhile."""
_HASH = 8
"""Bytes of the hash of an array."""

_ENDS = {
    "undecided": "{who} get different bits in {shown}, each time the same, and no third worker can decide "
    "which are right: the processor, the memory or a library of one of their hosts is at fault, or the step "
    "depends on the worker",
    "step": "the step is not deterministic: computed again from the same state and examples, {who} got other "
    "bits in {shown}; look for random numbers that no seed of Keras determines, for the time, and for "
    "operations that are not deterministic",
    "everyone": "{who} get different bits in {shown}: the step depends on the worker; look for random "
    "numbers that no seed of Keras determines, for the time, and for hosts that differ",
}
_MACHINE = "its processor, its memory or a library of its host is at fault"

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
        cycle, place = divmod(self._number(step), self.replicas)

        def position(replica: int) -> int:
            return seed_at(self.seed, cycle, replica)

        return (sorted(range(self.replicas), key=position)[place],)

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
    """The hashes that a worker has computed for a replica, of each attempt."""

    worker: int
    attempts: tuple[Hashes, ...]

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
    """The conclusion from the answers for a replica.

    Attributes:
        kind: `equal`; `worker`: the one of `workers` is at fault; `undecided`: one of the two is;
            `step`: the step is not deterministic; `everyone`: each worker computes something else.
        workers: see above.
        why: the reason, for people; follows the name of the worker at fault.
    """

    kind: Literal["equal", "worker", "undecided", "step", "everyone"]
    workers: tuple[int, ...] = ()
    why: str = ""


def judge(answers: Answers) -> Verdict:
    """Decide which worker is at fault. Pure.

    Args:
        answers: two attempts of the owner and of the checker, if there is one, and one of the third worker.
    """
    owner, checker, third = answers
    if answers.are_equal:
        return Verdict("equal")
    if checker is None:
        return Verdict("step", (owner.worker,))
    both = tuple(sorted((owner.worker, checker.worker)))
    if owner.is_steady and checker.is_steady:
        if third is None:
            return Verdict("undecided", both)
        if owner.attempts[0] == checker.attempts[0]:
            return Verdict("worker", (third.worker,), _agree(owner, checker))
        for guilty, other in ((checker, owner), (owner, checker)):
            if third.attempts[0] == other.attempts[0]:
                return Verdict("worker", (guilty.worker,), _agree(other, third))
        return Verdict("everyone", tuple(sorted((*both, third.worker))))
    if not (owner.is_steady or checker.is_steady):
        return Verdict("step", both)
    steady, shaky = (owner, checker) if owner.is_steady else (checker, owner)
    if third is not None and third.attempts[0] != steady.attempts[0]:
        return Verdict("step", tuple(sorted((*both, third.worker))))
    again = f"its second computation gave other bits, and {_agree(steady, third)}"
    return Verdict("worker", (shaky.worker,), again)


def _agree(steady: Answer, third: Answer | None) -> str:
    if third is None:
        return f"worker {steady.worker} computed the same bits twice"
    return f"workers {steady.worker} and {third.worker} agree"


class Verifications:
    """A record of what the job has verified so far; equal on all its members.

    Attributes:
        plan: which replicas are verified in which steps.
        step: the training step in progress; 0 in a step that does not train.
        count: number of partials that this process knows to be verified.
        compares_hosts: whether each host computes a replica of the step in progress.
    """

    def __init__(self, job: Job) -> None:
        self.plan = VerificationPlan(job.settings.seed, job.view.replicas, job.settings.verification)
        self.step = 0
        self.count = 0
        self.compares_hosts = False
        self._job = job
        self._told = 0
        self._verified = [0] * self.plan.replicas

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
    def packed(self) -> list[int]:
        """The last verified step of each replica, for `unpack`."""
        return list(self._verified)

    def unpack(self, packed: Sequence[int]) -> None:
        """Continue from `packed`, of a process of the same job; empty if nothing was recorded."""
        self._verified = list(packed) or self._verified

    def begin(self, step: int, *, first: bool = False) -> None:
        """Begin a step.

        Args:
            step: its number, counted from 1 over the whole job; 0 for a step that does not train.
            first: whether it is the first one of its program.
        """
        self.step = step
        self.compares_hosts = self._job.context.over_hosts and (
            first or bool(step and step % _HOSTS_EVERY == 0)
        )

    def end_call(self) -> None:
        """Publish how much is verified: a call ends."""
        self.step = 0
        if self.count > self._told and self._job.is_chief:
            self._told = self.count
            self._job.events.publish(ReplicasVerified(self.count, self.up_to))

    def note(self, replicas: Sequence[int]) -> None:
        """Note that the step in progress has verified `replicas`."""
        self.count += len(replicas)
        for replica in replicas:
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
            (arrays,) = self.round_.partials([replica]).values()
            parts = self.round_.named_parts(arrays).values() if replica in started else ()
            hashes.append(b"".join(map(digest_array, parts)))
            self.newest[replica] = started.get(replica)
        return hashes


class Verifier:
    """Verifies the partials of rounds before they are summed.

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

    def verify(self, round_: Round) -> None:
        """Verify a round, if that is due.

        A worker that is at fault ends here, and the others verify the round again without it.

        Raises:
            DisagreementError: workers compute different bits, and it is unknown which are right.
        """
        drawn, compares_hosts = self._verifications.drawn, self._verifications.compares_hosts
        if not (drawn or compares_hosts) or not round_.anywhere or round_.verified or self._job.joins:
            return
        if self._attempts is None or self._attempts.round_ is not round_:
            self._attempts = _Attempts(round_)
        if compares_hosts:
            self._exchange(partial(self._compare_hosts, round_), round_.catching_up)
        if drawn:
            self._verify(round_, drawn)
        round_.verified, self._attempts = True, None

    def _compare_hosts(self, round_: Round, view: View, communicator: Communicator) -> None:
        """Let the first worker of each host compute replica 0, with all operations of the program."""
        round_.entered()
        worker = self._job.worker
        round_.begin(view.replicas_of(worker))
        leads = any(host[0] == worker for host in view.hosts)
        from_here = (self._made(0, 1), host_report(self._job)) if leads else None
        round_.settle()
        what = f"the comparison of hosts in {round_.what}"
        blobs = communicator.gather(msgspec.msgpack.encode(from_here), what=what)
        of_workers = [msgspec.msgpack.decode(blob, type=_FromHost | None) for blob in blobs]
        (hashes, first), *others = filter(None, of_workers)
        unlike = [(made, report) for made, report in others if made != hashes]
        if unlike:
            made, other = unlike[0]
            answers = Answers(Answer(first.worker, tuple(hashes)), Answer(other.worker, tuple(made)))
            shown = _listed(self._differing(round_, answers))
            reports = (first, *(report for _, report in unlike))
            refuse_unlike(self._job, round_.what, shown, reports, texts_of_all(communicator, what))

    def _verify(self, round_: Round, drawn: Sequence[int]) -> None:
        """Return once all answers for the replicas of a round are equal."""
        while True:
            answers_of = self._exchange(partial(self._answers, round_, drawn, 1), round_.catching_up)
            differing = [replica for replica, answers in answers_of.items() if not answers.are_equal]
            if not differing:
                break
            answers_of = self._exchange(partial(self._answers, round_, differing, 2), round_.catching_up)
            for replica, answers in answers_of.items():
                self._act(round_, replica, answers, judge(answers))
        self._verifications.note(drawn)

    def _answers(
        self, round_: Round, replicas: Sequence[int], attempts: int, view: View, communicator: Communicator
    ) -> dict[int, Answers]:
        """Compute what this worker has to, and return the answers of all workers, by replica."""
        round_.entered()
        worker, turn = self._job.worker, self._verifications.turn
        round_.begin(view.replicas_of(worker))
        made_here: list[tuple[int, str, list[Hashes]]] = []
        for replica in replicas:
            roles = Roles.of(view, replica, turn)
            if worker == roles.owner:
                # A worker without others checks itself.
                number = max(attempts, 2) if roles.checker is None else attempts
                made_here.append((replica, "owner", self._made(replica, number)))
            elif worker == roles.checker:
                made_here.append((replica, "checker", self._made(replica, attempts)))
            elif worker == roles.third and attempts > 1:
                made_here.append((replica, "third", self._made(replica, 1)))
        round_.settle()
        blob = msgspec.msgpack.encode((worker, made_here))
        answers_of: dict[int, dict[str, Answer]] = {replica: {} for replica in replicas}
        # With several hosts, they may be of an earlier view, in which the workers had other roles.
        for other in communicator.gather(blob, what=f"the verification of {round_.what}"):
            sender, made_there = msgspec.msgpack.decode(
                other, type=tuple[int, list[tuple[int, str, list[Hashes]]]]
            )
            for replica, role, hashes in made_there:
                answers_of[replica][role] = Answer(sender, tuple(hashes))
        return {replica: Answers(**answers) for replica, answers in answers_of.items()}

    def _made(self, replica: int, number: int) -> list[Hashes]:
        assert self._attempts is not None
        return self._attempts.made(replica, number)[:number]

    def _act(self, round_: Round, replica: int, answers: Answers, verdict: Verdict) -> None:
        """End the worker at fault, or all; return on the others."""
        if verdict.kind == "equal":
            return
        names = self._differing(round_, answers)
        what = f"{round_.what}: replica {replica}"
        who = name_workers(verdict.workers)
        event = VerificationFailed(
            step=self._verifications.step,
            replica=replica,
            arrays=tuple(names),
            workers=verdict.workers,
            verdict=verdict.kind,
        )
        if self._job.is_chief:
            self._job.events.publish(event)
        shown = _listed(names)
        if verdict.kind == "worker":
            (guilty,) = verdict.workers
            if guilty == self._job.worker:
                message = (
                    f"{what}, computed on {who}, has the wrong bits in {shown}: {verdict.why}; {_MACHINE}"
                )
                self._job.membership.end_differing(DisagreementError(message, verdict.workers))
            return
        raise DisagreementError(f"{what}: {_ENDS[verdict.kind].format(who=who, shown=shown)}{self._advice()}")

    def _differing(self, round_: Round, answers: Answers) -> list[str]:
        """Return the names of the arrays that two attempts differ in."""
        assert round_.layout is not None
        attempts = [hashes for answer in answers.present for hashes in answer.attempts]
        other = next((hashes for hashes in attempts if hashes != attempts[0]), attempts[0])
        names = round_.named_parts(round_.layout.zeros)
        pairs = zip(names, _parts(attempts[0]), _parts(other), strict=False)
        return [self._describe(name) for name, first, second in pairs if first != second]

    def _advice(self) -> str:
        if self._job.checkpoints.scheduler is None:
            return ""
        up_to = self._verifications.up_to
        return (
            f"; the steps up to {up_to} are verified: remove the checkpoints of later steps before you "
            "resume the job"
            if up_to
            else "; no step is verified yet: start over"
        )


def _parts(hashes: Hashes) -> list[Hashes]:
    return [hashes[start : start + _HASH] for start in range(0, len(hashes), _HASH)]


def _listed(names: Sequence[str]) -> str:
    """Return the first names of arrays, and how many more there are."""
    if not names:
        return "its examples"
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {count(rest, 'other array')}" if rest > 0 else "")


_known: list[tuple[Job, Verifications]] = []


def verifications_of(job: Job) -> Verifications:
    """Return what this process and its job verify."""
    if not _known or _known[0][0] is not job:
        _known[:] = [(job, Verifications(job))]
        # A loop that neither `fit` nor `strategy.steps` drives has no end that is known before.
        job.at_exit(_known[0][1].end_call)
    return _known[0][1]
