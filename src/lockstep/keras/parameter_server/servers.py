"""The parameter servers as the chief and the workers use them: with whole variables and slots.

Each server has some rows of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.keras.parameter_server.served_variables import Slot
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import EndCall, Pull, Push, Read, Write
from lockstep.transport.array_channel import AskingChannel

Array = npt.NDArray[Any]


class Servers:
    """The connections of one process to all servers.

    Variables are numbered over all optimizers, and so are slots, in the order of the optimizers' variables.

    Args:
        channels: to each server.
        shards: of all variables.
    """

    def __init__(self, channels: Sequence[AskingChannel], shards: Sequence[Shard]) -> None:
        self._channels = channels
        self._shards: list[list[Shard]] = [[] for _ in channels]
        self.add(shards)

    def add(self, shards: Iterable[Shard]) -> None:
        """Add the shards of further variables."""
        for shard in shards:
            self._shards[shard.server].append(shard)

    def pull(self, step: int) -> list[Array]:
        """Return the variables, to compute a step with them.

        Raises:
            PeerLostError: a server has ended.
            PeerStuckError: a server has not answered in time.
        """
        return self._whole([arrays for _, arrays in self._ask_all(Pull(step))])

    def pull_with_common(self, step: int, part: int = 0) -> tuple[list[Array], dict[Slot, Array]]:
        """Return the variables, and the slots that belong to none of them, as the first server has them."""
        answers = self._ask_all(Pull(step, common=True, part=part))
        values, arrays = answers[0]
        common = dict(zip(values.slots, arrays[len(self._shards[0]) :], strict=True))
        return self._whole([arrays for _, arrays in answers]), common

    def push(
        self, step: int, gradients: Mapping[int, Array], updates: tuple[int, ...] = (0,), part: int = 0
    ) -> int:
        """Let the servers update variables; return the largest staleness.

        Args:
            step: for which the gradients were computed.
            gradients: by the number of the variable.
            updates: the numbers of the optimizers that are applied.
            part: how often the step has applied an optimizer before.
        """
        asked: list[Push] = []
        for channel, shards in zip(self._channels, self._shards, strict=True):
            own = [(k, one) for k, one in enumerate(shards) if one.variable in gradients]
            asked.append(Push(step, tuple(k for k, _ in own), updates, part))
            channel.send(asked[-1], [shard.part_of(gradients[shard.variable]) for _, shard in own])
        answers = [channel.receive(push)[0] for channel, push in zip(self._channels, asked, strict=True)]
        return max((answer.staleness for answer in answers), default=0)

    def read(self, step: int, slots: Sequence[Slot]) -> tuple[list[Array], list[Array]]:
        """Return the variables and the slots, after a number of steps."""
        answers = self._ask_all(Read(step))
        found: dict[Slot, list[tuple[Shard | None, Array]]] = {}
        for shards, (values, arrays) in zip(self._shards, answers, strict=True):
            for (position, number), array in zip(values.slots, arrays[len(shards) :], strict=True):
                shard = shards[position] if position >= 0 else None
                key = (position if shard is None else shard.variable, number)
                found.setdefault(key, []).append((shard, array))
        whole = []
        for slot in slots:
            pieces = sorted(found[slot], key=lambda piece: 0 if piece[0] is None else piece[0].start)
            joined = len(pieces) > 1 and pieces[0][0] is not None and pieces[0][1].ndim > 0
            whole.append(np.concatenate([array for _, array in pieces]) if joined else pieces[0][1])
        return self._whole([arrays for _, arrays in answers]), whole

    def write(self, step: int, variables: Mapping[int, Array], slots: Mapping[Slot, Array]) -> None:
        """Replace values of variables and slots, after a number of steps."""
        for channel, shards in zip(self._channels, self._shards, strict=True):
            own = [(k, one) for k, one in enumerate(shards) if one.variable in variables]
            arrays = [shard.part_of(variables[shard.variable]) for _, shard in own]
            keys: list[Slot] = []
            for (variable, number), value in slots.items():
                if variable < 0:
                    keys.append((variable, number))
                    arrays.append(value)
                for k, shard in enumerate(shards):
                    if shard.variable == variable:
                        keys.append((k, number))
                        arrays.append(shard.part_of(value))
            channel.ask(Write(step, tuple(k for k, _ in own), tuple(keys)), arrays)

    def end_call(self) -> None:
        """End the call on all servers."""
        for channel in self._channels:
            channel.ask(EndCall())

    def _ask_all(self, question: Pull | Read) -> list[tuple[Any, list[Array]]]:
        for channel in self._channels:
            channel.send(question)
        return [channel.receive(question) for channel in self._channels]

    def _whole(self, answers: Sequence[Sequence[Array]]) -> list[Array]:
        parts: dict[int, list[tuple[Shard, Array]]] = {}
        for shards, arrays in zip(self._shards, answers, strict=True):
            for shard, array in zip(shards, arrays, strict=False):
                parts.setdefault(shard.variable, []).append((shard, array))
        whole = []
        for variable in range(len(parts)):
            pieces = sorted(parts[variable], key=lambda piece: piece[0].start)
            whole.append(pieces[0][1] if len(pieces) == 1 else np.concatenate([array for _, array in pieces]))
        return whole
