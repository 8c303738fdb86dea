"""Whom a job admits, what it waits for, and in which order its hosts stand."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.hosts.listening_job import _ListeningJob
from lockstep.hosts.roster import Offers, OpenRoster, RefusedOffer, Roster, TaskRoster, by_address, placed
from lockstep.hosts.where import Listen
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.host import HostOffer
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.protocol.rendezvous import Arrival, Task
from lockstep.system.event_loop import EventLoop
from lockstep.transport.local_channel import LocalChannel

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)
HERE = JobHost("10.0.0.1", 1)
CLUSTER = tuple(Task("worker", index, address := f"node{index}:2222", address) for index in range(4))


def admitted(roster: Roster, offers: Offers) -> list[tuple[str, HostOffer]]:
    """Return the offers that a gate admits in this order until the roster is complete."""
    there: list[tuple[str, HostOffer]] = []
    for peer, offer in offers:
        if not roster.missing(there, ()):
            return there
        if not roster.is_full(there) and not roster.objection(peer, offer, there):
            there.append((peer, offer))
    return there


# As many hosts as come.


def test_hosts_get_the_workers_that_they_offer_in_the_order_of_their_agents() -> None:
    offers = [("10.0.0.3", HostOffer(2)), ("10.0.0.2", HostOffer(4))]
    hosts, order = placed(OpenRoster(6, HERE), offers)
    assert hosts == (HERE, JobHost("10.0.0.3", 2), JobHost("10.0.0.2", 3))
    assert order == (0, 1)
    twice = OpenRoster(3, JobHost("127.0.0.1", 1))
    hosts, _ = placed(twice, [("127.0.0.1", HostOffer(1)), ("127.0.0.1", HostOffer(1))])
    assert [host.name for host in hosts] == ["127.0.0.1", "127.0.0.1 (2)", "127.0.0.1 (3)"]


def test_hosts_are_placed_in_the_order_of_their_tasks() -> None:
    offers = [(f"10.0.0.{task + 1}", HostOffer(1, tasks=CLUSTER, task=task)) for task in (3, 1, 2)]
    hosts, order = placed(OpenRoster(4, HERE, tasks=CLUSTER), offers)
    assert [host.name for host in hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert order == (1, 2, 0)


def test_what_a_job_waits_for() -> None:
    def waits(*offered: int, **fields: Any) -> str:
        return OpenRoster(6, HERE, **fields).missing([("", HostOffer(workers)) for workers in offered], ())

    assert waits() == "5 more workers"
    assert waits(2, 1) == "2 more workers"
    assert waits(7) == ""
    assert waits(7, waits=True) == "0 more workers"


def test_a_job_names_the_tasks_of_its_cluster_for_which_it_waits() -> None:
    roster = OpenRoster(4, HERE, tasks=CLUSTER)
    task = [HostOffer(1, tasks=CLUSTER, task=number) for number in range(4)]
    refused = RefusedOffer("10.0.0.9", task[3], "it is refused")
    assert roster.missing([("10.0.0.2", task[2])], ()) == (
        "2 more workers: worker 1 (node1:2222), worker 3 (node3:2222)"
    )
    assert roster.missing([("10.0.0.2", task[2]), ("10.0.0.3", task[1])], (refused,)) == (
        "1 more worker: worker 3 (node3:2222); 10.0.0.9 was refused: it is refused"
    )
    assert roster.missing([("10.0.0.2", HostOffer(3))], (refused,)) == ""
    twice = RefusedOffer("10.0.0.2", task[2], "it runs already")
    assert "refused" not in roster.missing([("10.0.0.2", task[2]), ("10.0.0.3", task[1])], (twice,))
    more = tuple(Task("worker", index, f"n{index}:1", f"n{index}:1") for index in range(9))
    assert OpenRoster(9, HERE, tasks=more).missing([], ()) == (
        "8 more workers: worker 1 (n1:1), worker 2 (n2:1), worker 3 (n3:1), worker 4 (n4:1), ..."
    )


def test_objections() -> None:
    def objects(peer: str, own: str = "10.0.0.1", **offer: Any) -> str:
        return OpenRoster(3, HERE, own).objection(
            peer, HostOffer(**{"workers": 1, **offer}), [("10.0.0.2", None)]
        )

    assert objects("10.0.0.3") == ""
    assert objects("10.0.0.3", workers=0) == "it offers no worker"
    assert "this job does not follow TF_CONFIG" in objects("10.0.0.3", first=arrival(0))
    for peer in ("10.0.0.1", "10.0.0.2"):
        assert f"already has an agent on host {peer}" in objects(peer)
    assert objects("10.0.0.2", own="") == ""


def test_objections_to_tasks_that_a_scheduler_starts() -> None:
    others = [
        ("10.0.0.2", HostOffer(1, tasks=CLUSTER, task=1)),
        ("10.0.0.9", HostOffer(1)),
        ("10.0.0.8", None),
    ]

    def objects(tasks: Sequence[Task], task: int, own: Sequence[Task] = CLUSTER) -> str:
        roster = OpenRoster(4, HERE, "10.0.0.1", tuple(own))
        return roster.objection("10.0.0.3", HostOffer(1, tasks=tuple(tasks), task=task), others)

    assert objects(CLUSTER, 2) == objects((), 0) == objects(CLUSTER, 2, ()) == ""
    assert objects(CLUSTER[:3], 2) == (
        "worker 2 and worker 0 have different clusters: 3 tasks (node0:2222, node1:2222, node2:2222), "
        "4 tasks (node0:2222, node1:2222, node2:2222, node3:2222). Give all tasks the same 'cluster' in "
        "TF_CONFIG"
    )
    moved = (*CLUSTER[:3], Task("worker", 3, "node9:2222", "node9:2222"))
    assert "worker 3 (node9:2222) in the one, worker 3 (node3:2222) in the other" in objects(moved, 2)
    assert objects(CLUSTER, 1).startswith(
        "worker 1 (node1:2222) already runs on 10.0.0.2: start each task once"
    )
    assert objects(CLUSTER, 0).startswith("worker 0 (node0:2222) already runs on the coordinator")
    # The same task twice on one host; and another one there.
    others[0] = ("10.0.0.3", HostOffer(1, tasks=CLUSTER, task=1))
    assert "worker 1 (node1:2222) already runs on 10.0.0.3" in objects(CLUSTER, 1)
    assert "tell it with --workers-here how many" in objects(CLUSTER, 2)
    for task in (-1, 4):
        assert "names tasks that do not exist" in objects(CLUSTER, task)


@quick
@given(st.data(), st.integers(1, 20), st.integers(0, 3), st.lists(st.integers(0, 5), max_size=30))
def test_a_job_gets_all_its_workers_and_each_host_at_least_one(
    data: st.DataObject, more: int, here: int, workers: list[int]
) -> None:
    """An agent that comes after the last vacancy is taken gets in only if an engine has started it."""
    limited = data.draw(st.booleans())
    roster = OpenRoster(here + more, JobHost("here", here) if here else None, limited=limited)
    peers = st.sampled_from(["10.0.0.2", "10.0.0.3"])
    offers = [(data.draw(peers), HostOffer(offered)) for offered in workers]
    there = admitted(roster, offers)
    complete = not roster.missing(there, ())
    assert complete == (sum(workers) >= more)
    assert roster.is_full(there) == (complete and limited)
    if complete:
        hosts, order = placed(roster, there)
        assert sum(host.workers for host in hosts) == here + more
        assert all(host.workers >= 1 for host in hosts)
        assert len({host.name for host in hosts}) == len(hosts)
        assert sorted(order) == list(range(len(there)))


@quick
@given(st.permutations(range(1, 9)))
def test_numbered_tasks_may_come_in_any_order(tasks: Sequence[int]) -> None:
    cluster = tuple(Task("worker", index, f"{index}:1", f"{index}:1") for index in range(9))
    roster = OpenRoster(9, JobHost("0", 1), tasks=cluster)
    hosts, order = placed(roster, [(str(task), HostOffer(1, tasks=cluster, task=task)) for task in tasks])
    assert [host.name for host in hosts] == [str(task) for task in range(9)]
    assert [tasks[at] for at in order] == [*range(1, 9)]


# The tasks of a `TF_CONFIG`.


TASKS = tuple(Task("worker", at, f"node{at + 1}:2222", f"10.0.0.{at + 1}:2222") for at in range(3))


def test_a_note_on_the_wait_ends_with_the_reason_of_a_refusal() -> None:
    """Otherwise, the seconds and the advice would seem to belong to the reason."""
    said: list[str] = []
    server = SimpleNamespace(keep_waiting=said.append)
    listener = SimpleNamespace(
        listener=SimpleNamespace(address="10.0.0.1:7000"), host_and_port=("10.0.0.1", 7)
    )
    gate: Any = SimpleNamespace(
        credentials=SimpleNamespace(greeting_key=None), listener=listener, server=server
    )
    spec = JobSpec(target="a.py", threads=1, run_dir=Path("run"))
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    with EventLoop() as loop:
        waits = _ListeningJob(spec, Listen(3, "10.0.0.1:7000"), commands[0], loop)
        waits.narrator(gate)("1 more worker: worker 3; 10.0.0.9 was refused: it is refused")
    assert said == [
        "other hosts to join with 1 more worker: worker 3, 0 s; 10.0.0.9 was refused: it is refused"
    ]
    for end in commands:
        end.close()


def arrival(slot: int, *here: int, **fields: Any) -> Arrival:
    known: dict[str, Any] = {"version": "1", "backend": "jax", "cores": 2, "gpus": (), "target": "main.py"}
    return Arrival(TASKS, slot, **known | fields, here=here or (slot,))


def test_missing_tasks() -> None:
    roster = TaskRoster(arrival(0), (0,))

    def missing(*offers: HostOffer, refused: Arrival | None = None) -> str:
        refusals = [RefusedOffer("10.0.0.3", HostOffer(1, refused), "other cluster")] if refused else []
        return roster.missing([("", offer) for offer in offers], refusals)

    second, third = HostOffer(1, arrival(1), (1,)), HostOffer(1, arrival(2), (2,))
    assert missing(HostOffer(1, arrival(1)), third) == "worker 1 (node2:2222)"
    assert missing(second, refused=arrival(2)) == (
        "worker 2 (node3:2222); 10.0.0.3 was refused: other cluster"
    )
    assert missing(second, refused=arrival(1)) == (
        "worker 2 (node3:2222); no process of its host has connected to node1:2222 yet (a firewall must let "
        "TCP connections to port 2222 through)"
    )
    assert missing(second, third) == ""


def test_objections_to_tasks() -> None:
    def objects(first: Arrival | None) -> str:
        offer = HostOffer(1, first and by_address(first))
        others = [("10.0.0.2", HostOffer(1, arrival(1), (1,))), ("10.0.0.4", None)]
        return TaskRoster(arrival(0), (0,)).objection("10.0.0.9", offer, others)

    assert objects(arrival(2)) == ""
    assert "this job follows TF_CONFIG" in objects(None)
    assert "runs Lockstep 2, but the job uses 1" in objects(arrival(2, version="2"))
    assert "worker 1 (node2:2222) already runs on 10.0.0.2: start" in objects(arrival(1))
    assert "worker 0 (node1:2222) already runs on the host of the coordinator: start" in objects(arrival(0))
    for invalid in (arrival(2, 3), arrival(7), arrival(0, 2)):
        assert "names tasks that do not exist" in objects(invalid)


@quick
@given(st.data(), st.integers(2, 8))
def test_the_hosts_of_tasks_may_come_in_any_order(data: st.DataObject, tasks: int) -> None:
    """A job is complete once a process waits for each task, and its hosts stand in the order of the tasks."""
    nodes = [0, *data.draw(st.lists(st.integers(0, 3), min_size=tasks - 1, max_size=tasks - 1))]
    places = tuple(Task("worker", at, f"node{node}:{at + 1}", "") for at, node in enumerate(nodes))
    here = {node: tuple(at for at in range(tasks) if nodes[at] == node) for node in sorted({*nodes})}
    firsts = {node: msgspec.structs.replace(arrival(at[0], *at), tasks=places) for node, at in here.items()}
    started = data.draw(st.sets(st.integers(0, tasks - 1)))
    waiting = {node: tuple(at for at in slots if at in started) for node, slots in here.items()}
    roster = TaskRoster(firsts[0], waiting[0])
    others = data.draw(st.permutations([node for node in here if node]))
    offers = [(f"10.0.0.{node}", HostOffer(len(here[node]), firsts[node], waiting[node])) for node in others]
    for at, (peer, offer) in enumerate(offers):
        assert (
            roster.objection(
                peer, msgspec.structs.replace(offer, first=by_address(firsts[others[at]])), offers[:at]
            )
            == ""
        )
    text = roster.missing(offers, ())
    assert text == ", ".join(str(places[at]) for at in range(tasks) if at not in started)
    hosts, _ = placed(roster, offers)
    assert hosts == tuple(
        JobHost(f"node{node}", len(slots)) for node, slots in sorted(here.items(), key=lambda one: one[1])
    )
    for node in others:
        assert "already runs on" in roster.objection("", HostOffer(1, by_address(firsts[node])), offers)
