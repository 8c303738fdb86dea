"""Steps that a worker skips are reported once that takes long."""

from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.state.resumable_calls import SKIPPING_EVERY, SkippedSteps
from lockstep.observability.events import StepsSkipped


def test_a_long_skip_is_reported_every_few_seconds_and_at_its_end() -> None:
    said: list[StepsSkipped] = []
    time = 100.0
    skipping = SkippedSteps(said.append, lambda: time)

    def skip(call: NumberedCall, seconds: float, steps: int = 1) -> list[StepsSkipped]:
        nonlocal time
        time += seconds
        call.steps += steps
        said.clear()
        skipping.note(call)
        return said.copy()

    long = NumberedCall("fit 1", 1, skipped=6)
    assert skip(long, 50.0) == []
    assert skip(long, SKIPPING_EVERY - 0.1) == []
    assert skip(long, 0.1) == [StepsSkipped("fit 1", 3, 6)]
    assert skip(long, 0.1) == []
    assert skip(long, SKIPPING_EVERY) == [StepsSkipped("fit 1", 5, 6)]
    assert skip(long, 0.1) == [StepsSkipped("fit 1", 6, 6)]
    # A joiner that has reached its first position skips on to the state that it receives.
    long.skipped = 8
    assert skip(long, 0.1, 2) == [StepsSkipped("fit 1", 8, 8)]
    short = NumberedCall("fit 2", 2, skipped=2)
    assert skip(short, 50.0) == skip(short, 1.0) == []
