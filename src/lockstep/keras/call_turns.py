"""Threads of a script that make distributed calls: one call at a time, in an order that all workers share.

Lockstep replaces attributes of Keras while a call computes, and the members of a view make the same calls of
the exchange in the same order. So the calls of several threads take turns. Different threads may call first
on different workers. So each call has a *key* that is equal on all of them, and the chief's next key decides.

The key of a call is its method, its model (by the number of its `compile` in the main thread, otherwise by
its settings), and a hash of its arguments. Before each call, the workers gather the keys of the calls that
wait. The chief's first key that waits everywhere is next, and a worker waits until one of its threads makes
that call. Equal keys are equal calls of models with equal settings. If their states differ, the comparison at
the beginning of the call detects it.

The journal has the keys, so a process that joins or resumes follows the recorded order. As long as only the
main thread makes calls, workers do not exchange keys. A thread that a call has started belongs to that call
and never waits for a turn.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep.data.digest import digest_arrays
from lockstep.errors import DisagreementError, ModelError, PeerStuckError
from lockstep.system.notes import note

MADE_BY_THREADS = "the next call of the script's threads"
"""Names the call of the exchange in which workers decide whose turn is next."""

ADVICE_ON_THREADS = (
    "several threads of the script make calls: build and compile all models in the main thread, in one "
    "order, and make calls in the main thread only before the threads start and after they have ended; or "
    "train one model after the other; or start a job for each"
)

_MOMENT = 10.0
"""Seconds after which a worker says that none of its threads makes the call whose turn it is."""

NextKey = Callable[[Callable[[], list[str]]], str]
"""Given a function that returns the keys of this worker's waiting calls, returns the key of the next call."""


@dataclass(eq=False)
class Turn:
    """A call of one thread that waits for its turn, or has it.

    Attributes:
        name: the name of the call, for messages.
        key: the key of the call on all workers; empty if the main thread makes all calls.
        thread: the thread that makes it.
    """

    name: str
    key: str
    thread: threading.Thread


