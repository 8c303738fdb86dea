"""`lockstep run --on ray` in a terminal: has a cluster run the job, and shows what it writes."""

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.errors import ConfigError, UnfitError
from lockstep.system.environment import shared_variables
from lockstep.system.notes import note

_PATIENCE = 60.0
"""Seconds for Ray to start the coordinator's actor again, on another node too."""
_PAUSE = 0.5
_HEAD = "node:__internal_head__"
"""The resource that only the head node has."""


def run_on_ray(
    address: str, words: Sequence[str], workers: int, resources: dict[str, float], detached: bool
) -> int:
    """Have a cluster run a job, and return the exit status of the job.

    Args:
        address: "ray" for the cluster of this machine or of the Ray job that this process belongs to, or that
            of a Ray client: ray://HOST:PORT.
        words: the arguments of `lockstep` for the coordinator.
        workers: number of workers.
        resources: what each worker needs, by Ray's name for it.
        detached: whether to return at once, while the job runs.

    Raises:
        ConfigError: there is no such cluster.
        UnfitError: Ray is not installed, or the cluster is lost.
    """
    try:
        import ray
    except ImportError:
        raise UnfitError("--on ray needs the package ray: pip install 'keras-lockstep[ray]'") from None
    from lockstep.ray.coordinator_actor import NAMESPACE, CoordinatorActor, RayJob
    from lockstep.ray.placement import WorkerNeeds

    where = "auto" if address == "ray" else address
    try:
        ray.init(where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster can be reached at {address} ({error}); start one with ray start --head, or give "
            "--on ray://HOST:PORT"
        ) from None
    # A runtime environment, such as that of `ray job submit --working-dir`, has its own folder on each node.
    uploaded = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    job = RayJob(
        name=f"{_name(words)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        words=tuple(words),
        workers=workers,
        needs=WorkerNeeds(resources),
        folder=None if uploaded else str(Path.cwd()),
        environment=shared_variables(),
        detached=detached,
    )
    actor: Any = (
        ray.remote(CoordinatorActor)
        .options(
            name=job.actor("coordinator"),
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            num_cpus=0,
            scheduling_strategy=_on_head(ray),
        )
        .remote(job)
    )
    if detached:
        ray.get(actor.show.remote("", 0))
        note(f"the job {job.name} runs on the cluster; lockstep list on its nodes shows it")
        return 0
    # Ray prints what its own processes report of each loss, which the job reports too.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return _Follower(ray, actor).run()


def _on_head(ray: Any) -> Any:
    """Return the strategy that prefers the head node, whose loss ends the cluster anyway.

    Ray takes 12 s and more to see that another node is dead; a coordinator there would be missing as long.
    """
    strategies = ray.util.scheduling_strategies
    heads = [node["NodeID"] for node in ray.nodes() if _HEAD in node["Resources"]]
    return strategies.NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"


def _name(words: Sequence[str]) -> str:
    script = words[words.index("--") + 1]
    return Path(script).stem


class _Follower:
    """Shows what the coordinator writes, and passes signals on, until the job ends."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._signals: list[int] = []

    def run(self) -> int:
        """Return the exit status of the job.

        Raises:
            UnfitError: the cluster is lost.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)
        run, position, lost = "", 0, 0.0
        errors = self._ray.exceptions
        while True:
            try:
                while self._signals:
                    self._ray.get(self._actor.stop.remote(self._signals[0]), timeout=_PATIENCE)
                    self._signals.pop(0)
                shown = self._ray.get(self._actor.show.remote(run, position), timeout=_PATIENCE)
            except (errors.ActorUnavailableError, errors.GetTimeoutError, errors.ActorDiedError) as error:
                # Ray starts the actor again.
                lost = lost or time.monotonic()
                if time.monotonic() - lost > _PATIENCE:
                    raise UnfitError(f"the cluster has lost the coordinator of the job: {error}") from None
                time.sleep(_PAUSE)
                continue
            lost, run, position = 0.0, shown.run, shown.position
            for number, data in shown.output:
                with contextlib.suppress(BrokenPipeError):
                    _write(number, data)
            if shown.status is not None:
                return int(shown.status)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
