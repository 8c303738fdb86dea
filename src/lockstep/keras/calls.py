"""The distributed calls of a process (`fit`, `evaluate`, ...), numbered, and where in them it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Call:
    """One distributed call and the number of steps it has taken."""

    name: str
    steps: int = 0


@dataclass
class Calls:
    """The calls in progress, the innermost last, and how many of each method there were."""

    numbers: dict[str, int] = field(default_factory=dict)
    stack: list[Call] = field(default_factory=lambda: [Call("a single batch")])

    @contextmanager
    def enter(self, method: str) -> Iterator[Call]:
        """Number a call of `method` and make it the current one for the block."""
        self.numbers[method] = self.numbers.get(method, 0) + 1
        name = f"{method} {self.numbers[method]}"
        if len(self.stack) > 1:
            name = f"{name} within {self.current.name}"
        self.stack.append(Call(name))
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
