"""What a job over hosts shows of itself continues when its coordinator is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from host_network import Host
from stepping_job import HERE


def test_another_coordinator_continues_what_the_job_shows(
    hosts: Sequence[Host], read_tensorboard: Callable[[Path], dict[str, list[tuple[int, Any]]]]
) -> None:
    for host in hosts[:2]:
        shutil.copy(HERE / "exporting.py", host.work)
    options = ("--hosts", "node1,node2", "--run-dir", "run", "--tensorboard", "board")
    options += ("--metrics-port", "0", "--ui", "--notify", "exec:cat >> told; echo >> told")
    running = hosts[0].lockstep("run", *options, "exporting.py")
    running.wait_until(lambda: "/metrics" in running.err and "lockstep: the page is at " in running.err)
    (url,) = re.findall(r"lockstep: metrics at (\S+)\n", running.err)

    def shown() -> str:
        ask = f"import urllib.request; print(urllib.request.urlopen({url!r}).read().decode())"
        command = hosts[0].command(sys.executable, "-I", "-c", ask)
        return subprocess.run(command, capture_output=True, text=True).stdout

    board, events = hosts[0].work / "board", hosts[0].work / "run" / "events.jsonl"
    running.wait_until(lambda: (board / "train").exists() and any((board / "train").iterdir()))
    running.wait_until(lambda: read_tensorboard(board / "train").get("epoch_loss"))
    running.wait_until(lambda: "lockstep_steps_total 1\n" in shown())
    (coordinator,) = hosts[0].matching("lockstep.hosts.coordinator_process")
    os.kill(coordinator, signal.SIGKILL)
    running.wait_until(lambda: '"event":"coordinator"' in events.read_text())
    running.wait_until(lambda: 'lockstep_job_info{job="run",' in shown())
    for host in hosts[:2]:
        (host.work / "continue").touch()
    assert running.end() == 0, running.err
    # Events shortly before a takeover may appear twice.
    losses = dict.fromkeys(read_tensorboard(board / "train")["epoch_loss"])
    assert list(losses) == [(0, 1.0), (1, 0.5)]
    assert len(list((board / "train").iterdir())) == 2
    texts = [text for _, text in read_tensorboard(board / "job")["membership"]]
    (found,) = [json.loads(line) for line in events.read_text().splitlines() if '"coordinator"' in line]
    assert f"another coordinator (process {found['pid']}) takes over" in texts[1]
    (told,) = [json.loads(line) for line in (hosts[0].work / "told").read_text().splitlines()]
    assert (told["what"], told["status"], told["workers"]) == ("finished", 0, 2)
