"""The callback that reports metrics to the caller of a function."""

from typing import Any

import keras

from lockstep.worker import reports


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the metrics of each epoch of a `fit`: `lockstep.ray.fit` returns the last ones.

    It replaces Ray Train's `ReportCheckpointCallback` in training functions. It does not save checkpoints:
    `lockstep.ray.fit(..., checkpoint=...)` does.

    Attributes:
        metrics: the metrics of the last epoch, with its validation; empty before.
        report: the number of reports that all of these callbacks had made then.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> from lockstep.ray import ReportCallback
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> report = ReportCallback()
        >>> history = model.fit(np.ones((8, 3)), np.ones(8), verbose=0, callbacks=[report])
        >>> report.metrics == {"loss": history.history["loss"][-1]}
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}
        self.report = 0
        reports.add(self)

    def set_model(self, model: Any) -> None:
        """Ignore the model, which may be deleted before this callback, which lasts as long as the process."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the metrics of an epoch."""
        self.metrics = {name: float(value) for name, value in (logs or {}).items()}
        self.report = reports.count() + 1
