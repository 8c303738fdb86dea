"""How much of its time a job trains while its hosts are lost and come back, as spot machines do.

    spot.py [--losses PER_HOUR] [--epochs N] [--seed N] [--cores SHARE] [--keep FOLDER]

A job has one worker on each of four hosts (`tests/hosts/host_network.py`, which needs root), and the command
is on a further one. Each of the four has a quota of processor time. Once all workers train, a host loses its
processes and its network at random times, and comes back after 30 to 120 seconds. One host always stays. The
rows are the effective training time as a share of the time from the command to its end, and from the first
step to its end. The digest must be that of one process that is not disturbed.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs import HERE, environment
from turns import FailedError

sys.path.insert(0, str(HERE.parent / "tests/hosts"))

from host_network import Host, HostNetwork, Running, Unavailable

HOSTS = 4
AWAY = 30.0, 120.0
"""Seconds, the least and the most, from the loss of a host to its return."""
SCRIPT = str(HERE / "spot_training.py")
PATIENCE = 4 * 3600.0


@dataclass
class Market:
    """Takes hosts away and gives them back.

    Attributes:
        events: the event log of the job.
        away: by the index of a host, when it comes back.
        losses: how many hosts were lost so far.
    """

    dice: random.Random
    hosts: list[Host]
    mean: float
    events: Path
    away: dict[int, float] = field(default_factory=dict)
    losses: int = 0

    def run(self, job: Running) -> None:
        """Play until the job ends."""
        due = time.monotonic() + self.dice.expovariate(1 / self.mean)
        deadline = time.monotonic() + PATIENCE
        while job.process.poll() is None:
            now = time.monotonic()
            if now > deadline:
                raise FailedError(f"the job has not ended: {job.err[-2000:]}")
            for index in [index for index, back in self.away.items() if back <= now]:
                del self.away[index]
                self.hosts[index].reconnect()
            if now >= due:
                due = now + self.dice.expovariate(1 / self.mean)
                there = [index for index in range(len(self.hosts)) if index not in self.away]
                unnoticed = self.losses - self.events.read_text().count('"event":"host lost"')
                if len(there) > 1 and members(self.events) - unnoticed > 1:
                    self._lose(self.dice.choice(there), now)
            time.sleep(0.05)

    def _lose(self, index: int, now: float) -> None:
        host = self.hosts[index]
        host.cut()
        host.signal_all(signal.SIGKILL)
        host.remove_abandoned()
        self.away[index] = now + self.dice.uniform(*AWAY)
        self.losses += 1


def trained_workers(events: Path) -> int:
    """The number of workers that have taken a step."""
    return events.read_text().count('"event":"first step"')


def members(events: Path) -> int:
    """The number of workers of the newest view."""
    views = [line for line in events.read_text().splitlines() if '"event":"view"' in line]
    return len(json.loads(views[-1])["workers"]) if views else HOSTS


@contextmanager
def quotas(network: HostNetwork, hosts: list[Host], cores: float) -> Iterator[None]:
    """Limit the processor time of each host: of its `sshd`, and so of what this starts.

    Args:
        cores: the limit, in cores.

    Raises:
        Unavailable: this machine has no writable control groups for processors.
    """
    old = Path("/sys/fs/cgroup/cpu/tasks").exists()
    root = Path("/sys/fs/cgroup/cpu" if old else "/sys/fs/cgroup")
    groups = [root / f"{network.folder.name}-{host.name}" for host in hosts]
    try:
        for host, group in zip(hosts, groups, strict=True):
            group.mkdir()
            quota = str(int(100_000 * cores))
            (group / ("cpu.cfs_quota_us" if old else "cpu.max")).write_text(quota)
            (group / "cgroup.procs").write_text((network.folder / f"{host.name}.pid").read_text())
    except OSError as error:
        raise Unavailable(f"no quota of processor time: {error}") from None
    try:
        yield
    finally:
        for group in groups:
            for process in (group / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(process)
            group.rmdir()


def trained(
    command: Host, where: list[str], epochs: int, market: Market | None
) -> tuple[list[dict[str, Any]], str]:
    """Run the job; return its events and its last line."""
    run = "calm" if market is None else "spot"
    options = [*where, "--replicas", str(HOSTS), "--threads-per-worker", "1", "--max-restarts", "100000"]
    options += ["--backend", "jax", "--run-dir", run, "--witness", "off"]
    job = command.lockstep("run", *options, SCRIPT, str(epochs), **environment("jax", 1))
    if market is not None:
        job.wait_until(lambda: market.events.exists() and trained_workers(market.events) == HOSTS)
        market.run(job)
    status = job.end(PATIENCE)
    if status:
        raise FailedError(f"status {status}: {job.err[-2000:]}")
    lines = (command.work / run / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], job.err.splitlines()[-1]


def main(losses: float, epochs: int, seed: int, cores: float, keep: Path | None) -> None:
    try:
        with tempfile.TemporaryDirectory() as cache, HostNetwork.open(HOSTS + 1, Path(cache)) as network:
            command, *hosts = network.hosts
            market = Market(random.Random(seed), hosts, 3600 / losses, command.work / "spot/events.jsonl")
            names = ",".join(host.name for host in hosts)
            with quotas(network, hosts, cores):
                events, line = trained(command, ["--hosts", names], epochs, market)
                for index in market.away:
                    hosts[index].reconnect()
            if keep is not None:
                shutil.copytree(command.work / "spot", keep)
            (*_, calm), _ = trained(command, ["-n", "1"], epochs, None)
    except Unavailable as why:
        print(f"skipping the spot market: {why}")
        return
    disturbed = events[-1]
    if not calm["digest"] or disturbed["digest"] != calm["digest"]:
        raise FailedError(f"other bits: {line}")
    first_steps = [event["time"] for event in events if event["event"] == "first step"][:HOSTS]
    trained_for = disturbed["time"] - max(first_steps)
    print(
        f"{HOSTS} hosts, {cores:g} of a core each, {losses:g} losses an hour, "
        f"{market.losses} of them; equal digests"
    )
    goal = "   to reach 0.97" * (losses <= 12)
    for name, seconds in [("command", disturbed["seconds"]), ("first step", trained_for)]:
        share = disturbed["effective"] / seconds
        print(f"  effective training time from the {name}: {share:.3f} of {seconds:.0f} s{goal}")
    pauses = f"{disturbed['pauses']}, {disturbed['paused']:.1f} s in all"
    print(f"  pauses: {pauses}; {disturbed['joined_hosts']} hosts joined")
    print(f"  {line}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=float, default=12.0, help="lost hosts an hour")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of 16 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=float, default=0.5, help="of each host")
    parser.add_argument("--keep", type=Path, help="copy the run folder of the disturbed job here")
    options = parser.parse_args()
    main(options.losses, options.epochs, options.seed, options.cores, options.keep)
