"""The rows on links between hosts."""

import pytest

from lockstep.doctor.check import Rating
from lockstep.doctor.links import examine_links
from lockstep.errors import ConfigError
from lockstep.system.programs import ProgramResult

FINE = ProgramResult(0, "", "", 1.0)


def test_each_pair_of_hosts_has_a_row() -> None:
    asked, said = list[tuple[tuple[str, str], bool]](), list[str]()

    def measure(pair: tuple[str, str], encrypted: bool) -> tuple[ProgramResult, dict[str, float]]:
        asked.append((pair, encrypted))
        return FINE, {"barrier": 0.00025, "bytes_per_second": 600e6 if encrypted else 900e6}

    rows = examine_links(["a", "b", "c"], measure, said.append)
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    assert asked == [(pair, encrypted) for pair in pairs for encrypted in (True, False)]
    assert [row.name for row in rows] == ["a - b", "a - c", "b - c"]
    assert rows[0].rating is Rating.FINE
    assert rows[0].reason == (
        "0.25 ms for a barrier, 600 MB/s in each direction; 0.25 ms for a barrier, 900 MB/s in each "
        "direction without encryption, which makes sums of large arrays 1.5 times as fast"
    )
    assert len(said) == 3


def test_a_job_that_fails_is_named() -> None:
    failed = ProgramResult(1, "", "lockstep: host b cannot take part\n  log: x\n", 1.0)
    (row,) = examine_links(["a", "b"], lambda _, __: (failed, {}), lambda _: None)
    assert row.rating is Rating.FAILURE
    assert row.reason == "a job on both hosts failed: host b cannot take part"
    assert "lockstep run --hosts a,b -m lockstep.doctor.link_program" in row.remedy


def test_one_host_has_no_link() -> None:
    with pytest.raises(ConfigError, match="two hosts or more"):
        examine_links(["a"], lambda _, __: (FINE, {}), lambda _: None)
