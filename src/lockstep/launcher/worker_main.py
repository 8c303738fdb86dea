"""The main program of a worker: enters its job, then runs the user's script.

The fork server, or a process that the user started by hand, starts it. Most modules are imported late,
because this process must first be bound to the life of the agent.
"""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lockstep.errors import (
    ChangedError,
    ConfigError,
    LockstepError,
    PeerLostError,
    PeerStuckError,
    SupersededError,
    WrongStateError,
    with_code,
)
from lockstep.observability.bus import Bus
from lockstep.observability.digest_records import WORKER_DIGESTS
from lockstep.observability.events import (
    WORKER_EVENTS,
    CheckEnded,
    ImportStarted,
    OrderRecorded,
    SourceChanged,
)
from lockstep.observability.measurements import WORKER_MEASUREMENTS
from lockstep.observability.step_recorder import StepRecorder
from lockstep.protocol.job_spec import JobSettings
from lockstep.protocol.worker import AgentMessage
from lockstep.system.clock import SystemClock
from lockstep.system.cuda import LISTED, ask_driver, names_in
from lockstep.system.environment import (
    WorkerIdentity,
    cache_folder,
    forget_worker,
    home_folder,
    read_worker,
    show_run_folder,
    variable,
)
from lockstep.system.exit_status import WRONG_STATE
from lockstep.system.landlock import write_only_below
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.prctl import die_with
from lockstep.system.standard_streams import flush_streams, write_whole_lines
from lockstep.transport.packet_channel import PacketChannel
from lockstep.worker.agent_client import AgentClient
from lockstep.worker.downloads import share_downloads
from lockstep.worker.file_writes import LibraryFolders, is_refused_write, refuse_effects, watch_writes
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.import_reports import report_imports
from lockstep.worker.jax_cache import keep_compiled
from lockstep.worker.program_sources import keep_sources
from lockstep.worker.script import (
    Script,
    device_memory_hint,
    gpu_hint,
    gpus_within_patience,
    hide_internals,
    is_of_machine,
    original_of,
    program_line,
    program_traceback,
    summarize,
    summarize_own,
    user_traceback,
)
from lockstep.worker.script_threads import ScriptThreads
from lockstep.worker.seeding import seed_everything
from lockstep.worker.stack_dump import write_when_asked
from lockstep.worker.tf_caches import CacheOwner, divide_caches

if TYPE_CHECKING:
    from lockstep.worker.job import Job

_STATUS: dict[type[BaseException], int] = {
    KeyboardInterrupt: 128 + signal.SIGINT,
    ChangedError: 2,
    SupersededError: 2,
    WrongStateError: WRONG_STATE,
}
"""The exit status for errors that are not faults of the script; otherwise 1."""


_SILENT_WAIT = 1.0
"""Seconds that a worker whose script has ended waits for others before it says so."""

_LAST_LINE_PATIENCE = 10.0
"""Seconds that it waits for them in all."""


def main(arguments: Sequence[str]) -> None:
    """Run the script of `arguments` as the worker that the environment describes."""
    try:
        identity = read_worker()
    except ConfigError as error:
        note(with_code(error))
        sys.exit(2)
    if not identity.by_hand:
        die_with(identity.agent)
        write_whole_lines()
    os.set_inheritable(identity.control, False)
    write_when_asked(RunPaths(identity.run_dir).stack(identity.worker))
    client = AgentClient(PacketChannel(socket.socket(fileno=identity.control), AgentMessage), identity.worker)
    if identity.by_hand:
        threading.Thread(target=_end_with_coordinator, args=(identity, client), daemon=True).start()
    clock = SystemClock()
    events = Bus(clock, identity.worker)
    # This comes before the client: the measurements of a call precede the event of its end.
    recorder = StepRecorder(events, clock, _is_chief)
    events.subscribe(client.report, *WORKER_EVENTS, *WORKER_MEASUREMENTS)
    events.subscribe(client.report, *WORKER_DIGESTS, OrderRecorded)
    try:
        job = _enter_job(identity, client, events)
    except PeerLostError as over:
        note(with_code(over))
        sys.exit(1)
    job.at_exit(recorder.flush)
    forget_worker()
    if RunPaths(identity.run_dir).events.exists():
        # Agents of other hosts have a temporary folder.
        show_run_folder(identity.run_dir)
    _share_searches()
    share_downloads(identity.run_dir, identity.agent, identity.worker, events.publish)
    sources = RunPaths(identity.run_dir).sources
    keep_sources(sources, lambda path, change: events.publish(SourceChanged(path, change)))
    _watch_writes(identity.run_dir, job.settings, client)
    report_imports(_publish_import)
    client.started()
    _run(Script.parse(arguments), client, identity)


