"""Calls of several threads take turns, in an order that all workers share."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.errors import DisagreementError, ModelError, PeerStuckError
from lockstep.keras import call_turns
from lockstep.keras.call_turns import CallTurns, agreed_key, key_of
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.journal import Journal
from lockstep.keras.state.resumable_calls import ResumableCalls, Resumption
from lockstep.worker import job

PATIENCE = 600.0


def turns_of(
    next_key: Callable[..., str] = lambda waiting: waiting()[0], patience: float = 60.0
) -> CallTurns:
    return CallTurns(next_key, lambda: False, lambda: patience, lambda: None)


class World:
    """Threads that make calls, all of which wait before the first has its turn.

    Args:
        turns: of the threads.
        names: of the calls, which are also their keys, in the order in which they begin to wait.
    """

    def __init__(self, turns: CallTurns, names: list[str]) -> None:
        self.turns = turns
        self.order: list[str] = []
        self.running = 0
        self.most = 0
        self._waits = {name: threading.Event() for name in names}
        self._all = threading.Event()

    def next_key(self, choose: Callable[[list[str]], str]) -> Callable[..., str]:
        """Return what decides about the next call once all wait."""

        def decide(waiting: Callable[[], list[str]]) -> str:
            assert self._all.wait(PATIENCE)
            return choose(waiting())

        return decide

    def call(self, name: str) -> None:
        def key() -> str:
            self._waits[name].set()
            if all(event.is_set() for event in self._waits.values()):
                self._all.set()
            return name

        with self.turns.turn(name, key):
            self.running += 1
            self.most = max(self.most, self.running)
            self.order.append(name)
            with self.turns.turn("within", lambda: pytest.fail("a call within a call needs no key")):
                assert self.turns.key == name
            self.running -= 1

    def run(self) -> None:
        with ThreadPoolExecutor(len(self._waits)) as threads:
            for done in [threads.submit(self.call, name) for name in self._waits]:
                done.result(PATIENCE)


def test_one_call_at_a_time_in_the_order_that_is_decided() -> None:
    names = ["fit of a", "fit of b", "fit of c"]
    turns = turns_of(lambda waiting: decide(waiting))
    world = World(turns, names)
    decide = world.next_key(max)
    world.run()
    assert world.order == sorted(names, reverse=True)
    assert world.most == 1
    turns.wait()


def test_workers_choose_a_call_that_waits_on_all_of_them() -> None:
    assert agreed_key([["a", "b"], ["b", "c"], ["c", "b"]]) == "b"
    assert agreed_key([["a", "b"], ["c"]]) == "a"
    assert agreed_key([["a"]]) == "a"


def test_a_call_that_no_thread_makes_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(call_turns, "_MOMENT", 0.01)
    turns = turns_of(lambda waiting: "fit of b", patience=0.5)

    def call() -> None:
        with turns.turn("fit", lambda: "fit of a"):
            pytest.fail("it has no turn")

    with ThreadPoolExecutor(1) as threads:
        missing = r"no thread of this worker makes the call fit of b, .* wait with fit of a; several threads"
        with pytest.raises(PeerStuckError, match=missing):
            threads.submit(call).result(PATIENCE)
    assert "makes the call fit of b" in capfd.readouterr().err


def test_a_thread_that_a_call_has_started_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = turns_of()
    monkeypatch.setattr(threading.Thread, "start", turns.started(threading.Thread.start))
    before = threading.Event()

    def call() -> None:
        assert before.wait(PATIENCE)
        assert not turns.is_within()

    with ThreadPoolExecutor(1) as others:
        outside = others.submit(call)
        with turns.turn("fit", lambda: "fit"):
            with ThreadPoolExecutor(1) as threads:
                inner = threads.submit(lambda: turns.turn("predict", lambda: "predict").__enter__())
                with pytest.raises(
                    ModelError, match=r"predict in thread .*, which fit in thread 'MainThread'"
                ):
                    inner.result(PATIENCE)
            before.set()
            outside.result(PATIENCE)


def test_custom_loops_of_two_threads_are_refused_for_several_workers() -> None:
    turns = turns_of()
    with turns.part("strategy.run", several=True):
        pass

    def part(several: bool) -> None:
        with turns.part("strategy.run", several=several):
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(part, False).result(PATIENCE)
        with turns.part("strategy.run", several=False):
            pass
        with pytest.raises(ModelError, match="while thread 'MainThread' calls it too"):
            threads.submit(part, True).result(PATIENCE)


def test_a_difference_of_workers_within_a_thread_names_threads() -> None:
    turns = turns_of()

    def call() -> None:
        with turns.turn("fit", lambda: "fit"):
            raise DisagreementError("the models differ", (1,))

    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(DisagreementError, match="differ; several thr") as it,
    ):
        threads.submit(call).result(PATIENCE)
    assert it.value.workers == (1,)


def test_the_key_of_a_call_has_the_values_that_it_passes() -> None:
    x, y = np.arange(6.0), np.ones(6)

    def key(*args: Any, **kwargs: Any) -> str:
        return key_of("fit", "model 1", args, kwargs)

    assert key(x, y, epochs=2) == key(x.copy(), y.copy(), epochs=2)
    assert len({key(x, y, epochs=2), key(y, x, epochs=2), key(x, y, epochs=3), key(x[:5], y, epochs=2)}) == 4
    assert key(keras.ops.convert_to_tensor(x)) != key(keras.ops.convert_to_tensor(y))
    assert key(iter(())) == key(iter(()))
    assert key_of("fit", "model 2", (), {}) != key_of("fit", "model 1", (), {})


def test_a_process_that_resumes_follows_the_recorded_turns() -> None:
    """The threads of the first process made calls in another order, the first call in its main thread."""
    journal = Journal()
    for number, key in enumerate(["", "fit of b", "fit of a"], start=1):
        journal.add([float(number)], {"fit": number}, number, key=key)
    resumption = Resumption(None, {}, Journal.unpacked(journal.packed()), 0, 0, 0, {})  # type: ignore[arg-type]
    calls = ResumableCalls(job.alone(), NumberedCalls())
    calls._resumption = resumption
    results: dict[str, Any] = {}

    def call(name: str) -> None:
        with calls.turns.turn("fit", lambda: name), calls.call("fit"):
            finished = calls.resume()
            assert finished is not None
            results[name] = finished.result

    call("fit of the main thread")
    begun = threading.Event()

    def late() -> None:
        assert begun.wait(PATIENCE)
        call("fit of b")

    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(late)
        first = threads.submit(call, "fit of a")
        begun.set()
        for done in (first, second):
            done.result(PATIENCE)
    assert results == {"fit of the main thread": [1.0], "fit of b": [2.0], "fit of a": [3.0]}


@pytest.mark.parametrize(
    ("options", "how", "workers"),
    [
        pytest.param("-n 2 --min-workers 2", "lost", (0, 2), marks=pytest.mark.slow),
        pytest.param("-n 2", "whole", (0, 1), marks=pytest.mark.slow),
        pytest.param("-n 1 --replicas 2", "whole", (0,), marks=pytest.mark.ci),
    ],
)
def test_an_ensemble_in_threads_has_the_figures_of_plain_keras(
    launch: Callable[..., Any],
    plain: Callable[..., str],
    options: str,
    how: str,
    workers: tuple[int, ...],
) -> None:
    """Also if a worker is lost, and another one follows the recorded calls of the threads."""
    run = launch(options, "ensembles.py", how)
    assert run.status == 0, run.stderr
    assert "several threads of the script make calls: they take turns" in run.stderr
    alone = [float(line.split()[1]) for line in plain("ensembles.py", "plain").splitlines()]
    assert len(alone) == 9
    figures = [run.marked(worker, "figure ") for worker in workers]
    assert figures == [figures[0]] * len(figures)
    assert [float(text.split()[1]) for text in figures[0]] == pytest.approx(alone, rel=1e-5)
