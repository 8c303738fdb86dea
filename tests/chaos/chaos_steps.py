"""A training without a framework, on a worker of a job and in one process."""

import hashlib
import signal
import sys
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from chaos_faults import Faults

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.contract import Communicator, Span
from lockstep.collectives.shared import communicator as communicator_module
from lockstep.observability.events import LastStepEnded
from lockstep.topology import View, split_evenly
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
# Small and large totals use different reduces.
LARGE, SMALL = 20000, 40
# So that a large total has several parts, if there are three workers or more.
communicator_module.ROOM = 1 << 15


def examples(step: int, replica: int, replicas: int) -> list[int]:
    """The ids of a replica's examples; batches are ragged, and the last replicas may have none."""
    size = (37, 5, 64, 2)[step % 4]
    counts = split_evenly(size, replicas)
    start = 1000 * step + sum(counts[:replica])
    return list(range(start, start + counts[replica]))


def gradient(state: Array, ids: list[int], step: int) -> list[Array]:
    """Return a gradient that depends on the state and on each example."""
    total = np.zeros_like(state)
    for example in ids:
        total += np.sin(state * np.float32(example % 13 + 1) + np.float32(example % 7))
    # Some steps have more leaves: the shared memory grows.
    return [total, *([np.full(LARGE, len(ids), "float64")] if step % 5 == 3 else [])]


def apply(state: Array, chain: bytes, total: list[Array], ids: list[list[int]]) -> tuple[Array, bytes]:
    """Return the next state, and the hash of all examples so far, in their order."""
    news = np.asarray(state - np.float32(0.01) * total[0] / np.float32(64), "float32")
    return news, hashlib.sha256(chain + repr(ids).encode() + b"".join(t.tobytes() for t in total)).digest()


def digest(state: Array, chain: bytes) -> str:
    return hashlib.sha256(state.tobytes() + chain).hexdigest()


def beginning(seed: int) -> tuple[Array, bytes]:
    return np.random.default_rng(seed).normal(size=SMALL).astype("float32"), b""


def alone(seed: int, replicas: int, steps: int) -> list[str]:
    """Return the digest of one process after each step; it adds along the same tree."""
    state, chain = beginning(seed)
    digests = []
    for step in range(steps):
        ids = [examples(step, replica, replicas) for replica in range(replicas)]
        parts = [gradient(state, own, step) for own in ids]
        total = [tree([part[leaf] for part in parts]) for leaf in range(len(parts[0]))]
        state, chain = apply(state, chain, total, ids)
        digests.append(digest(state, chain))
    return digests


def tree(parts: list[Array]) -> Array:
    """Sum along the job's tree: the left half is the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return np.asarray(tree(parts[:half]) + tree(parts[half:]), parts[0].dtype)


def train(job: Job, steps: int, faults: Faults) -> str:
    """Train as a worker of a job, from the beginning or from the position of the others."""
    step, (state, chain) = 0, beginning(job.settings.seed)
    if job.joins:
        faults.step = steps
        faults.step = job.membership.position().step
        step, state, chain = unpacked(job.join())
    elif job.checkpoints.resumed is not None:
        step, state, chain = unpacked(job.checkpoints.resumed)
    replicas = job.view.replicas
    while step < steps:
        faults.step = step
        summed = job.exchange(partial(total, job, state, step, {}, faults))
        ids = [examples(step, replica, replicas) for replica in range(replicas)]
        state, chain = apply(state, chain, summed, ids)
        faults.passing("after apply")
        if step % 3 == 1:
            own = digest(state, chain).encode() * 20000
            blobs = job.exchange(partial(gathered, own))
            assert set(blobs) == {own}
        step += 1
        faults.step = step
        now = packed(step, state, chain)
        job.between_steps(lambda whole, now=now: now if whole else Contents(now.step, {}, {}))  # type: ignore[misc]
        if job.checkpoints.scheduler is not None and job.is_chief:
            job.checkpoints.scheduler.after_step(step, lambda now=now: now)  # type: ignore[misc]
            if job.checkpoints.scheduler.leaving:
                job.events.publish(LastStepEnded(step))
                assert job.checkpoints.scheduler.close(10)
                sys.exit(128 + signal.SIGTERM)
    job.exchange(lambda view, communicator: communicator.barrier())
    if job.checkpoints.scheduler is not None:
        assert job.checkpoints.scheduler.close(10)
    return digest(state, chain)


def packed(step: int, state: Array, chain: bytes) -> Contents:
    return Contents(step, {"chain": chain.hex()}, {"state": state})


def unpacked(contents: Contents) -> tuple[int, Array, bytes]:
    return contents.step, np.array(contents.arrays["state"]), bytes.fromhex(contents.manifest["chain"])


def total(
    job: Job,
    state: Array,
    step: int,
    parts: dict[int, list[Array]],
    faults: Faults,
    view: View,
    communicator: Communicator,
) -> list[Array]:
    """Compute the replicas that `parts` lacks; return the sum of all."""
    for replica in view.replicas_of(job.worker):
        if replica not in parts:
            parts[replica] = gradient(state, examples(step, replica, view.replicas), step)
    own = {Span(replica, replica + 1): parts[replica] for replica in view.replicas_of(job.worker)}
    faults.passing("before publishing")
    check = b"other data" if faults.differs else step.to_bytes(4)
    return list(communicator.reduce(own, check=check, what=f"step {step}"))


def gathered(blob: bytes, view: View, communicator: Communicator) -> list[bytes]:
    return communicator.gather(blob)