def _share_searches() -> None:
    from lockstep.worker.tuner_searches import share_searches

    share_searches()


def _watch_writes(run_dir: Path, settings: JobSettings, client: AgentClient) -> None:
    if settings.replicas > 1:
        checkpoints = (settings.checkpoints.folder,) if settings.checkpoints is not None else ()
        folders = (run_dir, cache_folder(), *checkpoints)
        places = LibraryFolders(folders, home_folder(), Path.cwd())
        if settings.checks:
            refuse_effects(places, _end_check)
            _write_only_here([*folders, *filter(None, [settings.kept_steps])])
        else:
            watch_writes(places, client.file_opened)


def _write_only_here(folders: Sequence[Path]) -> None:
    """Keep libraries of a script, which may be written in C, from writing files of the script."""
    hidden = [folder for folder in home_folder().glob(".*") if folder.is_dir()]
    system = [Path("/dev"), Path("/proc"), Path(tempfile.gettempdir())]
    with contextlib.suppress(OSError):
        write_only_below([*folders, cache_folder().parent, *hidden, *system])


def _end_with_coordinator(identity: WorkerIdentity, client: AgentClient) -> None:
    """End this process when the coordinator of its job has ended."""
    client.wait_for_end()
    note(
        f"the coordinator of this job (process {identity.agent}) has ended, so worker {identity.worker} "
        "exits; restart all workers"
    )
    os._exit(1)


def _end_check(reason: str) -> NoReturn:
    from lockstep.worker import job

    job.current().end_check(reason)


def _enter_job(identity: WorkerIdentity, client: AgentClient, events: Bus) -> "Job":
    from lockstep.topology import place
    from lockstep.transport.state_memory import MemoryTransport
    from lockstep.worker import job, tf_distribute_shim
    from lockstep.worker.checkpoints import open_checkpoints
    from lockstep.worker.membership import AgentMembership, take_welcome, wait_policy

    welcome = take_welcome(client)
    settings = welcome.settings
    seed_everything(settings.seed)
    keep_compiled(cache_folder(), settings.threads)
    if settings.tf_distribute:
        tf_distribute_shim.replace_names()
    elif settings.replicas > 1:
        tf_distribute_shim.refuse_strategies(settings.replicas)
    policy = wait_policy(settings.limits.timeout)
    membership = AgentMembership(identity, welcome, client, policy, MemoryTransport())
    if identity.joins:
        view = place(settings.replicas, (identity.worker,))
        communicator = job.by_itself(view)
    else:
        view, communicator = membership.first_view()
    context = job.JobContext(
        identity.worker,
        events,
        settings,
        identity.run_dir,
        identity.host,
        over_hosts=membership.over_hosts,
        state_pool=membership.state_pool,
    )
    checkpoints = open_checkpoints(settings, events, job.is_chief, joins=identity.joins)
    this_job = job.Job(context, (view, communicator), membership, checkpoints, policy, joins=identity.joins)
    job.enter(this_job)
    leads_host = any(host[0] == identity.worker for host in view.hosts)
    first = CacheOwner(identity.worker, this_job.is_chief, leads_host and not identity.joins)
    this_job.at_exit(divide_caches(first))
    if settings.adopts:
        when_imported({"keras": _adopt})
    os.register_at_fork(after_in_child=job.become_alone)
    return this_job


def _publish_import(event: ImportStarted) -> None:
    from lockstep.worker import job

    # This does not use the bus of the worker, because the script may have forked this process.
    job.current().events.publish(event)


def _is_chief() -> bool:
    from lockstep.worker import job

    return job.is_chief()


def _adopt(_: object) -> None:
    """Distribute models that the script compiles without a strategy; called when it has imported Keras."""
    from lockstep.keras import patches
    from lockstep.worker import job

    patches.install_at_compile(job.current())


