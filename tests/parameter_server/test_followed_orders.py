"""One process that follows the orders of a simulated run computes what the run has computed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ConfigError, DisagreementError
from lockstep.keras.parameter_server.followed_orders import Answered, Attempt, FollowedOrders
from lockstep.keras.parameter_server.server_shards import ServerShards
from lockstep.keras.parameter_server.servers import Gradients, Servers
from lockstep.keras.parameter_server.worker import DoneWork
from lockstep.parameter_server.order import OrderWriter, Record, RecordedOrder, RecordKind
from lockstep.parameter_server.partitioners import FixedShardsPartitioner, place_variables
from lockstep.protocol.parameter_server import Assigned, AtCall, Pull, WorkDone

ROWS = 4


def updated(value: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return another result for each order of updates."""
    return value * 0.5 + gradient


def gradient_of(step: int, part: int, pulled: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(pulled) * 0.25 + step + part / 8


class Vector:
    """The `ServedVariables` of one server, with one variable."""

    def __init__(self, size: int) -> None:
        self.value = np.zeros(size)
        self.state_bytes = self.value.nbytes

    def values(self, rows: Any = None) -> list[np.ndarray]:
        return [self.value.copy()]

    def update(self, gradients: Mapping[int, np.ndarray], updates: Any = (0,), rows: Any = None) -> None:
        self.value = updated(self.value, gradients[0])


class Noted(OrderWriter):
    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[Record] = []

    def add(self, kind: RecordKind, worker: int, step: int, part: int = 0) -> None:
        self.records.append(Record(kind, worker, step, part))


@dataclass
class Running:
    """A step that a worker of the simulated run computes."""

    step: int
    part: int = 0
    pulled: dict[int, np.ndarray] = field(default_factory=dict)
    pushed: set[int] = field(default_factory=set)


class Simulation:
    """A run: in each turn one process does something, or a worker is lost.

    A step gives gradients to the servers once, or several times, each time before it reads the weights again.
    """

    def __init__(self, seed: int, servers: int, workers: int, steps: int, losses: int) -> None:
        self.random = random.Random(seed)
        self.shards = place_variables([((ROWS,), 8)], servers, FixedShardsPartitioner(servers))
        self.values = [np.zeros(shard.stop - shard.start) for shard in self.shards]
        self.orders: list[list[Record]] = [[] for _ in range(servers)]
        self.chief: list[Record] = []
        self.parts = [self.random.choice((1, 1, 2, 3)) for _ in range(steps)]
        self.waiting = list(range(steps))
        self.work: dict[int, Running] = {}
        self.left = list(range(1, workers + 1))
        self.losses = losses
        self.seen: dict[tuple[int, int], np.ndarray] = {}
        applied: set[tuple[int, int, int]] = set()
        while self.waiting or self.work:
            worker = self.random.choice(self.left)
            if self.losses and len(self.left) > 1 and self.random.random() < 0.02:
                self.losses -= 1
                self.left.remove(worker)
                if worker in self.work:
                    self.waiting.insert(0, self.work.pop(worker).step)
            elif worker not in self.work:
                if self.waiting:
                    self.work[worker] = Running(self.waiting.pop(0))
                    self.chief.append(Record(RecordKind.ASSIGN, worker, self.work[worker].step))
            else:
                self.advance(worker, self.work[worker], applied)

    def advance(self, worker: int, own: Running, applied: set[tuple[int, int, int]]) -> None:
        missing = [k for k in range(len(self.values)) if k not in own.pulled]
        if missing:
            server = self.random.choice(missing)
            own.pulled[server] = self.values[server].copy()
            self.orders[server].append(Record(RecordKind.PULL, worker, own.step, own.part))
            return
        pulled = [own.pulled[server] for server in range(len(self.values))]
        self.seen[worker, own.step] = np.concatenate(pulled)
        parts = self.parts[own.step]
        if own.part == parts and parts > 1:
            self.complete(worker)
            return
        unpushed = [k for k in range(len(self.values)) if k not in own.pushed]
        if unpushed:
            server = self.random.choice(unpushed)
            own.pushed.add(server)
            if (server, own.step, own.part) not in applied:
                applied.add((server, own.step, own.part))
                gradient = self.shards[server].part_of(gradient_of(own.step, own.part, pulled))
                self.values[server] = updated(self.values[server], gradient)
                self.orders[server].append(Record(RecordKind.PUSH, worker, own.step, own.part))
            return
        if parts == 1:
            self.complete(worker)
        else:
            own.part, own.pulled, own.pushed = own.part + 1, {}, set()

    def complete(self, worker: int) -> None:
        self.chief.append(Record(RecordKind.DONE, worker, self.work.pop(worker).step))


class Workers:
    """Computes steps as those of the simulated run."""

    unit = "step"

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = parts
        self.seen: dict[tuple[int, int], np.ndarray] = {}
        self.completed_steps: list[int] = []

    def pull(
        self, servers: Servers, server: int, attempt: Attempt, part: int
    ) -> tuple[Pull, list[np.ndarray]]:
        return Pull(attempt.step, part=part), []

    def compute(self, attempt: Attempt, pulled: list[Answered]) -> DoneWork | Gradients:
        part = attempt.batch = 0 if attempt.batch is None else attempt.batch + 1
        arrays = [array for _, (array,) in pulled]
        self.seen[attempt.worker, attempt.step] = np.concatenate(arrays)
        message = WorkDone(AtCall(-1, -1), attempt.step)
        if part == self.parts[attempt.step] and part > 1:
            return DoneWork(message, [], None)
        gradients = Gradients({0: gradient_of(attempt.step, part, arrays)}, part=part)
        return DoneWork(message, [], gradients) if self.parts[attempt.step] == 1 else gradients

    def completed(self, step: int) -> None:
        self.completed_steps.append(step)


def followed(run: Simulation) -> tuple[FollowedOrders, list[Vector], list[Noted], Workers]:
    vectors = [Vector(len(value)) for value in run.values]
    writers, workers = [Noted() for _ in vectors], Workers(run.parts)
    servers = []
    for variables, writer, records in zip(vectors, writers, run.orders, strict=True):
        order, given = RecordedOrder(records), variables
        made: Any = given
        servers.append((ServerShards(made, writer, order, None), order))
    return FollowedOrders("fit 1", servers, run.shards, workers), vectors, writers, workers


def assigned(step: int) -> Assigned:
    return Assigned(step, (), ())


@pytest.mark.parametrize("seed", range(60))
def test_the_orders_of_a_run_are_followed(seed: int) -> None:
    chosen = random.Random(seed)
    run = Simulation(seed, chosen.choice((1, 2, 4)), chosen.randint(1, 5), chosen.randint(1, 40), seed % 4)
    orders, vectors, writers, workers = followed(run)
    for turn in run.chief:
        if turn.kind is RecordKind.ASSIGN:
            orders.assign(turn.worker, assigned(turn.step), ())
        else:
            told: Any = orders.done(turn.worker, turn.step).message
            assert told.step == turn.step
            assert np.array_equal(workers.seen[turn.worker, turn.step], run.seen[turn.worker, turn.step])
    orders.servers.end_call()
    assert workers.completed_steps == [turn.step for turn in run.chief if turn.kind is RecordKind.DONE]
    for vector, value in zip(vectors, run.values, strict=True):
        assert vector.value.tobytes() == value.tobytes()
    assert [writer.records[:-1] for writer in writers] == run.orders


def test_a_step_that_the_recorded_run_has_not_computed_is_refused() -> None:
    run = Simulation(1, 2, 2, 5, 0)
    orders, *_ = followed(run)
    with pytest.raises(ConfigError, match="the chief has not assigned step 8 to worker 1"):
        orders.done(1, 7)
    for turn in run.chief:
        if turn.kind is RecordKind.ASSIGN:
            orders.assign(turn.worker, assigned(turn.step), ())
        else:
            orders.done(turn.worker, turn.step)
    orders.assign(1, assigned(7), ())
    with pytest.raises(
        DisagreementError, match="trains on, and the recorded one ends the call: the script, its"
    ):
        orders.done(1, 7)
    with pytest.raises(
        DisagreementError, match="reads the weights on parameter server 0, and the recorded one ends"
    ):
        orders.servers.read(5, ())
