"""The distributed calls of a process (`fit`, `evaluate`, ...), numbered, and where in them it is."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """One distributed call.

    Attributes:
        name: of the method, and how many of it there were; for messages.
        number: of the call among all, from 1; 0 outside of any.
        steps: taken in the call so far.
        skipped: how many of its steps were taken before this process began, and are not taken again.
        callbacks: that the call was given.
        settings: how the call trains, as its checkpoints say it.
        marks: what tells which of their attributes have changed since before and after `on_train_begin`.
        at_end: whether its state can be taken at its end only.
        looks: how often a batch of its data was looked at before it began.
    """

    name: str
    number: int
    steps: int = 0
    skipped: int = 0
    callbacks: Any = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    marks: list[Any] = field(default_factory=list)
    at_end: bool = False
    looks: int = 0


@dataclass
class Calls:
    """The calls in progress, the innermost last, and how many of each method there were.

    Attributes:
        methods: how many calls of each method have begun.
        outermost: how many calls outside of any other have begun.
        taken: how many steps of training have been taken, in all calls.
        stack: the calls in progress.
        unnumbered: methods whose calls do not count in the numbers of calls.
    """

    methods: dict[str, int] = field(default_factory=dict)
    outermost: int = 0
    taken: int = 0
    stack: list[Call] = field(default_factory=lambda: [Call("no call", 0)])
    unnumbered: frozenset[str] = frozenset()

    @contextmanager
    def enter(self, method: str) -> Iterator[Call]:
        """Number a call of `method` and make it the current one for the block."""
        self.methods[method] = self.methods.get(method, 0) + 1
        name = f"{method} {self.methods[method]}"
        if len(self.stack) == 1:
            self.outermost += 1
        else:
            name = f"{name} within {self.current.name}"
        numbered = (count for method, count in self.methods.items() if method not in self.unnumbered)
        self.stack.append(Call(name, sum(numbered)))
        try:
            yield self.current
        finally:
            self.stack.pop()

    @property
    def current(self) -> Call:
        """The innermost call in progress."""
        return self.stack[-1]

    def where(self) -> str:
        """Name the step that is being taken, for messages."""
        return f"step {self.current.steps + 1} of {self.current.name}"
