"""How a job is described when it begins: the first line is short, and says how to get the same bits again."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.protocol.job_spec import Checkpoints, JobHost, JobSpec

TWO = JobSpec(
    target="train.py", run_dir=Path("runs/a"), workers=2, replicas=2, threads=1, chosen="on JAX, ..."
)
ONE = replace(TWO, workers=1, replicas=1)
HOSTS = replace(TWO, workers=3, replicas=8, threads=4, hosts=(JobHost("a", 2), JobHost("b", 1)), plain=True)
SERVERS = replace(TWO, workers=5, replicas=5, parameter_servers=2, joint_input=True)


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        (
            TWO,
            "2 workers, 2 replicas (fixed for this job; --replicas 2 gives these bits with -n 1 or 2); logs "
            "in runs/a",
            "1 thread each, seed 0 unless the script sets one; on JAX, ...",
        ),
        (
            ONE,
            "1 worker, 1 replica (like plain Keras; --replicas 2 gives the bits of -n 2); logs in runs/a",
            "1 thread each, seed 0 unless the script sets one; on JAX, ...",
        ),
        (
            HOSTS,
            "3 workers on 2 hosts, 8 replicas (fixed for this job; --replicas 8 gives these bits with -n 1 "
            "to 8); logs in runs/a",
            "4 threads each (elsewhere, give --threads-per-worker 4), seed 0 unless the script sets one; "
            "connections between hosts are not encrypted; on JAX, ...",
        ),
        (
            SERVERS,
            "a chief (worker 0), 2 workers, 2 parameter servers (from worker 3); lockstep rerun repeats the "
            "bits; logs in runs/a",
            "1 thread each, seed 0 unless the script sets one; each worker reads all input; on JAX, ...",
        ),
        (
            replace(SERVERS, workers=1),
            "a chief (worker 0), 2 workers, 2 parameter servers in one process; lockstep rerun repeats the "
            "bits; logs in runs/a",
            "1 thread each, seed 0 unless the script sets one; each worker reads all input; on JAX, ...",
        ),
        (
            replace(TWO, checkpoints=Checkpoints(Path("/saved"), 50, None, 3, Path("/saved/step-5"))),
            "2 workers, 2 replicas (fixed for this job; --replicas 2 gives these bits with -n 1 or 2); logs "
            "in runs/a",
            "1 thread each, seed 0 unless the script sets one; on JAX, ...; resuming from /saved/step-5, "
            "checkpoints every 50 steps",
        ),
    ],
)
def test_a_job_is_described_in_two_lines(spec: JobSpec, first: str, second: str) -> None:
    assert spec.describe() == (first, second)
    assert len(first.split()) <= 25
