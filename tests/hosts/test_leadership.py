"""The rules by which another host takes a job over, simulated: no two lineages, whatever is lost, and when.

Each step of a simulation is one message, one try to write to the store, or one fault, chosen at random. So
every process may pause anywhere for any time, and messages and writes may take any time.
"""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from lockstep.checkpoint.object_store import Conflict
from lockstep.errors import CheckpointError, SupersededError
from lockstep.hosts.leadership import Leader, Leadership

HOSTS = 4
STEPS = 400


class SimulatedStore:
    """An object with a tag. A write may fail before or after it counts, and the store may be away."""

    def __init__(self, choose: random.Random, trouble: float) -> None:
        self.choose, self.trouble = choose, trouble
        self.content: tuple[bytes, str] | None = None
        self.away = False

    def read(self, name: str) -> tuple[bytes, str] | None:
        if self.away or self.choose.random() < self.trouble:
            raise CheckpointError("no answer")
        return self.content

    def replace(self, name: str, data: bytes, tag: str | None) -> str:
        if self.away or self.choose.random() < self.trouble:
            raise CheckpointError("no answer")
        if tag != (None if self.content is None else self.content[1]):
            raise Conflict
        self.content = data, str(int(tag or "0") + 1)
        if self.choose.random() < self.trouble:
            raise CheckpointError("the answer was lost")
        return self.content[1]


@dataclass(frozen=True, eq=False)
class View:
    """A view of a term, its hosts, those of them that get the state from the others, and the view before."""

    term: int
    number: int
    hosts: frozenset[int]
    joiners: frozenset[int] = frozenset()
    before: "View | None" = None

    def follows(self, other: "View | None") -> bool:
        """Whether another view is this one, or came before it."""
        view: View | None = self
        while view is not None and view is not other:
            view = view.before
        return view is other


NO_VIEW = View(0, 0, frozenset())


def age(view: View) -> tuple[int, int]:
    """The order of records."""
    return view.term, view.number


@dataclass
class Agent:
    """The agent of a host. It follows one coordinator; it keeps the record and enters views as it hears."""

    leader: "Coordinator | None" = None
    inbox: deque[tuple[str, object]] = field(default_factory=deque)
    record: View = NO_VIEW
    view: View | None = None
    done: int | None = 0
    lost: bool = False


@dataclass(eq=False)
class Coordinator:
    """A coordinator: first it takes the job over, then it makes views of the hosts that follow it."""

    leader: Leader
    following: set[int]
    leads: bool = False
    term: int = 1
    view: View = NO_VIEW
    ready: set[int] = field(default_factory=set)
    pending: View | None = None


