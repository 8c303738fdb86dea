"""The greeting of a connection between hosts, and the fuzzing of its decoder."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol.greeting import (
    JOB,
    NONCE,
    SIZE,
    ConnectionKind,
    Greeting,
    decode_greeting,
    encode_greeting,
    may_begin,
)

KEY = b"k" * 32
SAMPLE = Greeting(ConnectionKind.LANE, b"j" * JOB, 1, 2, 3, 4, 5, b"n" * NONCE, 6)

quick = settings(max_examples=200, deadline=None, derandomize=True, database=None)
greetings = st.builds(
    Greeting,
    kind=st.sampled_from(ConnectionKind),
    job=st.binary(min_size=JOB, max_size=JOB),
    term=st.integers(0, 2**32 - 1),
    view=st.integers(0, 2**32 - 1),
    incarnation=st.integers(0, 2**64 - 1),
    host=st.integers(0, 2**16 - 1),
    lane=st.integers(0, 2**16 - 1),
    nonce=st.binary(min_size=NONCE, max_size=NONCE),
)


@quick
@given(greetings, st.binary())
def test_a_greeting_is_decoded_with_its_key(greeting: Greeting, key: bytes) -> None:
    data = encode_greeting(greeting, key)
    assert len(data) == SIZE
    assert all(may_begin(data[:count]) for count in range(SIZE))
    assert decode_greeting(data, key) == greeting


def test_the_format_is_that_of_version_1() -> None:
    """Other versions find the version at the same place."""
    head = (
        "4c4f434b53544550 0001 0002"
        + "6a" * 16
        + "00000001 00000002 0000000000000003 0004 0005 0006"
        + "6e" * 16
    )
    assert encode_greeting(SAMPLE, KEY)[:66] == bytes.fromhex(head)
    assert SIZE == 98


def test_every_changed_bit_is_noticed() -> None:
    data = encode_greeting(SAMPLE, KEY)
    for bit in range(8 * SIZE):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"not a process of Lockstep|version of Lockstep|not the key"):
            decode_greeting(bytes(changed), KEY)


def test_a_refusal_says_why() -> None:
    data = encode_greeting(SAMPLE, KEY)
    for sent, key, why in [
        (b"GET / HTTP/1.1\r\n".ljust(SIZE), KEY, "it is not a process of Lockstep"),
        (data[:-1], KEY, "it is not a process of Lockstep"),
        (data[:8] + b"\0\2" + data[10:], KEY, "in format 2, this one in format 1: install the same version"),
        (data, b"other", "its key is not the key of this job"),
    ]:
        with pytest.raises(ValueError, match=why):
            decode_greeting(sent, key)


def test_a_signed_greeting_of_an_unknown_kind_is_refused() -> None:
    data = encode_greeting(Greeting(7), KEY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown kind of connection"):
        decode_greeting(data, KEY)


@pytest.mark.parametrize(
    "wrong", [{"job": b""}, {"nonce": b"x"}, {"term": -1}, {"lane": 2**16}, {"view": 2**32}]
)
def test_a_greeting_that_does_not_fit_is_not_sent(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"bytes|format|range"):
        encode_greeting(Greeting(ConnectionKind.LANE, **wrong), KEY)  # type: ignore[arg-type]


@quick
@given(
    st.binary(max_size=2 * SIZE) | st.binary(min_size=SIZE - 8, max_size=SIZE - 8).map(b"LOCKSTEP".__add__)
)
def test_any_bytes_are_a_greeting_or_refused(data: bytes) -> None:
    may_begin(data)
    with suppress(ValueError):
        decode_greeting(data, KEY)
