"""The comparison of a script with one process: in a separate job, which may run beside a run.

`lockstep check` waits for the job. Beside a run, a process of low priority waits for it. The run does not
depend on this process, however that process ends. It begins after the run's first step, when the downloads of
the script are complete.

Beside a run, a fork of the command starts the job. It does not use anything of the run. With the run's seed,
it begins with the same first state and the same first batch. A check that does not send requests to a job
cannot disturb it. The fork waits for the first settings in the digest log of the run. These, together with
the program and its versions, are the key under which a verdict is kept. Then it lowers its priority (and that
of its sessions, which Linux may weigh against each other), hides the GPUs, makes itself the first process
that the kernel kills for lack of memory, and limits its processor time. The processes of the check inherit
these settings. The kernel kills it when the command ends; the command kills it when the job ends. The
coordinator reads the verdict for the last line of the run.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from lockstep.coordinator.comparison import (
    NOT_COMPARED,
    cache_result,
    name_of_cached,
    read_fields,
    save_verdict,
    unnamed,
    verdict,
)
from lockstep.observability.run_lines import GrowingFile, json_object
from lockstep.system.child_process import command_of, ending_with_this_process
from lockstep.system.descendants import kill_family
from lockstep.system.environment import WITHOUT_GPUS, cache_folder, usable_cores, with_temporary_folder
from lockstep.system.exit_status import signal_name
from lockstep.system.landlock import can_restrict
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.prctl import die_with, keep_priority
from lockstep.system.prose import count
from lockstep.system.standard_streams import close_other_descriptors
from lockstep.worker.program_sources import file_hash

Calls = Literal["off", "first", "every-fit"]
"""The calls of a script to compare: none, the first of each kind for each compiled model, or every one."""

DELAY = 45.0
"""Seconds from the start of a run to the earliest start of the comparison beside it."""
SHARE = 0.015
"""The part of the processor time of a job of ten minutes that a process of the comparison may use at most.

Two processes use most of it: one imports the framework, the other runs the script.
"""
NICE = 19
"""The nice value of the comparison: it gets about a hundredth of the time of busy processors."""
_TEN_MINUTES = 600.0
_LOOK_EVERY = 1.0
_MEMORY_FACTOR = 2.0
"""Memory of a comparison, in that of a worker: it keeps the state before the step, too."""
_TAIL = 20
_WAS_KILLED = "the comparison was killed by"
_KILLED = re.compile(r"was killed by (\w+)")


def compare(
    words: Sequence[str],
    program: Sequence[str],
    folder: Path,
    calls: Calls,
    tell: Callable[[Mapping[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Compare a script in a job of one worker; return the comparisons, and how the script ended.

    Args:
        words: the command-line words of options of `lockstep run`.
        program: the words that name the script and its arguments.
        folder: the existing folder for its run.
        calls: the calls to compare.
        tell: receives the result so far, whenever a step has been compared.
    """
    job = command_of(
        "lockstep", "run", "-n", "1", "--max-restarts", "0", "--checks", calls, "--run-dir", str(folder)
    )
    paths = RunPaths(folder)
    # The folder may have the events of an earlier comparison.
    begun = time.time()
    log, temporary = folder / "output", paths.temporary
    temporary.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ending_with_this_process([*job, *words, *program]),
            # The run and the comparison must not find temporary files of each other.
            env=with_temporary_folder(temporary),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                ended = _wait(process, lambda: _compared(_events(paths.events, begun)), tell)
            except BaseException:
                process.kill()
                raise
    shutil.rmtree(temporary, ignore_errors=True)
    events = _events(paths.events, begun)
    failures = [event["summary"] for event in events if event["event"] == "failed"]
    failed = failures[0] if failures else _end_of(ended, log, paths.log(0)) if ended else ""
    reasons = [event["reason"] for event in events if event["event"] == "check ended"]
    return {
        "compared": _compared(events),
        "ended": reasons[0] if reasons else "",
        "failed": "" if reasons else failed,
    }


