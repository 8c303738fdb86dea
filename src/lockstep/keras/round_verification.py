"""Verification of the rounds of a step: their partials, before they are summed, and then the sums.

The owner of each drawn replica and a second worker, its checker, hash the partial that each has computed. If
the hashes differ, both compute it again, a third worker computes it once, and `judge` decides from these
answers. All workers get all answers, so they all decide the same.

Then the workers sum. The bytes of a total are divided into R parts, and those with the numbers of the drawn
replicas are verified: all owners send their summands of such a part to its checker, which adds them up along
the tree. If changes are sent as small integers, the total includes the sums of limits, from which their
scales follow (see `lockstep.keras.scaled_sums`). A checksum of the total alone would not be enough:
floating-point addition rounds, so a checksum of a total is not the sum of the checksums of its summands. All
workers compare their hashes of the total, as each of them has it, with the checker's. If they differ, another
worker also adds up the part, and `judge_sum` decides. The checker of a replica also computes its limits and
small integers once more.

All workers also compare their hashes of the other parts with each other's, and verify a part in which they
differ. So all updates follow from one total, and workers that agree in an update can outvote another one (see
`lockstep.keras.state_verification`). Otherwise, workers of one host with the same wrong total could outvote
others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lockstep.collectives.adder import Adder, flat
from lockstep.collectives.contract import Bytes, Communicator, Span
from lockstep.collectives.layout import Layout, Piece, allocate
from lockstep.collectives.network.lane_reduce import summer_of
from lockstep.collectives.plan import Sum
from lockstep.data.digest import digest_array
from lockstep.keras.backends.contract import Total
from lockstep.keras.host_report import HostReport, host_report, refuse_unlike
from lockstep.keras.rounds import ExchangeCall, Round
from lockstep.keras.verdicts import (
    Answer,
    Hashes,
    Roles,
    Verdict,
    are_equal,
    differing_names,
    judge_again,
    judge_sum,
    listed,
    with_earlier,
)
from lockstep.keras.verification import StepWithdrawn, Verifications
from lockstep.keras.worker_exchange import texts_of_all
from lockstep.topology import View
from lockstep.worker.job import Job

_MOST_WRONG_CHECKS = 3
"""The most checks of one sum or of its summands that are wrong once while it is right: then the job stops."""
_HEAD = 16
"""Bytes before a summand that is sent: the number of its part, and its replica."""
_ROOM = 1 << 26
"""Bytes of the summands that are sent at once, if they are of several parts."""
_SUM = "the sum over all replicas"

_FromHost = tuple[list[Hashes], HostReport]
"""The hashes that the first worker of a host has computed, and its report."""


@dataclass
class _Attempts:
    """The attempts of this worker in the round in progress, by replica.

    Attributes:
        round_: the round.
        hashes: the hashes of each attempt.
        newest: the partial of the last attempt, which shows whether the round has a newer attempt.
        answers: the first answers of all workers, until the workers that differ have computed again.
        compared: whether hosts are compared.
    """

    round_: Round
    hashes: dict[int, list[Hashes]] = field(default_factory=dict)
    newest: dict[int, Any] = field(default_factory=dict)
    answers: dict[int, list[Answer]] | None = None
    compared: bool = False

    def made(self, replica: int, number: int) -> list[Hashes]:
        """Compute a replica until there are `number` attempts; return the hashes of these.

        If an exception interrupts the computation, a second call continues it. A graph raises one, only on
        the workers that compute, so earlier calls of the exchange must not be repeated.
        """
        hashes, started = self.hashes.setdefault(replica, []), self.round_.started
        while len(hashes) < number:
            if hashes and started.get(replica) is self.newest[replica]:
                started.pop(replica, None)
            self.round_.begin([replica])
            hashes.append(_hashes_of(self.round_, replica))
            self.newest[replica] = started.get(replica)
        return hashes[:number]


class _SumAnswer(NamedTuple):
    """A worker's answers on the verified parts of a total.

    Attributes:
        worker: its id.
        readings: by part, including parts that nobody adds up, the hash of the total as this worker has it.
        sums: by part for which it is the checker, the hash of the sum that it has computed, and the first
            byte at which its own total differs from that sum; -1 if there is no difference.
        changed: by verified replica that it owns, the present hashes of its partial, if they have changed.
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
        verdict: the verdict on the workers at fault.
        label: the name of the wrong result.
        names: the names of the arrays that are wrong.
        part: the part of the step; see `follow`.
        replica: the number of the replica, or of the part of the total.
        lasts: see `follow`.
        byte: the first wrong byte of the total; -1 if it is unknown.
        answers: the workers' sums, if they differ.
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
    """A copy of the limits and sums of a round, which later calls of the exchange do not change.

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
            adder: the adder that sums.
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
        verifications: the verifications of the job.
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
        """Return the total of a round, as `Round.sum` does; verify its partials and the sum, if due.

        A worker at fault ends here, and the others verify the round again without it.

        Raises:
            DisagreementError: workers compute different bits, and it is unknown which are right.
            StepWithdrawn: another worker decides in this step, which all repeat.
        """
        while True:
            try:
                return self._sum(round_)
            except StepWithdrawn:
                if self._verifications.admit is None:
                    raise
                self._verifications.admit()
                self._attempts = None
                round_.forget()

    def _sum(self, round_: Round) -> Total:
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
        attempts, made = self._attempts, self._attempts.made
        if compares_hosts and not attempts.compared:
            self._exchange(partial(self._compare_hosts, round_, made), round_.catching_up)
            attempts.compared = True
        while drawn and (fault := self._partial_fault(round_, drawn, made, "gradient")):
            # The others follow if they still differ without the worker at fault.
            self._follow(fault)
        round_.verified, self._attempts = True, None
        return drawn

    def _compare_hosts(
        self,
        round_: Round,
        made: Callable[[int, int], list[Hashes]],
        view: View,
        communicator: Communicator,
    ) -> None:
        """Let the first worker of each host compute replica 0, with all operations of the program."""
        round_.entered()
        worker = self._job.worker
        round_.begin(view.replicas_of(worker))
        leads = any(host[0] == worker for host in view.hosts)
        from_here = (made(0, 1), host_report(self._job)) if leads else None
        round_.settle()
        label = f"the comparison of hosts in {round_.label}"
        blobs = communicator.gather(msgspec.msgpack.encode(from_here), what=label)
        of_workers = [msgspec.msgpack.decode(blob, type=_FromHost | None) for blob in blobs]
        (hashes, first), *others = filter(None, of_workers)
        unlike = [(made_there, report) for made_there, report in others if made_there != hashes]
        if unlike:
            made_there, other = unlike[0]
            answers = (Answer(first.worker, tuple(hashes)), Answer(other.worker, tuple(made_there)))
            shown = listed(self._differing(round_, answers))
            reports = (first, *(report for _, report in unlike))
            refuse_unlike(self._job, round_.label, shown, reports, texts_of_all(communicator, label))

    def _follow(self, fault: _Fault) -> None:
        """See `Verifications.follow`."""
        self._verifications.follow(
            fault.verdict, fault.label, fault.names, fault.part, fault.replica, lasts=fault.lasts
        )

    def _partial_fault(
        self, round_: Round, replicas: Sequence[int], made: Callable[[int, int], list[Hashes]], part: str
    ) -> _Fault | None:
        """Return the first fault in replicas of a round, or None.

        Args:
            round_: the round.
            replicas: the replicas.
            made: see `_answers`.
            part: see `Doubt`.

        Raises:
            StepWithdrawn: another worker decides.
        """
        verifications, number = self._verifications, round_.number
        attempts = self._attempts or _Attempts(round_)
        if attempts.answers is None:
            act = partial(self._answers, round_, replicas, 1, made)
            attempts.answers = self._exchange(act, round_.catching_up)
        answers_of = attempts.answers
        doubted = [replica for replica in replicas if verifications.answers_before(part, replica, number)]
        differing = [replica for replica, answers in answers_of.items() if not are_equal(answers)]
        if not (doubted or differing):
            if part == "gradient":
                self._verified = {r: answers[0].attempts[0] for r, answers in answers_of.items()}
            return None
        replica = [*doubted, *differing][0]
        act = partial(self._answers, round_, [replica], 2, made)
        answers = self._exchange(act, round_.catching_up)[replica]
        attempts.answers = None
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
    ) -> dict[int, list[Answer]]:
        """Compute this worker's attempts; return the answers of all workers, by replica, the owner's first.

        Args:
            round_: the round.
            replicas: the replicas to compute.
            attempts: the number of attempts of their owners and checkers.
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
        return {
            replica: [answers[role] for role in ("owner", "checker", "third") if role in answers]
            for replica, answers in answers_of.items()
        }

    def _rounded(self, round_: Round, replica: int, number: int) -> list[Hashes]:
        """Round a partial to small integers a number of times; return the hashes."""
        round_.begin([replica])
        replicas = self._verifications.plan.replicas
        return [_rounded_hashes_of(round_, replica, replicas) for _ in range(number)]

    def _verified_total(self, round_: Round, parts: Sequence[int]) -> Total:
        """Return the total of a summed round, after verifying that its `parts` are correct."""
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
                    verdict = Verdict("worker", workers, "others add up the same summands to a different sum")
                    lasts = True
                elif not was_wrong:
                    # It is unknown whether the sum, or a summand on its way, was wrong.
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
        """Return the first fault in a total, or in a verified partial, or None.

        In parts other than `parts`, this detects only differences between workers.
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
        """Return the fault in a part of a total on which some answers differ."""
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
            again: whether other workers also add up.
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
            # A checker was lost meanwhile, or a summand was lost because its head had a wrong bit.
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
        """Send this worker's summands to the checkers; return those that it receives, by part and replica."""
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
        """Return the names of the arrays in which two attempts differ."""
        attempts = [hashes for answer in answers for hashes in answer.attempts]
        return differing_names(self._part_names(round_), attempts)

    def _part_names(self, round_: Round) -> list[str]:
        assert round_.layout is not None
        parts, computed = round_.named_parts(round_.layout.zeros), next(iter(round_.started), -1)
        names = [self._describe(name) for name in (*parts, *round_.layout.limited)]
        return [*names, *round_.outputs_of(computed)]


def _hashes_of(round_: Round, replica: int) -> Hashes:
    """Return the hashes of the arrays of a replica, or none if it does not contribute."""
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
    """Yield the parts, replicas and summands in a worker's data, up to a head with wrong bits.

    Args:
        data: the data of the worker.
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
