"""One run of a scheduled function in a worker: what it asks the servers, and whose error ends what."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server.function_calls import Scheduled
from lockstep.keras.parameter_server.function_run import RanFunction
from lockstep.keras.parameter_server.servers import Gradients
from lockstep.keras.parameter_server.worker_function import WorkerFunction
from lockstep.protocol.parameter_server import AtCall

AT = AtCall(4, 9)
ROWS = np.array([1, 3])


class Runner:
    """A `FunctionRunner` on a backend that raises an error of its own for any error of a function."""

    failure = None
    pull_rows: Any = None
    exchange: Any = None

    def first_of(self, number: int) -> int:
        return 10 * number

    def run(self, function: Any, call: Callable[[], Any], step: int, seed: int, exchange: Any) -> RanFunction:
        self.exchange = exchange
        try:
            result = call()
        except Exception as error:
            raise RuntimeError(f"the backend says {error}") from None
        return RanFunction(result, {2: np.ones(1)}, {}, (0,), {5: (np.zeros(1), np.ones(1))})


def run_of(act: Callable[[Runner], Any], pull_rows: Any = None, exchange: Any = None) -> WorkerFunction:
    """Return a run of a function, which is given its runner."""
    runner: Any = Runner()
    nothing: Any = lambda: ((), {})  # noqa: E731
    scheduled = Scheduled(lambda: act(runner), nothing, nothing)
    return WorkerFunction(runner, scheduled, 7, 1, pull_rows, exchange)


def test_lookups_and_exchanges_are_numbered_and_concern_variables_of_all_optimizers() -> None:
    asked: list[Any] = []

    def exchange(gradients: Gradients) -> Sequence[Any]:
        asked.append((dict(gradients.of), gradients.updates, gradients.part))
        return (gradients.part,)

    def pull_rows(*given: Any) -> Any:
        asked.append(given)
        return given[1]

    def act(runner: Runner) -> float:
        runner.pull_rows(3, ROWS)
        assert runner.exchange(1, {2: 0.5}) == [0]
        runner.pull_rows(4, ROWS)
        assert runner.exchange(0, {}) == [1]
        return 2.5

    done, arrays, gradients = run_of(act, pull_rows, exchange).run(AT, 1)
    assert asked == [(3, ROWS, 0), ({12: 0.5}, (1,), 0), (4, ROWS, 1), ({}, (0,), 1)]
    assert (done.at, done.step, done.changed, done.failure) == (AT, 7, ("5",), None)
    assert [array.tolist() for array in arrays] == [[0.0], [1.0]]
    assert gradients is not None
    assert (list(gradients.of), gradients.updates, gradients.part) == ([2], (0,), 0)


@pytest.mark.parametrize("how", ["pull_rows", "exchange"])
def test_the_loss_of_a_server_is_no_failure_of_the_function(how: str) -> None:
    def lost(*_: Any) -> Any:
        raise PeerLostError("parameter server 0 has ended")

    def act(runner: Runner) -> None:
        (runner.pull_rows if how == "pull_rows" else runner.exchange)(0, {})

    with pytest.raises(PeerLostError, match="parameter server 0 has ended"):
        run_of(act, lost, lost).run(AT, 1)


def test_an_error_of_the_function_is_told_to_the_chief(capfd: pytest.CaptureFixture[str]) -> None:
    def act(runner: Runner) -> None:
        raise ValueError("wrong")

    done, arrays, gradients = run_of(act).run(AT, 3)
    assert done.failure is not None
    assert (done.failure.message, done.failure.worker) == ("the backend says wrong", 3)
    assert (arrays, gradients) == ([], None)
    assert "function 8 (<lambda>) raises an exception" in capfd.readouterr().err


def test_another_function_may_run_meanwhile() -> None:
    """In a replay in one process, whatever runs looks up rows for the function whose turn it is."""
    found: list[str] = []
    runs = [run_of(lambda _: None, lambda *_, name=name: found.append(name)) for name in "ab"]
    runner: Any = SimpleNamespace()
    for run in (*runs, runs[0]):
        run._runner = runner
        run.attach()
        runner.pull_rows(0, ROWS)
    assert found == ["a", "b", "a"]
