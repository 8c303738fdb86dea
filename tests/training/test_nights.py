"""A night with a full disk and two lost workers: each place where people look names the problems."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.monitoring.followed_job import open_job
from lockstep.monitoring.page_data import parts
from lockstep.monitoring.past_runs import past_runs, table
from lockstep.monitoring.report import build_report
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.top_text import as_text
from lockstep.system.clock import SystemClock

pytestmark = pytest.mark.ci


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_a_night_is_told_the_same_everywhere(launch: Callable[..., Any], disk: Path) -> None:
    saving = f"--checkpoint {disk / 'kept'} --checkpoint-every 1 --keep 1 --replicas 2 --tag night"
    night = launch(f"-n 2 --min-workers 2 {saving}", "night.py", str(disk))
    assert night.status == 0, night.stderr
    failures, written = (events(night.folder, kind) for kind in ("checkpoint failed", "checkpoint"))
    saved = written[-1]["step"]
    assert len(failures) >= 20
    failed = (
        f"{len(failures)} checkpoints failed, the newest complete one is from step {saved} of 30 (cannot "
        f"write a checkpoint to {disk}/kept: No space left on device)"
    )

    # The command: one note for each chief that has written, and one for the tenth failure of one of them.
    last = night.stderr.splitlines()[-1]
    assert re.match(
        r"lockstep: finished in [^(]* \((\d+ % effective training, )?\d pauses of [^)]*\): 30 steps on 2 "
        rf"workers \(2 lost, 2 joined\); {re.escape(failed)}; ",
        last,
    )
    assert len(re.findall("a checkpoint failed", night.stderr)) <= 4

    # lockstep runs, top, the page, the report.
    (run,) = past_runs([night.folder], 0.0)
    assert (run.lost, run.joined, run.epoch, run.tags) == (2, 2, 6, ("night",))
    assert set(run.metrics) == {"loss", "mae", "val_loss", "val_mae"}
    assert run.effective == pytest.approx(
        events(night.folder, "finished")[0]["effective"] / run.seconds, abs=1e-4
    )
    assert run.end.startswith(f"finished; {failed}")
    heading, row = table([run])
    assert "  2 " in row[heading.index("LOST") - 2 :]
    top = as_text(open_job(str(night.folder), SystemClock(), 1.0).look())
    assert last.removeprefix("lockstep: ") in top
    # One line for those since the last worker joined.
    assert re.search(r"no checkpoint: cannot write a checkpoint .* \(\d+ times\)", top)
    followed = RunFolder(night.folder)
    followed.update()
    summary = parts(followed.state, active=False)["summary"]
    assert (summary["lost"], summary["joined"], summary["troubles"]) == (2, 2, [failed])
    assert failed in build_report(night.folder).html
    # What is folded from the files is what the coordinator has counted, up to measurements that came late.
    assert followed.state.totals.pauses == len(events(night.folder, "paused"))

    # With space, the same command resumes, and the bits are those of a quiet night.
    (disk / "filler").unlink()
    morning = launch(f"-n 1 {saving}", "night.py")
    quiet = launch("-n 1 --replicas 2", "night.py")
    assert (morning.status, quiet.status) == (0, 0), morning.stderr + quiet.stderr
    digests = [events(each.folder, "finished")[0]["digest"] for each in (night, morning, quiet)]
    assert digests[0] == digests[1] == digests[2] != ""
    by_name = {run.name: run for run in past_runs([night.folder, morning.folder], 0.0)}
    assert by_name[morning.folder.name].resumed_from == night.folder.name
    assert by_name[morning.folder.name].end.startswith("finished")
