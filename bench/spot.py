"""How much of its time a job trains while its hosts are lost and come back, as spot machines do.

    spot.py [--losses PER_HOUR] [--epochs N] [--seed N]

A job has one worker on each of four hosts (`tests/hosts/host_network.py`, which needs root), and the command
is on a further one. Once all workers train, a host loses its processes and its network at random times, and
comes back after 30 to 120 seconds. One host always stays. The row is the effective training time as a share
of the time from the command to its end. The digest must be that of a job that loses nothing.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
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
                if len(there) > 1 and members(self.events) > 1:
                    self._lose(self.dice.choice(there), now)
            time.sleep(0.05)

    def _lose(self, index: int, now: float) -> None:
        host = self.hosts[index]
        host.cut()
        host.signal_all(signal.SIGKILL)
        host.remove_abandoned()
        self.away[index] = now + self.dice.uniform(*AWAY)
        self.losses += 1


def first_steps(events: Path) -> int:
    """The number of workers that have taken a step."""
    return events.read_text().count('"event":"first step"')


def members(events: Path) -> int:
    """The number of workers of the newest view."""
    views = [line for line in events.read_text().splitlines() if '"event":"view"' in line]
    return len(json.loads(views[-1])["workers"]) if views else HOSTS


def trained(
    command: Host, hosts: list[Host], epochs: int, market: Market | None
) -> tuple[dict[str, Any], str]:
    """Run the job; return its `finished` event and its last line."""
    run = "calm" if market is None else "spot"
    names = ",".join(host.name for host in hosts)
    options = [
        "--hosts",
        names,
        "--replicas",
        str(HOSTS),
        "--threads-per-worker",
        "1",
        "--max-restarts",
        "100000",
    ]
    options += ["--backend", "jax", "--run-dir", run, "--witness", "off"]
    job = command.lockstep("run", *options, SCRIPT, str(epochs), **environment("jax", 1))
    if market is not None:
        job.wait_until(lambda: market.events.exists() and first_steps(market.events) == HOSTS)
        market.run(job)
    status = job.end(PATIENCE)
    if status:
        raise FailedError(f"status {status}: {job.err[-2000:]}")
    lines = (command.work / run / "events.jsonl").read_text().splitlines()
    (finished,) = [event for event in map(json.loads, lines) if event["event"] == "finished"]
    return finished, job.err.splitlines()[-1]


def main(losses: float = 12.0, epochs: int = 60, seed: int = 0) -> None:
    try:
        with tempfile.TemporaryDirectory() as cache, HostNetwork.open(HOSTS + 1, Path(cache)) as network:
            command, *hosts = network.hosts
            events = command.work / "spot/events.jsonl"
            market = Market(random.Random(seed), hosts, 3600 / losses, events)
            disturbed, line = trained(command, hosts, epochs, market)
            for index in market.away:
                hosts[index].reconnect()
            calm, _ = trained(command, hosts, epochs, None)
    except Unavailable as why:
        print(f"skipping the spot market: {why}")
        return
    if not calm["digest"] or disturbed["digest"] != calm["digest"]:
        raise FailedError(f"other bits: {line}")
    share = disturbed["effective"] / disturbed["seconds"]
    print(f"{HOSTS} hosts, {losses:g} losses an hour, {market.losses} of them; equal digests")
    print(
        f"  effective training time: {share:.3f} of {disturbed['seconds']:.0f} s"
        + "   to reach 0.97" * (losses <= 12)
    )
    pauses = f"{disturbed['pauses']}, {disturbed['paused']:.1f} s in all"
    print(f"  pauses: {pauses}; {disturbed['joined_hosts']} hosts joined")
    print(f"  calm: {calm['effective'] / calm['seconds']:.3f} of {calm['seconds']:.0f} s")
    print(f"  {line}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=float, default=12.0, help="lost hosts an hour")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of 16 steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.losses, options.epochs, options.seed)
