"""Findings on machines."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep.doctor.finding import Finding, Rating, worst
from lockstep.doctor.machine import examine_machine, judge, judge_system
from lockstep.doctor.resources import (
    Clocks,
    Cores,
    Disk,
    HostMemory,
    Machine,
    SharedMemoryTest,
    System,
    UserLimits,
)

LINUX = System("Linux", "x86_64", "6.1", "")
GOOD = Machine(
    LINUX,
    "AVX2",
    Cores(8, 8, None),
    HostMemory(32 * 10**9, 20 * 10**9, None),
    SharedMemoryTest(2**24, "", "", 8 * 10**9),
    UserLimits(4096, 2**20, None, 30_000),
    Disk(False, "", 80 * 10**9),
    Clocks("tsc", 5e-8, 0.0, 1.8e9, 1.7e9),
)


def row(machine: Machine, name: str) -> Finding:
    return {finding.name: finding for finding in judge(machine)}[name]


def test_a_suitable_machine_is_fine() -> None:
    findings = judge(GOOD)
    assert worst(findings) is Rating.FINE
    assert {finding.section for finding in findings} == {"machine"}
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("changed", "name", "rating", "reason"),
    [
        (
            {},
            "instructions",
            Rating.FINE,
            "limit all to it (jax: XLA_FLAGS=--xla_cpu_max_isa=AVX2; ",
        ),
        ({"instructions": ""}, "instructions", Rating.FINE, "hosts of one job need processors of one kind"),
        ({"cores": Cores(8, 4, None)}, "cores", Rating.FINE, "4 of 8 cores"),
        ({"cores": Cores(8, 8, 8.0)}, "cores", Rating.FINE, "8 cores"),
        ({"cores": Cores(2, 2, None, 0.9)}, "cores", Rating.FINE, "2 cores"),
        (
            {"cores": Cores(2, 2, None, 6.0)},
            "cores",
            Rating.WARNING,
            "2 cores: other programs use some of them",
        ),
        # Enough cores are left for those that are counted.
        ({"cores": Cores(8, 8, 4.0, 4.0)}, "cores", Rating.FINE, "the time of 4"),
        (
            {"cores": Cores(8, 4, None, 5.5)},
            "cores",
            Rating.WARNING,
            "(load average 5.5), so steps take longer",
        ),
        ({"cores": Cores(1, 1, None)}, "cores", Rating.WARNING, "1 core: all workers share one"),
        ({"cores": Cores(8, 1, None)}, "cores", Rating.WARNING, "1 of 8 cores: all workers share one"),
        (
            {"cores": Cores(8, 8, 2.5)},
            "cores",
            Rating.FINE,
            "8 cores by affinity, of which the cgroup allows the time of 2.5",
        ),
        ({"cores": Cores(8, 8, 1.9)}, "cores", Rating.WARNING, "the time of 1.9: all workers share one"),
        (
            {"memory": HostMemory(32 * 10**9, 20 * 10**9, 25 * 10**9)},
            "memory",
            Rating.FINE,
            "20.0 GB of 32.0 GB available",
        ),
        (
            {"memory": HostMemory(32 * 10**9, 20 * 10**9, 10**9)},
            "memory",
            Rating.WARNING,
            "1.0 GB of 32.0 GB left under the cgroup's limit: each worker",
        ),
        (
            {"memory": HostMemory(10**9, 299 * 10**6, None)},
            "memory",
            Rating.FAILURE,
            "299 MB of 1.0 GB available",
        ),
        ({"memory": HostMemory(10**9, 10**9, -5)}, "memory", Rating.FAILURE, "0 MB of 1.0 GB left under the"),
        (
            {"memory": HostMemory(9 * 10**9, 3 * 10**8, None)},
            "memory",
            Rating.WARNING,
            "300 MB of 9.0 GB available",
        ),
        (
            {"memory": HostMemory(9 * 10**9, 2 * 10**9, None)},
            "memory",
            Rating.FINE,
            "2.0 GB of 9.0 GB available",
        ),
        ({"shared": SharedMemoryTest(2**24, "", "", None)}, "/dev/shm", Rating.FINE, "no limit"),
        (
            {"shared": SharedMemoryTest(2**24, "", "", 64 * 2**20)},
            "/dev/shm",
            Rating.WARNING,
            "67 MB are free: Lockstep does not use it, but the workers of PyTorch's DataLoader",
        ),
        (
            {"shared": SharedMemoryTest(2**24, "No memory", "", None)},
            "shared memory",
            Rating.FAILURE,
            "fails: No memory",
        ),
        ({"limits": UserLimits(None, None, None, None)}, "open files", Rating.FINE, "no limit"),
        ({"limits": UserLimits(1023, 4096, None, None)}, "open files", Rating.WARNING, "1,023 per process"),
        ({"limits": UserLimits(1024, 1024, None, None)}, "open files", Rating.FINE, "1,024 per process"),
        ({"limits": UserLimits(None, None, None, None)}, "processes and threads", Rating.FINE, "no limit"),
        (
            {"limits": UserLimits(None, None, 256, 9999)},
            "processes and threads",
            Rating.FINE,
            "256 more can start",
        ),
        (
            {"limits": UserLimits(None, None, 255, 9999)},
            "processes and threads",
            Rating.WARNING,
            "255 more can",
        ),
        (
            {"limits": UserLimits(None, None, 9999, 3)},
            "processes and threads",
            Rating.WARNING,
            "3 more can start",
        ),
        ({"disk": Disk(True, "", 10**9)}, "disk", Rating.FINE, "1.0 GB are free in runs/ in the current"),
        ({"disk": Disk(False, "", None)}, "disk", Rating.FINE, "the current folder is writable"),
        ({"disk": Disk(False, "", 10**9 - 1)}, "disk", Rating.WARNING, "1,000 MB are free in the current"),
        (
            {"clocks": Clocks("hpet", 1.5e-6, 0.0, 1.8e9, 1.7e9)},
            "monotonic clock",
            Rating.WARNING,
            "hpet, 1,500 ns per reading: each reading is a system call",
        ),
        (
            {"clocks": Clocks("", 5e-8, 0.0, 1.8e9, 1.7e9)},
            "monotonic clock",
            Rating.FINE,
            "of an unknown source, 50 ns per reading",
        ),
        (
            {"clocks": Clocks("tsc", 5e-8, 0.25, 2e9, 0)},
            "monotonic clock",
            Rating.WARNING,
            "went back by 0.25 s",
        ),
        (
            {"clocks": Clocks("tsc", 5e-8, 0.0, 1e9, 1e9 + 600)},
            "wall clock",
            Rating.FINE,
            "2001-09-09 01:46 UTC",
        ),
        (
            {"clocks": Clocks("tsc", 5e-8, 0.0, 0.0, 1e9)},
            "wall clock",
            Rating.WARNING,
            "it shows 1970-01-01 00:00 UTC, but installed files date from 2001-09-09 01:46 UTC",
        ),
    ],
)
def test_each_resource_is_judged(changed: dict[str, Any], name: str, rating: Rating, reason: str) -> None:
    finding = row(replace(GOOD, **changed), name)
    assert reason in finding.reason
    assert finding.rating is rating
    assert bool(finding.remedy) == (rating is not Rating.FINE)
    others = [each for each in judge(replace(GOOD, **changed)) if each.name != name]
    assert worst(others) is Rating.FINE


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
    assert [(each.name, each.rating) for each in examine_machine()] == [("system", Rating.FAILURE)]


@pytest.mark.parametrize(
    ("hard", "remedy"), [(None, "ulimit -n 65536"), (4096, "ulimit -n 4096"), (512, "raise the hard limit")]
)
def test_the_remedy_for_open_files_respects_the_hard_limit(hard: int | None, remedy: str) -> None:
    limits = UserLimits(256, hard, None, None)
    assert row(replace(GOOD, limits=limits), "open files").remedy.startswith(remedy)


def test_the_remedy_for_threads_names_the_lower_limit() -> None:
    user, group = UserLimits(None, None, 3, 9), UserLimits(None, None, 9, 3)
    assert "ulimit -u" in row(replace(GOOD, limits=user), "processes and threads").remedy
    assert "--pids-limit" in row(replace(GOOD, limits=group), "processes and threads").remedy
