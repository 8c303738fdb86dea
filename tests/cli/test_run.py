"""The results of a run: status, output, logs, environment, events."""

import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from lockstep import __version__

ALONE = (
    "lockstep: the script used no strategy and compiled no model: "
    "each of the 2 workers ran all of it by itself"
)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_command_exits_with_the_status_of_the_script(lockstep: Any, text: str, status: int) -> None:
    assert lockstep.run("-n", "1", lockstep.script(text)).status == status


_FAILS_ONCE = """
if not os.path.exists("failed"):
    open("failed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
print("attempt", os.environ.get("LOCKSTEP_ATTEMPT"))
"""


def test_a_failed_job_starts_again_in_the_same_folder(lockstep: Any) -> None:
    done = lockstep.run("-n", "1", "--restart-job", "2", lockstep.script(_FAILS_ONCE))
    assert (done.status, done.out) == (0, "attempt None\n")
    (note,) = (line for line in done.err.splitlines() if "starts again" in line)
    ended = "the job has ended with status 137, and starts again in 1 s from its last checkpoint, if any"
    assert note == f"lockstep: {ended} (restart 1 of 2)"
    assert done.log(0) == "attempt None\n"


def test_a_verified_job_that_goes_back_starts_again(lockstep: Any) -> None:
    script = lockstep.script(_FAILS_ONCE.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(70)"))
    done = lockstep.run("-n", "1", "--replicas", "2", "--verify-every", "1", script)
    assert (done.status, done.log(0)) == (0, "attempt None\n")
    assert "the job has ended with status 70, and starts again in 1 s " in done.err


@pytest.mark.ci
def test_a_job_that_fails_again_and_again_ends(lockstep: Any) -> None:
    done = lockstep.run("-n", "1", "--restart-job", "1", lockstep.script("sys.exit(3)"))
    assert done.status == 3
    assert done.err.count("starts again in 1 s") == 1
    assert done.err.endswith("lockstep: no restart of the job is left (--restart-job 1)\n")


def test_a_job_that_was_stopped_does_not_start_again(lockstep: Any) -> None:
    running = lockstep.start("-n", "1", "--restart-job", "1", lockstep.script("announce(me); stay()"))
    ((_, (pidfd,)),) = running.announced(1).items()
    os.close(pidfd)
    running.process.send_signal(signal.SIGTERM)
    done = running.end()
    assert done.status == 143
    assert "starts again" not in done.err


def test_the_output_of_the_chief_is_shown_and_every_worker_has_a_log(lockstep: Any) -> None:
    done = lockstep.run(
        "-n", "2", lockstep.script("print('out', me); print('err', me, file=sys.stderr); barrier()")
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    start = [
        "lockstep: 2 workers, 2 replicas (fixed for this job; --replicas 2 gives these bits with -n 1 or 2); "
        "logs in run",
        f"lockstep: {threads} thread{'s' * (threads > 1)} each, seed 0 unless the script sets one; on JAX, "
        "because KERAS_BACKEND selects it",
    ]
    assert (done.status, done.out) == (0, "out 0\n")
    assert done.lines == [*start, "err 0", ALONE]
    assert [sorted(done.log(worker).splitlines()) for worker in (0, 1)] == [
        ["err 0", "out 0"],
        ["err 1", "out 1"],
    ]
    assert sorted(path.name for path in done.folder.iterdir()) == [
        "events.jsonl",
        "measurements.jsonl",
        "sources",
        "worker-0.log",
        "worker-1.log",
    ]


def test_tee_all_shows_every_worker(lockstep: Any) -> None:
    done = lockstep.run("--tee", "all", lockstep.script("print('a', me, end='\\nb', flush=True)"))
    assert sorted(done.out.splitlines()) == [
        "[worker 0] a 0",
        "[worker 0] b",
        "[worker 1] a 1",
        "[worker 1] b",
    ]


def test_a_line_of_one_stream_is_not_cut_by_the_other(lockstep: Any) -> None:
    text = """
print("a", end=" ")
print("note", file=sys.stderr)
while "note" not in open("run/worker-0.log").read():
    pass
print("b")
"""
    done = lockstep.run("-n", "1", lockstep.script(text))
    assert (done.status, done.out) == (0, "a b\n")
    assert done.log(0).splitlines() == ["note", "a b"]


def test_much_output_is_complete(lockstep: Any) -> None:
    done = lockstep.run(lockstep.script("for n in range(20_000): print(me, n)"))
    expected = ["".join(f"{worker} {n}\n" for n in range(20_000)) for worker in (0, 1)]
    assert done.out == expected[0]
    assert [done.log(0), done.log(1)] == expected


def test_the_chief_waits_for_a_slow_reader(lockstep: Any) -> None:
    """As without Lockstep: its output does not accumulate in memory."""
    text = """
import select
os.set_blocking(1, False)
written = 0
while written < 2**25 and select.select([], [1], [], 0.5)[1]:
    written += os.write(1, b"x" * 65536)
announce(written)
# Until the output is read, which begins when the process is known.
select.select([], [1], [])
"""
    running = lockstep.start("-n", "1", lockstep.script(text))
    ((written, (pidfd,)),) = running.announced(1).items()
    os.close(pidfd)
    assert int(written) < 2**22
    done = running.end()
    assert (done.status, done.out) == (0, "x" * int(written))


def test_a_module_in_the_current_folder_does_not_hide_a_dependency(lockstep: Any) -> None:
    (lockstep.folder / "msgspec.py").write_text("raise SystemExit('wrong')")
    (lockstep.folder / "scripts").mkdir()
    name = lockstep.script("print('ran')", "scripts/script.py")
    command = [sys.executable, "-P", "-m", "lockstep", "run", "-n", "1", name]
    done = subprocess.run(command, cwd=lockstep.folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_a_closed_reader_does_not_end_the_job(lockstep: Any) -> None:
    running = lockstep.start(lockstep.script("for n in range(20_000): print(me, n)"))
    running.process.stdout.close()
    running.process.stdout = None
    done = running.end()
    assert done.status == 0
    assert done.log(0).count("\n") == 20_000


def test_a_reset_connection_and_a_file_size_limit_lose_only_output(lockstep: Any) -> None:
    name = lockstep.script("os.write(1, b'x' * 5 * 2**20); barrier(); print('end', file=sys.stderr)")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as stdout:
        stdout.connect(server.getsockname())
        connection = server.accept()[0]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        shell = f"ulimit -f 4096; exec {sys.executable} -m lockstep run --run-dir run {name}"
        done = subprocess.run(
            ["bash", "-c", shell], cwd=lockstep.folder, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0, done.stderr
    log = "run/worker-{}.log: File too large; data that cannot be written is lost"
    notes = [
        "cannot write to stdout (Connection reset by peer); training continues, and the logs keep",
        *(f"cannot write {lockstep.folder}/{log.format(worker)}" for worker in (0, 1)),
        "end",
    ]
    for text in notes:
        assert done.stderr.count(text) == 1, done.stderr
    assert '"event":"output lost"' in (lockstep.folder / "run" / "events.jsonl").read_text()


def test_a_job_runs_though_its_notes_cannot_be_written(lockstep: Any) -> None:
    name = lockstep.script("print('out')")
    shell = f"exec {sys.executable} -m lockstep run -n 1 --run-dir run {name} 2> /dev/full"
    done = subprocess.run(["bash", "-c", shell], cwd=lockstep.folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "out\n")


def test_output_does_not_reach_files_that_reuse_closed_descriptors(lockstep: Any) -> None:
    name = lockstep.script("print('out'); barrier()")
    shell = f"exec {sys.executable} -m lockstep run --run-dir run {name} >&- 2>&-"
    done = subprocess.run(["bash", "-c", shell], cwd=lockstep.folder)
    assert done.returncode == 0
    files = [path for path in (lockstep.folder / "run").iterdir() if path.is_file()]
    contents = {path.name: path.read_text() for path in files}
    events = contents.pop("events.jsonl") + contents.pop("measurements.jsonl")
    assert contents == {"worker-0.log": "out\n", "worker-1.log": "out\n"}
    assert {type(json.loads(line)) for line in events.splitlines()} == {dict}


def test_arguments_after_the_script_belong_to_the_script(lockstep: Any) -> None:
    done = lockstep.run(
        "-n", "1", lockstep.script("print(sys.argv)"), "--epochs", "3", "-n", "--help", "--", "x"
    )
    assert done.out == "['script.py', '--epochs', '3', '-n', '--help', '--', 'x']\n"


def test_a_module_runs_as_with_python_m(lockstep: Any) -> None:
    package = lockstep.folder / "package"
    package.mkdir()
    (package / "train.py").write_text(
        "import sys; print(__name__, __package__, __file__, sys.argv, sys.path[0])"
    )
    done = lockstep.run("-n", "1", "-m", "package.train", "-m", "x")
    file = package / "train.py"
    expected = f"__main__ package {file} ['{file}', '-m', 'x'] {lockstep.folder}\n"
    assert (done.status, done.out) == (0, expected)


def test_a_traceback_is_the_one_of_python(lockstep: Any) -> None:
    name = lockstep.script("def deep(): raise ValueError('no good')\ntry: {}['k']\nexcept KeyError: deep()")
    python = subprocess.run([sys.executable, name], cwd=lockstep.folder, capture_output=True, text=True)
    done = lockstep.run("-n", "1", name)
    assert done.status == 1
    assert done.log(0) == python.stderr
    message = "lockstep: worker 0 exited with status 1: ValueError: no good\n  log: run/worker-0.log\n"
    assert done.err.partition("selects it\n")[2] == python.stderr + message


def test_a_syntax_error_is_the_one_of_python(lockstep: Any) -> None:
    name = lockstep.script("def (")
    python = subprocess.run([sys.executable, name], cwd=lockstep.folder, capture_output=True, text=True)
    assert lockstep.run("-n", "1", name).log(0) == python.stderr


def test_sys_exit_with_a_text_is_status_1(lockstep: Any) -> None:
    done = lockstep.run("-n", "1", lockstep.script("sys.exit('enough')"))
    assert (done.status, done.log(0)) == (1, "enough\n")


def test_workers_have_the_documented_environment(lockstep: Any) -> None:
    names = ["TF_CONFIG", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "NPROC", "OMP_NUM_THREADS", "KERAS_BACKEND"]
    names += ["CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE"]
    text = f"""
import json, random, numpy
print(json.dumps({{name: os.environ.get(name) for name in {names}}}))
print([name for name in os.environ if name.startswith("LOCKSTEP_")])
settings = job.current().settings
print(random.random(), numpy.random.rand(), job.current().view.owners, settings.threads, settings.joint_input)
"""
    options = ["-n", "2", "--replicas", "3", "--threads-per-worker", "2", "--seed", str(2**32 + 5)]
    options += ["--input", "joint"]
    options += ["--backend", "jax", lockstep.script(text)]
    done = lockstep.run(*options, PYTHONHASHSEED="7", CUDA_VISIBLE_DEVICES="1")
    note = f"lockstep: workers get PYTHONHASHSEED from the job's seed, --seed {2**32 + 5}, instead of 7"
    assert done.err.splitlines().count(note) == 1
    addresses = ["127.0.0.1:20000", "127.0.0.1:20001", "127.0.0.1:20002"]
    import random

    import numpy as np

    numbers = f"{random.Random(2**32 + 5).random()} {np.random.RandomState(5).rand()} (0, 0, 1) 2 True"
    for worker in range(2):
        variables, lockstep_variables, drawn = done.log(worker).splitlines()
        found = json.loads(variables)
        assert json.loads(found.pop("TF_CONFIG")) == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": worker},
            "environment": "lockstep run",
        }
        assert found == {
            "PYTHONHASHSEED": "5",
            "PYTHONUNBUFFERED": "1",
            "NPROC": "2",
            "OMP_NUM_THREADS": "2",
            "KERAS_BACKEND": "jax",
            "CUDA_VISIBLE_DEVICES": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        assert (lockstep_variables, drawn) == ("['LOCKSTEP_RUN_DIR']", numbers)


def test_threads_do_not_depend_on_the_number_of_workers(lockstep: Any) -> None:
    name = lockstep.script("print(job.current().settings.threads)")
    assert {lockstep.run("-n", n, "--replicas", "2", name).out for n in "12"} == {
        f"{max(1, len(os.sched_getaffinity(0)) // 2)}\n"
    }


def test_a_run_writes_its_events(lockstep: Any) -> None:
    text = (
        "from lockstep.observability.events import StrategyInstalled\n"
        "job.current().events.publish(StrategyInstalled('none', {'x': '1'}))\n"
        "job.current().note_distribution()"
    )
    done = lockstep.run(lockstep.script(text))
    assert done.notes == []
    events = done.events()
    assert all(isinstance(event["time"], float) for event in events)
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("job", "finished")
    assert {name: names.count(name) for name in set(names) - {"decision"}} == {
        "job": 1,
        "started": 2,
        "ready": 2,
        "strategy": 2,
        "distributes": 2,
        "done": 2,
        "exited": 2,
        "finished": 1,
    }
    assert [event["status"] for event in events if event["event"] == "exited"] == [0, 0]
    assert events[-1]["status"] == 0
    job, script = events[0], lockstep.folder / "script.py"
    assert job["script"] == {
        "path": str(script),
        "sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
    }
    assert job["versions"].items() >= {"keras-lockstep": __version__, "keras": version("keras")}.items()
    left = {path.name for path in done.folder.iterdir()}
    assert left == {"events.jsonl", "measurements.jsonl", "sources", "worker-0.log", "worker-1.log"}


def test_child_processes_of_a_script_are_not_workers(lockstep: Any) -> None:
    text = """
import multiprocessing
def where(queue):
    queue.put((job.current().view.replicas, type(job.current().communicator).__name__, __name__))
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=where, args=(queue,))
        child.start()
        print(method, queue.get(), flush=True)
        child.join()
    print(type(job.current().communicator).__name__)
"""
    done = lockstep.run("-n", "2", lockstep.script(text))
    name = done.out.splitlines()[0].split("'")[1]
    assert name != "SharedCommunicator"
    assert done.out.splitlines() == [
        f"fork (1, '{name}', '__main__')",
        f"spawn (1, '{name}', '__mp_main__')",
        "SharedCommunicator",
    ]


def test_a_second_run_appends_to_the_files_of_a_folder(lockstep: Any) -> None:
    name = lockstep.script("print('run', sys.argv[1])")
    first = lockstep.run("-n", "1", name, "1")
    second = lockstep.run("-n", "1", name, "2")
    assert second.log(0) == "run 1\nrun 2\n"
    assert [event["event"] for event in second.events()].count("finished") == 2
    assert (first.out, second.out) == ("run 1\n", "run 2\n")


def test_two_runs_at_once(lockstep: Any) -> None:
    name = lockstep.script("announce('worker'); barrier(); sys.stdin.read(); print('in', sys.argv[1])")
    runs = [lockstep.start(name, run, run=run) for run in ("a", "b")]
    done = [run.end() for run in runs]
    assert [run.status for run in done] == [0, 0]
    assert [run.log(1) for run in done] == ["in a\n", "in b\n"]


@pytest.mark.ci
def test_the_folder_of_a_live_run_is_refused(lockstep: Any) -> None:
    name = lockstep.script("announce('worker'); stay()")
    running = lockstep.start("-n", "1", name)
    running.announced(1)
    refused = lockstep.run("-n", "1", name)
    assert refused.status == 2
    expected = "another run uses run; wait for it to end, or give another --run-dir"
    assert refused.err == f"lockstep: ConfigError: {expected}\n"
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status == 143


def test_the_default_folder_is_named_after_the_script_and_the_time(lockstep: Any) -> None:
    name = lockstep.script("")
    command = [sys.executable, "-m", "lockstep", "run", "-n", "1", name]
    done = subprocess.run(command, cwd=lockstep.folder, capture_output=True, text=True, check=True)
    (folder,) = (lockstep.folder / "runs").iterdir()
    assert re.fullmatch(r"script-\d{8}-\d{6}", folder.name)
    first = "1 worker, 1 replica (like plain Keras; --replicas 2 gives the bits of -n 2)"
    assert f"lockstep: {first}; logs in runs/{folder.name}\n" in done.stderr


def test_gpus_are_distributed_by_default(lockstep: Any) -> None:
    done = lockstep.run(
        "--replicas",
        "4",
        lockstep.script("print(os.environ['CUDA_VISIBLE_DEVICES'])"),
        CUDA_VISIBLE_DEVICES="5,7",
    )
    assert [done.log(0), done.log(1)] == ["5\n", "7\n"]


@pytest.mark.parametrize(
    "module", ["lockstep.cli.main", "lockstep.agent.agent", "lockstep.launcher.worker_main"]
)
def test_no_command_loads_a_framework(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'keras', 'jax', 'numpy', 'psutil'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--ps 2 --hosts a:2,b",
            "there is room for 3, but a job with --ps 2 has a chief, 2 parameter servers",
        ),
        ("--ps 1 -n 2 --hosts a:2,b:3", "has 5 workers, but the job has 4"),
        ("--ps 1 --checkpoint c", "use keras.callbacks.BackupAndRestore or ModelCheckpoint"),
    ],
)
def test_parameter_servers_that_a_job_cannot_have_are_refused(lockstep: Any, options: str, said: str) -> None:
    done = lockstep.run(*options.split(), lockstep.script(""))
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert said in line
    assert not (lockstep.folder / "runs").exists()


def test_a_run_loads_no_framework(lockstep: Any) -> None:
    note = lockstep.folder / "loaded"
    (lockstep.folder / "sitecustomize.py").write_text(
        "import atexit, pathlib, sys\n"
        "def note():\n"
        "    loaded = {'keras', 'jax', 'tensorflow', 'torch'} & set(sys.modules)\n"
        f"    with pathlib.Path({str(note)!r}).open('a') as file: print(sorted(loaded), file=file)\n"
        "atexit.register(note)\n"
    )
    done = lockstep.run(lockstep.script("barrier()"), PYTHONPATH=str(lockstep.folder))
    assert done.status == 0
    # The command and its two workers.
    assert note.read_text() == "[]\n" * 3


def test_files_that_several_workers_write_are_reported(lockstep: Any) -> None:
    """Except files that only the chief, a library for itself, or a worker's child writes."""
    writes = """
import io, pathlib
import lockstep
with open("rows.csv", "a") as file:
    file.write("row")
barrier()
pathlib.Path("plot.png").write_bytes(b"")
os.close(os.open("raw", os.O_WRONLY | os.O_CREAT))
open(os.devnull, "w").close()
open(f"own-{me}", "w").close()
open("rows.csv").close()
home = pathlib.Path.home() / ".library"
home.mkdir(exist_ok=True)
(home / "cache").write_text("")
if lockstep.is_chief():
    open("once.csv", "w").close()
barrier()
open("rows.csv", "w").close()
child = os.fork()
if child == 0:
    open("once.csv", "w").close()
    os._exit(0)
os.waitpid(child, 0)
"""
    done = lockstep.run("-n", "2", lockstep.script(writes), HOME=str(lockstep.folder))
    assert done.status == 0
    lines = [line for line in done.notes if " both " in line]
    first = (
        (lockstep.folder / "script.py").read_text().split("\n").index('with open("rows.csv", "a") as file:')
    )
    assert lines == [
        f"lockstep: workers 0 and 1 both {does}; every worker runs the whole script: guard the line with if "
        "lockstep.is_chief():"
        for does in (
            f"append to rows.csv (script.py:{first + 1}), so it has each line several times",
            f"write plot.png (script.py:{first + 4})",
            f"write raw (script.py:{first + 5})",
        )
    ]


def test_options_of_the_command_after_the_script_are_named(lockstep: Any) -> None:
    text = "print(sys.argv[1:])"
    done = lockstep.run("-n", "1", lockstep.script(text), "-n", "2", "--epochs", "3", "--seed=4")
    assert (done.status, done.out) == (0, "['-n', '2', '--epochs', '3', '--seed=4']\n")
    assert done.err.splitlines()[1].endswith("; -n, --seed after the script is for the script")
