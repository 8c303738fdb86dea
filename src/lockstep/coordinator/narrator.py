"""Tells the user about a job: notes while it runs, and why it has ended. It makes no decisions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.coordinator.comparison import read_verdict
from lockstep.coordinator.file_conflicts import FileConflicts
from lockstep.coordinator.job_record import JobRecord
from lockstep.coordinator.job_report import explain, fields_of_end, how_it_goes, last_line, troubles
from lockstep.coordinator.startup_progress import Progress, preparations, prepares, skipping
from lockstep.observability import events as run_events
from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.console import Console
from lockstep.observability.measurements import MEASUREMENTS
from lockstep.observability.run_state import RunState
from lockstep.observability.slowness import describe
from lockstep.protocol.host import HostEnded
from lockstep.protocol.job_spec import BACKEND_NAMES, JobSpec
from lockstep.protocol.worker import FileOpened, HostMembers
from lockstep.supervisor.actions import JobOutcome
from lockstep.supervisor.state import Stage, State
from lockstep.system.clock import Clock
from lockstep.system.exit_status import unkillable
from lockstep.system.paths import RunPaths
from lockstep.system.prose import count, whose_lines

_DOWNLOAD_REPEAT = 20.0
_LONG_WRITE = 5.0


class Narrator:
    """Tells the user what the workers do, from the events that the coordinator publishes.

    Args:
        spec: the job.
        paths: the paths of the run, absolute.
        console: shows the notes.
        events: the bus of the run.
        clock: for durations.
        state: returns the state of supervision.
        record: the record of the job that the coordinator takes over; None for a new job.

    Attributes:
        begun: the time at which the job began, on the clock.
        since: the same time, in seconds since 1970.
        run: the state of the run.
        doing: the distributed call in which the workers are.
        chief_writes: paths that callbacks of the chief write.
        used_strategy: whether the script has created a strategy.
    """

    def __init__(
        self,
        spec: JobSpec,
        paths: RunPaths,
        console: Console,
        events: Bus,
        clock: Clock,
        state: Callable[[], State],
        record: JobRecord | None,
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._console = console
        self._events = events
        self._clock = clock
        self._state = state
        kept = record or JobRecord(spec, state(), (), begun=clock.now(), since=clock.wall())
        self.begun, self.since = kept.begun, kept.since
        self.doing, self.chief_writes, self.used_strategy = kept.doing, kept.chief_writes, kept.used_strategy
        self._progress: Progress | None = None
        if record is None and not state().size.by_hand:
            self._progress = Progress(console.say, console.shown, self.begun)
        self._writers = FileConflicts(Path.cwd())
        self._downloads: dict[str, float] = {}
        self._errors: dict[int, str] = {}
        # A coordinator that takes over continues the totals of the job.
        self.run = RunState(
            keeps_history=False,
            job={"workers": spec.workers},
            members=state().view.workers,
            totals=kept.tally,
            remaining=kept.remaining,
        )
        events.subscribe(self._hear, *run_events.RUN_EVENTS, *MEASUREMENTS)

    # While the job runs.

    @property
    def due(self) -> float | None:
        """The time of the next call of `serve`, or None after the first step."""
        return self._progress.due if self._progress else None

    def how_it_goes(self) -> str:
        """Return how the job goes, in a few words, or an empty string if there is nothing to say."""
        return "; ".join(how_it_goes(self.run.totals, self._clock.now() - self.begun))

    def serve(self) -> None:
        """Report the progress of each worker before the first step, if due."""
        if self._state().stage is not Stage.RUNNING or self.run.stepped:
            self._progress = None
        if self._progress is not None:
            self._progress.serve(self._clock.now(), lambda: preparations(self.run, self._clock.wall()))

    def say(self, text: str, logs: Sequence[int] = ()) -> None:
        """Show a note, and the names of the logs of some workers."""
        # Workers that were started by hand write to their own terminals.
        named = () if self._state().size.by_hand else logs
        self._console.say("\n".join((text, *(f"  log: {self._name_log(worker)}" for worker in named))))

    def warn(self, text: str) -> None:
        """Show a warning, also on the run's page."""
        self._events.publish(run_events.WarningShown(text))
        self._console.say(text)

    def tell_of_file(self, worker: int, file: FileOpened) -> None:
        """Warn of a file that several workers write."""
        host = None if file.shared else self._state().workers[worker].host
        conflicts, text = self._writers.opened(
            *(worker, file.path, file.line, self._state().running, host),
            appends=file.appends,
            library=file.library,
        )
        if conflicts:
            self._events.publish(run_events.ConflictingWrite(worker, file.path, file.line))
        if text:
            self._console.say(text)

    def tell_of_moved_files(self, old: HostMembers, new: HostMembers) -> None:
        """Report where files of the chief are, if the chief is now on another host."""
        if old.host != new.host and self.chief_writes:
            self._console.say(
                f"worker {new.workers[0]} on {new.name} is the chief now: files that callbacks have written "
                f"so far are on {old.name}, and new ones are on {new.name}: {', '.join(self.chief_writes)}"
            )

    def _hear(self, published: PublishedEvent) -> None:
        before, self.run = self.run.ended_call, self.run.after(published)
        ended = self.run.ended_call
        if ended is not None and ended is not before and (line := describe(ended.of(self.run.members))):
            self._console.say(line)
        if isinstance(published.event, run_events.ScriptFailed):
            self._errors[published.event.worker] = published.event.summary
        if isinstance(published.event, run_events.MemoryExhausted):
            self._console.say(
                f"memory ran out, so the kernel killed worker {published.event.worker}: use fewer workers or "
                "smaller batches, or give the container or the machine more memory"
            )
        if isinstance(published.event, run_events.GpuLost):
            self._console.say(
                f"{published.event.fault}; no other worker gets it (sudo dmesg | grep -i xid shows the cause)"
            )
        if published.worker is not None:
            self._hear_worker(published.worker, published.event)

    def _hear_worker(self, worker: int, event: run_events.Event) -> None:
        match event:
            case run_events.StrategyInstalled(backend):
                self.used_strategy = True
                if self._spec.replicas == 1:
                    # Keras's own loop follows, which does not report anything.
                    self._progress = None
                self._tell_of_backend(worker, backend)
            case run_events.StepsSkipped():
                self._tell_of_skipped_steps(worker, event)
            case run_events.CallStarted(name):
                self.doing = name
            case run_events.ChiefWrites(paths):
                self.chief_writes = tuple(dict.fromkeys((*self.chief_writes, *paths)))
            case run_events.SourceChanged(path, text):
                self._console.say(f"worker {worker}: {path} {text}")
            case run_events.DownloadAwaited(file, of, seconds):
                self._tell_of_download(worker, file, of, seconds)
            case run_events.HostsDiffer(text):
                self._console.say(text)
            case run_events.CheckpointWritten(path, _, seconds):
                self._console.say(
                    f"checkpoint {path}{f' ({seconds:.0f} s)' if seconds >= _LONG_WRITE else ''}"
                )
            case run_events.TrainingResumed(where) if worker == self._state().view.chief:
                if self._state().workers[worker].started_at is None:
                    # Otherwise it has joined, and is the chief because the hosts of all others retire.
                    self._console.say(f"training resumed after {where}")

    def _tell_of_backend(self, worker: int, backend: str) -> None:
        """Correct the first line of the job if the script does not select the predicted backend."""
        actual, predicted = BACKEND_NAMES.get(backend), BACKEND_NAMES.get(self._spec.backend or "")
        if worker == self._state().view.chief and actual and predicted and actual != predicted:
            self.warn(f"the script selects {actual} itself, so it runs on {actual}, not on {predicted}")

    def _tell_of_skipped_steps(self, worker: int, event: run_events.StepsSkipped) -> None:
        """Report a worker's progress. Before the first step, one note reports that of all workers."""
        if event.steps < event.of and not (self._progress is not None and prepares(self.run, worker)):
            skips = skipping(event.call, event.steps, event.of, event.what)
            self._console.say(f"worker {worker} is {skips}")

    def _tell_of_download(self, worker: int, file: str, of: str, seconds: float) -> None:
        """Report for which download a worker waits: once for several workers, then repeatedly."""
        last, now = self._downloads.get(file), self._clock.now()
        if last is None or now - last >= _DOWNLOAD_REPEAT:
            self._downloads[file] = now
            waits = f"has waited {seconds:.0f} s" if seconds >= _DOWNLOAD_REPEAT else "waits"
            self._console.say(f"worker {worker} {waits} for {of} to download {file}")

    # This is at its end.

    def tell_success(self) -> None:
        """Show the last line of the job while the workers that were started by hand still have terminals."""
        if line := self._summary():
            self._console.say(line)

    def announce(self, outcome: JobOutcome) -> None:
        """Show the last line of the job on other hosts, before their agents end."""
        if last := outcome.message or (self._summary() if outcome.status == 0 else ""):
            for read in self._console.readers:
                read(last)

    def conclude(self, outcome: JobOutcome, hosts: Sequence[tuple[str, HostEnded]]) -> None:
        """Report how the job has ended.

        Args:
            outcome: how it has ended.
            hosts: the name of each host, and the last report of its agent.
        """
        spec, state = self._spec, self._state()
        self._console.end_lines()
        if outcome.message:
            evidence = [each for _, host in hosts for each in host.evidence]
            evidence.sort(key=lambda each: outcome.workers.index(each.worker))
            said = outcome
            if outcome.stopped and state.distributes:
                said = replace(outcome, message=f"{outcome.message}{self._what_remains()}")
            self._console.say(explain(said, evidence, self._has_shown, self._name_log))
            if problems := troubles(self.run.totals):
                self._console.say(f"until then: {'; '.join(problems)}")
        elif spec.workers > 1 and not self.used_strategy:
            usage = "used no strategy and compiled no model" if spec.adopts else "used no strategy"
            self.warn(f"the script {usage}: each of the {spec.workers} workers ran all of it by itself")
        elif spec.replicas > 1 and self.used_strategy and not state.distributes:
            lines = whose_lines(spec.workers, spec.replicas)
            self.warn(
                f"the script distributed nothing: {lines}; train with model.fit, or "
                "pass the replica's computation to strategy.run"
            )
        if self._writers.unnamed:
            self._console.say(
                f"several workers wrote {count(self._writers.unnamed, 'more file')}: "
                f"grep 'written by several' {RunPaths(spec.run_dir).events}"
            )
        for name, host in hosts:
            if host.left:
                self.warn(f"{unkillable(host.left)}{f' on {name}' if name else ''}")
        if outcome.status == 0 and (line := self._summary()):
            self._console.say(line)

    def record_end(self, status: int, message: str, workers: tuple[int, ...] = ()) -> None:
        """Publish the end of the job, with its totals."""
        done = fields_of_end(self.run.totals, self._clock.now() - self.begun)
        self._events.publish(run_events.JobFinished(status=status, message=message, workers=workers, **done))

    def _has_shown(self, worker: int) -> bool:
        """Whether the terminal has shown a worker's output, or that of another worker with the same error."""
        error = self._errors.get(worker)
        alike = [other for other, text in self._errors.items() if text == error]
        return any(map(self._console.shows, (worker, *alike)))

    def _summary(self) -> str:
        state, seconds = self._state(), self._clock.now() - self.begun
        compared = read_verdict(self._paths)
        return last_line(self.run.totals, seconds, len(state.members), len(state.failures), compared)

    def _what_remains(self) -> str:
        """Return how a stopped job can continue; empty if it saves checkpoints, but does not have one."""
        if saved := self.run.totals.saved:
            return f"; the same command resumes from step {saved}"
        return "" if self._state().keeps else "; no checkpoint was requested (--checkpoint)"

    def _name_log(self, worker: int) -> str:
        return str(RunPaths(self._spec.run_dir).log(worker))
