"""The distributed calls of a process (`fit`, `evaluate`, ...), numbered, and where in them it is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.keras.state.randomness import script_seeds, seed_of


@dataclass
class KerasCall:
    """One distributed call.

    Attributes:
        name: of the method, and how many of it there were; for messages.
        number: of the call, from 1, other than those of all others; 0 outside of any.
        seed: 64 bits that follow from the seeds that the script had set when the call began.
        steps: taken in the call so far.
        skipped: how many of its steps were taken before this process began, and are not taken again.
        callbacks: that the call was given.
        settings: how the call trains, as its checkpoints say it.
        marks: what tells which of their attributes have changed since before and after `on_train_begin`.
        model: that a call of `fit` trains.
        by_batch: whether what callbacks decide counts at the end of each batch, and not only of each epoch.
        at_end: whether its state can be taken at its end only.
        looks: how often a batch of its data was looked at before it began.
        passes: over its examples that have begun.
        states: the random states with which the last of them began.
        inner: how many calls of each method have begun within.
        leaves: what is kept of it when it ends, if that is not what it returns.
        logs: of its last step.
        heard: the step whose end callbacks had heard of when the state was taken that this process goes on
            from; None if they had not.
    """

    name: str
    number: int
    seed: int = 0
    steps: int = 0
    skipped: int = 0
    callbacks: Any = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    marks: list[Any] = field(default_factory=list)
    model: Any = None
    by_batch: bool = False
    at_end: bool = False
    looks: int = 0
    passes: int = 0
    states: Mapping[str, Any] = field(default_factory=dict)
    inner: dict[str, int] = field(default_factory=dict)
    leaves: "Callable[[KerasCall], Any] | None" = None
    logs: Any = None
    heard: int | None = None


@dataclass
class CallStack:
    """The calls in progress, the innermost last, and how many of each method there were.

    Attributes:
        job_seed: everything random in the job follows from it.
        methods: how many calls of each method have begun, outside of any other.
        outermost: how many calls outside of any other have begun.
        taken: how many steps of training have been taken, in all calls.
        stack: the calls in progress.
        unnumbered: methods whose calls do not count in the numbers of calls.
        asked: where the program was when it last asked for its place, and how often it has asked there.
    """

    job_seed: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    outermost: int = 0
    taken: int = 0
    stack: list[KerasCall] = field(default_factory=lambda: [KerasCall("no call", 0)])
    unnumbered: frozenset[str] = frozenset()
    asked: tuple[tuple[int, int, int], int] = ((0, 0, 0), 0)

    @contextmanager
    def enter(self, method: str) -> Iterator[KerasCall]:
        """Number a call of `method` and make it the current one for the block.

        The number follows from the calls that the script itself has made: where one of them failed, and how
        many calls it had made within, does not matter.
        """
        outer, within = self.current, len(self.stack) > 1
        counts = outer.inner if within else self.methods
        counts[method] = counts.get(method, 0) + 1
        name = f"{method} {counts[method]}"
        if within:
            call = KerasCall(f"{name} within {outer.name}", outer.number + (sum(counts.values()) << 32))
        else:
            self.outermost += 1
            call = KerasCall(name, sum(n for method, n in counts.items() if method not in self.unnumbered))
        call.seed = seed_of(script_seeds(self.job_seed))
        self.stack.append(call)
        try:
            yield call
        finally:
            self.stack.pop()

    @contextmanager
    def again_in(self, call: KerasCall) -> Iterator[None]:
        """Make a call that has ended the current one for the block."""
        self.stack.append(call)
        try:
            yield
        finally:
            self.stack.pop()

    def next_seed(self) -> int:
        """Return a seed for a place in the program: another for each time it asks.

        It follows from the job's seed, the script's, and the place, and is the same in a process that passes
        over what others have computed.
        """
        where = self.outermost, len(self.stack), self.current.steps
        count = self.asked[1] + 1 if self.asked[0] == where else 1
        self.asked = where, count
        return seed_of(script_seeds(self.job_seed), where, count)

    @property
    def current(self) -> KerasCall:
        """The innermost call in progress."""
        return self.stack[-1]

    def where(self) -> str:
        """Name the step that is being taken, for messages."""
        return f"step {self.current.steps + 1} of {self.current.name}"
