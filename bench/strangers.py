"""What strangers cost a job on two hosts: 500 connections at once to the port at which an agent listens.

    strangers.py [--floods N]

A small model on JAX with one worker on each host; a host is a network namespace (see `hosts_network.py`), and
so is that of the strangers, who connect and send nothing. The longest step from the first connection until
the agent has closed the last one is compared with the longest step of as much time before. The processor time
is that of the agent, for all connections of a flood. On a machine that others use, start it with `chrt -r 1`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hosts_member import address
from hosts_network import available, network, write_ssh
from programs import HERE, environment
from report import print_row

FLOODS = 9
CONNECTIONS = 500
START_SECONDS = 300.0
END_SECONDS = 120.0
QUIET_SECONDS = 8.0
"""At least; longer than a flood."""
FLOOD = f"""
import json, select, socket, sys, time
began, poll, streams = time.monotonic(), select.poll(), []
for _ in range({CONNECTIONS}):
    streams.append(stream := socket.socket())
    stream.setblocking(False)
    stream.connect_ex((sys.argv[1], int(sys.argv[2])))
    poll.register(stream, select.POLLIN)
left = {{stream.fileno() for stream in streams}}
while left:
    for stream, _ in poll.poll():
        poll.unregister(stream)
        left.discard(stream)
print(json.dumps([began, time.monotonic()]))
"""


def listener(namespace: str) -> tuple[int, int]:
    """Return the port at which the agent of a host listens, and its process."""
    command = ["ip", "netns", "exec", namespace, "ss", "-ltnpH"]
    (line,) = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return int(line.split()[3].rpartition(":")[2]), int(line.rpartition("pid=")[2].partition(",")[0])


def processor_seconds(process: int) -> float:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def wait_for(path: Path, job: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + START_SECONDS
    while not path.exists():
        if job.poll() is not None or time.monotonic() > end:
            sys.exit("the job has not started")
        time.sleep(0.1)


def measure(floods: int) -> None:
    with network(3) as namespaces, tempfile.TemporaryDirectory(prefix="lockstep-bench-") as temporary:
        folder = Path(temporary)
        write_ssh(folder)
        hosts = ["--hosts", f"{address(0)},{address(1)}", "--threads-per-worker", "1"]
        run = [sys.executable, "-m", "lockstep", "run", *hosts, "--run-dir", str(folder / "run")]
        variables = os.environ | environment("jax", 1) | {"PATH": f"{folder}:{os.environ['PATH']}"}
        script = [str(HERE / "strangers_training.py"), str(folder)]
        command = ["ip", "netns", "exec", namespaces[0], *run, *script]
        job = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL)
        windows, used = [], []
        try:
            wait_for(folder / "started", job)
            port, agent = listener(namespaces[1])
            flood = ["ip", "netns", "exec", namespaces[2], sys.executable, "-c", FLOOD, address(1), str(port)]
            for _ in range(floods):
                time.sleep(QUIET_SECONDS)
                before = processor_seconds(agent)
                answer = subprocess.run(flood, check=True, capture_output=True, timeout=END_SECONDS)
                used.append(processor_seconds(agent) - before)
                windows.append(json.loads(answer.stdout))
            (folder / "stop").touch()
            if job.wait(END_SECONDS):
                sys.exit("the job has failed")
        finally:
            job.terminate()
            job.wait()
        ends = np.array(json.loads((folder / "ends").read_text()))
    report(ends, windows, used)


def report(
    ends: "np.ndarray[tuple[int], np.dtype[np.float64]]", windows: list[list[float]], used: list[float]
) -> None:
    steps = np.diff(ends)

    def longest(begin: float, end: float) -> float:
        """Return the longest of the steps that were under way between two times."""
        return float(steps[(ends[1:] > begin) & (ends[:-1] < end)].max())

    flooded = [longest(begin, end) for begin, end in windows]
    quiet = [longest(2 * begin - end, begin) for begin, end in windows]
    print(f"{CONNECTIONS} connections at once, {len(windows)} times, {len(steps)} steps: median (p10-p90)")
    print_row("a step", steps.tolist(), "ms")
    print_row("until the agent has closed all connections", [end - begin for begin, end in windows], "s")
    print_row("the longest step meanwhile", flooded, "ms")
    print_row("the longest step of as much time before", quiet, "ms")
    differences = [during - before for during, before in zip(flooded, quiet, strict=True)]
    print_row("the difference", differences, "ms", "50")
    print_row("processor time of the agent", used, "ms")


def main(floods: int = FLOODS) -> None:
    if not (available() and shutil.which("ss")):
        print("skipping the strangers, which need root and the commands ip and ss")
        return
    measure(floods)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--floods", type=int, default=FLOODS, help="at least 2")
    main(parser.parse_args().floods)
