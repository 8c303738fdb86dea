"""The exports of a job: TensorBoard's files, OpenMetrics and notifications, while it runs.

The process of the coordinator writes them, not the chief: its bus has the events of all workers and hosts, it
outlives every worker, and the interpreter of a worker is busy. A thread takes the events from a feed, so a
slow disk never blocks decisions. The values of OpenMetrics are added up where events are published, because a
counter must not miss any. The command opens their port, so that a port in use is refused before processes
start; the keeper passes it on to each coordinator. `Exports` is not part of the job. It belongs to the
command, so a command that takes over a job passes its own.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.observability.bus import Bus


@dataclass(frozen=True)
class Exports:
    """The exports of the coordinator's process; a coordinator that takes over continues them.

    Attributes:
        tensorboard: the folder of TensorBoard's files, absolute; None without TensorBoard.
        metrics: descriptor of the socket at which `/metrics` listens; None without metrics.
        notifier: descriptor of the socket to the notifier; None without a notifier.
    """

    tensorboard: Path | None = None
    metrics: int | None = None
    notifier: int | None = None


NO_EXPORTS = Exports()


@contextmanager
def exported(
    events: Bus, exports: Exports, labels: Mapping[str, str], workers: int, complain: Callable[[str], None]
) -> Iterator[None]:
    """Show the events of a job during the block.

    Args:
        events: the bus of the job.
        exports: the exports of the job; their descriptors are closed after the block.
        labels: the labels of the job, by their names.
        workers: the number of its members before the first event.
        complain: shows a line about a failure, on any thread.
    """
    with ExitStack() as ends:
        if exports.tensorboard is not None:
            from lockstep.observability.tensorboard_writer import written_for_tensorboard

            ends.enter_context(written_for_tensorboard(events, exports.tensorboard, complain))
        if exports.metrics is not None:
            from lockstep.observability.job_metrics import KINDS, JobMetrics
            from lockstep.observability.metrics_server import served

            metrics = JobMetrics(labels, workers)
            ends.callback(events.subscribe(metrics.add, *KINDS))
            ends.enter_context(served(socket.socket(fileno=exports.metrics), metrics.text))
        yield
