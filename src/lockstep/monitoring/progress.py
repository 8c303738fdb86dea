"""The progress of training in a run, the time that the rest takes, and epochs that were better. Pure."""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lockstep.observability.growth import Columns
from lockstep.observability.run_state import CallInfo, RunState, WorkerInfo
from lockstep.observability.step_recorder import trains

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MANY = 8
"""The number of measurements from which only the newer half of the time says how long the rest takes."""

_JUDGED = re.compile(
    r"(?:^|_)(?:(?P<lower>loss|error|mae|mse|mape|msle|rmse|crossentropy|perplexity|divergence|hinge"
    r"|brier(?:_score)?)|(?P<higher>acc|accuracy|auc|precision|recall|score|f1|io_?u))"
    r"(?:[_@]?(?:at|top|k|rate|\d))*$",
    re.IGNORECASE,
)
"""The ends of the names of metrics that are better if they are lower, or higher; of others, that is unknown.

What comes before may be the name of an output.
"""


@dataclass(frozen=True)
class BetterEpoch:
    """An epoch at whose end a metric was better than at the end of the last one.

    Attributes:
        value: the best value of the metric.
        epoch: the first epoch that has it, from 1.
    """

    value: float
    epoch: int


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run in its last call that trains.

    Attributes:
        call: its name.
        step: the number of the last step in the call; None before the first.
        steps: the number of its steps, if it ends with its last epoch; None if it is unknown.
        epoch: the epoch in progress, or the last one if the call has ended, from 1; None if it has none.
        epochs: the last epoch that the call requests; None if it is unknown.
        left: seconds until its last step at the present speed; None if they are unknown, or it has ended.
    """

    call: str
    step: int | None
    steps: int | None
    epoch: int | None
    epochs: int | None
    left: float | None


def progress(run: RunState) -> TrainingProgress | None:
    """Return the progress of a run, or None before its first call that trains."""
    index = max((at for at, call in enumerate(run.calls) if trains(call.name)), default=None)
    if index is None:
        return None
    call = run.calls[index]
    rows = [(info, taken) for info in run.workers.values() if len(taken := _rows(info, index))]
    leader = max(rows, key=lambda row: row[1]["number"][-1], default=None)
    step = None if leader is None else int(leader[1]["number"][-1])
    epoch = _epoch(run, call)
    steps = _steps(run, call, None if leader is None else leader[1])
    left = None
    if call.ended is None and run.finished is None:
        left = _left_in_epochs(run, call) if leader is None else _left(leader[1], steps)
    return TrainingProgress(call.name, step, steps, epoch, call.epochs, left)


def metric_rank(name: str) -> int:
    """Return the rank of a metric for displays of only some: the losses come first."""
    return {"loss": 0, "val_loss": 1}.get(name, 2)


def better_epochs(run: RunState) -> dict[str, BetterEpoch]:
    """Return the last `fit`'s best epochs for metrics whose last and newest values are worse.

    If it was resumed, its earlier epochs also count.
    """
    import numpy as np

    epochs_by_metric: dict[str, BetterEpoch] = {}
    spans = _spans_of_last_fit(run)
    for name, columns in run.metrics.items():
        chosen = np.zeros(len(columns), bool)
        for span in spans:
            chosen |= span.contains(columns)
        values, epochs = (columns.column(column)[chosen] for column in ("value", "epoch"))
        judged = _JUDGED.search(name)
        if judged is None or not np.isfinite(values).any():
            continue
        sign = 1.0 if judged["lower"] else -1.0
        best = int(np.nanargmin(np.where(np.isfinite(values), sign * values, np.nan)))
        newest = run.values.get(name, float(values[-1]))
        # The epoch in progress may already be better.
        is_worse = newest is None or not sign * newest <= sign * values[best]
        if values[best] != values[-1] and is_worse:
            epochs_by_metric[name] = BetterEpoch(float(values[best]), int(epochs[best]))
    return epochs_by_metric


class _Span(NamedTuple):
    """The epochs that ended between two times, before an epoch."""

    since: float
    until: float
    before: float

    def contains(self, columns: Columns) -> "npt.NDArray[np.bool_]":
        """Return which rows are within the span."""
        times = columns.column("time")
        within: npt.NDArray[np.bool_] = (times >= self.since) & (times <= self.until)
        return within & (columns.column("epoch") < self.before)


def _spans_of_last_fit(run: RunState) -> list[_Span]:
    """Return the last `fit`'s epochs; of an earlier start, only those before a later start's first epoch."""
    name = next((call.name for call in reversed(run.calls) if re.fullmatch(r"fit \d+", call.name)), None)
    spans: list[_Span] = []
    before = next_began = math.inf
    for call in reversed([call for call in run.calls if call.name == name]):
        span = _Span(call.began, next_began if call.ended is None else call.ended, before)
        spans.append(span)
        epochs = [columns.column("epoch")[span.contains(columns)] for columns in run.metrics.values()]
        # Before the end of its first epoch, it is not known to continue an earlier start.
        first_epoch = before if before < math.inf else 0.0
        before = min((float(each.min()) for each in epochs if len(each)), default=first_epoch)
        next_began = call.began
    return spans


def _rows(info: WorkerInfo, call: int) -> "npt.NDArray[np.void]":
    """Return `time`, `number` and `trained` of the measurements of a worker in a call."""
    import numpy as np

    chosen = info.steps.column("call") == call if len(info.steps) else np.zeros(0, bool)
    names = ("time", "number", "trained")
    rows = np.zeros(int(chosen.sum()), [(name, np.float64) for name in names])
    for name in names if len(rows) else ():
        rows[name] = info.steps.column(name)[chosen]
    return rows


def _epoch(run: RunState, call: CallInfo) -> int | None:
    """Return the epoch in progress in a `fit`, or the last one if it has ended."""
    if not call.name.startswith("fit"):
        return None
    last = max((int(epoch) for epoch, _, _ in _ended_epochs(run, call)), default=call.initial_epoch or 0)
    return last + (call.ended is None and run.finished is None)


def _ended_epochs(run: RunState, call: CallInfo) -> list[tuple[float, float, float]]:
    """Return the epochs of a call that have ended, and the training steps and the times of their ends."""
    until, names = math.inf if call.ended is None else call.ended, ("epoch", "trained", "time")
    for columns in run.metrics.values():
        chosen = (columns.column("time") >= call.began) & (columns.column("time") <= until)
        if chosen.any():
            return list(zip(*(columns.column(name)[chosen] for name in names), strict=True))
    return []


def _steps(run: RunState, call: CallInfo, rows: "npt.NDArray[np.void] | None") -> int | None:
    """Return the number of steps of a `fit`, from the known or the measured length of its epochs."""
    if call.epochs is None:
        return None
    first = call.initial_epoch or 0
    length: float | None = call.steps_per_epoch
    if length is None and rows is not None and (ended := _ended_epochs(run, call)):
        before = rows["trained"][-1] - rows["number"][-1]
        epoch, trained, _ = ended[-1]
        length = (trained - before) / (epoch - first) if epoch > first else None
    return None if length is None else round((call.epochs - first) * length)


def _left_in_epochs(run: RunState, call: CallInfo) -> float | None:
    """Return the time of the remaining epochs, if steps are not measured; the first epoch compiles."""
    ended = _ended_epochs(run, call)
    if call.epochs is None or len(ended) < 2:
        return None
    (first, _, since), (last, _, until) = ended[0], ended[-1]
    return max(0.0, (call.epochs - last) * (until - since) / (last - first)) if last > first else None


def _left(rows: "npt.NDArray[np.void]", steps: int | None) -> float | None:
    """Return the time of the remaining steps at the speed of the last ones."""
    # The first row is that of the first step, which compiles.
    rows = rows[1:]
    if steps is None or len(rows) < 2:
        return None
    if len(rows) >= _MANY:
        rows = rows[rows["time"] >= (rows["time"][0] + rows["time"][-1]) / 2]
    taken = float(rows["number"][-1] - rows["number"][0])
    if taken <= 0:
        return None
    rate = float(rows["time"][-1] - rows["time"][0]) / taken
    return max(0.0, (steps - float(rows["number"][-1])) * rate)
