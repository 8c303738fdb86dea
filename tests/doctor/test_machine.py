"""Findings on machines."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep.doctor.check import Finding, Rating, Sources, judge, worst
from lockstep.doctor.checkup import CHECKS, examine
from lockstep.doctor.machine import (
    Clocks,
    Cores,
    HostMemory,
    Limits,
    SharedMemoryTest,
    Space,
    System,
    judge_system,
    look_at_clocks,
    look_at_cores,
    look_at_disk,
    look_at_instructions,
    look_at_limits,
    look_at_memory,
    look_at_shared_files,
    look_at_shared_memory,
    look_at_system,
)

LINUX = System("Linux", "x86_64", "6.1", "")
HERE = "the current folder"
GOOD: dict[Any, object] = {
    look_at_system: LINUX,
    look_at_instructions: "AVX2",
    look_at_cores: Cores(8, 8, None),
    look_at_memory: HostMemory(32 * 10**9, 20 * 10**9, None),
    look_at_shared_memory: SharedMemoryTest(2**24, ""),
    look_at_shared_files: Space(8 * 10**9, "", "/dev/shm"),
    look_at_limits: Limits(4096, 2**20, None, 30_000),
    look_at_disk: Space(80 * 10**9, "", HERE),
    look_at_clocks: Clocks("tsc", 5e-8, 0.0, 1.8e9, 1.7e9),
}


def findings(changed: dict[Any, object]) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge("machine", CHECKS["machine"], {**GOOD, **changed})}


def test_a_suitable_machine_is_fine() -> None:
    rows = findings({}).values()
    assert worst(rows) is Rating.FINE
    assert {finding.section for finding in rows} == {"machine"}
    assert not any(finding.remedy for finding in rows)


@pytest.mark.parametrize(
    ("changed", "name", "rating", "reason"),
    [
        (
            {},
            "instructions",
            Rating.FINE,
            "limit all to it (jax: XLA_FLAGS=--xla_cpu_max_isa=AVX2; ",
        ),
        (
            {look_at_instructions: ""},
            "instructions",
            Rating.FINE,
            "hosts of one job need the same kind of processor",
        ),
        ({look_at_cores: Cores(8, 4, None)}, "cores", Rating.FINE, "4 of 8 cores"),
        ({look_at_cores: Cores(8, 8, 8.0)}, "cores", Rating.FINE, "8 cores"),
        ({look_at_cores: Cores(2, 2, None, 0.9)}, "cores", Rating.FINE, "2 cores"),
        (
            {look_at_cores: Cores(2, 2, None, 6.0)},
            "cores",
            Rating.WARNING,
            "2 cores: other programs use some of them",
        ),
        # Enough cores are left for those that are counted.
        ({look_at_cores: Cores(8, 8, 4.0, 4.0)}, "cores", Rating.FINE, "the time of 4"),
        (
            {look_at_cores: Cores(8, 4, None, 5.5)},
            "cores",
            Rating.WARNING,
            "(load average 5.5), so steps take longer",
        ),
        ({look_at_cores: Cores(1, 1, None)}, "cores", Rating.WARNING, "1 core: all workers share one"),
        ({look_at_cores: Cores(8, 1, None)}, "cores", Rating.WARNING, "1 of 8 cores: all workers share one"),
        (
            {look_at_cores: Cores(8, 8, 2.5)},
            "cores",
            Rating.FINE,
            "8 cores by affinity, of which the cgroup allows the time of 2.5",
        ),
        (
            {look_at_cores: Cores(8, 8, 1.9)},
            "cores",
            Rating.WARNING,
            "the time of 1.9: all workers share one",
        ),
        (
            {look_at_memory: HostMemory(32 * 10**9, 20 * 10**9, 25 * 10**9)},
            "memory",
            Rating.FINE,
            "20.0 GB of 32.0 GB available",
        ),
        (
            {look_at_memory: HostMemory(32 * 10**9, 20 * 10**9, 10**9)},
            "memory",
            Rating.WARNING,
            "1.0 GB of 32.0 GB left under the cgroup's limit: each worker",
        ),
        (
            {look_at_memory: HostMemory(10**9, 299 * 10**6, None)},
            "memory",
            Rating.FAILURE,
            "299 MB of 1.0 GB available",
        ),
        (
            {look_at_memory: HostMemory(10**9, 10**9, -5)},
            "memory",
            Rating.FAILURE,
            "0 MB of 1.0 GB left under the",
        ),
        (
            {look_at_memory: HostMemory(9 * 10**9, 3 * 10**8, None)},
            "memory",
            Rating.WARNING,
            "300 MB of 9.0 GB available",
        ),
        (
            {look_at_memory: HostMemory(9 * 10**9, 2 * 10**9, None)},
            "memory",
            Rating.FINE,
            "2.0 GB of 9.0 GB available",
        ),
        ({look_at_shared_files: Space(None, "", "/dev/shm")}, "/dev/shm", Rating.FINE, "no limit"),
        (
            {look_at_shared_files: Space(64 * 2**20, "", "/dev/shm")},
            "/dev/shm",
            Rating.WARNING,
            "67 MB are free: Lockstep does not use it, but the workers of PyTorch's DataLoader",
        ),
        (
            {look_at_shared_memory: SharedMemoryTest(2**24, "No memory")},
            "shared memory",
            Rating.FAILURE,
            "fails: No memory",
        ),
        ({look_at_limits: Limits(None, None, None, None)}, "open files", Rating.FINE, "no limit"),
        ({look_at_limits: Limits(1023, 4096, None, None)}, "open files", Rating.WARNING, "1,023 per process"),
        ({look_at_limits: Limits(1024, 1024, None, None)}, "open files", Rating.FINE, "1,024 per process"),
        ({look_at_limits: Limits(None, None, None, None)}, "processes and threads", Rating.FINE, "no limit"),
        (
            {look_at_limits: Limits(None, None, 256, 9999)},
            "processes and threads",
            Rating.FINE,
            "256 more can start",
        ),
        (
            {look_at_limits: Limits(None, None, 255, 9999)},
            "processes and threads",
            Rating.WARNING,
            "255 more can",
        ),
        (
            {look_at_limits: Limits(None, None, 9999, 3)},
            "processes and threads",
            Rating.WARNING,
            "3 more can start",
        ),
        (
            {look_at_disk: Space(10**9, "", "runs/ in the current folder")},
            "disk",
            Rating.FINE,
            "1.0 GB are free in runs/ in the current",
        ),
        ({look_at_disk: Space(None, "", HERE)}, "disk", Rating.FINE, "the current folder is writable"),
        (
            {look_at_disk: Space(10**9 - 1, "", HERE)},
            "disk",
            Rating.WARNING,
            "1,000 MB are free in the current",
        ),
        (
            {look_at_clocks: Clocks("hpet", 1.5e-6, 0.0, 1.8e9, 1.7e9)},
            "monotonic clock",
            Rating.WARNING,
            "hpet, 1,500 ns per reading: each reading is a system call",
        ),
        (
            {look_at_clocks: Clocks("", 5e-8, 0.0, 1.8e9, 1.7e9)},
            "monotonic clock",
            Rating.FINE,
            "of an unknown source, 50 ns per reading",
        ),
        (
            {look_at_clocks: Clocks("tsc", 5e-8, 0.25, 2e9, 0)},
            "monotonic clock",
            Rating.WARNING,
            "went back by 0.25 s",
        ),
        (
            {look_at_clocks: Clocks("tsc", 5e-8, 0.0, 1e9, 1e9 + 600)},
            "wall clock",
            Rating.FINE,
            "2001-09-09 01:46 UTC",
        ),
        (
            {look_at_clocks: Clocks("tsc", 5e-8, 0.0, 0.0, 1e9)},
            "wall clock",
            Rating.WARNING,
            "it shows 1970-01-01 00:00 UTC, but installed files date from 2001-09-09 01:46 UTC",
        ),
    ],
)
def test_each_resource_is_judged(changed: dict[Any, Any], name: str, rating: Rating, reason: str) -> None:
    rows = findings(changed)
    finding = rows.pop(name)
    assert reason in finding.reason
    assert finding.rating is rating
    assert bool(finding.remedy) == (rating is not Rating.FINE)
    assert worst(rows.values()) is Rating.FINE


@pytest.mark.parametrize(
    ("system", "rating", "reason"),
    [
        (replace(LINUX, processor="aarch64"), Rating.FINE, "Linux 6.1 on aarch64"),
        (System("Darwin", "arm64", "24.1", "gone"), Rating.FAILURE, "this is Darwin on arm64"),
        (
            replace(LINUX, processor="riscv64"),
            Rating.FAILURE,
            "on x86_64 and aarch64; this is Linux on riscv64",
        ),
        (
            System("Linux", "x86_64", "4.18", "Function not implemented"),
            Rating.FAILURE,
            "pidfd_open fails: Function not implemented (kernel 4.18)",
        ),
    ],
)
def test_each_system_is_judged(system: System, rating: Rating, reason: str) -> None:
    finding = judge_system(system)
    assert reason in finding.reason
    assert finding.rating is rating


def test_a_system_other_than_linux_has_no_other_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    findings = examine(Sources(is_importable=lambda name: False), lambda line: None, train=True)
    machine = [(each.name, each.rating) for each in findings if each.section == "machine"]
    assert machine == [("system", Rating.FAILURE)]


@pytest.mark.parametrize(
    ("hard", "remedy"), [(None, "ulimit -n 65536"), (4096, "ulimit -n 4096"), (512, "raise the hard limit")]
)
def test_the_remedy_for_open_files_respects_the_hard_limit(hard: int | None, remedy: str) -> None:
    limits = Limits(256, hard, None, None)
    assert findings({look_at_limits: limits})["open files"].remedy.startswith(remedy)


def test_the_remedy_for_threads_names_the_lower_limit() -> None:
    user, group = Limits(None, None, 3, 9), Limits(None, None, 9, 3)
    assert "ulimit -u" in findings({look_at_limits: user})["processes and threads"].remedy
    assert "--pids-limit" in findings({look_at_limits: group})["processes and threads"].remedy
