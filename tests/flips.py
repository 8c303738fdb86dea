"""Flips a bit at a seeded random place of a training, and says what becomes of it.

    flips.py [--flips N] [--first-seed N] [--every K] [--keras]
    flips.py --clean N [--keras]

Workers are threads that take the steps of a small training with the exchange of workers on one host or on
two, and verify them. NumPy computes the steps, or with `--keras`, a program of Keras's backend does. With
`--clean`, they take N steps without a wrong bit, and nothing may be found. Otherwise one of them has one
wrong bit once, at one of `PLACES`. What became of it is one of

* found: a verification has failed, and whoever is left has the right state;
* stopped: the job has ended with an error, and no wrong worker was named;
* harmless: none has failed, and the state at the end is that of an undisturbed training;
* missed: none has failed, and the state is wrong: possible only if a step or part was not verified;
* unseen: likewise, of a single worker, whose memory no other worker has a copy of;
* wrong: a verification has failed, and the state is wrong nevertheless, or the wrong worker was named.
"""

import argparse
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "collectives"))

from host_threads import ConnectedView, WorkerOfHost

from lockstep.collectives.contract import Communicator, WaitPolicy
from lockstep.collectives.network.lane import Lane
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.packed_reduce import SMALL, PackedReduce
from lockstep.collectives.shared.pool import SharedPool
from lockstep.collectives.shared.slice_reduce import SliceReduce
from lockstep.data.batch import Share
from lockstep.data.digest import digest_array
from lockstep.errors import DisagreementError, PeerLostError
from lockstep.keras import round_verification, rounds, state_verification
from lockstep.keras.round_verification import Verifier
from lockstep.keras.rounds import Round
from lockstep.keras.state_verification import StateVerifier
from lockstep.keras.verification import Verifications
from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.events import VerificationFailed
from lockstep.protocol.job_spec import JobSettings, Verification
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker.job import Job, JobContext
from lockstep.worker.peers import Alone, EnteredView

