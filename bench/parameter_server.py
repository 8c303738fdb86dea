"""Asynchronous training: Lockstep's parameter servers against tf_keras's, and against synchronous training.

    parameter_server.py [--turns N] [--goals]

With `--goals`, only the rows run that have a goal.
Each row compares whole jobs, which run one after the other in alternating order; a job reports the speed of
its epochs after the first two. No process is pinned; those of Lockstep have one thread. tf_keras trains the
same model with the same numbers of workers and servers. In the rows with a slow worker, one of three sleeps
nine times as long in each step as its fastest step has taken. In those of tables, each step looks up 1,280
rows of 8 values; the bytes are those of the arrays between a worker, the server and the chief, and the memory
is the most that a worker, or a server, has used, with what it shares.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from programs import environment
from report import print_row
from turns import FailedError

HERE = Path(__file__).parent
TURNS = 4
SECONDS = 240.0
TABLES = (10**4, 10**5, 10**6, 10**7)
SERVER = "ServerEmbedding"
GOALS = {"tutorial": "3.00", "mlp": "3.00", "embedding": "2.50", f"table-{TABLES[-1]}": "1.50"}
"""How many times as fast as tf_keras each model is to be, in `fit` or in the custom loop of `embedding`."""
SCRIPT = str(HERE / "parameter_server_training.py")
LOCKSTEP = [sys.executable, "-m", "lockstep", "run", "--threads-per-worker", "1"]


def lockstep(options: str, backend: str, *arguments: str) -> float:
    """Run a job; return the batches per second that its chief prints."""
    return lockstep_with_logs(options, backend, *arguments)[0]


def lockstep_with_logs(options: str, backend: str, *arguments: str) -> tuple[float, list[str]]:
    """Run a job; return the batches per second that its chief prints, and the logs of all processes."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        command = [*LOCKSTEP, *options.split(), "--run-dir", str(Path(name) / "run"), SCRIPT, *arguments]
        done = subprocess.run(
            command, env=environment(backend, 1), capture_output=True, text=True, timeout=SECONDS
        )
        found = speed(done.stdout, done.returncode, done.stderr)
        logs = sorted((Path(name) / "run").glob("worker-?.log"))
        return found, [log.read_text() for log in logs]


def shown(log: str, mark: str) -> float:
    """Return the number after a mark in a log."""
    (line,) = (line for line in log.splitlines() if line.startswith(f"{mark} "))
    return float(line.split()[1])


def speed(output: str, status: int, errors: str) -> float:
    found = [line for line in output.splitlines() if line.startswith("speed ")]
    if status or len(found) != 1:
        raise FailedError(f"a job ended with status {status}\n{errors}")
    return float(found[0].split()[1])