def _run(script: Script, client: AgentClient, identity: WorkerIdentity) -> None:
    from lockstep.worker import job

    try:
        try:
            _run_whole(script)
        finally:
            job.current().exit()
    except SystemExit as leaving:
        # Python handles it as usual.
        if leaving.code in (None, 0):
            _finish(client, identity)
        else:
            # An agent cannot get the exit status of a process that a user started.
            client.finished(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    except BaseException as error:
        sys.exit(_fail(error, client, identity))
    _finish(client, identity)


def _finish(client: AgentClient, identity: WorkerIdentity) -> None:
    """Report success, and complete the last work of the job here."""
    from lockstep.worker import job

    # This comes first: a stop that arrives now waits for the last checkpoint.
    client.finished()
    job.current().end()
    if identity.by_hand:
        flush_streams()
        # The work is done: Ctrl-C only ends the wait.
        with contextlib.suppress(KeyboardInterrupt):
            _await_last_line(client, identity.worker)


def _await_last_line(client: AgentClient, worker: int) -> None:
    """Wait for the last line of the job, which appears on the terminal of each running worker."""
    client.awaits_last_line()
    if client.wait_for_release(_SILENT_WAIT):
        return
    ended = f"the script of worker {worker} has finished"
    note(f"{ended}; it waits up to {_LAST_LINE_PATIENCE:g} s for the other workers (Ctrl-C ends the wait)")
    if not client.wait_for_release(_LAST_LINE_PATIENCE - _SILENT_WAIT):
        note(f"{ended}; the others continue, and the last line of the job appears on their terminals")


def _run_whole(script: Script) -> None:
    """Run the script; unless it ends with an error, complete the work that it has begun."""
    from lockstep.worker import job

    threads = ScriptThreads()
    try:
        script.run()
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            threads.wait()
            job.current().complete()
        raise
    threads.wait()
    job.current().complete()


def _end_if_refused(error: BaseException, summary: str) -> None:
    """If a job only checks the script, report that the check ends at a refused write."""
    from lockstep.worker import job

    if job.current().settings.checks and is_refused_write(error):
        line = program_line(error) or "the script"
        job.current().events.publish(CheckEnded(f"{line} writes a file: {summary}"))


def _fail(error: BaseException, client: AgentClient, identity: WorkerIdentity) -> int:
    trace = user_traceback(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        # The frames of Keras or Lockstep in which the signal arrived do not explain anything.
        trace = program_traceback(trace) or trace
    error = original_of(error).with_traceback(trace)
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 1)
    text = "".join(traceback.format_exception(error))
    if isinstance(error, LockstepError):
        summary = summarize_own(error)
        # The frames of Keras would hide the error. A hook that the script has set is still called.
        prints = identity.by_hand or sys.excepthook is not sys.__excepthook__
    else:
        summary, prints = f"{summarize(error)}{_hint(error, identity.device_users)}", True
        # This is for the terminal. The event has all frames.
        hide_internals(error)
    _end_if_refused(error, summary)
    flush_streams()
    if identity.by_hand:
        # The job ends with SIGTERM to all workers, and the user of this one sees its own status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Notify the other workers first: writing the output may block on a slow reader.
    blames = isinstance(error, PeerLostError | PeerStuckError)
    recurs = not is_of_machine(error)
    if not client.failed(status, summary, text, blames=blames, prints=prints, recurs=recurs) or prints:
        sys.excepthook(type(error), error, error.__traceback__)
    return status


def _hint(error: BaseException, device_users: int) -> str:
    """Return a hint to show after an error of the script, or an empty string if there is none."""
    from lockstep.worker import job

    # A library may raise such an error without a number, for a reason other than a path.
    exists = isinstance(error, FileExistsError) and error.errno is not None
    if exists and job.current().settings.workers > 1:
        return (
            "; every worker runs this line, and another one may have created it: pass exist_ok=True, or "
            "create it on one worker only: if lockstep.is_chief()"
        )
    # This does not use the driver if possible, because it may hang when it has lost a GPU.
    listed = variable(LISTED)
    gpus = gpus_within_patience() if listed is None else names_in(listed)
    return device_memory_hint(error, gpus, device_users) or gpu_hint(error, gpus, ask_driver)


if __name__ == "__main__":
    main(sys.argv[1:])