class CallTurns:
    """Gives one thread of this process at a time its turn. Calls within its call belong to that turn.

    Args:
        next_key: decides which call is next; called in one thread at a time.
        ordered: whether the script follows recorded calls, some of which have keys.
        patience: returns the seconds for which a worker waits for others.
        note_once: shows the user, once, that threads take turns.
    """

    def __init__(
        self,
        next_key: NextKey,
        ordered: Callable[[], bool],
        patience: Callable[[], float],
        note_once: Callable[[], object],
    ) -> None:
        self._next_key = next_key
        self._ordered = ordered
        self._patience = patience
        self._note_once: Callable[[], object] | None = note_once
        self._changed = threading.Condition()
        self._holder: Turn | None = None
        self._loops: threading.Thread | None = None
        self._waiting: list[Turn] = []
        self._chosen: str | None = None
        self._chooses = False
        self._chosen_at = 0.0
        self._noted = False
        self._in_threads = False
        self._within: weakref.WeakKeyDictionary[threading.Thread, Turn] = weakref.WeakKeyDictionary()

    @property
    def key(self) -> str:
        """The key of the call that has its turn, or an empty string if the main thread makes all calls."""
        return self._holder.key if self._holder is not None else ""

    def started(self, original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """Return the replacement of `Thread.start`, which notes the call in which a thread is started."""

        def start(thread: threading.Thread) -> None:
            holder, starter = self._holder, threading.current_thread()
            if holder is not None and (holder.thread is starter or self._within.get(starter) is holder):
                self._within[thread] = holder
            original(thread)

        return start

    def is_within(self) -> bool:
        """Whether a call that has its turn has started this thread, and may wait for it."""
        holder, thread = self._holder, threading.current_thread()
        if holder is None or holder.thread is thread:
            return False
        # A thread that Python has not started belongs to a library, for example one that reads the examples.
        return self._within.get(thread) is holder or type(thread).__name__ == "_DummyThread"

    @contextmanager
    def turn(self, name: str, key: Callable[[], str]) -> Iterator[None]:
        """Let this thread make a call in the block, when it has its turn.

        Args:
            name: the name of the call.
            key: returns the key of the call, which is equal on all workers.

        Raises:
            ModelError: a call that has its turn has started this thread.
            DisagreementError: another worker makes a call that no thread of this worker makes.
        """
        thread, holder = threading.current_thread(), self._holder
        if holder is not None and holder.thread is thread:
            yield
            return
        self._refuse_within(name)
        turn = self._begin(name, key, thread)
        try:
            with _threads_advised(bool(turn.key)):
                yield
        finally:
            self._end()

    @contextmanager
    def part(self, name: str, *, several: bool) -> Iterator[None]:
        """Let this thread compute a part of its custom loop in the block.

        Args:
            name: the name of the part.
            several: whether several workers do so. They cannot know which loop is next, so only one thread
                may have a loop.

        Raises:
            ModelError: another thread has a custom loop, or a call that has its turn has started this thread.
        """
        thread, holder = threading.current_thread(), self._holder
        if holder is not None and holder.thread is thread:
            yield
            return
        self._refuse_within(name)
        if several and self._loops is not None and self._loops is not thread and self._loops.is_alive():
            raise ModelError(
                f"{name} in thread {thread.name!r}, while thread {self._loops.name!r} calls it too: several "
                "workers cannot tell which thread is next; compute custom loops in one thread, or start a "
                "job for each"
            )
        self._loops = thread
        turn = Turn(name, "", thread)
        with self._changed:
            while self._holder is not None or self._chooses:
                self._changed.wait(_MOMENT)
            self._holder = turn
        try:
            yield
        finally:
            self._end()

    def wait(self) -> None:
        """Wait until no thread has its turn or waits for it."""
        with self._changed:
            while self._holder is not None or self._waiting:
                self._changed.wait(_MOMENT)

    def _end(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    def _refuse_within(self, name: str) -> None:
        if (holder := self._holder) is not None and self.is_within():
            raise ModelError(
                f"{name} in thread {threading.current_thread().name!r}, which {holder.name} in thread "
                f"{holder.thread.name!r} has started and may wait for: calls of several threads take turns; "
                f"make this call in that thread, or before {holder.name}"
            )

    def _begin(self, name: str, key: Callable[[], str], thread: threading.Thread) -> Turn:
        if not (self._in_threads or thread is not threading.main_thread() or self._ordered()):
            turn = Turn(name, "", thread)
            with self._changed:
                while self._holder is not None or self._chooses:
                    self._changed.wait(_MOMENT)
                if not self._in_threads:
                    self._holder, self._chosen = turn, None
                    return turn
        turn = Turn(name, key(), thread)
        with self._changed:
            self._waiting.append(turn)
            self._changed.notify_all()
            try:
                while not self._has_its_turn(turn):
                    self._changed.wait(_MOMENT)
                    self._check_arrival(turn)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            self._holder, self._chosen = turn, None
        return turn

    def _has_its_turn(self, turn: Turn) -> bool:
        """Whether a waiting call has its turn. The first waiting thread finds out which call is next."""
        if self._holder is not None or self._chooses:
            return False
        if self._chosen is None:
            if self._waiting[0] is not turn:
                return False
            self._chooses = True
            self._changed.release()
            try:
                with _threads_advised(True):
                    chosen = self._next_key(self._keys)
            finally:
                self._changed.acquire()
                self._chooses = False
                self._changed.notify_all()
            self._chosen, self._chosen_at, self._noted = chosen, time.monotonic(), False
            if chosen:
                self._in_threads = True
                if self._note_once is not None:
                    self._note_once()
                    self._note_once = None
        if self._next() is not turn:
            return False
        turn.key = self._chosen
        return True

    def _next(self) -> Turn | None:
        """Return the waiting call whose turn is next, if it has arrived."""
        return next((turn for turn in self._waiting if self._is_chosen(turn)), None)

    def _is_chosen(self, turn: Turn) -> bool:
        # Recorded calls from before the first thread do not have keys: the main thread made them.
        return turn.key == self._chosen if self._chosen else turn.thread is threading.main_thread()

    def _keys(self) -> list[str]:
        with self._changed:
            return list(dict.fromkeys(turn.key for turn in self._waiting))

    def _check_arrival(self, turn: Turn) -> None:
        """If no thread makes the next call, print a note, and after some time raise an error."""
        if self._holder is not None or self._chosen is None or self._waiting[0] is not turn:
            return
        if self._next() is not None:
            return
        waited = time.monotonic() - self._chosen_at
        call = self._chosen or "of the main thread"
        text = (
            f"no thread of this worker makes the call {call}, whose turn it is; its threads wait with "
            f"{', '.join(waiting.key for waiting in self._waiting)}"
        )
        if waited >= self._patience():
            raise PeerStuckError(f"{text}; {ADVICE_ON_THREADS}")
        if waited >= _MOMENT and not self._noted:
            self._noted = True
            note(f"has waited {waited:.0f} s: {text}")


@contextmanager
def _threads_advised(applies: bool) -> Iterator[None]:
    """Add to a disagreement of workers that threads may be its cause, if that applies."""
    try:
        yield
    except DisagreementError as error:
        if not applies or ADVICE_ON_THREADS in str(error):
            raise
        raise DisagreementError(f"{error}; {ADVICE_ON_THREADS}", error.workers) from error


def agreed_key(waiting: Sequence[Sequence[str]]) -> str:
    """Return the next call's key: the chief's first one that waits on all workers, or else its first one.

    Args:
        waiting: the keys of the waiting calls of each worker, the chief first.
    """
    chief, *others = waiting
    return next((key for key in chief if all(key in other for other in others)), chief[0])


def key_of(method: str, subject: str, args: Any, kwargs: Any) -> str:
    """Return the key of a call: its method, its model, and the values it passes.

    Args:
        method: the name of the method.
        subject: identifies the model.
        args: the arguments.
        kwargs: the keyword arguments.
    """
    texts: list[str] = []
    arrays = []
    for leaf in keras.tree.flatten((list(args), sorted(kwargs.items()))):
        if leaf is None or isinstance(leaf, bool | int | float | str | bytes):
            texts.append(repr(leaf))
            continue
        texts.append(type(leaf).__qualname__)
        if (array := _array(leaf)) is not None:
            arrays.append(array)
    return f"{method} of {subject} #{digest_arrays(arrays, repr(texts).encode()).hex()[:16]}"


def _array(value: Any) -> Any:
    if not hasattr(value, "shape") or not (hasattr(value, "__array__") or hasattr(value, "numpy")):
        return None
    try:
        array = np.ascontiguousarray(keras.ops.convert_to_numpy(value))
    except Exception:
        return None
    return array if array.dtype.kind in "biufcSU" else None
