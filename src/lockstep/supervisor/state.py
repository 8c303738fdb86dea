"""The state of supervision.

A job is RUNNING until its `JobOutcome` is decided; while it is LOOKING, the outcome is provisional.

A worker's record names its phase:

    joiner       JOINING -> LOCATING -> JOINING -> READY -> MEMBER; JOIN_FAILED if its script raises
    member       MEMBER until its process ends; its record notes if its script raises
    not needed   LEAVING, from joiner or member, until its process ends
    ended        FINISHED a member with status 0, LEFT a worker that was LEAVING, LOST any other
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from lockstep.protocol.host import SILENCE, StartView
from lockstep.protocol.job_spec import GRACE, TERM, TIMEOUT, JobSpec
from lockstep.protocol.worker import HostMembers, Notice, StateSource
from lockstep.supervisor.actions import Action, JobOutcome
from lockstep.system.notes import NOTE_EVERY
from lockstep.topology import View, place_on_hosts


class Phase(Enum):
    """The phase of a worker's life.

    The first workers start as members. A worker that starts later is a joiner: it requests the position of
    the members, runs the script by itself up to there, and becomes a member with the next view.
    """

    JOINING = auto()
    """A joiner that runs the script up to the position of the members."""
    LOCATING = auto()
    """A joiner that waits for the position of the members."""
    READY = auto()
    """A joiner that waits for the next view."""
    JOIN_FAILED = auto()
    """A joiner whose script has raised, or that the state did not reach; its process still runs."""
    MEMBER = auto()
    """A member of the view, or a worker that the last view left behind; its process still runs."""
    LEAVING = auto()
    """A worker that is no longer needed, and was asked to leave or killed; its process still runs."""
    FINISHED = auto()
    """A member whose process ended with status 0."""
    LEFT = auto()
    """A worker that was LEAVING when its process ended."""
    LOST = auto()
    """A worker whose process ended in any other way."""


JOINERS = frozenset({Phase.JOINING, Phase.LOCATING, Phase.READY, Phase.JOIN_FAILED})
ENDED = frozenset({Phase.FINISHED, Phase.LEFT, Phase.LOST})


@dataclass(frozen=True)
class Failure:
    """A member's failure that no other failure has caused. The others continue without the member.

    Attributes:
        outcome: how the job ends if this failure decides it.
        order: the number of workers that had failed before.
    """

    outcome: JobOutcome
    order: int


@dataclass(frozen=True)
class WorkerRecord:
    """The state of a worker in supervision.

    Attributes:
        phase: its phase.
        host: the index of its host.
        member_since: the number of the first view of which it is a member.
        started_at: the time at which it was started to join; None for the first workers.
        raised: whether its script has raised while it was not a joiner.
        failure: its failure; None if it has none or only blames another worker.
        script_ended: whether its script has ended.
        awaits_end: whether it has also completed its last work, and waits for the last line of the job.
        waits_in_vain: whether it waits, as of its last report, for a worker that ended with status 0.
        condemned: whether it was killed because it was stuck.
    """

    phase: Phase = Phase.MEMBER
    host: int = 0
    member_since: int = 1
    started_at: float | None = None
    raised: bool = False
    failure: Failure | None = None
    script_ended: bool = False
    awaits_end: bool = False
    waits_in_vain: bool = False
    condemned: bool = False

    @property
    def is_over(self) -> bool:
        """Whether its script has raised, or its process has failed."""
        return self.raised or self.failure is not None

    @property
    def blames(self) -> bool:
        """Whether its script has raised, but only because of another worker or of the end of the job."""
        return self.raised and self.failure is None


@dataclass(frozen=True)
class TimeLimits:
    """Time limits and intervals, in seconds.

    Attributes:
        timeout: for a worker to arrive where others wait for it, and for joiners that training waits for.
        blame: until the cause must appear of a failure that blames another worker.
        look: for a stuck worker to write its stack.
        abort: for workers to end after the abort, until SIGTERM.
        leave: for workers whose scripts have all raised to exit by themselves, until SIGTERM.
        term: for workers to end after SIGTERM or the signal that stops the job, until SIGKILL.
        kill: for workers to end after SIGKILL, until the job ends without them.
        save: for the chief to complete its step and write a checkpoint before the job stops (`--grace`).
        repeat: between two messages that one worker waits for another.
        idle: from the first strategy until a message that the script has distributed nothing.
        young: from the start of a worker, while its loss delays its replacement.
        pause: before the replacement of a young worker starts; doubles with each such loss in a row.
        longest_pause: the upper limit of `pause`.
        silence: without a message of a host, until it counts as lost.
        cut_off: without a message of any host, until they all count as lost.
        hold: without an answer from the coordinator, until a host pauses training; None if it does not.
    """

    timeout: float = TIMEOUT
    blame: float = 1.0
    look: float = 0.5
    abort: float = 3.0
    leave: float = 15.0
    term: float = TERM
    kill: float = 1.0
    save: float = GRACE
    repeat: float = NOTE_EVERY
    idle: float = 45.0
    young: float = 60.0
    pause: float = 1.0
    longest_pause: float = 60.0
    silence: float = SILENCE
    cut_off: float = 600.0
    hold: float | None = None


@dataclass(frozen=True)
class JobSize:
    """The target number of workers, and the budget of restarts.

    Attributes:
        wanted: the target number of workers; 0 for the present number.
        min_workers: training waits while there are fewer.
        restarts_left: the number of lost workers that will still be replaced.
        max_restarts: the budget at the start of the job and after each request to scale.
        closed: whether no worker is replaced because none can join.
        by_hand: whether no worker is replaced because the user starts the workers by hand.
    """

    wanted: int = 0
    min_workers: int = 1
    restarts_left: int = 0
    max_restarts: int = 0
    closed: bool = False
    by_hand: bool = False

    @classmethod
    def of(cls, wanted: int, min_workers: int, max_restarts: int) -> "JobSize":
        """Return the size of a new job."""
        return cls(wanted, min_workers, max_restarts, max_restarts)


@dataclass(frozen=True)
class Admission:
    """The admission of joiners to the next view.

    Attributes:
        posted: the notice to the members of the view.
        source: the location of the state that the chief has given; all members then wait for the next view.
            None before.
        holders: the hosts that have this state.
        receivers: the hosts to which this state was sent, without those that have failed to receive it.
        moved: texts on how much of this state has arrived, by host.
        deadline: the time at which the job gives up if its members wait for joiners, or for the state to
            reach them; None if they do not wait.
        report_at: the time of the message that names the hosts that wait for the state; None if the state is
            not being sent.
        backoff_until: the earliest time to start a worker; None for no limit.
        young_losses: the number of workers in a row that were lost soon after their start.
        unreported: the consequences of losses, until a message has reported them.
        arrivals: the hosts of workers that wait because a user has started them by hand.
        accused: the workers that repeat different bits: the next view waits for another worker, which
            decides. Empty if there are none.
    """

    posted: Notice = Notice.NOTHING
    source: StateSource | None = None
    holders: frozenset[int] = frozenset()
    receivers: frozenset[int] = frozenset()
    moved: tuple[tuple[int, str], ...] = ()
    deadline: float | None = None
    report_at: float | None = None
    backoff_until: float | None = None
    young_losses: int = 0
    unreported: str = ""
    arrivals: tuple[int, ...] = ()
    accused: tuple[int, ...] = ()

    def without_state(self) -> "Admission":
        """Return the admission after the wait for the next view."""
        none = frozenset[int]()
        return replace(
            self,
            source=None,
            holders=none,
            receivers=none,
            moved=(),
            deadline=None,
            report_at=None,
            accused=(),
        )

    def with_consequence(self, text: str) -> "Admission":
        """Return the admission with one more consequence of a loss to report; an empty text adds none."""
        texts = dict.fromkeys(part for part in (self.unreported, text) if part)
        return replace(self, unreported="; ".join(texts))


class Stage(Enum):
    """The stages of a job's end."""

    RUNNING = auto()
    """The end is not decided."""
    LOOKING = auto()
    """A worker is stuck, and writes its stack."""
    SAVING = auto()
    """The job stops; the chief completes its step and writes a checkpoint."""
    ENDING = auto()
    """The exchange of the workers was aborted."""
    TERMINATING = auto()
    """The workers have received SIGTERM, or the signal that stops the job."""
    KILLING = auto()
    """The workers have received SIGKILL."""
    FINISHED = auto()
    """The job has ended."""


