"""Writes metrics, the times of steps, load and membership as TensorBoard's event files, while the job runs.

`Points` decides which points go to which file. A thread writes them, because a disk may be slow. Only the
package `tensorboard` is needed, never TensorFlow.
"""

import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time as wall_time
from typing import NamedTuple

from lockstep.observability.bus import Bus, Feed, PublishedEvent
from lockstep.observability.events import (
    CoordinatorStarted,
    Event,
    JobFinished,
    JobStarted,
    TrainingResumed,
    ViewStarted,
)
from lockstep.observability.measurements import STEP_PARTS, LoadMeasured, MetricsRecorded, StepsMeasured
from lockstep.observability.run_state import RunState
from lockstep.observability.step_recorder import serves, trains
from lockstep.system.files import FOLDER_MODE
from lockstep.system.prose import count, date_text, name_workers

_MEMBERSHIP: tuple[type[Event], ...] = (JobStarted, ViewStarted, CoordinatorStarted, JobFinished)
_KINDS = (MetricsRecorded, StepsMeasured, LoadMeasured, TrainingResumed, *_MEMBERSHIP)
_QUEUE = 8192
_PATIENCE = 10.0
"""Seconds at the end of a job in which the disk can take what remains."""
_MOST_CALLS = 32
"""The number of calls of `fit` whose epochs are shown: each has separate runs."""
_JOB = "job"


class Point(NamedTuple):
    """One value of a series.

    Attributes:
        run: the folder within the folder of all runs, which TensorBoard shows as a run.
        tag: the name of the series.
        step: its position in the series.
        time: the time of the point, in seconds since 1970.
        value: a number, or text in Markdown.
    """

    run: str
    tag: str
    step: int
    time: float
    value: float | str


class Points:
    """Turns the events of a job into points.

    Points without a step get the last known training step. They are omitted until one is known, because
    TensorBoard removes later points of an earlier run of the job when a point with a smaller step follows.
    """

    def __init__(self) -> None:
        self._state = RunState(keeps_history=False)
        self._waiting: list[PublishedEvent] = []
        self._text: tuple[int, str] = (-1, "")

    def of(self, published: PublishedEvent) -> list[Point]:
        """Return the points that follow from an event."""
        points, time, step = [], published.time, self._step
        self._state = self._state.after(published)
        match event := published.event:
            case MetricsRecorded():
                points = _metrics(event, time)
            case StepsMeasured() if trains(event.call) or serves(event.call):
                points = _steps(f"worker-{published.worker}", event, time)
            case LoadMeasured() if step is not None:
                points = _load(event, step, time)
            case _ if isinstance(event, _MEMBERSHIP):
                self._waiting.append(published)
        return points + self._membership()

    @property
    def _step(self) -> int | None:
        """The last known training step; a server may be the first to know it."""
        served = [sums.trained for sums in self._state.served.values()]
        return max((step for step in (self._state.trained, *served) if step is not None), default=None)

    def _membership(self) -> list[Point]:
        last_step = self._step
        if last_step is None:
            return []
        points = []
        for time, _, event in self._waiting:
            line = f"* {date_text(time)}: {_described(event)}"
            # TensorBoard shows one text for each step.
            step, text = self._text
            text = f"{text}\n{line}" if step == last_step else line
            self._text = (last_step, text)
            points.append(Point(_JOB, "membership", last_step, time, text))
            if isinstance(event, JobStarted):
                points.append(Point(_JOB, "workers", last_step, time, event.job["workers"]))
            elif isinstance(event, ViewStarted):
                points.append(Point(_JOB, "workers", last_step, time, len(event.workers)))
        self._waiting.clear()
        return points


def _described(event: Event) -> str:
    match event:
        case JobStarted(job=job):
            return f"the job begins with {count(job['workers'], 'worker')}"
        case ViewStarted(number, workers, reason):
            return f"view {number} with {name_workers(workers)}: {reason}"
        case CoordinatorStarted(pid=pid):
            return f"another coordinator (process {pid}) takes over"
        case JobFinished(status=status, message=message):
            return f"the job ends with status {status}" + (f": {message}" if message else "")
    raise AssertionError(event)


def _metrics(event: MetricsRecorded, time: float) -> list[Point]:
    """Return metrics under the names that Keras's callback `TensorBoard` gives them."""
    points = []
    number = int(event.call[4:]) if re.fullmatch("fit [0-9]+", event.call) else 0
    above = "" if number == 1 else f"fit-{number}/"
    for name, recorded in event.values.items():
        value = math.nan if recorded is None else recorded
        run, tag = "train", f"batch_{name}"
        if name.startswith("val_"):
            name = name.removeprefix("val_")
            run, tag = "validation", f"evaluation_{name}_vs_iterations"
        points.append(Point(run, tag, event.trained, time, value))
        if event.epoch is not None and 1 <= number <= _MOST_CALLS:
            points.append(Point(above + run, f"epoch_{name}", event.epoch - 1, time, value))
    return points


