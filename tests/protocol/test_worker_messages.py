"""Messages survive the way, whatever they say, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observability.events import (
    CallStarted,
    CheckpointWritten,
    DistributionBegan,
    StrategyInstalled,
    TrainingEnded,
)
from lockstep.protocol.worker import (
    MAX_PACKET,
    MAX_TEXT,
    EventReport,
    Failed,
    Finished,
    Message,
    NewView,
    Started,
    Stop,
    WaitReport,
    decode,
    encode,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
messages = st.one_of(
    st.builds(Started),
    st.builds(Finished),
    st.builds(Stop, st.integers(1, 64)),
    st.builds(
        EventReport,
        st.one_of(
            st.builds(DistributionBegan),
            st.builds(CheckpointWritten, texts, st.integers(0, 2**53), st.floats(0, 1e6)),
            st.builds(StrategyInstalled, texts, st.dictionaries(texts, texts, max_size=3)),
            st.builds(TrainingEnded, st.integers(0, 2**53), texts, texts),
        ),
    ),
    st.builds(WaitReport, texts, st.lists(st.integers(0, 9)).map(tuple), st.floats(0, 1e6)),
    st.builds(Failed, st.integers(0, 255), texts, texts, st.booleans()),
)


@given(messages)
def test_decode_inverts_encode(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary())
def test_garbage_is_a_value_error(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(packet)


def test_long_texts_lose_their_middle() -> None:
    text = "a" * MAX_TEXT + "ä" * MAX_TEXT
    sent = decode(encode(Failed(1, "s", text, False)))
    assert isinstance(sent, Failed)
    assert len(sent.traceback.encode()) <= MAX_TEXT
    assert sent.traceback.startswith("aaa")
    assert sent.traceback.endswith("äää")
    assert "\n... (cut) ...\n" in sent.traceback


def test_the_worst_text_fits_a_packet() -> None:
    assert len(encode(Failed(1, "", "\0" * 10 * MAX_TEXT, False))) <= MAX_PACKET


def test_odd_texts_and_values_are_spelled_out() -> None:
    assert decode(encode(EventReport(CallStarted("\udc80")))) == EventReport(CallStarted("\\udc80"))


def test_a_message_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=f"is more than {MAX_PACKET}"):
        encode(NewView(1, tuple(range(200_000))))
