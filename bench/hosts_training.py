"""A model trained by one worker on each of several hosts, against DistributedDataParallel on the same links.

    hosts_training.py [jax | tensorflow | torch] [MODEL] [--hosts N] [--rate RATE] [--turns N] [--steps N]
        [--local-steps H ...]

A host is a network namespace (see `hosts_network.py`); this needs root. The command reaches the other hosts
with a program in the place of ssh that starts a process there. Other rows are the same job without
encryption, as many workers on one host, with more than two hosts the job on two, and the peer without an
exchange: what is left of its step. With local steps, which compute something else, other rows take H steps
between two exchanges; each value is one of `lockstep run --local-steps`. On PyTorch, DistributedDataParallel
does so beside it, with post-local SGD, and so does torchft, where it can be imported. With a rate, such as
1gbit, a host sends no faster. All processes are pinned, have one thread, and in their turns real-time
priority, so that other programs of the machine do not disturb the comparison.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hosts_network import SUBNET, available, network, run_over_hosts, within
from models import COMPARED, MODELS
from programs import (
    KERAS_DDP_FUSED,
    LOCKSTEP,
    PEERS,
    PeerProgram,
    Work,
    peer_program,
    train_lockstep,
    training_script,
)
from report import print_regime
from results import Ratio, Results
from turns import REALTIME, FailedError, Program, take_turns

TURNS = 5
PLAIN_LINK = "lockstep, not encrypted"
ONE_HOST = "lockstep, one host"
TWO_HOSTS = "lockstep, not encrypted, two hosts"
NO_EXCHANGE = "keras, fused Adam, no exchange"
LOCAL = "lockstep, not encrypted, local steps "
LOCAL_DDP = KERAS_DDP_FUSED + ", post-local SGD "
TORCHFT = "keras, fused Adam, torchft LocalSGD "


def ratios(hosts: int, local: Sequence[str]) -> list[Ratio]:
    return [
        Ratio(f"{hosts} hosts against ddp of keras, fused Adam", LOCKSTEP, KERAS_DDP_FUSED, "1.30"),
        Ratio(f"{hosts} hosts, not encrypted, against it", PLAIN_LINK, KERAS_DDP_FUSED, "1.30"),
        Ratio("its processes without an exchange, against it", NO_EXCHANGE, KERAS_DDP_FUSED),
        Ratio(f"{hosts} hosts against one", LOCKSTEP, ONE_HOST),
        Ratio(f"{hosts} hosts, not encrypted, against one", PLAIN_LINK, ONE_HOST),
        Ratio(f"{hosts} hosts, not encrypted, against two", PLAIN_LINK, TWO_HOSTS),
        *(
            Ratio(f"{hosts} hosts, local steps {text}, against synchronous", LOCAL + text, PLAIN_LINK)
            for text in local
        ),
        *(
            Ratio(f"{hosts} hosts, local steps {text}, against one", LOCAL + text, ONE_HOST, "0.90")
            for text in local
        ),
    ]


def ddp(
    name: str, namespaces: list[str], exchange: int, work: Work, local_steps: int = 0, torchft: str = ""
) -> Program:
    arguments = ("keras", "fused", str(exchange))
    peer = PeerProgram(name, "training_ddp.py", arguments, "torch", processes=len(namespaces))
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "BENCH_LOCAL_STEPS": str(local_steps)}
    variables["BENCH_TORCHFT"] = torchft
    program = peer_program(peer, name, work, variables)
    program.commands = within(namespaces, program.commands)
    return program


def measure(backend: str, hosts: int, rate: str, work: Work, local: Sequence[str]) -> None:
    with (
        network(hosts, rate) as namespaces,
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as temporary,
    ):
        folder = Path(temporary)

        def over_hosts(name: str, number: int, *options: str) -> Program:
            script = training_script(name, work)
            return run_over_hosts(name, script, options, namespaces[:number], backend, folder)

        programs = [
            over_hosts(LOCKSTEP, hosts),
            over_hosts(PLAIN_LINK, hosts, "--plain"),
            train_lockstep(ONE_HOST, hosts, hosts, backend, work, folder / ONE_HOST),
        ]
        programs += [over_hosts(LOCAL + text, hosts, "--plain", "--local-steps", text) for text in local]
        if hosts > 2:
            programs.append(over_hosts(TWO_HOSTS, 2, "--plain"))
        if backend == "torch":
            programs.append(ddp(KERAS_DDP_FUSED, namespaces, hosts, work))
            programs.append(ddp(NO_EXCHANGE, namespaces[:2], 0, work))
            numbers = sorted({int(text.split(",")[0]) for text in local})
            programs += [ddp(f"{LOCAL_DDP}{h}", namespaces, hosts, work, h) for h in numbers]
            if find_spec("torchft"):
                programs += [ddp(f"{TORCHFT}{h}", namespaces, hosts, work, h, SUBNET) for h in numbers]
        for program in programs:
            program.variables[REALTIME] = "1"
        regime = take_turns(folder, programs, work.turns)
    measured = Results(backend, programs, work)
    measured.check()
    print(
        f"{MODELS[work.model].title} on {backend}, {hosts} hosts{rate and f' at {rate}'}, "
        f"{work.batch} examples per replica, {work.turns} turns of {work.steps} steps: median (p10-p90)"
    )
    print_regime(regime)
    measured.report()
    for ratio in ratios(hosts, local):
        measured.report_ratio(ratio)


def main(
    backend: str = "torch",
    model: str = "cnn",
    hosts: int = 2,
    turns: int = TURNS,
    steps: int | None = None,
    rate: str = "",
    local: Sequence[str] = (),
) -> None:
    if not available():
        print("skipping the training on several hosts, which needs root and the command ip")
        return
    try:
        measure(backend, hosts, rate, Work.of(model, turns, steps), local)
    except FailedError as error:
        sys.exit(f"{model} on {backend}, {hosts} hosts: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="torch", choices=PEERS)
    parser.add_argument("model", nargs="?", default="cnn", choices=COMPARED)
    parser.add_argument("--hosts", type=int, default=2, help="the number of hosts")
    parser.add_argument(
        "--rate", default="", help="of each host's link, such as 100mbit; unlimited by default"
    )
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--steps", type=int, help="steps per turn")
    parser.add_argument(
        "--local-steps", nargs="+", default=(), metavar="H", help="also train with local steps"
    )
    options = parser.parse_args()
    main(
        options.backend,
        options.model,
        options.hosts,
        options.turns,
        options.steps,
        options.rate,
        options.local_steps,
    )
