"""All-reduce between hosts: Lockstep's streams, with and without TLS 1.3, against gloo.

    hosts_reduce.py [--turns N] [--hosts N ...] [--lanes N ...]

float32 arrays of 64 KB to 100 MB. A host is a network namespace, connected to the others by a virtual
bridge; this needs root. With one lane, each host has one process, on a core of its own if there are enough.
All programs stay alive and take turns, so that the same conditions apply to all; the ratios are medians of
paired ones. The processes have real-time priority, so that other programs of the machine do not disturb the
comparison. The totals must be equal on all members and in all programs; with more than two members the
arrays contain small integers, since gloo adds in another order. The processor time is that of the members;
the kernel also charges them for some of the work of the virtual network.
"""

import argparse
import importlib.util
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from allreduce_member import CASES, GLOO, LOCKSTEP
from hosts_member import CERTIFICATE, TLS
from hosts_network import available, network, within
from report import Spread
from turns import FailedError, Program, take_turns

MEMBER = str(Path(__file__).with_name("hosts_member.py"))
TURNS = 9


def program(name: str, namespaces: list[str], lanes: int, turns: int, variables: dict[str, str]) -> Program:
    hosts = len(namespaces)
    words = [sys.executable, MEMBER, name, str(turns), str(hosts), str(lanes)]
    commands = [[*words, str(at)] for at in range(hosts)]
    return Program(name, within(namespaces, commands), hosts * lanes, hosts * lanes, variables)


def rounds(found: Program, case: str, key: str) -> list[float]:
    """Return the median of the rounds of each turn; a round lasts until its slowest member ends."""
    turns = [[answer[case][key] for answer in turn] for turn in found.answers]
    if key == "processor":
        return [statistics.median(map(sum, zip(*turn, strict=True))) for turn in turns]
    return [statistics.median(map(max, zip(*turn, strict=True))) * 1e6 for turn in turns]


def report(programs: list[Program], case: str, size: int) -> None:
    digests = {(answer[case]["digest"]) for found in programs for answer in found.answers[0]}
    if len(digests) > 1:
        raise FailedError(f"{case}: the sums differ")
    print(f"  {case}")
    base = rounds(programs[-1], case, "seconds")
    for found in programs:
        spread = Spread.of(rounds(found, case, "seconds"))
        members = len(found.answers[0])
        used = statistics.median(rounds(found, case, "processor")) / members / size * 1e9
        line = f"    {found.name:9} {spread.median:9,.0f} µs ({spread.low:,.0f}-{spread.high:,.0f})"
        line = f"{line:42} {used:5.2f} ns a byte and member"
        if found is not programs[-1]:
            pairs = zip(rounds(found, case, "seconds"), base, strict=True)
            line += f"  / {programs[-1].name}: {Spread.of([own / other for own, other in pairs])}"
        print(line, flush=True)


def measure(hosts: int, lanes: int, turns: int) -> None:
    print(f"all-reduce of float32, {hosts} hosts, {lanes} lanes, {turns} turns: median (p10-p90)")
    with network(hosts) as namespaces, tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        variables = {CERTIFICATE: str(Path(folder, "both.pem"))}
        names = [LOCKSTEP]
        if shutil.which("openssl"):
            certificate(Path(folder, "both.pem"))
            names.append(TLS)
        if importlib.util.find_spec("torch"):
            names.append(GLOO)
        else:
            print("  skipping gloo, which needs torch")
        found = [program(name, namespaces, lanes, turns, variables) for name in names]
        take_turns(Path(folder), found, turns)
    for case in CASES:
        report(found, case.name, sum(4 * int(size_of(shape)) for shape in case.shapes))


def size_of(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def certificate(path: Path) -> None:
    """Write a new certificate, which signs itself, and its key."""
    command = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=lockstep"]
    key, own = path.with_suffix(".key"), path.with_suffix(".crt")
    subprocess.run([*command, "-keyout", key, "-out", own], check=True, capture_output=True)
    path.write_bytes(key.read_bytes() + own.read_bytes())


def main(turns: int = TURNS, hosts: tuple[int, ...] = (2, 4), lanes: tuple[int, ...] = (1,)) -> None:
    if not available():
        print("skipping the all-reduce between hosts, which needs root and the command ip")
        return
    try:
        for count in hosts:
            for each in lanes:
                measure(count, each, turns)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="numbers of hosts")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1], help="numbers of processes of a host")
    options = parser.parse_args()
    main(options.turns, tuple(options.hosts), tuple(options.lanes))