def _steps(run: str, event: StepsMeasured, time: float) -> list[Point]:
    if not event.count:
        return []
    served = serves(event.call)
    values = {
        "updates/seconds_per_update" if served else "steps/seconds_per_step": event.seconds / event.count
    }
    if event.staleness is not None and event.largest_staleness is not None:
        values |= {
            "steps/staleness": event.staleness / event.count,
            "steps/largest_staleness": float(event.largest_staleness),
        }
    if event.seconds and event.examples:
        values["steps/examples_per_second"] = event.examples / event.seconds
    if event.seconds:
        values |= {f"share/{part}": getattr(event, part) / event.seconds for part in STEP_PARTS}
    return [Point(run, tag, event.trained, time, value) for tag, value in values.items()]


def _load(event: LoadMeasured, step: int, time: float) -> list[Point]:
    host = "host-" + re.sub(r"[^\w.()-]", "_", event.host)
    values: dict[tuple[str, str], float | None] = {
        (host, f"load/{figure}"): getattr(event, figure)
        for figure in ("busy", "memory_used", "swapping", "throttled")
    }
    for gpu in event.gpus:
        for figure in ("utilization", "memory_used", "temperature", "power"):
            values[host, f"gpu-{gpu.index}/{figure}"] = getattr(gpu, figure)
    for worker in event.workers:
        for figure in ("cores", "delayed", "memory", "faults"):
            values[f"worker-{worker.worker}", f"load/{figure}"] = getattr(worker, figure)
    return [Point(run, tag, step, time, value) for (run, tag), value in values.items() if value is not None]


class EventFiles:
    """The event files of this process: one in the folder of each run.

    A file is open only while points are written to it, so many runs do not need many descriptors.

    Args:
        folder: the folder of all runs.

    Raises:
        ImportError: the package `tensorboard` is not installed, or does not work.
    """

    def __init__(self, folder: Path) -> None:
        # This takes a second. TensorBoard's own EventFileWriter would import TensorFlow if that is installed.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._records = event_pb2.Event, RecordWriter
        self._summary, self._tensor = summary_pb2, tensor_pb2.TensorProto
        self._text_type = types_pb2.DT_STRING
        self._folder = folder
        self._files: dict[str, Path] = {}

    def write(self, points: Iterable[Point]) -> None:
        """Append points to the files of their runs.

        Raises:
            OSError: a file cannot be written.
        """
        by_run: dict[str, list[Point]] = {}
        for point in points:
            by_run.setdefault(point.run, []).append(point)
        for run, of_run in by_run.items():
            begins = run not in self._files
            if begins:
                self._files[run] = self._new_file(run)
            with self._files[run].open("xb" if begins else "ab") as file:
                records = self._records(file)
                if begins:
                    version = self._event(wall_time=of_run[0].time, file_version="brain.Event:2")
                    records.write(version.SerializeToString())
                for point in of_run:
                    records.write(self._encoded(point))

    def _new_file(self, run: str) -> Path:
        folder = self._folder / run
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        # TensorBoard reads the files of a run in the order of their names.
        return folder / f"events.out.tfevents.{wall_time():017.6f}.{socket.gethostname()}.{os.getpid()}"

    def _encoded(self, point: Point) -> bytes:
        tag, summary = _encodable(point.tag), self._summary
        if isinstance(point.value, str):
            plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
            kind = summary.SummaryMetadata(plugin_data=plugin, data_class=summary.DATA_CLASS_TENSOR)
            text = self._tensor(dtype=self._text_type, string_val=[_encodable(point.value).encode()])
            value = summary.Summary.Value(tag=tag, metadata=kind, tensor=text)
        else:
            value = summary.Summary.Value(tag=tag, simple_value=point.value)
        event = self._event(wall_time=point.time, step=point.step, summary=summary.Summary(value=[value]))
        encoded: bytes = event.SerializeToString()
        return encoded


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


@contextmanager
def written_for_tensorboard(events: Bus, folder: Path, complain: Callable[[str], None]) -> Iterator[None]:
    """Write the events of a job for TensorBoard during the block, from a thread.

    A slow disk costs points, but not the caller's time, except for some seconds at the end.

    Args:
        events: the bus of the job.
        folder: the folder of all runs; earlier files in it remain.
        complain: shows a line about lost points, on any thread.
    """
    feed = events.feed(*_KINDS, size=_QUEUE)
    # A disk that hangs must not keep the process from ending.
    thread = threading.Thread(
        target=_write, args=(feed, folder, complain), name="lockstep tensorboard", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        feed.close()
        thread.join(_PATIENCE)
        if thread.is_alive():
            complain(f"the last points for TensorBoard are lost: writing to {folder} takes too long")


def _write(feed: Feed, folder: Path, complain: Callable[[str], None]) -> None:
    try:
        files, points, complete = EventFiles(folder), Points(), True
        while (taken := feed.take())[0]:
            published, lost = taken
            if lost and complete:
                complete = False
                complain(f"{folder} is slow: some points for TensorBoard are lost")
            files.write(point for event in published for point in points.of(event))
    except ImportError as error:
        complain(f"TensorBoard's files cannot be written: {error}")
    except OSError as error:
        complain(f"cannot write to {folder}: {error.strerror}; further points for TensorBoard are lost")
    finally:
        feed.close()
