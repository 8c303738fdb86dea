"""Which pairs of options `lockstep run` refuses, and how: every option with every other one."""

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner

from lockstep.cli import job_options
from lockstep.cli import run as command
from lockstep.cli.agent import agent
from lockstep.cli.check import check
from lockstep.errors import ConfigError
from lockstep.ray import command as ray
from lockstep.system import environment

VALUES = {
    "--workers": "2",
    "--ps": "1",
    "--replicas": "2",
    "--threads-per-worker": "1",
    "--backend": "jax",
    "--hosts": "a,b",
    "--listen": "127.0.0.1",
    "--workers-here": "1",
    "--tf-config": None,
    "--slurm": None,
    "--on": "ray",
    "--cpus-per-worker": "1",
    "--gpus-per-worker": "0",
    "--resource-per-worker": "a=1",
    "--detach": None,
    "--plain": None,
    "--devices": "0",
    "--seed": "1",
    "--input": "joint",
    "--update": "divided",
    "--env": "A=1",
    "--run-dir": "d",
    "--tag": "night",
    "--tee": "all",
    "--tensorboard": "t",
    "--metrics-port": "0",
    "--notify": "exec:cat",
    "--timeout": "5",
    "--max-restarts": "1",
    "--restart-job": "1",
    "--min-workers": "2",
    "--checkpoint": "c",
    "--checkpoint-every": "5",
    "--keep": "2",
    "--one-writer": None,
    "--standby": "10.0.0.2:7001",
    "--grace": "3s",
    "--verify-every": "2",
    "--verify-replicas": "all",
    "--avoid-host-after": "2",
    "--exact-batch": None,
    "--local-steps": "20",
    "--allow-unlike": None,
    "--accept-changes": None,
    "--tf-distribute": None,
    "--no-adopt": None,
    "--witness": "off",
    "--ui": None,
    "-m": None,
}
WAYS = ("--hosts", "--listen", "--tf-config", "--slurm", "--on")
NOT_HERE = f"give {', '.join(WAYS[:-1])} or {WAYS[-1]} too"
OF_AN_ENGINE = "applies to workers on an engine; give --on too"
NO_CHECKPOINTS = (
    "needs --checkpoint DIR, without which this command saves no checkpoints; for a script with "
    "lockstep.callbacks.Checkpoint, give"
)
RUNS = ""
REFUSALS = [
    *(
        (f"{way} {other}", f"{way} and {other} cannot be combined: each one says where the workers run")
        for way, other in combinations(WAYS, 2)
    ),
    ("--ps --replicas", "--ps cannot be combined with --replicas: a step is one batch on one worker"),
    (
        "--ps --checkpoint",
        "--ps cannot be combined with --checkpoint: use keras.callbacks.BackupAndRestore or ModelCheckpoint",
    ),
    (
        "--ps --devices",
        "--ps cannot be combined with --devices: all processes share the visible GPUs; set "
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "--ps --verify-every",
        "--ps cannot be combined with --verify-every: lockstep rerun repeats the whole run",
    ),
    ("--ps --min-workers", "--ps cannot be combined with --min-workers: workers do not wait for one another"),
    ("--ps --update", "--ps cannot be combined with --update: the servers have the optimizer's state"),
    ("--ps --local-steps", "--ps cannot be combined with --local-steps: workers train asynchronously"),
    *(
        (
            f"{way} --restart-job",
            f"--restart-job cannot be combined with {way}: there, several commands or an engine start the "
            "job",
        )
        for way in WAYS[1:]
    ),
    *(
        (
            f"{way} --detach",
            f"--detach cannot be combined with {way}: the scheduler starts each task without a terminal, and "
            "waits for its end",
        )
        for way in WAYS[2:-1]
    ),
    (
        "--standby not --hosts not --listen not --tf-config not --slurm",
        "--standby is for jobs on several hosts without an engine; give --hosts, --listen, --tf-config or "
        "--slurm too",
    ),
    (" not ".join(("--plain", *WAYS)), f"--plain is for jobs on several hosts; {NOT_HERE}"),
    (
        "--on --ui",
        "--ui shows the run folder, which with --on is on a node of the cluster; run lockstep ui there",
    ),
    ("--on not --workers", "--on needs the number of workers; give -n too"),
    ("--cpus-per-worker not --on", f"--cpus-per-worker {OF_AN_ENGINE}"),
    ("--gpus-per-worker not --on", f"--gpus-per-worker {OF_AN_ENGINE}"),
    ("--resource-per-worker not --on", f"--resource-per-worker {OF_AN_ENGINE}"),
    (
        "--on --metrics-port",
        "--metrics-port cannot be combined with --on: it serves on this machine alone, and the engine "
        "chooses where the coordinator runs",
    ),
    *(
        (
            f"{way} --devices",
            f"--devices is for one host; with {way}, set CUDA_VISIBLE_DEVICES on each",
        )
        for way in WAYS
    ),
    (
        "--workers-here not --listen not --tf-config",
        "--workers-here is for jobs that other hosts join; give --listen or --tf-config too",
    ),
    ("--listen not --workers", "--listen needs the number of all workers; give -n too"),
    (
        "--tf-config --workers",
        "-n cannot be combined with --tf-config: each task of TF_CONFIG runs one worker, or --workers-here",
    ),
    ("--checkpoint-every not --checkpoint", f"--checkpoint-every {NO_CHECKPOINTS} every= to the callback"),
    ("--keep not --checkpoint", f"--keep {NO_CHECKPOINTS} keep= to the callback"),
    ("--one-writer", "--one-writer needs --checkpoint with a URL, such as s3://bucket/job"),
    (
        "--standby",
        "--standby needs --checkpoint with a URL, such as s3://bucket/job, without --one-writer: if two "
        "hosts cannot reach each other, only the store can decide which of them leads the job",
    ),
    (
        "--detach --ui",
        "--ui cannot be combined with --detach: nobody would see the address of the page; run lockstep ui "
        "JOB",
    ),
    ("--on", RUNS),
    *(
        (
            f"--ps {way} not --workers",
            "there is room for 2, but a job with --ps 1 has a chief, 1 parameter server and at least one "
            "worker: 3 processes in total",
        )
        for way in ("--hosts", "--slurm")
    ),
    ("--devices --min-workers not --workers", "--min-workers 2 is more than the 1 workers to start with"),
    (
        "--devices --verify-every not --workers",
        "--verify-every needs at least 2 replicas: Keras itself computes the only one; lockstep rerun "
        "repeats a whole run in another process, and compares the bits",
    ),
    (
        "--verify-every --allow-unlike",
        "--verify-every compares the bits of workers, so it excludes --allow-unlike",
    ),
    (
        "--verify-every --update",
        "--verify-every compares the states of workers, so it excludes --update divided, with which they "
        "share one",
    ),
    (
        "--allow-unlike --update",
        "--update divided compares the states of workers, so it excludes --allow-unlike",
    ),
    ("--verify-replicas not --verify-every", "--verify-replicas all needs --verify-every K"),
    (
        "--avoid-host-after not --verify-every",
        "--avoid-host-after needs --verify-every K, which names workers",
    ),
    (
        "--local-steps --update",
        "--local-steps excludes --update divided: an update averages the whole state",
    ),
]
"""The first row decides that has only options which are given, except those after `not`."""