def tf_keras(model: str, workers: int, servers: int, kind: str = "tf_keras") -> float:
    """Train with tf_keras's strategy; return the batches per second."""
    count = 1 + workers + servers
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    cluster = {"chief": ports[:1], "worker": ports[1 : 1 + workers], "ps": ports[1 + workers :]}
    tasks = [(job, index) for job, places in cluster.items() for index in range(len(places))]
    with ExitStack() as stack:
        processes = []
        for job, index in reversed(tasks):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            # With one thread between operations, its servers wait for each other.
            variables = {"TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"}
            process = subprocess.Popen(
                [sys.executable, SCRIPT, model, kind],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        output, _ = processes[-1].communicate(timeout=SECONDS)
        return speed(output, processes[-1].returncode, "tf_keras")


def against_tf_keras(model: str, turns: int) -> None:
    """Print the row of a model: `fit`, or the custom loop of `embedding`."""
    is_loop, is_table = model == "embedding", model.startswith("table-")
    kind, other = ("loop", "tf_keras_loop") if is_loop else ("servers", "tf_keras")
    speeds, others, sizes = list[float](), list[float](), list[float]()
    for turn in range(turns):
        for own in (True, False) if turn % 2 else (False, True):
            if not own:
                others.append(tf_keras(model, 2, 1, other))
                continue
            speed_of_job, logs = lockstep_with_logs("-n 2 --ps 1", "tensorflow", model, kind)
            speeds.append(speed_of_job)
            if is_table:
                sizes.append(shown(logs[1], "bytes"))
    name = f"table of {int(model.removeprefix('table-')):,} rows" if is_table else model
    unit = "functions/s" if is_loop else "batches/s"
    ratios = [a / b for a, b in zip(speeds, others, strict=True)]
    print(f"{name} on tensorflow, 2 workers and 1 server, {turns} jobs each: median (p10-p90)")
    print_row("lockstep", speeds, unit)
    print_row("tf_keras, ParameterServerStrategy", others, unit)
    print_row("lockstep / tf_keras", ratios, "times", GOALS.get(model, ""))
    if is_table:
        print_row("lockstep, a worker and a step", sizes, "kB")


def with_a_slow_worker(turns: int) -> None:
    """Print the rows of a job on JAX of which one worker is slow."""
    asynchronous, without, synchronous = [], [], []
    for _ in range(turns):
        asynchronous.append(lockstep("-n 3 --ps 1", "jax", "mlp", "servers", "slow"))
        without.append(lockstep("-n 2 --ps 1", "jax", "mlp", "servers"))
        synchronous.append(lockstep("-n 3", "jax", "mlp", "mirrored", "slow"))
    print(f"mlp on jax, one of 3 workers is 10 times slower, {turns} jobs each: median (p10-p90)")
    print_row("2 workers and 1 server, without the slow one", without, "batches/s")
    print_row("3 workers and 1 server", asynchronous, "batches/s")
    print_row("3 workers, synchronous", synchronous, "batches/s")
    kept = [a / b for a, b in zip(asynchronous, without, strict=True)]
    print_row("with the slow worker / without it", kept, "times", "0.80")
    gained = [a / b for a, b in zip(asynchronous, synchronous, strict=True)]
    print_row("asynchronous / synchronous", gained, "times")


def main(turns: int = TURNS, *, goals: bool = False) -> None:
    try:
        for model in ("tutorial", "mlp", "embedding", *(f"table-{rows}" for rows in TABLES)):
            if model in GOALS or not goals:
                against_tf_keras(model, turns)
        with_a_slow_worker(turns)
        if goals:
            return
        for rows_of_table in TABLES[2:]:
            kinds: dict[str, tuple[list[float], list[float]]] = {"Embedding": ([], []), SERVER: ([], [])}
            for turn in range(turns):
                for kind in list(kinds)[:: 1 if turn % 2 else -1]:
                    option = ["server-table"] if kind == SERVER else []
                    model = f"table-{rows_of_table}"
                    found, logs = lockstep_with_logs("-n 2 --ps 1", "tensorflow", model, "servers", *option)
                    kinds[kind][0].append(found)
                    kinds[kind][1].append(shown(logs[1], "memory"))
            print(f"table of {rows_of_table:,} rows on tensorflow, 2 workers and 1 server, {turns} jobs each")
            for kind, (speeds, memory) in kinds.items():
                print_row(f"{kind}", speeds, "batches/s")
                print_row(f"{kind}, memory of a worker", memory, "MB")
        for rows_of_table in TABLES[1:]:
            model, found = f"table-{rows_of_table}", {"Embedding": [], SERVER: [], "tf_keras": []}
            for turn in range(turns):
                for kind in list(found)[:: 1 if turn % 2 else -1]:
                    if kind != "tf_keras":
                        option = ["server-table"] if kind == SERVER else []
                        found[kind].append(lockstep("-n 2 --ps 1", "tensorflow", model, "loop", *option))
                    else:
                        found[kind].append(tf_keras(model, 2, 1, "tf_keras_loop"))
            print(f"custom loop, table of {rows_of_table:,} rows, 2 workers and 1 server, {turns} jobs each")
            for kind, speeds in found.items():
                print_row(kind, speeds, "functions/s")
        for model, kind in (("mlp", "servers"), ("table-100000", "servers"), ("embedding", "loop")):
            kept, alone = [], []
            for turn in range(turns):
                for option in ("", "no-standby") if turn % 2 else ("no-standby", ""):
                    found = lockstep("-n 2 --ps 2", "tensorflow", model, kind, *option.split())
                    (alone if option else kept).append(found)
            print(f"{model} on tensorflow, 2 workers and 2 servers, {turns} jobs each: median (p10-p90)")
            print_row("each server has a standby", kept, "batches/s")
            print_row("none has", alone, "batches/s")
            print_row("with standbys / without", [a / b for a, b in zip(kept, alone, strict=True)], "times")
        for rows_of_table in TABLES[2:]:
            speeds, cores, memory = (
                {option: list[float]() for option in ("", "no-standby")} for _ in range(3)
            )
            for turn in range(turns):
                for option in ("", "no-standby") if turn % 2 else ("no-standby", ""):
                    given = f"table-{rows_of_table}", "servers", "server-table", *option.split()
                    found, logs = lockstep_with_logs("-n 2 --ps 2", "tensorflow", *given)
                    speeds[option].append(found)
                    cores[option].append(shown(logs[-1], "cores"))
                    memory[option].append(shown(logs[-1], "memory"))
            print(f"{SERVER}, {rows_of_table:,} rows, tensorflow, 2 workers and 2 servers, {turns} jobs each")
            for option, name in (("", "each server has a standby"), ("no-standby", "none has")):
                print_row(name, speeds[option], "batches/s")
                print_row(f"{name}, time of a server's cores for a step", cores[option], "ms")
                print_row(f"{name}, memory of a server", memory[option], "MB")
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--goals", action="store_true", help="only the rows that have a goal")
    options = parser.parse_args()
    main(options.turns, goals=options.goals)
