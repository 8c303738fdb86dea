"""A model trained by one worker on each of two hosts, against DistributedDataParallel over the same link.

    hosts_training.py [jax | tensorflow | torch] [MODEL] [--turns N] [--steps N]

A host is a network namespace (see `hosts_reduce.py`); this needs root. The command reaches the other host
with a program in the place of ssh that starts a process there. Other rows are the same job without
encryption, and two workers on one host. All processes are pinned and have one thread.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from hosts_reduce import network
from models import COMPARED, MODELS
from programs import HERE, KERAS_DDP_FUSED, LOCKSTEP, PEERS, Work, environment, peer_program
from report import print_regime
from results import Ratio, Results
from turns import FailedError, Program, take_turns

TURNS = 5
PLAIN_LINK = "lockstep, not encrypted"
ONE_HOST = "lockstep, one host"
ADDRESSES = ("10.219.0.1", "10.219.0.2")
RATIOS = [
    Ratio("two hosts against ddp of keras, fused Adam", LOCKSTEP, KERAS_DDP_FUSED, "1.30"),
    Ratio("two hosts, not encrypted, against it", PLAIN_LINK, KERAS_DDP_FUSED, "1.30"),
    Ratio("two hosts against one", LOCKSTEP, ONE_HOST),
    Ratio("two hosts, not encrypted, against one", PLAIN_LINK, ONE_HOST),
]
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
exec ip netns exec "{namespace}" env SSH_CONNECTION="{ours} 1 $2 22" sh -c "$3"
"""


def lockstep(
    name: str, options: list[str], namespace: str, backend: str, work: Work, folder: Path
) -> Program:
    script = [str(HERE / "training_keras.py"), name, work.model, "lockstep", "-1", *work.arguments]
    given = ["--replicas", "2", "--threads-per-worker", "1", "--run-dir", str(folder / name), *options]
    run = [sys.executable, "-m", "lockstep", "run", *given, *script]
    variables = environment(backend, 1) | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return Program(name, [["ip", "netns", "exec", namespace, *run]], 2, 2, variables)


def ddp(namespaces: list[str], work: Work) -> Program:
    peer = next(peer for peer in PEERS["torch"] if peer.name == KERAS_DDP_FUSED)
    program = peer_program(peer, peer.name, work, {"GLOO_SOCKET_IFNAME": "eth0"})
    program.commands = [
        ["ip", "netns", "exec", namespace, *command]
        for namespace, command in zip(namespaces, program.commands, strict=True)
    ]
    return program


def measure(backend: str, work: Work) -> None:
    with network(2) as namespaces, tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        ssh = folder / "ssh"
        ssh.write_text(SSH.format(namespace=namespaces[1], ours=ADDRESSES[0]))
        ssh.chmod(0o755)
        hosts = ["--hosts", ",".join(ADDRESSES)]
        programs = [
            lockstep(LOCKSTEP, hosts, namespaces[0], backend, work, folder),
            lockstep(PLAIN_LINK, [*hosts, "--plain"], namespaces[0], backend, work, folder),
            lockstep(ONE_HOST, ["-n", "2"], namespaces[0], backend, work, folder),
        ]
        if backend == "torch":
            programs.append(ddp(namespaces, work))
        regime = take_turns(folder, programs, work.turns)
    measured = Results(backend, programs, work)
    measured.check()
    print(
        f"{MODELS[work.model].title} on {backend}, two hosts, {work.batch} examples per replica, "
        f"{work.turns} turns of {work.steps} steps: median (p10-p90)"
    )
    print_regime(regime)
    measured.report()
    for ratio in RATIOS:
        measured.report_ratio(ratio)


def main(backend: str = "torch", model: str = "cnn", turns: int = TURNS, steps: int | None = None) -> None:
    if os.geteuid() or not shutil.which("ip"):
        print("skipping the training on two hosts, which needs root and the command ip")
        return
    try:
        measure(backend, Work.of(model, turns, steps))
    except FailedError as error:
        sys.exit(f"{model} on {backend}, two hosts: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="torch", choices=PEERS)
    parser.add_argument("model", nargs="?", default="cnn", choices=COMPARED)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--steps", type=int, help="steps per turn")
    options = parser.parse_args()
    main(options.backend, options.model, options.turns, options.steps)