def _wait(
    process: "subprocess.Popen[bytes]",
    compared: Callable[[], list[dict[str, Any]]],
    tell: Callable[[Mapping[str, Any]], object],
) -> int:
    """Wait for the job of a comparison, and meanwhile report its comparisons; return its exit status.

    After its steps, a script may need more time than the run beside it has left.
    """
    told = 0
    while True:
        try:
            return process.wait(_LOOK_EVERY)
        except subprocess.TimeoutExpired:
            steps = compared()
            if len(steps) > told:
                told = len(steps)
                tell({"compared": steps, "ended": "", "failed": ""})


def _compared(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons of steps among events."""
    return [
        {name: event[name] for name in event if name not in ("event", "time", "worker")}
        for event in events
        if event["event"] == "compared"
    ]


def _end_of(status: int, output: Path, log: Path) -> str:
    """Return why a comparison that has not published an error has ended.

    Args:
        status: the exit status of its job, negative for a signal.
        output: the file with the output of its job.
        log: the file with the output of the script, such as a message about its arguments.
    """
    said = _tail_of(output)
    killed = _KILLED.search(said)
    name = signal_name(-status) if status < 0 else killed[1] if killed else ""
    if name == "SIGXCPU":
        return f"it takes more than {resource.getrlimit(resource.RLIMIT_CPU)[0]} s of processor time"
    if name:
        return f"{_WAS_KILLED} {name}"
    return _tail_of(log) or said or f"the comparison has ended with status {status}"


def _tail_of(log: Path) -> str:
    """Return the last lines of a log; empty if there are none."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:]).strip()
    except OSError:
        return ""


def _events(path: Path, since: float) -> list[Mapping[str, Any]]:
    """Return the events of a log from a time on; earlier events belong to earlier runs."""
    events = map(json_object, GrowingFile(path).lines())
    return [event for event in events if event is not None and event.get("time", 0.0) >= since]


@contextlib.contextmanager
def witness_beside(
    folder: Path, words: Sequence[str], program: Sequence[str], calls: Calls, mode: str = ""
) -> Iterator[None]:
    """Compare a run's script in a process beside the run, which ends with the block, or with this process.

    The result is saved in the folder of the run. A note names differences that no other note explains, or
    reports why there is no comparison.

    Args:
        folder: the folder of the run; the run has not begun.
        words: the command-line words of options of `lockstep run`.
        program: the words that name the script and its arguments.
        calls: the calls to compare.
        mode: an option with which the run takes different training steps from those that are compared.
    """
    paths = RunPaths(folder.absolute())
    save_verdict(paths, NOT_COMPARED)
    parent = os.getpid()
    try:
        process = os.fork()
    except OSError:
        yield
        return
    if process == 0:
        _become_witness(parent, paths, words, program, calls, mode)
    try:
        yield
    finally:
        kill_family(process)
        shutil.rmtree(paths.comparing.temporary, ignore_errors=True)


def _become_witness(
    parent: int, paths: RunPaths, words: Sequence[str], program: Sequence[str], calls: Calls, mode: str
) -> NoReturn:
    try:
        die_with(parent)
        # Ctrl-C in a terminal is for the command.
        os.setsid()
        # Among them are locks of the command.
        close_other_descriptors()
        _witness(paths, words, program, calls, mode)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _tell(paths, {"compared": [], "ended": "", "failed": f"{type(error).__name__}: {error}"})
    finally:
        # The command waits for its other children, and must not find this child when it has ended.
        while True:
            signal.pause()


def _witness(paths: RunPaths, words: Sequence[str], program: Sequence[str], calls: Calls, mode: str) -> None:
    begun = time.time()  # The events of the run have this clock.
    name = name_of_cached([*words, *program, calls], _wait_for_first_step(paths, begun))
    saved = cache_folder() / "compared" / name
    result = read_fields(saved)
    # The key has the modules that the script had imported before its first call.
    if result and result.get("sources") == _hashes(result.get("sources", {}), program):
        _tell(paths, result, mode)
        return
    if reason := _lack_of_protection() or _lack_of_memory(os.getppid()):
        _tell(paths, {"compared": [], "ended": reason, "failed": ""})
        return
    _step_back(calls)
    folder = paths.comparing.root
    folder.mkdir(exist_ok=True)
    noted = False

    def tell(result: Mapping[str, Any]) -> None:
        nonlocal noted
        if noted or not unnamed(result):
            save_verdict(paths, verdict(result, mode), result)
        else:
            noted = True
            _tell(paths, result, mode)

    result = compare(words, program, folder, calls, tell)
    result["sources"] = _sources(paths.comparing)
    if noted:
        save_verdict(paths, verdict(result, mode), result)
    else:
        _tell(paths, result, mode)
    # Another comparison must not be killed.
    if any(not step["reason"] for step in result["compared"]) and _WAS_KILLED not in result["failed"]:
        cache_result(saved, result)


def _wait_for_first_step(paths: RunPaths, begun: float) -> list[Mapping[str, Any]]:
    """Wait for a run's first step; return the records of its program, its first call and this step."""
    time.sleep(DELAY)
    logs: dict[Path, GrowingFile] = {}
    first: dict[str, Mapping[str, Any]] = {}
    events = ("program", "settings", "digests")
    while not first.keys() >= {*events}:
        time.sleep(_LOOK_EVERY)
        for path in sorted(paths.digests.glob("*")):
            for line in logs.setdefault(path, GrowingFile(path)).lines():
                record = json_object(line)
                if record is not None and record.get("time", 0.0) >= begun:
                    first.setdefault(record["event"], record)
    return [first[event] for event in events]


def _sources(paths: RunPaths) -> dict[str, str]:
    """Return the hashes of the source files that the script of a comparison has imported, by path."""
    sources: dict[str, str] = {}
    for path in sorted(paths.digests.glob("*")):
        for event in _events(path, 0.0):
            if event["event"] == "program":
                sources = event["sources"]
    return sources


def _hashes(sources: Iterable[str], program: Sequence[str]) -> dict[str, str]:
    """Return the present hashes of source files, whose paths may be relative to the script's folder.

    Some modules, such as PyTorch's `_ops`, have a path that is not a file. Their hash is empty, as in records
    of a program.
    """
    target = program[program.index("--") + 1]
    folder = Path.cwd().joinpath(*target.split(".")[:-1]) if "-m" in program[:1] else Path(target).parent
    return {source: file_hash(folder.absolute() / source) or "" for source in sources}


def _lack_of_protection() -> str:
    """Return why a comparison could harm files of the run, or an empty string if it cannot."""
    if can_restrict():
        return ""
    return "Landlock, which keeps the check from the files of the script, is not available"


def _lack_of_memory(command: int) -> str:
    """Return why there is not enough memory for a comparison, or an empty string if there is.

    Args:
        command: the process id of the command, whose workers on this host are its descendants.
    """
    import psutil

    from lockstep.system.memory import available_memory

    largest = 0
    for process in psutil.Process(command).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            largest = max(largest, process.memory_info().rss)
    needed, available = _MEMORY_FACTOR * largest, available_memory()
    if needed <= available:
        return ""
    return f"it needs about {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are available"


def _step_back(calls: Calls) -> None:
    """Give the run priority on the processors and the GPUs, and if memory runs out."""
    os.nice(NICE)
    keep_priority()
    # The kernel kills the process with the highest value.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ.update(WITHOUT_GPUS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if calls == "first":
        limit = max(1, round(SHARE * _TEN_MINUTES * usable_cores()))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 60))


def _tell(paths: RunPaths, result: Mapping[str, Any], mode: str = "") -> None:
    """Save the result of a comparison; show a note about differences that no other note names."""
    text = verdict(result, mode)
    save_verdict(paths, text, result)
    if differences := unnamed(result):
        call, part = differences[0]
        begins = f", from {part['begins']} on" if part["begins"] else ""
        rest = (
            f"; {count(len(differences) - 1, 'more part')} in {paths.comparison}" if differences[1:] else ""
        )
        difference = f"{part['part']}: {part['deviation']}{begins}{rest}"
        note(
            f"{call} does not have the numbers of one process: {difference}; please report it with the script"
        )
    elif text.startswith(NOT_COMPARED):
        note(text)
