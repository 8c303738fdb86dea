"""A custom loop ends on all workers when one is lost, and resumes from the program's checkpoint."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "killed_chief.py"


@pytest.mark.slow
def test_restarted_workers_resume_from_the_chiefs_checkpoint(
    host: Any, lean: Callable[..., dict[str, str]]
) -> None:
    variables = {"KERAS_BACKEND": "tensorflow", **lean(PROGRAM, "tensorflow")}

    def start(index: int) -> Any:
        cluster = {"chief": [f"127.0.0.1:{host.ports[0]}"], "worker": [f"127.0.0.1:{host.ports[1]}"]}
        kind = "worker" if index else "chief"
        return host.start(host.config(0, kind=kind, **cluster), str(PROGRAM), "saved", **variables)

    chief, other = start(0), start(1)
    assert chief.status() == -signal.SIGKILL
    assert other.status() == 1
    (note,) = [
        line for line in other.text.splitlines() if line.endswith("; the job ends: restart all workers")
    ]
    assert "so no new worker can join: restart the job to resume from the program's checkpoint" in note
    assert "and it joins" not in note

    again = [start(1), start(0)]
    shown = [terminal.end() for terminal in again]
    assert all("resuming at step 10 of epoch 0" in text for text in shown)
    losses = [float(loss) for loss in re.findall(r"epoch \d: .* loss ([\d.]+)", shown[0])]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    digests = [re.findall("digest: .*", text) for text in shown]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
    assert [path.name for path in (host.folder / "saved").glob("of_worker_*")] == []
