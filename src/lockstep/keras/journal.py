"""What has happened in the calls of a process, so that another process can go on from it.

A process that resumes runs the script from its beginning. Calls that were finished then return what they
returned; the call that was in progress is gone through without computing, up to the step that is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.keras.randomness import fingerprint, random_states, set_random_states


@dataclass(frozen=True)
class Finished:
    """What one finished call, outside of any other, has left.

    Attributes:
        result: what it returned; of `fit`, the epochs and the history.
        methods: how many calls of each method there were at its end.
        taken: steps of training that had been taken at its end.
        states: the random states at its end; None where they were those at the end of the call before.
    """

    result: Any
    methods: Mapping[str, int]
    taken: int
    states: Mapping[str, Any] | None


class Journal:
    """The finished calls of a process, in their order."""

    def __init__(self, finished: list[Finished]) -> None:
        self._finished = finished
        self._last_states = b""

    def add(self, result: Any, methods: Mapping[str, int], taken: int) -> None:
        """Note that a call has finished."""
        states = random_states()
        known = fingerprint(states)
        changed = known != self._last_states
        self._last_states = known
        self._finished.append(Finished(result, dict(methods), taken, states if changed else None))

    def __len__(self) -> int:
        return len(self._finished)

    def packed(self) -> list[dict[str, Any]]:
        """Return all of it as plain values."""
        return [vars(one) for one in self._finished]

    @classmethod
    def unpacked(cls, packed: list[dict[str, Any]]) -> "Journal":
        """Return what `packed` has returned."""
        return cls([Finished(**one) for one in packed])

    def replay(self, number: int) -> Finished:
        """Return the finished call at `number`, from 0; set the random states to those at its end."""
        finished = self._finished[number]
        for earlier in reversed(self._finished[: number + 1]):
            if earlier.states is not None:
                set_random_states(earlier.states)
                break
        return finished
