"""The host's side of a `strategy.run` in a graph of TensorFlow: which replica is next, what has come of them.

The graph is made once; which replicas this worker computes may change while it is used. So the graph asks for
one replica after the other, until there is none left and the replicas' parts have been added up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.contract import Total
from lockstep.keras.consistency import CHECK_EVERY
from lockstep.keras.per_replica import Returned, Shelf, Spec, Values, is_empty
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.synchronization import SCALAR, Round, gathered_scalars

NONE_LEFT = -1


class Missing(Exception):
    """A replica must be computed before its round can be summed."""

    def __init__(self, replica: int) -> None:
        super().__init__(replica)
        self.replica = replica


@dataclass
class HostExecution:
    """One execution of a run.

    Attributes:
        inputs: what each replica has its own of: values, and which leaf of them.
        seed: random numbers that no variable gives follow from it.
        rounds: that have begun.
        totals: of the rounds that are summed.
        outputs: what replicas of this worker have returned, apart from single numbers.
    """

    inputs: Sequence[tuple[Values, int]]
    seed: int = 0
    rounds: list[Round] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)
    outputs: dict[int, Sequence[Any]] = field(default_factory=dict)

    @property
    def sources(self) -> list[Values]:
        """The values that inputs are leaves of, each once."""
        return list({id(values): values for values, _ in self.inputs}.values())


class RunHost:
    """The host's side of one `strategy.run` of a graph.

    Args:
        exchange: between the workers.
        name: of the function, for messages.
    """

    def __init__(self, exchange: RunRounds, name: str) -> None:
        self._exchange = exchange
        self._name = name
        self._count = 0
        self._execution = HostExecution(())
        self.shelf = Shelf()

    @property
    def what(self) -> str:
        """Names the present execution in messages."""
        return f"execution {self._count} of {self._name}"

    @property
    def is_due(self) -> bool:
        """Whether the workers' weights are to be compared after the present execution."""
        return (self._count - 1) % CHECK_EVERY == 0

    def begin(self, inputs: Sequence[tuple[Values, int]], seed: int) -> None:
        """Begin an execution, whose replicas have `inputs`, and random numbers that follow from `seed`."""
        self._exchange.refuse_followers(self._name)
        self._count += 1
        self._execution = HostExecution(inputs, seed)

    def next_replica(self, number: int, like: Mapping[str, npt.NDArray[Any]] | None) -> int:
        """Return the next replica to compute in round `number`; NONE_LEFT once the round is summed.

        Args:
            number: of the round, from 0.
            like: a partial of zeros; None where its shapes are not known beforehand.
        """
        execution = self._execution
        if number == len(execution.rounds):
            this = self._exchange.round(self.what, _missing, execution.sources, execution.seed, like)
            execution.rounds.append(this)
        try:
            total = self._exchange.total(execution.rounds[number])
        except Missing as missing:
            return missing.replica
        execution.totals.append(total)
        return NONE_LEFT

    def leaves_of(self, replica: int) -> list[Any]:
        """Return whether a replica has examples, and its own of each input."""
        execution = self._execution
        examples = not is_empty(execution.sources, replica)
        return [examples, *(values.of(replica)[leaf] for values, leaf in execution.inputs)]

    def publish(self, number: int, replica: int, partial: Mapping[str, Any], outputs: Sequence[Any]) -> None:
        """Take what a replica has computed in round `number`."""
        self._execution.rounds[number].started[replica] = partial
        self._execution.outputs[replica] = outputs

    def total(self, number: int, *, last: bool) -> Total:
        """Return the total of a round; a copy of one whose memory the next round's reduce takes."""
        total = self._execution.totals[number]
        return total if last else {name: array.copy() for name, array in total.items()}

    def finish(self, specs: Sequence[Spec]) -> int:
        """End the execution; return the ticket of what the replicas have returned, of `specs`."""
        execution, self._execution = self._execution, HostExecution(())
        local = iter(range(len(specs)))
        columns: list[Mapping[int, Any]] = []
        for position, spec in enumerate(specs):
            if spec.is_number:
                bits = execution.totals[-1][f"{SCALAR}{position}"]
                columns.append(dict(enumerate(gathered_scalars(bits, np.dtype(spec.dtype)))))
            else:
                at = next(local)
                columns.append({replica: leaves[at] for replica, leaves in execution.outputs.items()})
        sources = execution.sources
        empty = frozenset(replica for replica in self._exchange.own if is_empty(sources, replica))
        return self.shelf.put(Returned(tuple(specs), tuple(columns), empty))


def _missing(replica: int) -> NoReturn:
    raise Missing(replica)
