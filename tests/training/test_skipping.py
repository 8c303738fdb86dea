"""Steps that a worker skips are reported once that takes long."""

from lockstep.keras.state.resumable_calls import SKIPPING_EVERY, SkippedSteps
from lockstep.observability.events import StepsSkipped


def test_a_long_skip_is_reported_every_few_seconds_and_at_its_end() -> None:
    said: list[StepsSkipped] = []
    time = 100.0
    skipping = SkippedSteps(said.append, lambda: time)

    def skip(call: str, skipped: int, of: int, seconds: float, what: str = "steps") -> list[StepsSkipped]:
        nonlocal time
        time += seconds
        said.clear()
        skipping.note(call, skipped, of, what)
        return said.copy()

    assert skip("fit 1", 1, 6, 50.0) == []
    assert skip("fit 1", 2, 6, SKIPPING_EVERY - 0.1) == []
    assert skip("fit 1", 3, 6, 0.1) == [StepsSkipped("fit 1", 3, 6)]
    assert skip("fit 1", 4, 6, 0.1) == []
    assert skip("fit 1", 5, 6, SKIPPING_EVERY) == [StepsSkipped("fit 1", 5, 6)]
    assert skip("fit 1", 6, 6, 0.1) == [StepsSkipped("fit 1", 6, 6)]
    # A joiner that has reached its first position skips on to the state that it receives.
    assert skip("fit 1", 8, 8, 0.1) == [StepsSkipped("fit 1", 8, 8)]
    assert skip("fit 2", 1, 2, 50.0) == skip("fit 2", 2, 2, 1.0) == []
    assert skip("steps 3", 1, 9, 50.0, "elements") == []
    assert skip("steps 3", 2, 9, SKIPPING_EVERY, "elements") == [StepsSkipped("steps 3", 2, 9, "elements")]