@dataclass(frozen=True)
class Saving:
    """The chief's progress since the job was asked to stop.

    Attributes:
        step: the completed step, whose checkpoint is being written; None until then.
        kept: the step of the checkpoint that is on the disk; None until then.
        failure: why a checkpoint could not be written; empty if none failed.
    """

    step: int | None = None
    kept: int | None = None
    failure: str = ""

    def outcome(self, why: str) -> str:
        """Describe the available checkpoint; without one, the failure, or else `why`."""
        if self.kept is not None:
            return f"checkpoint written at step {self.kept}"
        return f"no checkpoint: {self.failure or why}"


@dataclass(frozen=True)
class Shutdown:
    """The progress of the job's end, and its outcome.

    Attributes:
        stage: the stage of the end.
        deadline: the deadline of the stage; in RUNNING, of the wait for the failures of others.
        outcome: how the job ends, once decided.
        suspect: how the job ends if no cause appears for a failure that blames another worker.
        saving: the chief's progress since the job was asked to stop.
    """

    stage: Stage = Stage.RUNNING
    deadline: float | None = None
    outcome: JobOutcome | None = None
    suspect: JobOutcome | None = None
    saving: Saving = field(default_factory=Saving)


@dataclass(frozen=True)
class State:
    """The state of supervision.

    Attributes:
        view: which worker computes which replica.
        slots: for each host, the number of workers that it should have.
        cores: for each host, the number of its cores; only their ratios matter.
        names: for each host, its name.
        lost_hosts: the indices of hosts that are lost for good; a host that returns has a new index.
        retiring: the indices of hosts whose departure was announced; they get no more workers.
        vital: the workers without which a job with parameter servers cannot continue. Such a job keeps its
            number of workers.
        servers: the parameter servers, which are not replaced.
        named: the names of the hosts of workers that verifications have named, once for each verdict.
        avoid_host_after: the number of times that a host is named before it retires; 0 for never.
        cut_off: whether all other hosts were silent for so long that this host seems to be cut off.
        heard_from: a time at which all hosts count as heard; later messages replace it.
        workers: all workers that were ever started, by id.
        limits: the time limits.
        size: the target number of workers, and the budget of restarts.
        admission: the admission of joiners to the next view.
        shutdown: the progress of the job's end.
        view_since: the time at which the view began; None for the first view.
        elastic: whether the job can continue without a lost worker.
        keeps: whether the job saves checkpoints.
        distributes: whether the script has distributed a computation or an input.
        idle_until: the time of the message that the script has distributed nothing; None if no such message
            is due.
        reported_late: the time at which a message last named each set of late workers.
    """

    view: View
    slots: tuple[int, ...]
    cores: tuple[int, ...]
    workers: Mapping[int, WorkerRecord]
    limits: TimeLimits = field(default_factory=TimeLimits)
    size: JobSize = field(default_factory=JobSize)
    admission: Admission = field(default_factory=Admission)
    shutdown: Shutdown = field(default_factory=Shutdown)
    view_since: float | None = None
    elastic: bool = False
    keeps: bool = False
    distributes: bool = False
    idle_until: float | None = None
    reported_late: tuple[tuple[tuple[int, ...], float], ...] = ()
    lost_hosts: frozenset[int] = frozenset()
    retiring: frozenset[int] = frozenset()
    vital: frozenset[int] = frozenset()
    servers: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    avoid_host_after: int = 0
    cut_off: bool = False
    heard_from: float = 0.0

    @classmethod
    def of(
        cls,
        view: View,
        limits: TimeLimits,
        size: JobSize,
        *,
        keeps: bool = False,
        cores: tuple[int, ...] = (),
        names: tuple[str, ...] = (),
        vital: frozenset[int] = frozenset(),
        servers: frozenset[int] = frozenset(),
    ) -> "State":
        """Return the state of a new job that begins with `view`; each host of the view has workers.

        Without `cores`, all hosts are alike; without `names`, they have numbers.
        """
        names = names or tuple(map(str, range(len(view.hosts))))
        cores = cores or (1,) * len(view.hosts)
        hosts = enumerate(view.hosts)
        workers = {worker: WorkerRecord(host=host) for host, there in hosts for worker in there}
        first = cls(view, tuple(map(len, view.hosts)), cores, workers, limits, size, keeps=keeps)
        return replace(first, names=names, vital=vital, servers=servers).with_slots(size.wanted)

    @classmethod
    def begin(cls, spec: JobSpec, cores: tuple[int, ...] = (), *, by_hand: bool = False) -> "State":
        """Return the state of a new job.

        Args:
            spec: the job.
            cores: the number of cores of each host; empty if all hosts are alike.
            by_hand: whether a user starts its workers.
        """
        wanted, limits = spec.workers, spec.limits
        size = JobSize.of(wanted, limits.min_workers, limits.max_restarts)
        begun = cls.of(
            spec.view,
            TimeLimits(timeout=limits.timeout, save=limits.grace, cut_off=limits.timeout, hold=spec.hold),
            JobSize(wanted, by_hand=True) if by_hand else size,
            keeps=spec.checkpoints is not None,
            cores=cores,
            names=tuple(host.name for host in spec.hosts),
            vital=spec.vital,
            servers=spec.servers,
        )
        return replace(begun, avoid_host_after=limits.avoid_host_after, named=spec.named_hosts)

    @property
    def stage(self) -> Stage:
        """The stage of the job's end."""
        return self.shutdown.stage

    @property
    def active(self) -> bool:
        """Whether the end of the job is still undecided."""
        return self.stage in (Stage.RUNNING, Stage.LOOKING)

    @property
    def due(self) -> float | None:
        """The time at which `DeadlinePassed` is due."""
        admission = self.admission
        times = (
            *(self.shutdown.deadline, admission.backoff_until, admission.deadline, admission.report_at),
            self.idle_until,
        )
        return min((at for at in times if at is not None), default=None)

    @property
    def running(self) -> frozenset[int]:
        """The workers whose processes run."""
        return frozenset(worker for worker, record in self.workers.items() if record.phase not in ENDED)

    @property
    def present(self) -> frozenset[int]:
        """The running workers, without joiners and leavers."""
        return self.within(Phase.MEMBER)

    @property
    def leaving(self) -> frozenset[int]:
        """The running workers that are no longer needed."""
        return self.within(Phase.LEAVING)

    @property
    def finished(self) -> frozenset[int]:
        """The members that ended with status 0."""
        return self.within(Phase.FINISHED)

    @property
    def scripts_ended(self) -> bool:
        """Whether there are members that run, and the scripts of all of them have ended without an error."""
        return bool(self.present) and all(self.workers[worker].script_ended for worker in self.present)

    @property
    def succeeds(self) -> bool:
        """Whether it is certain that the job succeeds, although members may still run."""
        if self.stage is Stage.RUNNING:
            return self.shutdown.suspect is None and self.scripts_ended
        return self.shutdown.outcome is not None and self.shutdown.outcome.status == 0

    @property
    def awaits_last_line(self) -> bool:
        """Whether the job succeeds, and all members, started by a user, wait for its last line."""
        waits = [self.workers[worker].awaits_end for worker in self.present]
        return self.size.by_hand and self.succeeds and bool(waits) and all(waits)

    @property
    def too_late_to_join(self) -> bool:
        """Whether no worker can join any more, because a member has succeeded.

        A member has succeeded if it has ended with status 0. A member that a user started may still wait for
        the others.
        """
        waits = self.size.by_hand and any(self.workers[worker].script_ended for worker in self.present)
        return waits or bool(self.finished)

    @property
    def joiners(self) -> tuple[int, ...]:
        """The workers that were started to join and are in no view yet, the longest-waiting first."""
        return tuple(sorted(self.within(*JOINERS)))

    @property
    def ready(self) -> tuple[int, ...]:
        """The joiners that wait for the next view, the longest-waiting first."""
        return tuple(sorted(self.within(Phase.READY)))

    @property
    def lacking(self) -> tuple[int, ...]:
        """The joiners that wait for the next view on hosts without the state."""
        return tuple(
            joiner for joiner in self.ready if self.workers[joiner].host not in self.admission.holders
        )

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the view, including those that ended since it began."""
        return self.view.workers

    @property
    def staying(self) -> tuple[int, ...]:
        """The members of the view that run and have not raised or failed, the longest-serving first."""
        there = self.present
        staying = [w for w in self.members if w in there and not self.workers[w].is_over]
        return tuple(sorted(staying, key=lambda worker: (self.workers[worker].member_since, worker)))

    @property
    def outgoing(self) -> tuple[int, ...]:
        """The members that retire, and leave with the next view, unless too few would remain.

        The remaining members may all be new.
        """
        outgoing = tuple(worker for worker in self.staying if self.retires(worker))
        remain = len(self.staying) - len(outgoing) + len(self.ready)
        return outgoing if remain >= self.size.min_workers else ()

    @property
    def filled(self) -> int:
        """The number of workers that count towards the target, without members that retire.

        If no worker can replace these members, they count until they leave.
        """
        there = [w for w in self.present if self.size.closed or not self.retires(w)]
        return len(there) + len(self.joiners)

    @property
    def failures(self) -> dict[int, JobOutcome]:
        """How the job would end because of each failed worker, the first failure first."""
        failed = [
            (worker_state.failure, worker)
            for worker, worker_state in self.workers.items()
            if worker_state.failure is not None
        ]
        failed.sort(key=lambda entry: entry[0].order)
        return {worker: failure.outcome for failure, worker in failed}

    @property
    def all_raised(self) -> bool:
        """Whether the script has raised on every running worker: their processes exit by themselves."""
        return all(self.workers[worker].raised for worker in self.running)

    def within(self, *phases: Phase) -> frozenset[int]:
        """Return the workers that are in one of `phases`."""
        return frozenset(worker for worker, record in self.workers.items() if record.phase in phases)

    @property
    def replaced(self) -> int | None:
        """The accused worker that the deciding worker replaces; None if it has a place of its own."""
        if not self.admission.accused:
            return None
        staying = self.staying
        accused = [worker for worker in staying if worker in self.admission.accused]
        has_place = len(staying) < (self.size.wanted or len(staying)) and self._has_place
        return None if not accused or has_place or len(staying) == 1 else accused[-1]

    @property
    def _has_place(self) -> bool:
        """Whether a host lacks a worker, or did until a joiner started there."""
        lacks = self._lacks(self.leaving)
        joined = {self.workers[worker].host for worker in self.joiners}
        return any(lack > 0 or (lack == 0 and host in joined) for host, lack in lacks.items())

    def retires(self, worker: int) -> bool:
        """Return whether a worker leaves: its host retires, or another worker takes its place."""
        return self.workers[worker].host in self.retiring or worker == self.replaced

    def next_view(self, workers: tuple[int, ...]) -> View:
        """Return the next view of `workers`, the longest-serving first."""
        hosts: dict[int, tuple[int, ...]] = {}
        for worker in workers:
            host = self.workers[worker].host
            hosts[host] = (*hosts.get(host, ()), worker)
        return place_on_hosts(self.view.replicas, tuple(hosts.values()), self.view.number + 1)

    def start_view(self, reason: str = "", source: StateSource | None = None) -> StartView:
        """Return the instruction to start the view, for `reason`; new members get the state from `source`."""
        hosts = tuple(HostMembers(self.workers[there[0]].host, there) for there in self.view.hosts)
        number = 0 if source is None else source.number
        return StartView(self.view.number, hosts, reason, tuple(sorted(self.leaving)), number)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts that take workers: they are not lost, and do not retire."""
        gone = self.lost_hosts | self.retiring
        return tuple(host for host in range(len(self.slots)) if host not in gone)

    def is_untrusted(self, host: int) -> bool:
        """Return whether workers of a host, including before its loss and return, were named too often."""
        return 0 < self.avoid_host_after <= self.named.count(self.names[host])

    def hosts_of(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Return the hosts of workers, each once, in the order of the workers."""
        return tuple(dict.fromkeys(self.workers[worker].host for worker in workers))

    def silent(self, heard: Mapping[int, float], now: float) -> tuple[int, ...]:
        """Return the hosts that are silent for too long, of those that were last heard at these times."""
        silence = self.limits.silence
        return tuple(host for host, at in heard.items() if now >= max(at, self.heard_from) + silence)

    def roomiest_host(self) -> int | None:
        """Return the first host that lacks most workers, or None if no host lacks any.

        A worker that decides between others starts on a different host from theirs, if one lacks workers.
        """
        lacks = self._lacks(self.leaving | {self.replaced})
        accused = {self.workers[worker].host for worker in self.admission.accused}
        lacking = [host for host, lack in lacks.items() if lack > 0]
        return max(lacking, key=lambda host: (host not in accused, lacks[host]), default=None)

    def _lacks(self, leaving: frozenset[int | None]) -> dict[int, int]:
        """Return the number of workers that each host lacks if those of `leaving` do not count."""
        there = Counter(self.workers[worker].host for worker in self.running - leaving)
        return {host: self.slots[host] - there[host] for host in self.hosts}

    def with_slots(self, workers: int) -> "State":
        """Return the state with slots for `workers`. New slots are where each worker gets the most cores.

        Without a host that takes workers, the state does not change.
        """
        slots = list(self.slots)

        def share(host: int) -> float:
            return self.cores[host] / (slots[host] + 1)

        for _ in range(sum(slots[host] for host in self.hosts), workers if self.hosts else 0):
            slots[max(self.hosts, key=share)] += 1
        return replace(self, slots=tuple(slots))

    def with_worker(self, worker: int, record: WorkerRecord) -> "State":
        """Return the state with a new record of a worker."""
        return replace(self, workers={**self.workers, worker: record})

    def with_phase(self, phase: Phase, *workers: int) -> "State":
        """Return the state with `workers` in `phase`."""
        moved = {worker: replace(self.workers[worker], phase=phase) for worker in workers}
        return replace(self, workers={**self.workers, **moved})


@dataclass(frozen=True)
class Decision:
    """The next state, the actions to carry out now, and the reason."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""

    def after(self, *actions: Action) -> "Decision":
        """Return the same decision with `actions` before its own actions."""
        return replace(self, actions=(*actions, *self.actions))