REPLICAS = 4
STEPS = 5
SIZES = (50, SMALL // 4 + 1000)
"""Numbers of elements: with a total that is summed at once, and in slices."""
PLACES = (
    *("input", "gradient", "partial", "published", "summed", "total", "update", "state", "hash"),
    *("frame", "limits", "scales"),
)
"""`frame`: data from another host; `limits` and `scales`: of sums of small integers."""
OF_KERAS = tuple(name for name in PLACES if name not in ("limits", "scales"))
"""The places of a training that `keras_program` takes: only local steps round to small integers."""
KINDS = ("found", "stopped", "harmless", "unseen", "missed", "wrong")
OF_MEMORY = ("total", "state", "scales")
"""Places whose bits only other workers have, too: `scales` after the verification of the sum."""
SHARED = ("published", "summed", "frame")
"""Places in the memory of a host, where the worker that is named may be another one."""
PASSES = {**dict.fromkeys(SHARED, 2), "limits": REPLICAS, "scales": 8}
"""How often a worker passes places in a step: in sums of limits and summands, and when they are verified."""

_PATIENCE = WaitPolicy(timeout=120.0)

Arrays = dict[str, Any]


@dataclass
class Flip:
    """One wrong bit of one worker, in `step` or later, after it has passed `place` another `passes` times."""

    place: str
    worker: int
    step: int
    random: random.Random
    now: int = 0
    done: bool = False
    passes: int = 0

    def due(self, place: str) -> bool:
        """Whether the bit is due here; it is only once."""
        if self.done or self.place != place or self.now < self.step:
            return False
        if self.passes:
            self.passes -= 1
            return False
        self.done = True
        return True

    def strike(self, arrays: Sequence[Any]) -> None:
        """Flip a bit of one of the arrays, in place."""
        bits = [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes]
        chosen = self.random.choice(bits)
        chosen[self.random.randrange(chosen.size)] ^= 1 << self.random.randrange(8)


_here = threading.local()


def _flip() -> Flip | None:
    return getattr(_here, "flip", None)


def _after(method: Callable[..., Any], place: str, arrays: Callable[[Any], list[Any]]) -> Callable[..., Any]:
    def wrapped(self: Any, *given: Any) -> None:
        method(self, *given)
        flip, outs = _flip(), arrays(self)
        if flip is not None and outs and flip.due(place):
            flip.strike(outs)

    return wrapped


def _made(function: Callable[..., Any], place: str) -> Callable[..., Any]:
    def wrapped(*given: Any) -> Any:
        array, flip = function(*given), _flip()
        if flip is not None and flip.due(place):
            flip.strike([array])
        return array

    return wrapped


def _receive(lane: Lane, host: int, view: memoryview, wait: Any, original: Any = Lane.receive) -> None:
    original(lane, host, view, wait)
    flip = _flip()
    # Headers and hashes are received as bytes, and arrays into their memory.
    if flip is not None and not isinstance(view.obj, bytearray) and flip.due("frame"):
        flip.strike([np.asarray(view)])


def _hashed(array: Any) -> bytes:
    digest = digest_array(array)
    flip = _flip()
    if flip is not None and flip.due("hash"):
        bits = bytearray(digest)
        bits[flip.random.randrange(len(bits))] ^= 1 << flip.random.randrange(8)
        return bytes(bits)
    return digest


@contextmanager
def _places() -> Iterator[None]:
    """Within the block, the exchange and the hashes have places for flips."""
    published = _after(SliceReduce.publish, "published", lambda reduce: [s.out for s in reduce.local_sums])
    summed = _after(SliceReduce.sum, "summed", lambda reduce: [s.out for s in reduce.total])
    packed = _after(
        PackedReduce.publish,
        "published",
        lambda reduce: [array for partial in reduce.packed_partials.values() for array in partial],
    )
    added = _after(PackedReduce.sum, "summed", lambda reduce: [s.out for s in reduce.total])
    with (
        mock.patch.object(SliceReduce, "publish", published),
        mock.patch.object(SliceReduce, "sum", summed),
        mock.patch.object(PackedReduce, "publish", packed),
        mock.patch.object(PackedReduce, "sum", added),
        mock.patch.object(Lane, "receive", _receive),
        mock.patch.object(rounds, "limits_of", _made(rounds.limits_of, "limits")),
        mock.patch.object(rounds, "scales_of", _made(rounds.scales_of, "scales")),
        mock.patch.object(round_verification, "digest_array", _hashed),
        mock.patch.object(state_verification, "digest_array", _hashed),
    ):
        yield


class Program:
    """A small training: its state is a dict of arrays."""

    def __init__(self, size: int) -> None:
        numbers = np.random.default_rng(size)
        names = ("weights", "slots")
        self.state: Arrays = {name: numbers.normal(size=size).astype("f4") for name in names}

    def published(self, state: Arrays) -> Any:
        """Do nothing: there are no variables."""
        return nullcontext()

    def settle(self) -> None:
        """Do nothing: NumPy has computed when it returns."""

    def to_numpy(self, array: Any) -> Any:
        """Return the array."""
        return array

    def parts(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays."""
        return arrays

    def named_state(self, state: Arrays) -> Arrays:
        """Return the state."""
        return state

    def load(self, state: Arrays, arrays: Mapping[str, Any]) -> Arrays:
        """Return a copy of the arrays."""
        return {name: array.copy() for name, array in arrays.items()}

    def compute(self, state: Arrays, step: int, replica: int, flip: Flip | None) -> Arrays:
        """Return the partial of a replica."""
        weights = state["weights"]
        x = np.random.default_rng((step, replica)).normal(size=weights.size).astype("f4")
        if flip is not None and flip.due("input"):
            flip.strike([x])
        with np.errstate(all="ignore"):
            gradient = np.tanh(weights * x) + x
            partial = {
                "gradient/0": gradient,
                "metric/0": np.float32(gradient[:9].sum()).reshape(1),
                # Sums of limits come first; see `Round.limits_of`.
                "scaled/0": np.sin(weights * x),
                "rare/0": np.float32(replica == 1) * x,
                "rare/1": np.zeros_like(x),
            }
        if flip is not None and flip.due("gradient"):
            flip.strike(list(partial.values()))
        return partial

    def apply(self, state: Arrays, total: Mapping[str, Any]) -> tuple[None, Arrays]:
        """Return the state after an update."""
        with np.errstate(all="ignore"):
            added = total["gradient/0"] + total["scaled/0"] + total["rare/0"]
            slots = np.float32(0.9) * state["slots"] + added
            return None, {"weights": state["weights"] - np.float32(0.01) * slots, "slots": slots}


class KerasProgram:
    """The training step of a Keras model, for one worker at a time.

    Attributes:
        state: before the first step.
    """

    turn = threading.RLock()
    """Keras, TensorFlow and PyTorch compute in one thread at a time."""

    def __init__(self, size: int) -> None:
        import keras

        from lockstep.keras.backends.adapter import adapter

        with self.turn:
            keras.utils.set_random_seed(1)
            hidden = keras.layers.Dense(size // 10, "tanh", name="hidden")
            normal = keras.layers.BatchNormalization(name="normal")
            layers = [hidden, normal, keras.layers.Dropout(0.2, seed=2, name="dropout")]
            self._model = keras.Sequential(
                [keras.Input((8,)), *layers, keras.layers.Dense(1, name="out")], name="flipped"
            )
            optimizer = keras.optimizers.Adam(0.01, name="adam")
            self._model.compile(optimizer, "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
            self._backend = adapter().steps()
            self._backend.build(self._model, "train", lambda: self._rows(0, 0))
            self._program = self._backend.program(self._model, "train")
            present = self._program.named_state(self._program.present())
            self._initial = {name: np.array(self.to_numpy(value)) for name, value in present.items()}

    @property
    def state(self) -> Any:
        """The state before the first step, also if this program has trained before."""
        with self.turn:
            return self._program.load(self._program.present(), self._initial)

    @staticmethod
    def _rows(step: int, replica: int) -> tuple[Any, Any]:
        x = np.random.default_rng((step, replica)).normal(size=(4, 8)).astype("f4")
        return x, x[:, :1].copy()

    def published(self, state: Any) -> Any:
        """Return a context in which the variables have their values."""
        return self._program.published(state)

    def settle(self) -> None:
        """Wait until no update reads a total."""
        self._backend.settle()

    def to_numpy(self, array: Any) -> Any:
        """Return an array of the backend as NumPy sees it."""
        return self._backend.to_numpy(array)

    def parts(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial by their own names."""
        return self._program.parts(0, arrays)

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the state by name."""
        with self.turn:
            return self._program.named_state(state)

    def load(self, state: Any, arrays: Mapping[str, Any]) -> Any:
        """Return the state with the values of the arrays."""
        with self.turn:
            return self._program.load(state, arrays)

    def compute(self, state: Any, step: int, replica: int, flip: Flip | None) -> Arrays:
        """Return the partial of a replica."""
        data = self._rows(step, replica)
        if flip is not None and flip.due("input"):
            flip.strike(list(data))
        share = Share(replica, 4, 1 / REPLICAS, step, lambda: data)
        with self.turn:
            partial = dict(self._program.compute(state, share, ()))
            if flip is not None and flip.due("gradient"):
                partial = {name: np.array(self.to_numpy(array)) for name, array in partial.items()}
                flip.strike(list(partial.values()))
        return partial

    def apply(self, state: Any, total: Mapping[str, Any]) -> tuple[None, Any]:
        """Return the state after an update."""
        with self.turn:
            _, state = self._program.apply(state, [total])
            self._backend.settle()
        return None, state


def numpy_program(worker: int, size: int) -> Program:
    """Return a program without a framework."""
    return Program(size)


@cache
def keras_program(worker: int, size: int) -> KerasProgram:
    """Return the program of Keras's backend that a worker always has, so that it is compiled once."""
    return KerasProgram(size)


def _struck(program: Any, state: Any, flip: Flip) -> Any:
    """Return a state with a flipped bit."""
    arrays = {name: np.array(program.to_numpy(value)) for name, value in program.named_state(state).items()}
    flip.strike(list(arrays.values()))
    return program.load(state, arrays)


class FlippedRound(Round):
    """The round of a step."""

    def __init__(self, worker: int, program: Any, state: Any, step: int, flip: Flip | None) -> None:
        super().__init__(f"step {step} of fit 1", worker, to_numpy=program.to_numpy, settle=program.settle)
        self._of = program, state, step, flip

    def compute(self, replica: int) -> Arrays:
        """Compute a replica."""
        program, state, step, flip = self._of
        return program.compute(state, step, replica, flip)

    def parts(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial by their own names."""
        return self._of[0].parts(arrays)

    def sum(self, view: View, communicator: Any) -> Any:
        """Sum, perhaps with a partial that has changed since it was computed."""
        flip = self._of[-1]
        owned = [r for r in view.replicas_of(self.worker) if r in self.started]
        if flip is not None and owned and flip.due("partial"):
            replica = flip.random.choice(owned)
            partial = {
                name: np.array(self._of[0].to_numpy(array)) for name, array in self.started[replica].items()
            }
            flip.strike(list(partial.values()))
            self.started[replica] = partial
        return super().sum(view, communicator)


class _Next(Alone):
    """A membership with prepared next views.

    Attributes:
        leaves: whether this worker ends alone, and not the whole job.
    """

    def __init__(self) -> None:
        self.following: list[EnteredView] = []
        self.leaves = False

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        """Return the prepared one, or end with the job."""
        if not self.following:
            raise lost
        return self.following.pop(0)

    def end_differing(self, differs: DisagreementError, advice: str = "") -> NoReturn:
        """End this worker."""
        self.leaves = True
        raise differs


def _opened(view: View, ends: ExitStack) -> list[SharedCommunicator]:
    """Return the exchange of a view, which `ends` closes."""
    segment, pool = ControlSegment.create(len(view.workers)), SharedPool.create()
    communicators = []
    for position in range(len(view.workers)):
        control = ControlSegment.attach(os.dup(segment.fd))
        memory = SharedPool.attach(os.dup(pool.fd))
        communicators.append(
            SharedCommunicator(control, Buffers(memory), position, ReducePlan.of(view), _PATIENCE)
        )
        ends.callback(control.close)
        ends.callback(memory.close)
    ends.callback(segment.close)
    ends.callback(pool.close)
    return communicators


@dataclass
class Training:
    """One training of some workers, with at most one flip.

    Attributes:
        workers: their number.
        size: number of elements of the weights.
        setting: of the verification.
        flip: the flip.
        hosts: the number of hosts, between which the workers are divided.
        steps: how many steps to take.
        program: returns the program of a worker, given its id and the size.
        failed: the verifications that have failed.
        states: the hash of the last state of each worker that is left.
        ended: the errors that have ended workers.
        has_stopped: whether one of them has ended the whole job.
    """

    workers: int
    size: int
    setting: Verification
    flip: Flip | None = None
    hosts: int = 1
    steps: int = STEPS
    program: Callable[[int, int], Any] = numpy_program
    failed: list[VerificationFailed] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    ended: list[DisagreementError] = field(default_factory=list)
    has_stopped: bool = False

    def run(self) -> None:
        """Train."""
        settings = JobSettings(workers=self.workers, threads=1, verification=self.setting)
        self._ends, self._of_hosts = ExitStack(), list[WorkerOfHost]()
        with self._ends:
            pools = [SharedPool.create() for _ in range(self.hosts)]
            for worker in range(self.workers):
                pool = SharedPool.attach(os.dup(pools[worker % self.hosts].fd))
                self._of_hosts.append(WorkerOfHost(pool))
            for each in (*pools, *self._of_hosts):
                self._ends.callback(each.close)
            entered = self._entered(tuple(range(self.workers)), 1)
            self._memberships = [_Next() for _ in entered]
            self._jobs = [
                Job(
                    JobContext(worker, Bus(SystemClock(), worker), settings, host=f"h{worker % self.hosts}"),
                    entry,
                    self._memberships[worker],
                )
                for worker, entry in enumerate(entered)
            ]
            self._take_all()

    def _take_all(self) -> None:
        for job in self._jobs:
            job.events.subscribe(self._note, VerificationFailed)
        with ThreadPoolExecutor(self.workers) as threads:
            list(threads.map(self._train, range(self.workers)))

    def _entered(self, workers: Sequence[int], number: int) -> list[EnteredView]:
        """Return a view and an end of its exchange for each of `workers`."""
        if self.hosts == 1:
            view = place(REPLICAS, tuple(workers), number)
            self._ends_of_view: Sequence[Communicator] = _opened(view, self._ends)
        else:
            of_hosts = [[worker for worker in workers if worker % 2 == host] for host in (0, 1)]
            connected = ConnectedView(REPLICAS, [ids for ids in of_hosts if ids], number)
            self._ends.callback(connected.close)
            view = connected.view
            self._ends_of_view = [
                connected.entrances[worker].enter(self._of_hosts[worker], _PATIENCE) for worker in workers
            ]
            for communicator in self._ends_of_view:
                self._ends.callback(communicator.close)
        return [(view, communicator) for communicator in self._ends_of_view]

    def _note(self, published: PublishedEvent) -> None:
        assert isinstance(published.event, VerificationFailed)
        self.failed.append(published.event)

    def _train(self, worker: int) -> None:
        job = self._jobs[worker]
        program = self.program(worker, self.size)
        flip = self.flip if self.flip is not None and self.flip.worker == worker else None
        _here.flip = flip
        verifications = Verifications(job)
        verifier = Verifier(job.exchange, job, verifications)
        states = StateVerifier(job, program, verifications)
        state = program.state
        try:
            for step in range(1, self.steps + 1):
                if flip is not None:
                    flip.now = step
                    if flip.due("state"):
                        state = _struck(program, state, flip)
                verifications.begin(step)
                what = f"step {step} of fit 1"
                before = states.begin(program, state, what, [program])
                total = verifier.sum(FlippedRound(worker, program, state, step, flip))
                if flip is not None and flip.due("total"):
                    total = {name: array.copy() for name, array in total.items()}
                    parts = program.parts(total).items()
                    flip.strike([array for name, array in parts if name.startswith("gradient")])

                def again(state: Any, total: Any = total) -> Any:
                    logs, state = program.apply(state, total)
                    if flip is not None and flip.due("update"):
                        state = _struck(program, state, flip)
                    return logs, state

                result = again(state)
                if before is not None:
                    result = states.end(before, program, result, what, again)
                state = result[1]
        except DisagreementError as error:
            self.ended.append(error)
            if self._memberships[worker].leaves:
                self._leave(job, error)
            else:
                self.has_stopped = True
                for communicator in self._ends_of_view:
                    communicator.abort("the job ends")
            return
        except PeerLostError:
            assert self.has_stopped
            return
        except Exception:
            # The others wait for this one.
            self.has_stopped = True
            for communicator in self._ends_of_view:
                communicator.abort("the test fails")
            raise
        finally:
            _here.flip = None
        values = map(program.to_numpy, program.named_state(state).values())
        self.states.add(b"".join(map(digest_array, values)).hex())

    def _leave(self, job: Job, error: DisagreementError) -> None:
        """Give the others the next view, and end this one."""
        left = tuple(worker for worker in job.view.workers if worker not in error.workers)
        if left and job.worker == min(error.workers):
            ended = self._ends_of_view
            for worker, entered in zip(left, self._entered(left, job.view.number + 1), strict=True):
                self._memberships[worker].following.append(entered)
            for communicator in ended:
                communicator.abort(f"worker {job.worker} has ended")


def outcome(
    seed: int, every: int, right: Mapping[int, str], program: Callable[[int, int], Any]
) -> tuple[str, str]:
    """Flip a bit; return its place, and what became of it.

    Args:
        seed: determines everything.
        every: K; with 1, all replicas are verified.
        right: see `undisturbed`.
        program: see `Training`.
    """
    drawn = random.Random(seed)
    place_ = drawn.choice(PLACES if program is numpy_program else OF_KERAS)
    over_hosts = place_ == "frame"
    if place_ not in ("published", "summed"):
        over_hosts |= drawn.random() < 0.2
    workers = drawn.randint(2 if over_hosts else 1, REPLICAS)
    flip = Flip(place_, drawn.randrange(workers), drawn.randint(1, STEPS - 1), drawn)
    flip.passes = drawn.randrange(PASSES.get(place_, 1))
    size, setting = drawn.choice(SIZES), Verification(every, every == 1)
    training = Training(workers, size, setting, flip, 1 + over_hosts, program=program)
    training.run()
    is_right = training.states <= {right[size]}
    accused = {worker for event in training.failed if event.verdict == "worker" for worker in event.workers}
    if training.has_stopped:
        return place_, "stopped" if accused <= {flip.worker} else "wrong"
    if not training.failed:
        unseen = workers == 1 and place_ in OF_MEMORY
        became = "harmless" if is_right else "unseen" if unseen else "missed"
        return place_, "wrong" if training.ended else became
    return place_, "found" if is_right and (place_ in SHARED or accused <= {flip.worker}) else "wrong"


def undisturbed(program: Callable[[int, int], Any] = numpy_program) -> dict[int, str]:
    """Return the hashes of the states at the end of trainings without a flip, by their sizes."""
    states = {}
    for size in SIZES:
        training = Training(1, size, Verification(), program=program)
        training.run()
        (states[size],) = training.states
    return states


def count(
    seeds: Sequence[int], every: int, program: Callable[[int, int], Any] = numpy_program
) -> dict[str, Counter[str]]:
    """Flip a bit for each seed; return the numbers of outcomes by place."""
    right = undisturbed(program)
    found: dict[str, Counter[str]] = {name: Counter() for name in PLACES}
    with _places():
        for seed in seeds:
            try:
                where, became = outcome(seed, every, right, program)
            except Exception:
                print(f"seed {seed}: it fails", flush=True)
                raise
            found[where][became] += 1
            if became == "wrong" or (became == "missed" and every == 1):
                print(f"seed {seed}: {where}: {became}", flush=True)
    return found


def clean(steps: int, program: Callable[[int, int], Any]) -> int:
    """Take steps without a wrong bit, divided among eight trainings; return the number of false alarms."""
    alarms = taken = 0
    for number in range(8):
        workers, hosts = 1 + number % REPLICAS, 1 + (number in (2, 5, 7))
        setting = Verification(1, number < 4)
        training = Training(workers, SIZES[0], setting, None, hosts, steps // 8, program)
        training.run()
        alarms += len(training.failed) + len(training.ended) + (len(training.states) != 1)
        taken += training.steps
    print(f"{taken} clean steps: {alarms} false alarms")
    return alarms


def main() -> int:
    """Flip bits, and print a table; the status is 1 if one was wrong, or missed although all is verified."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--keras", action="store_true")
    options = parser.parse_args()
    program = keras_program if options.keras else numpy_program
    if options.clean:
        return clean(options.clean, program)
    seeds = range(options.first_seed, options.first_seed + options.flips)
    counts = count(seeds, options.every, program)
    print(f"{'':12}" + "".join(f"{kind:>10}" for kind in KINDS))
    for name, numbers in filter(lambda item: item[1], counts.items()):
        print(f"{name:12}" + "".join(f"{numbers[kind]:10}" for kind in KINDS))
    bad = sum(
        numbers["wrong"] + (numbers["missed"] if options.every == 1 else 0) for numbers in counts.values()
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
