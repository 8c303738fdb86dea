"""Publishes a metric as a training would, waits until the file `continue` exists, and publishes another."""

import time
from pathlib import Path

from lockstep.observability.measurements import MetricsRecorded
from lockstep.worker import job

for trained in (1, 2):
    if job.is_chief():
        metrics = MetricsRecorded(call="fit 1", epoch=trained, trained=trained, values={"loss": 1 / trained})
        job.current().events.publish(metrics)
    while trained == 1 and not Path("continue").exists():
        time.sleep(0.01)
