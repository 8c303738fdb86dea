import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.facts import check_facts, check_standby, own_facts, threads_for_all
from lockstep.hosts.gathering import AwaitedHost, Stopped, gather_facts
from lockstep.protocol.admin import StopRequest
from lockstep.protocol.channel import PeerGone, Unreadable
from lockstep.protocol.host import HostFacts, Prepare
from lockstep.protocol.job_spec import JobHost
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.transport.local_channel import LocalChannel

HOSTS = (JobHost("node1", 1), JobHost("node2", 2))
FACTS = HostFacts("n", "3.11.2", "x86_64", {"keras": "3.12"}, 4, "ab", "10.0.0.1", 4000, 7)
PREPARE = Prepare(bytes(16), "secret", True, "train.py", False, (), "jax", "", {})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"problem": "train.py does not exist"}, "host node2: train.py does not exist"),
        (
            {"machine": "aarch64"},
            "different kinds of processor: x86_64 on node1, aarch64 on node2; install the same on all hosts",
        ),
        ({"python": "3.12.1"}, "different versions of Python: 3.11.2 on node1, 3.12.1 on node2"),
        ({"libraries": {"keras": "3.13"}}, "different versions of keras: 3.12 on node1, 3.13 on node2"),
        ({"libraries": {}}, "different versions of keras: 3.12 on node1, none on node2"),
        ({"open_files": 39}, "host node2: the limit on open files is 39, and 2 workers need 48: raise it"),
        ({"processes_left": 29}, "host node2: the limit on this user's processes and threads leaves 29, and"),
        ({"script": "cd"}, "train.py differs between node1 and node2; copy the same file to all hosts"),
    ],
)
def test_hosts_that_differ_are_named(changed: dict[str, object], reason: str) -> None:
    check_facts(HOSTS, [FACTS, msgspec.structs.replace(FACTS, address="10.0.0.2", cores=8)], "train.py")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_facts(HOSTS, [FACTS, msgspec.structs.replace(FACTS, **changed)], "train.py")


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"), [((4, 8), 3, 4), ((8, 2), 3, 1), ((4, 8), 6, 2), ((1, 1), 6, 1)]
)
def test_the_host_with_fewest_cores_for_a_replica_decides(
    cores: tuple[int, int], replicas: int, threads: int
) -> None:
    facts = [msgspec.structs.replace(FACTS, cores=own) for own in cores]
    assert threads_for_all(HOSTS, facts, replicas) == threads


def test_the_standby_needs_a_port_that_its_host_does_not_use() -> None:
    facts = [FACTS, msgspec.structs.replace(FACTS, address="10.0.0.2")]
    for free in ("", "10.0.0.2:4001", "10.0.0.3:4000"):
        check_standby(free, HOSTS, facts)
    with pytest.raises(
        ConfigError, match=re.escape("host node2 already listens at the address of --standby 10.0.0.2:4")
    ):
        check_standby("10.0.0.2:4000", HOSTS, facts)


def test_a_host_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = own_facts(PREPARE, "10.0.0.1", 4000)
    assert "train.py" in missing.problem
    (tmp_path / "train.py").write_text("print(1)\n")
    one, other = (own_facts(PREPARE, "10.0.0.1", 4000) for _ in range(2))
    assert (one.problem, one.cores) == ("", len(os.sched_getaffinity(0)))
    assert one.script == other.script != ""
    assert one.incarnation != other.incarnation
    assert {"keras", "numpy", "jax"} <= one.libraries.keys()
    assert "secret" not in repr(PREPARE)


@dataclass
class Hosts:
    """Two agents, as the coordinator sees them, and the ends of these agents and of the command."""

    loop: EventLoop
    ends: list[LocalChannel] = field(default_factory=list)  # type: ignore[type-arg]
    notes: list[str] = field(default_factory=list)

    def gather(self, *, patience: float = 60.0) -> dict[int, HostFacts]:
        self.command, command = LocalChannel.pair()
        awaited = {}
        for at, name in enumerate(("node1", "node2")):
            own, agent = LocalChannel.pair()
            self.ends.append(agent)
            awaited[at] = AwaitedHost(name, own, lambda: "ssh exited with status 255")
        self.act(self)
        return gather_facts(
            awaited,
            PREPARE,
            command,
            loop=self.loop,
            clock=SystemClock(),
            patience=patience,
            say=self.notes.append,
        )

    def act(self, _: object) -> None:
        """Replaced by tests: what happens before the wait."""


@pytest.fixture
def hosts() -> "object":
    with EventLoop() as loop:
        yield Hosts(loop)


def test_the_facts_of_all_hosts_are_gathered(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(_: object) -> None:
        for end in hosts.ends:
            end.send(FACTS)

    monkeypatch.setattr(hosts, "act", act)
    assert hosts.gather() == {0: FACTS, 1: FACTS}
    assert [end.receive() for end in hosts.ends] == [PREPARE, PREPARE]


@pytest.mark.parametrize("what", ["gone", "garbage", "silent"])
def test_a_host_that_does_not_answer_is_named(
    hosts: Hosts, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(_: object) -> None:
        hosts.ends[0].send(FACTS)
        if what == "gone":
            hosts.ends[1].close()
        elif what == "garbage":
            hosts.ends[1].send(Unreadable("not JSON"))

    monkeypatch.setattr(hosts, "act", act)
    reasons = {
        "gone": "host node2 cannot take part: ssh exited with status 255",
        "garbage": "host node2 sent an invalid message (not JSON); install the same version of Lockstep",
        "silent": "no answer from the agent of node2 within 0 s",
    }
    with pytest.raises(UnfitError, match=re.escape(reasons[what])):
        hosts.gather(patience=0.0 if what == "silent" else 60.0)


@pytest.mark.parametrize(("message", "signal"), [(StopRequest(15), 15), (PeerGone(), 0)])
def test_a_stop_ends_the_wait(
    hosts: Hosts, message: object, signal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "act", lambda _: hosts.command.send(message))
    with pytest.raises(Stopped) as stopped:
        hosts.gather()
    assert stopped.value.signal == signal
