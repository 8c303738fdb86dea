"""What a change of membership costs the coordinator of a job on many hosts.

    many_hosts.py [--hosts N]

The real coordinator, in virtual time, with agents that only answer (`tests/coordinator/simulated_hosts.py`):
hosts join within 10 s, a tenth is lost at once, and another tenth falls silent at once. The processor time is
that of the coordinator, without the network. Then, what one end of a connection between workers takes.
"""

import argparse
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from programs import HERE
from report import print_row

sys.path.insert(0, str(HERE.parent / "tests/coordinator"))

from simulated_hosts import ManyHosts

from lockstep.transport.keys import JobKey
from lockstep.transport.packet_channel import encode

HOSTS = 1000
ARRIVING = 10.0
CALM = 10.0
CONNECTIONS = 200


def measure(count: int, folder: Path) -> None:
    job = ManyHosts(folder, count, 1)

    def row(what: str, holds: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        began, before = job.clock.now(), job.coordinator.state.view.number
        job.loop.take_traffic()
        yield holds
        traffic, views = job.loop.take_traffic(), job.coordinator.state.view.number - before
        sent, size = sum(traffic.sent.values()), sum(traffic.sent_bytes.values()) / 1e6
        print(
            f"  {what:24} {views:4} views  {sent:8,} messages  {size:9,.1f} MB  "
            f"{traffic.seconds:6.2f} s of a core  {job.clock.now() - began:6.2f} s",
            flush=True,
        )

    def scenario() -> Iterator[Callable[[], bool]]:
        yield lambda: job.coordinator.state.elastic
        for _ in range(count - 1):
            job.arrive(job.dice.uniform(0.0, ARRIVING))
        yield from row("all but one join", lambda: job.has(count))
        until = job.clock.now() + CALM
        yield from row(f"{CALM:g} s of training", lambda: job.clock.now() >= until)
        for host in job.hosts[1 : count // 10 + 1]:
            host.die()
        yield from row("a tenth is lost", lambda: job.has(count - count // 10))
        alive = [host for host in job.hosts if host.alive]
        for host in alive[-(count // 10) :]:
            host.fall_silent()
        yield from row("a tenth falls silent", lambda: job.has(count - 2 * (count // 10)))
        view = alive[0].view
        began = time.process_time()
        size = len(encode(view)) if view is not None else 0
        spent = 1e3 * (time.process_time() - began)
        members = len(view.hosts) if view is not None else 0
        print(f"  encoding a view of {members:,} hosts, {size:,} bytes: {spent:.2f} ms")
        job.finish()
        yield lambda: False

    print(f"the coordinator of {count:,} hosts")
    job.run(scenario())


def handshake(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Make both ends of a TLS handshake in memory."""
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [contexts[0].wrap_bio(one, other), contexts[1].wrap_bio(other, one, server_side=True)]
    while ends:
        for end in list(ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def measure_connections() -> None:
    """Measure what one end of a connection of a view takes."""
    credentials = JobKey.generate().mint(encrypted=True)
    loading, shaking = [], []
    for _ in range(CONNECTIONS):
        began = time.process_time()
        contexts = credentials.client_context(), credentials.server_context()
        loaded = time.process_time()
        handshake(contexts)
        loading.append((loaded - began) / 2)
        shaking.append((time.process_time() - loaded) / 2)
    print("one end of a connection, processor time: median (p10-p90)")
    print_row("to load the certificate", loading, "ms")
    print_row("the handshake", shaking, "ms")


def main(count: int = HOSTS) -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        measure(count, Path(folder))
    measure_connections()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=HOSTS, help="at least 20")
    main(parser.parse_args().hosts)
