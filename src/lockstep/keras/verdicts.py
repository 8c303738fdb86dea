"""Decides which replicas a verified step verifies, and which workers are at fault. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep.keras.seeds import seed_at
from lockstep.protocol.job_spec import Verification
from lockstep.system.prose import count, name_workers
from lockstep.topology import View

_NAMED = 3
"""How many arrays that differ a message names."""
_HASH = 8
"""Bytes of the hash of an array."""

Hashes = bytes
"""The hashes of the arrays of a partial, one after the other; empty for a replica without examples."""


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
        """Return a number that differs in each cycle, so that the checkers differ too."""
        return self._number(step) // (1 if self.verification.all else self.replicas)

    def _number(self, step: int) -> int:
        return step // self.verification.every - 1


class Roles(NamedTuple):
    """The workers that compute a verified replica.

    Attributes:
        owner: computes it for the total.
        checker: computes it a second time; None if the view has no other worker. Then the owner computes it
            twice.
        third: decides if they differ; None if the view has no further worker.
    """

    owner: int
    checker: int | None
    third: int | None

    @classmethod
    def of(cls, view: View, replica: int, turn: int) -> "Roles":
        """Return the roles in a view. Each turn has a different checker."""
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


class Verdict(NamedTuple):
    """The conclusion from the answers for a part of a step.

    Attributes:
        kind: `equal`; `worker`: the `workers` are at fault; `undecided`: some of them are; `step`: the step
            is not deterministic; `everyone`: each worker computes a different result; `sum`: all workers have
            the same wrong sum; `repeated`: likewise, or a product of one computation was wrong (a check, a
            copy, a hash), and is computed again; `third`: some of them are at fault, and another worker
            decides.
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


def are_equal(answers: Sequence[Answer]) -> bool:
    """Whether all attempts of all workers have the same bits."""
    return len({hashes for answer in answers for hashes in answer.attempts}) == 1


def judge(answers: Sequence[Answer]) -> Verdict:
    """Decide which workers are at fault. Pure.

    Args:
        answers: of different workers: two attempts of each, or one of a worker that decides between others.
    """
    if are_equal(answers):
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
        again = f"its second computation gave different bits, and {_agree(steady)}"
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

    A worker that has checked the part wrongly once is not named, because it may have received wrong data.

    Args:
        readings: by worker, the hash of the part as that worker has it.
        first: the worker that has added up the summands, and the hash of its result.
        again: by worker, the hash of its result from summands that were sent once more: this worker, and
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
        return Verdict("worker", wrong, "added up twice more, it has different bits")
    checker, hashes = first
    others = {worker for worker, got in again.items() if {got} == read}
    if not read.intersection({hashes, again.get(checker)}) and others and others != {summer}:
        return Verdict("worker", (checker,), "all workers have a different sum")
    return Verdict("undecided", tuple(sorted(again)))


def judge_again(answers: Sequence[Answer], earlier: Sequence[Answer] = ()) -> Verdict:
    """Decide as `judge` does, including answers of workers that have left. Pure.

    If those that agree share a host or a GPU that the other one does not use, they prove nothing: that host
    or that GPU may be at fault.

    Args:
        answers: see `judge`.
        earlier: the answers of the workers that repeated different bits before; empty if none did.
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
