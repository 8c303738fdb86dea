"""A value that is separate in each thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ThreadValue(threading.local, Generic[Value]):
    """The attribute `value`, which has the same initial value in each thread."""

    def __init__(self, value: Value) -> None:
        self.value = value

    @contextmanager
    def within(self, value: Value) -> Iterator[None]:
        """Within the block, this thread has another value."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