class Job:
    """A job, its coordinators and its store. Each host may start a coordinator, and often does."""

    def __init__(self, seed: int, *, fenced: bool = True) -> None:
        self.choose = random.Random(seed)
        self.fenced = fenced
        self.store = SimulatedStore(self.choose, self.choose.choice([0.0, 0.02, 0.2]))
        self.agents = [Agent() for _ in range(HOSTS)]
        self.parts: set[tuple[View, int, int]] = set()
        self.ended: dict[View, tuple[int, int]] = {}
        self.coordinators: list[Coordinator] = []
        self.superseded = self.took_over = 0
        first = self.start(set(range(HOSTS)))
        self.store.trouble, trouble = 0.0, self.store.trouble
        first.leader.look(1)
        first.leader.begin(1)
        first.leads = True
        self.plan(first, View(1, 1, frozenset(range(HOSTS)), before=NO_VIEW))
        self.store.trouble = trouble

    def start(self, following: set[int]) -> Coordinator:
        coordinator = Coordinator(Leader(self.store, "job", f"here:{len(self.coordinators)}"), following)
        self.coordinators.append(coordinator)
        for host in following:
            self.follow(host, coordinator)
        return coordinator

    def follow(self, host: int, coordinator: Coordinator | None) -> None:
        """Let an agent follow another coordinator. What the last one has sent is lost from some point on."""
        agent = self.agents[host]
        for _ in range(self.choose.randrange(len(agent.inbox) + 1)):
            self.hear(host)
        if agent.leader is not None:
            agent.leader.following.discard(host)
            agent.leader.ready.discard(host)
        agent.inbox.clear()
        agent.leader = coordinator
        if coordinator is not None:
            coordinator.following.add(host)

    def plan(self, coordinator: Coordinator, view: View) -> None:
        coordinator.pending = view

    def act(self, coordinator: Coordinator) -> None:
        """Take the job over, or begin the view that is planned, or plan one."""
        try:
            if not coordinator.leads:
                self.take_over(coordinator)
            elif (view := coordinator.pending) is not None:
                if self.fenced:
                    coordinator.leader.begin_view(coordinator.term, view.number, view.hosts)
                coordinator.view, coordinator.pending = view, None
                for host in sorted(coordinator.following):
                    self.agents[host].inbox += (("record", view), ("view", view))
            else:
                self.change(coordinator)
        except SupersededError:
            self.superseded += 1
            self.end(coordinator)
        except CheckpointError:
            # It tries the same again.
            return

    def take_over(self, coordinator: Coordinator) -> None:
        records = [self.agents[host].record for host in coordinator.following]
        if not records:
            return
        newest = max(records, key=age)
        term = coordinator.leader.look(1)
        following = {host for host in coordinator.following if self.follows_from(host, newest)}
        if self.fenced:
            coordinator.leader.take_over(term, following)
        for host in coordinator.following - following:
            self.follow(host, None)
        for host in sorted(following):
            # The record contains the instructions that an agent may lack.
            self.agents[host].inbox += (("record", newest), ("view", newest))
        coordinator.leads, coordinator.term, coordinator.view = True, term, newest
        self.took_over += 1

    def follows_from(self, host: int, newest: View) -> bool:
        """Whether an agent has no instruction that follows from a newer record."""
        return newest.follows(self.agents[host].view)

    def change(self, coordinator: Coordinator) -> None:
        """Leave hosts behind that do not follow, and let those that are ready join."""
        followers = coordinator.view.hosts & coordinator.following
        # Agents report who has lost its state.
        members = frozenset(host for host in followers if self.agents[host].done is not None)
        joiners = frozenset(coordinator.ready - members)
        if members and (members != coordinator.view.hosts or joiners):
            coordinator.ready.clear()
            last, hosts = coordinator.view, members | joiners
            self.plan(coordinator, View(coordinator.term, last.number + 1, hosts, joiners, last))
        for host in coordinator.following - coordinator.view.hosts:
            if all(kind != "join" for kind, _ in self.agents[host].inbox) and host not in coordinator.ready:
                self.agents[host].inbox += (("record", coordinator.view), ("join", coordinator))

    def end(self, coordinator: Coordinator) -> None:
        for host in list(coordinator.following):
            self.follow(host, None)
        self.coordinators.remove(coordinator)

    def hear(self, host: int) -> None:
        """Let an agent take a message of its coordinator."""
        agent = self.agents[host]
        kind, about = agent.inbox.popleft()
        if kind == "record":
            assert isinstance(about, View)
            agent.record = about
        elif kind == "join":
            assert isinstance(about, Coordinator)
            agent.view, agent.done = None, None
            about.ready.add(host)
        elif kind == "view":
            assert isinstance(about, View)
            if agent.view is not None and agent.view.follows(about):
                return
            if host in about.hosts and (agent.done is None) == (host in about.joiners):
                agent.view = about
            else:
                # It was left behind, or taken for what it is not: it comes again as a newcomer.
                agent.view, agent.done = None, None

    def train(self, host: int) -> None:
        """Let a host send its part of the next call, end a call whose parts are there, or get a state."""
        agent = self.agents[host]
        if (view := agent.view) is None:
            return
        if agent.done is None:
            givers = [self.agents[one] for one in view.hosts - view.joiners]
            states = [giver.done for giver in givers if giver.view == view and giver.done is not None]
            agent.done = states[0] if states else None
            return
        call = agent.done + 1
        self.parts.add((view, host, call))
        # Who is behind gets the total that another member of the view has.
        others = [self.agents[one] for one in view.hosts]
        has = any(other.view is view and (other.done or 0) >= call for other in others)
        if has or all((view, one, call) in self.parts for one in view.hosts):
            agent.done = call
            first, last = self.ended.get(view, (call, call))
            self.ended[view] = min(first, call) if not has else first, max(last, call)

    def fault(self) -> None:
        """Let something be lost, or come back."""
        living = [host for host, agent in enumerate(self.agents) if not agent.lost]
        host = self.choose.choice(living)
        match self.choose.randrange(5):
            case 0 if len(living) > 2:
                self.follow(host, None)
                self.agents[host].lost, self.agents[host].view = True, None
            case 1:
                self.follow(host, None)
            case 2:
                self.store.away = not self.store.away
            case 3 if len(self.coordinators) < 3:
                self.start({host})
            case 4 if self.coordinators and self.choose.random() < 0.3:
                self.end(self.choose.choice(self.coordinators))

    def step(self) -> None:
        host = self.choose.randrange(HOSTS)
        agent = self.agents[host]
        drawn = self.choose.random()
        if drawn < 0.04:
            self.fault()
        elif agent.lost:
            return
        elif drawn < 0.25 and self.coordinators:
            self.act(self.choose.choice(self.coordinators))
        elif drawn < 0.5 and agent.inbox:
            self.hear(host)
        elif drawn < 0.6 and agent.leader is None and self.coordinators:
            # A coordinator that leads already lets it come as a newcomer.
            self.follow(host, self.choose.choice(self.coordinators))
            if agent.leader is not None and agent.leader.leads:
                agent.view, agent.done = None, None
        else:
            self.train(host)

    def check(self) -> None:
        """Check that the calls that have ended form one lineage: a later view makes one again at most."""
        intervals = sorted(self.ended.items(), key=lambda one: (one[1][0], one[1][1], age(one[0])))
        for (earlier, (_, last)), (later, (first, _)) in itertools.pairwise(intervals):
            assert first >= last, f"{age(earlier)} has ended calls to {last}, {age(later)} from {first}"

    @property
    def calls(self) -> int:
        """The number of calls that have ended."""
        return max((last for _, last in self.ended.values()), default=0)

    def calm(self) -> bool:
        """Let the store answer, and one coordinator start; return whether the job has survived until then."""
        self.store.away, self.store.trouble = False, 0.0
        for coordinator in list(self.coordinators):
            self.end(coordinator)
        living = {host for host, agent in enumerate(self.agents) if not agent.lost}
        newest = max((self.agents[host].record for host in living), key=age)
        following = {host for host in living if self.follows_from(host, newest)}
        assert self.store.content is not None
        named = set(msgspec.json.decode(self.store.content[0], type=Leadership).hosts)
        states = {host for host in following if self.agents[host].done is not None}
        self.start(living)
        for _ in range(60):
            for coordinator in list(self.coordinators):
                self.act(coordinator)
            for host in living:
                while self.agents[host].inbox:
                    self.hear(host)
                self.train(host)
        return bool(named & following and states & (newest.hosts - newest.joiners))


