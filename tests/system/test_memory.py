"""How many processes the kernel has killed for lack of memory, by files that the test writes."""

from pathlib import Path

import pytest

from lockstep.system.memory import memory_kills


@pytest.mark.parametrize(
    ("groups", "files", "kills"),
    [
        ("0::/job/step\n", {"job/step/memory.events": 2, "job/memory.events": 3}, 2),
        ("0::/job/step\n", {"job/memory.events": 3}, 3),
        ("4:memory:/job\n0::/job\n", {"memory/job/memory.oom_control": 4, "unified/job/memory.events": 5}, 4),
        # In a container, which does not see the path of its group on the host.
        ("4:memory:/docker/1\n", {"memory/memory.oom_control": 6}, 6),
        ("0::/\n", {"memory.stat": 7}, 9),
    ],
)
def test_kills_are_those_of_the_nearest_cgroup(
    tmp_path: Path, groups: str, files: dict[str, int], kills: int
) -> None:
    membership, mount, machine = tmp_path / "cgroup", tmp_path / "mount", tmp_path / "vmstat"
    membership.write_text(groups)
    machine.write_text("pgfault 1\noom_kill 9\n")
    for name, number in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"oom 1\noom_kill {number}\n")
    assert memory_kills(membership, mount, machine) == kills
    assert memory_kills(membership, mount, tmp_path / "none") == (kills if kills < 9 else 0)
