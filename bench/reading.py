"""How reading scales: two workers against one, on inputs whose examples cost more than a training step.

    reading.py [jax | tensorflow | torch] [--replicas R | --hosts] [--source WORD] [--turns N] [--steps N]

A worker of a job reads the rows of its replicas only, where the input allows it. Other rows show plain Keras
in one process, and two processes against one of DistributedDataParallel with DistributedSampler, and of
MultiWorkerMirroredStrategy with AutoShardPolicy.DATA. With `--hosts`, the rows are two replicas on two hosts
(see `hosts_network.py`) against two workers and one on one host; this needs root. All processes are pinned to
one core each and have one thread.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from hosts_network import available, network, run_over_hosts
from programs import HERE, environment, run_lockstep
from reading_sources import DIVIDED, SOURCES
from report import print_regime, print_row
from results import require
from turns import FailedError, Program, take_turns

TURNS = 7
STEPS = 16
BATCH = 32
"""Examples per replica."""
NEAR = 1e-3
"""The fraction by which the loss of another program may differ in the first turn."""
TWO_HOSTS = "two hosts"
JOBS = (TWO_HOSTS, "two workers", "one worker")
DDP, MWMS = "ddp, DistributedSampler", "tf_keras, MWMS"
PEERS = {"DataLoader": (DDP, "reading_ddp.py", "torch"), "tf.data": (MWMS, "reading_mwms.py", "tensorflow")}


def programs(backend: str, source: str, replicas: int, turns: int, steps: int, folder: Path) -> list[Program]:
    """Return Lockstep with two workers and with one, plain Keras, and the peer with two processes and one."""
    sizes = [str(number) for number in (replicas, BATCH, turns, steps)]
    script = str(HERE / "reading_keras.py")
    made = [
        run_lockstep(
            name, [script, name, source, "lockstep", *sizes], workers, replicas, backend, folder / name
        )
        for workers, name in ((2, "two workers"), (1, "one worker"))
    ]
    plain = [sys.executable, script, "keras", source, "plain", *sizes]
    made.append(Program("keras", [plain], 1, replicas, environment(backend, 1)))
    if source in PEERS:
        _, script, own = PEERS[source]
        for title, processes in zip(peer_titles(source), (2, 1), strict=True):
            command = [sys.executable, str(HERE / script), title, str(processes)]
            commands = [[*command, str(process), *sizes] for process in range(processes)]
            made.append(Program(title, commands, processes, replicas, environment(own, 1)))
    return made


def programs_over_hosts(
    backend: str, source: str, namespaces: list[str], turns: int, steps: int, folder: Path
) -> list[Program]:
    """Return Lockstep with one worker on each of two hosts, and with two workers and one on one host."""
    sizes = [str(number) for number in (len(namespaces), BATCH, turns, steps)]
    script = [str(HERE / "reading_keras.py"), TWO_HOSTS, source, "lockstep", *sizes]
    one_host = programs(backend, source, len(namespaces), turns, steps, folder)[:2]
    return [run_over_hosts(TWO_HOSTS, script, (), namespaces, backend, folder), *one_host]


def peer_titles(source: str) -> tuple[str, str]:
    name, _, _ = PEERS[source]
    return f"{name}, two processes", f"{name}, one process"


def measure(backend: str, source: str, replicas: int, turns: int, steps: int, over_hosts: bool) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-")))
        if over_hosts:
            namespaces = stack.enter_context(network(replicas))
            every = programs_over_hosts(backend, source, namespaces, turns, steps, folder)
        else:
            every = programs(backend, source, replicas, turns, steps, folder)
        regime = take_turns(folder, every, turns)
    compare(every)
    examples = steps * BATCH * replicas
    seconds = {
        each.name: [max(answer["seconds"] for answer in turn) for turn in each.answers] for each in every
    }
    print(
        f"{source} on {backend}, {replicas} replicas of {BATCH} examples, {turns} turns of {steps} steps: "
        "median (p10-p90)"
    )
    print_regime(regime)
    for name, taken in seconds.items():
        print_row(name, [examples / each for each in taken], "examples/s")

    def ratio(label: str, program: str, other: str, to_reach: str) -> None:
        pairs = zip(seconds[program], seconds[other], strict=True)
        print_row(f"  {label}", [theirs / ours for ours, theirs in pairs], "times", to_reach)

    if over_hosts:
        ratio("two hosts / one worker", TWO_HOSTS, "one worker", "1.80" if source in DIVIDED else "0.97")
        ratio("two hosts / two workers on one", TWO_HOSTS, "two workers", "0.95")
    ratio("two workers / one worker", "two workers", "one worker", "1.80" if source in DIVIDED else "0.97")
    if over_hosts:
        return
    ratio("one worker / keras", "one worker", "keras", "0.95")
    if source in PEERS:
        two, one = peer_titles(source)
        ratio("the peer's two processes / one", two, one, "")
        ratio("two workers / the peer's two processes", "two workers", two, "1.00")


def compare(every: list[Program]) -> None:
    """Require that the weights of all jobs are equal, and the losses of all programs near."""
    jobs = [each.answers for each in every if each.name in JOBS]
    for turn in zip(*jobs, strict=True):
        require(len({answer["weights"] for answers in turn for answer in answers}) == 1, "workers differ")
    loss = float.fromhex(jobs[0][0][0]["loss"])
    for each in every:
        other = float.fromhex(each.answers[0][0]["loss"])
        require(abs(other - loss) <= NEAR * loss, f"{each.name} has the loss {other}, a job {loss}")


def main(
    backend: str = "jax",
    replicas: int = 2,
    word: str = "",
    turns: int = TURNS,
    steps: int = STEPS,
    over_hosts: bool = False,
) -> None:
    if over_hosts and not available():
        print("skipping the input of two hosts, which needs root and the command ip")
        return
    for source in SOURCES:
        if word in source:
            try:
                measure(backend, source, replicas, turns, steps, over_hosts)
            except FailedError as error:
                sys.exit(f"{source} on {backend}: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="jax", choices=("jax", "tensorflow", "torch"))
    spread = parser.add_mutually_exclusive_group()
    spread.add_argument("--replicas", type=int, default=2)
    spread.add_argument("--hosts", action="store_true", help="measure one worker on each of two hosts")
    parser.add_argument("--source", default="", metavar="WORD", help="sources whose names contain it")
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per turn")
    options = parser.parse_args()
    main(options.backend, options.replicas, options.source, options.turns, options.steps, options.hosts)
