"""Slurm's notation for lists of hosts and of tasks per host."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.slurm_step import expand_counts, expand_hosts
from lockstep.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,4}", fullmatch=True)
RANGES = st.tuples(st.integers(0, 120), st.integers(0, 3), st.integers(0, 4))
"""First number, number of further ones, width."""
PIECES = st.one_of(NAMES, st.lists(RANGES, min_size=1, max_size=3))
HOSTS = st.lists(
    st.lists(PIECES, min_size=1, max_size=3).map(lambda pieces: ["n", *pieces]), min_size=1, max_size=4
)


def written(pieces: list[str | list[tuple[int, int, int]]]) -> str:
    """Return a name with brackets in Slurm's notation."""
    return "".join(
        piece
        if isinstance(piece, str)
        else "["
        + ",".join(f"{low:0{w}}" + (f"-{low + more:0{w}}" if more else "") for low, more, w in piece)
        + "]"
        for piece in pieces
    )


def spelled(pieces: list[str | list[tuple[int, int, int]]]) -> list[str]:
    """Return the hosts of such a name; the last bracket varies fastest."""
    if not pieces:
        return [""]
    head, rest = pieces[0], spelled(pieces[1:])
    if isinstance(head, str):
        return [head + tail for tail in rest]
    numbers = [str(n).rjust(w, "0") for low, more, w in head for n in range(low, low + more + 1)]
    return [number + tail for number in numbers for tail in rest]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(HOSTS)
def test_generated_lists_of_hosts_are_expanded(hosts: list[list[str | list[tuple[int, int, int]]]]) -> None:
    expected = [host for pieces in hosts for host in spelled(pieces)]
    assert expand_hosts(",".join(map(written, hosts))) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=6), st.booleans())
def test_generated_lists_of_counts_are_expanded(runs: list[tuple[int, int]], short: bool) -> None:
    text = ",".join(str(n) if short and times == 1 else f"{n}(x{times})" for n, times in runs)
    assert expand_counts(text) == [n for n, times in runs for _ in range(times)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(alphabet="ab01[],-x ", max_size=12))
def test_any_text_is_expanded_or_raises(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ConfigError:
        return
    assert hosts
    assert all(re.fullmatch(r"[ab01x-]+", host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1,3]", ["n1", "n3"]),
        ("node[1-3,7],gpu[01-02]", ["node1", "node2", "node3", "node7", "gpu01", "gpu02"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("n[1-2]-ib.local", ["n1-ib.local", "n2-ib.local"]),
        ("b,a,b", ["b", "a", "b"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_lists_of_hosts_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not a list of hosts") for text in ("", ",", "a,", ",a", "a,,b", "a b", "a[1", "a1]")),
        ("a[[1]]", "is not a list of hosts"),
        ("a[]", "has '' in brackets"),
        ("a[1-]", "has '1-' in brackets"),
        ("a[3-1]", "has '3-1' in brackets"),
        ("a[1-2-3]", "has '1-2-3' in brackets"),
        ("a[x]", "has 'x' in brackets"),
        ("a[²]", "has '²' in brackets"),
        ("a[0-65536]", "has more than 65536 hosts"),
        ("a[1-300][1-300]", "has more than 65536 hosts"),
        ("a[0-999999999]", "has more than 65536 hosts"),
    ],
)
def test_invalid_lists_of_hosts_raise(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_hosts(text)
    assert f"Slurm's list of hosts, {text!r}, {message}: expected a list such as" in str(caught.value)


@pytest.mark.parametrize("text", ["", "x", "2,", "2(x)", "2(3)", "(x3)", "-1", "2 (x3)", "1(x99999999)", "²"])
def test_invalid_lists_of_counts_raise(text: str) -> None:
    with pytest.raises(ConfigError, match="expected the tasks on each host"):
        expand_counts(text)
