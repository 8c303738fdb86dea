"""The distributed calls of a process (`fit`, `evaluate`, `steps` ...), numbered, and its position in them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.keras.randomness import script_seeds
from lockstep.keras.seeds import seed_of

_RUN = "strategy.run"


@dataclass
class NumberedCall:
    """One distributed call.

    Attributes:
        name: the method and the count of its calls, for messages.
        number: the unique number of the call, from 1; 0 outside of calls.
        seed: 64 bits, derived from the seeds that the script had set when the call began.
        steps: number of steps of the call so far.
        skipped: number of its steps that another process took and that are not repeated.
        callbacks: the callbacks of the call.
        extent: `initial_epoch`, `epochs` and `steps_per_epoch` of a `fit`, if they are known.
        settings: how the call trains, as recorded in its checkpoints.
        callback_hashes: the hashes of the callbacks' attributes, before and after `on_train_begin`,
            to detect changes.
        values: the `lockstep.keras.changed_values.ChangedValues` of a `fit`; None if they are not kept.
        model: the model that a call of `fit` trains.
        by_batch: whether decisions of callbacks take effect after each batch, not only after each epoch.
        at_end: whether it is for a single batch, and workers join and checkpoints are saved after it.
        samples: number of sample batches of its data that were read before it began.
        passes: number of passes over its examples that have begun.
        states: the random states at the beginning of the last pass.
        held: the states that reading its examples changes in the objects that hold them; see `states_held`.
        held_by_validation: the same for the validation data of a `fit`.
        inner: number of calls within it that have begun, by method.
        result_of: returns the result to record when it ends, if that is not its return value.
        logs: the logs of its last step.
        outputs: the outputs of each of its steps so far, if it is a `predict` in which workers can join.
        processed: the step whose end callbacks had processed in the restored state; None if there is none.
        metrics: the values of the metrics before this call, a validation in which workers can join; None
            for other calls.
    """

    name: str
    number: int
    seed: int = 0
    steps: int = 0
    skipped: int = 0
    callbacks: Any = ()
    extent: tuple[int | None, int | None, int | None] = (None, None, None)
    settings: Mapping[str, str] = field(default_factory=dict)
    callback_hashes: list[Any] = field(default_factory=list)
    values: Any = None
    model: Any = None
    by_batch: bool = False
    at_end: bool = False
    samples: int = 0
    passes: int = 0
    states: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)
    held_by_validation: Mapping[str, Any] = field(default_factory=dict)
    inner: dict[str, int] = field(default_factory=dict)
    result_of: "Callable[[NumberedCall], Any] | None" = None
    logs: Any = None
    outputs: list[Any] = field(default_factory=list)
    processed: int | None = None
    metrics: Mapping[str, Any] | None = None

    @property
    def forwarding(self) -> bool:
        """Whether the call is skipping steps."""
        return self.steps < self.skipped

    @property
    def held_by_inputs(self) -> Mapping[str, Any]:
        """The states that reading changes in all its inputs."""
        return {**self.held, **self.held_by_validation}


@dataclass
class NumberedCalls:
    """The calls in progress, the innermost last, and the number of calls by method.

    Attributes:
        job_seed: the seed of all random numbers in the job.
        methods: number of top-level calls that have begun, by method.
        outermost: number of top-level calls that have begun.
        taken: number of training steps in all calls.
        stack: the calls in progress.
        unnumbered: methods whose calls do not count in the numbers of calls.
        last_seeds: the position of the last call of `next_seed`, and its number of calls there, by purpose.
    """

    job_seed: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    outermost: int = 0
    taken: int = 0
    stack: list[NumberedCall] = field(default_factory=lambda: [NumberedCall("no call", 0)])
    unnumbered: frozenset[str] = frozenset()
    last_seeds: dict[str, tuple[tuple[int, int, int], int]] = field(default_factory=dict)

    @contextmanager
    def enter(self, method: str) -> Iterator[NumberedCall]:
        """Number a call of `method` and make it the current one for the block.

        The number depends only on the calls that the script itself has made, not on where one of them failed
        or how many calls it made internally.
        """
        outer, within = self.current, len(self.stack) > 1
        counts = outer.inner if within else self.methods
        counts[method] = counts.get(method, 0) + 1
        name = f"{method} {counts[method]}"
        if within:
            call = NumberedCall(f"{name} within {outer.name}", outer.number + (sum(counts.values()) << 32))
        else:
            self.outermost += 1
            call = NumberedCall(name, sum(n for method, n in counts.items() if method not in self.unnumbered))
        call.seed = seed_of(script_seeds(self.job_seed))
        self.stack.append(call)
        try:
            yield call
        finally:
            self.stack.pop()

    def move_to(self, methods: Mapping[str, int], taken: int) -> None:
        """Go on after the calls of another process, given their numbers by method and the training steps."""
        self.methods.clear()
        self.methods.update(methods)
        self.taken = taken

    @contextmanager
    def again_in(self, call: NumberedCall) -> Iterator[None]:
        """Make an ended call the current one for the block."""
        self.stack.append(call)
        try:
            yield
        finally:
            self.stack.pop()

    def next_seed(self, purpose: str = "") -> int:
        """Return a new seed for the current position in the program.

        It is derived from the job's seed, the script's seeds, and the position. It is the same in a process
        that skips computations of others.

        Args:
            purpose: the seeds of one purpose do not depend on how often others are drawn.
        """
        position = self.outermost, len(self.stack), self.current.steps
        last_position, count = self.last_seeds.get(purpose, (position, 0))
        count = count + 1 if last_position == position else 1
        self.last_seeds[purpose] = position, count
        return seed_of(script_seeds(self.job_seed), position, count, *filter(None, [purpose]))

    def next_run_seed(self) -> int:
        """Return a new seed for a `strategy.run` at the current position; see `next_seed`."""
        return self.next_seed(_RUN)

    def repeat_run_seeds(self) -> None:
        """Begin the seeds of `next_run_seed` again, if the position stays the same."""
        self.last_seeds.pop(_RUN, None)

    @property
    def current(self) -> NumberedCall:
        """The innermost call in progress."""
        return self.stack[-1]

    @property
    def resumable(self) -> NumberedCall:
        """The call at whose steps a process resumes: the one in progress, or the `fit` that validates."""
        return self.current if self.current.metrics is None else self.stack[-2]

    def where(self) -> str:
        """Name the current step, for messages."""
        return f"step {self.current.steps + 1} of {self.current.name}"