def run(seeds: range, *, fenced: bool = True) -> dict[str, int]:
    """Run simulations; return how often something happened in all of them."""
    happened = {"took over": 0, "superseded": 0, "lineages": 0, "continued": 0, "calls": 0}
    for seed in seeds:
        job = Job(seed, fenced=fenced)
        for _ in range(STEPS):
            job.step()
        try:
            job.check()
        except AssertionError:
            if fenced:
                raise AssertionError(f"seed {seed}") from None
            happened["lineages"] += 1
        happened["took over"] += job.took_over
        happened["superseded"] += job.superseded
        happened["calls"] += (before := job.calls)
        survives = job.calm()
        if fenced:
            job.check()
            assert job.calls > before or not survives, f"seed {seed}"
        happened["continued"] += survives
    return happened


def test_one_lineage() -> None:
    """Whatever is lost, and when."""
    happened = run(range(300))
    assert happened["took over"] > 300, happened
    assert happened["superseded"] > 100, happened
    assert happened["calls"] > 1500, happened
    assert happened["continued"] > 100, happened


def test_without_the_object_there_are_two_lineages() -> None:
    """The simulation sees what the rules prevent."""
    assert run(range(300), fenced=False)["lineages"] > 5


@pytest.mark.slow
def test_one_lineage_in_many_simulations() -> None:
    run(range(300, 12_000))
