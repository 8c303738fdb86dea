"""Looks at this machine and at prepared files, and the resulting findings."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.doctor import machine
from lockstep.doctor.check import Finding, Rating, Sources, judge, look, worst
from lockstep.doctor.checkup import CHECKS
from lockstep.doctor.machine import look_at_clocks, look_at_cores, look_at_memory, look_at_system
from lockstep.system.cgroups import cpu_quota, processes_left
from lockstep.system.process_limits import threads_of
from virtual_clock import VirtualClock

NOW = 2e9


def found(name: str, **sources: Any) -> Finding:
    """Return a finding on this machine, with other sources."""
    [check] = (check for check in CHECKS["machine"] if check.name == name)
    [finding] = judge("machine", [check], look([check], Sources(**{"clock": VirtualClock(NOW), **sources})))
    return finding


def test_this_machine_can_run_jobs(tmp_path: Path) -> None:
    checks, sources = CHECKS["machine"], Sources(folder=tmp_path)
    facts = look(checks, sources)
    assert worst(judge("machine", checks, facts)) < Rating.FAILURE
    assert facts[look_at_system].system == "Linux"
    assert facts[look_at_cores].usable == len(os.sched_getaffinity(0))
    assert 0 < facts[look_at_memory].usable <= facts[look_at_memory].total
    assert facts[look_at_clocks].installed > 1e9
    assert 0 < facts[look_at_clocks].seconds_a_reading < 1e-3


def test_the_load_average_is_read_where_it_is_visible(tmp_path: Path) -> None:
    assert look_at_cores(Sources(proc=tmp_path)).load == 0.0
    (tmp_path / "loadavg").write_text("6.25 4.05 4.86 6/165 11789\n")
    assert look_at_cores(Sources(proc=tmp_path)).load == 6.25


class Groups:
    """A tree of control groups in the format of the kernel."""

    def __init__(self, folder: Path, membership: str) -> None:
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        self.membership = self.proc / "self" / "cgroup"
        self.membership.parent.mkdir(parents=True)
        self.membership.write_text(membership)

    def add(self, path: str, **files: str) -> None:
        (self.mount / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.mount / path / name.replace("__", ".")).write_text(f"{text}\n")

    def quota(self) -> float | None:
        return cpu_quota(self.membership, self.mount)

    def left(self) -> int | None:
        return processes_left(self.membership, self.mount)


def test_limits_of_version_2(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/a/b\n")
    assert (groups.quota(), groups.left()) == (None, None)
    groups.add("a/b", cpu__max="max 100000", pids__max="max", pids__current="7")
    assert (groups.quota(), groups.left()) == (None, None)
    groups.add("a", cpu__max="150000 100000", pids__max="100", pids__current="90")
    groups.add("", cpu__max="400000 100000", pids__max="5000", pids__current="95")
    assert (groups.quota(), groups.left()) == (1.5, 10)


def test_limits_of_version_1(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "5:pids:/job\n4:cpu,cpuacct:/host/only\n1:name=systemd:/\n0::/\n")
    groups.add("cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert (groups.quota(), groups.left()) == (None, None)
    # The path of the host is not visible in the container.
    groups.add("cpu,cpuacct", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    groups.add("pids/job", pids__max="20", pids__current="25")
    assert (groups.quota(), groups.left()) == (0.5, 0)


def test_a_container_with_limits(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/\n")
    groups.add(
        "",
        cpu__max="50000 100000",
        memory__max="1500000000",
        memory__current="500000000",
        pids__max="64",
        pids__current="4",
    )
    places = {"proc": groups.proc, "cgroups": groups.mount}
    cores, memory, threads = (found(name, **places) for name in ("cores", "memory", "processes and threads"))
    assert "allows the time of 0.5" in cores.reason
    assert "the time of 0.5: all workers share one" in cores.reason
    assert memory.reason.startswith("1.0 GB of ")
    assert "60 more can start" in threads.reason
    assert {cores.rating, memory.rating, threads.rating} == {Rating.WARNING}


def test_an_unlimited_cgroup_is_not_shown(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "4:memory:/\n")
    groups.add("memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="0")
    assert found("memory", proc=groups.proc, cgroups=groups.mount).facts["room"] is None


def test_threads_are_counted_per_user(tmp_path: Path) -> None:
    for pid, user, threads in ((1, 0, 5), (20, 7, 3), (21, 7, 40)):
        (tmp_path / str(pid)).mkdir()
        status = f"Name:\tx\nUid:\t{user}\t9\t9\t9\nThreads:\t{threads}\n"
        (tmp_path / str(pid) / "status").write_text(status)
    (tmp_path / "22").mkdir()
    assert threads_of(7, tmp_path) == 43


def test_usable_cores_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        finding = found("cores")
    finally:
        os.sched_setaffinity(0, allowed)
    assert finding.rating is Rating.WARNING
    assert finding.facts["usable"] == 1


def limited(limits: str, name: str) -> Finding:
    """Return a finding of a process with these limits."""
    script = (
        "import os, resource\n"
        "from lockstep.doctor.check import Sources, judge, look\n"
        "from lockstep.doctor.checkup import CHECKS\n"
        f"{limits}\n"
        f"checks = [check for check in CHECKS['machine'] if check.name == {name!r}]\n"
        "[finding] = judge('machine', checks, look(checks, Sources()))\n"
        "print(int(finding.rating), finding.reason, finding.remedy, sep='|')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rating, reason, remedy = result.stdout.strip().split("|")
    return Finding(Rating(int(rating)), reason, remedy)


def test_too_few_open_files_are_a_warning() -> None:
    finding = limited("resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))", "open files")
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("100 per process")
    assert finding.remedy.startswith("raise the hard limit")


def test_a_failed_allocation_of_shared_memory_is_a_failure() -> None:
    finding = limited("resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))", "shared memory")
    assert finding.rating is Rating.FAILURE
    assert "File too large" in finding.reason
    assert "ulimit -f" in finding.remedy


@pytest.mark.skipif(os.getuid() != 0, reason="only root may change its user")
def test_a_low_limit_of_processes_is_a_warning() -> None:
    limits = "resource.setrlimit(resource.RLIMIT_NPROC, (50, 50)); os.setuid(61234)"
    finding = limited(limits, "processes and threads")
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("49 more")


@pytest.mark.skipif(os.getuid() != 0, reason="this user is not root")
def test_root_has_no_limit_of_processes() -> None:
    script = (
        "import resource\n"
        "from lockstep.doctor.check import Sources\n"
        "from lockstep.doctor.machine import look_at_limits\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))\n"
        "print(look_at_limits(Sources()).user_left)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "None\n"


def test_a_sandbox_without_shared_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(machine.os, "memfd_create", refuse)
    finding = found("shared memory")
    assert finding.rating is Rating.FAILURE
    assert "memfd_create: Operation not permitted" in finding.reason


@pytest.mark.usefixtures("closes_descriptors")
def test_the_test_allocation_is_freed() -> None:
    found("shared memory")


def test_a_missing_folder_for_shared_files_is_a_warning(tmp_path: Path) -> None:
    finding = found("/dev/shm", shm=tmp_path / "absent")
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("No such file or directory: Lockstep does not use it")


def test_a_file_in_place_of_the_folder_of_runs_is_a_failure(tmp_path: Path) -> None:
    assert found("disk", folder=tmp_path).rating is Rating.FINE
    (tmp_path / "runs").write_text("")
    finding = found("disk", folder=tmp_path)
    assert finding.rating is Rating.FAILURE
    assert finding.reason.startswith("cannot write to runs/ in the current folder")
    assert finding.reason.endswith("Not a directory")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert found("disk", folder=tmp_path).rating is Rating.FAILURE


def test_a_missing_folder_is_a_failure(tmp_path: Path) -> None:
    finding = found("disk", folder=tmp_path / "absent")
    assert finding.rating is Rating.FAILURE
    assert finding.reason.endswith("No such file or directory")


def test_a_removed_current_folder_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    finding = found("disk")
    assert finding.rating is Rating.FAILURE
    assert finding.reason.startswith("cannot write to the current folder")


def test_the_inspection_leaves_no_file(tmp_path: Path) -> None:
    found("disk", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_clock_source_is_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "current_clocksource"
    source.write_text("acpi_pm\n")
    assert found("monotonic clock", clock_source=source).rating is Rating.WARNING
    source.write_text("kvm-clock\n")
    assert found("monotonic clock", clock_source=source).rating is Rating.FINE
    assert found("monotonic clock", clock_source=tmp_path / "absent").rating is Rating.FINE


class JumpingClock(VirtualClock):
    """A clock that jumps after every thousandth reading."""

    def __init__(self, jump: float) -> None:
        super().__init__(NOW)
        self._jump = jump
        self._readings = 0

    def now(self) -> float:
        self._readings += 1
        return super().now() + self._readings * 1e-6 + self._readings // 1000 * self._jump


@pytest.mark.parametrize(
    ("jump", "rating"), [(-0.5, Rating.WARNING), (-0.0005, Rating.FINE), (0.5, Rating.FINE)]
)
def test_a_clock_that_goes_back_is_a_warning(jump: float, rating: Rating) -> None:
    finding = found("monotonic clock", clock=JumpingClock(jump))
    assert finding.rating is rating
    assert ("it went back by 0.5 s" in finding.reason) == (rating is Rating.WARNING)
    assert finding.facts["seconds_back"] == pytest.approx(max(0.0, -jump), abs=1e-5)


def test_a_clock_behind_the_installation_is_a_warning(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for file, age in ((new, NOW + 3600), (old, NOW - 3600)):
        file.write_text("")
        os.utime(file, (age, age))
    assert found("wall clock", dated_files=(old, tmp_path / "absent")).rating is Rating.FINE
    finding = found("wall clock", dated_files=(old, new))
    assert finding.rating is Rating.WARNING
    assert time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(NOW + 3600)) in finding.reason