TASK = {
    "cluster": {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]},
    "task": {"type": "chief", "index": 0},
}
STEP = {
    "JOB_ID": "1",
    "STEP_ID": "0",
    "PROCID": "0",
    "NODEID": "0",
    "STEP_NODELIST": "127.0.0.1,127.0.0.2",
    "STEP_NUM_NODES": "2",
    "STEP_NUM_TASKS": "2",
    "STEP_TASKS_PER_NODE": "1(x2)",
}


class Begun(BaseException):
    """The command has refused nothing."""


def begin(*_: Any, **__: Any) -> NoReturn:
    raise Begun


def message(options: set[str]) -> str:
    """Return why the command refuses these options; empty if it does not."""
    words = [word for option in VALUES if option in options for word in (option, VALUES[option]) if word]
    return refusal_of(*words, "train" if "-m" in options else "train.py")


def refusal_of(*words: str) -> str:
    """Return why the command refuses these words; empty if it does not."""
    context = command.run.make_context("run", [*words])
    try:
        with context:
            command.run.invoke(context)
    except Begun:
        return RUNS
    except ConfigError as error:
        return str(error)
    raise AssertionError(words)


def expected(options: set[str]) -> str:
    for row, refusal in REFUSALS:
        first, *without = row.split(" not ")
        if options.issuperset(first.split()) and options.isdisjoint(without):
            return refusal
    return RUNS


@pytest.fixture(autouse=True)
def _nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands up to the point where the job would begin, as a task of two schedulers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setitem(environment._at_start, "TF_CONFIG", json.dumps(TASK))
    for name, value in STEP.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(job_options, "read_machine", lambda: (None, None))
    monkeypatch.setattr(command, "_exports", begin)
    monkeypatch.setattr(ray, "run_on_ray", begin)


def test_every_pair_of_options() -> None:
    shown = [param for param in command.run.params if isinstance(param, click.Option) and not param.hidden]
    assert {max(param.opts, key=len) for param in shown} == VALUES.keys()
    for pair, more in product(combinations(VALUES, 2), ((), ("--workers",))):
        options = {*pair, *more}
        assert message(options) == expected(options), options


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--listen= -n 2", "':0' is not an address; expected HOST:PORT"),
        ("--listen 7000 -n 2", "7000 is a port without an address"),
        ("--hosts= -n 2", "--hosts '': '' is not a host"),
        (
            "--listen 127.0.0.1:7000 --standby 127.0.0.1:7000 -n 2 --checkpoint s3://bucket/job",
            "--standby 127.0.0.1:7000 is the address of the first host",
        ),
        ("--on= -n 2", "--on  is not an engine: give ray, or ray://HOST:PORT"),
        ("--on k8s -n 2", "--on k8s is not an engine: give ray, or ray://HOST:PORT"),
        ("--listen a -n 2 --workers-here 3", "--workers-here 3 is more than the 2 workers of the job"),
        ("--listen a -n 1 --ps 1 --workers-here 3", ""),
        ("--backend jax --env KERAS_BACKEND=jax", ""),
        ("--backend jax --env KERAS_BACKEND=torch", "--env KERAS_BACKEND=torch and --backend jax choose"),
        ("--slurm -n 1", "1 worker cannot run on the 2 hosts of this Slurm step"),
    ],
)
def test_values_that_no_job_can_have(words: str, refusal: str) -> None:
    said = refusal_of(*words.split(), "train.py")
    assert said.startswith(refusal)
    assert bool(said) == bool(refusal)


@pytest.mark.parametrize("tag", ["", " ", "a,b", "a\nb", "a" * 101])
def test_tags_that_no_table_can_show_are_refused(tag: str) -> None:
    done = CliRunner().invoke(command.run, ["--tag", "fine", "--tag", tag, "train.py"])
    assert done.exit_code == 2
    assert "give 1 to 100 printable characters without a comma" in done.output


@pytest.mark.parametrize(
    ("called", "words"),
    [
        (command.run, "--timeout nan train.py"),
        (command.run, "--cpus-per-worker nan train.py"),
        (command.run, "--gpus-per-worker nan train.py"),
        (agent, "--timeout nan"),
        (agent, "--timeout inf"),
        (check, f"--seed {2**63} train.py"),
    ],
    ids=lambda value: value.name if isinstance(value, click.Command) else value,
)
def test_numbers_that_no_command_can_use(called: click.Command, words: str) -> None:
    with pytest.raises(click.BadParameter):
        called.make_context("lockstep", words.split())
