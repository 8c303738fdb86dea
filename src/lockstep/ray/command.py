"""Runs a job on a cluster, and shows its output in a terminal, for `lockstep run --on ray`."""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, UnfitError
from lockstep.ray.node import ANSWERS_WITHIN
from lockstep.system.environment import shared_variables
from lockstep.system.exit_status import STOP_SIGNALS
from lockstep.system.notes import note
from lockstep.system.prose import install_command

if TYPE_CHECKING:
    from lockstep.ray.function_run import SentFunction

_PATIENCE = 600.0
"""Seconds for Ray to start the coordinator's actor again; minutes if the control store is lost too."""
_DIED = 60.0
"""The same if Ray says that it does not."""
_NOTED = 10.0
"""Seconds until a note about that."""
_PAUSE = 0.5
_MEMORY = 1 << 20
"""Bytes that the coordinator's actor asks for. Ray puts an actor without any need on a random node."""
_HEAD = "node:__internal_head__"
"""The resource that only the head node has."""


def run_on_ray(
    *,
    address: str,
    name: str,
    words: Sequence[str],
    workers: int,
    resources: dict[str, float],
    detached: bool,
    variables: dict[str, str],
) -> int:
    """Run a job on a cluster, and return its exit status.

    Args:
        address: "ray" for the cluster of this machine, or of the Ray job of this process; or the address for
            a Ray client: ray://HOST:PORT.
        name: the name of the job, unique in the cluster.
        words: the arguments of `lockstep` for the coordinator.
        workers: number of workers.
        resources: the resources of each worker, by Ray's names.
        detached: whether to return at once, while the job runs.
        variables: the variables whose values Ray must not get: those of the script and of `--notify`.

    Raises:
        ConfigError: there is no such cluster.
        UnfitError: Ray is not installed, or the cluster is lost.
    """
    advice = "start one with ray start --head, or give --on ray://HOST:PORT"
    connect("--on ray", address, advice)
    import ray

    actor = submit(name, words, workers, resources, detached=detached, variables=variables)
    if detached:
        ray.get(actor.show.remote("", 0))
        note(f"the job {name} runs on the cluster; lockstep list on its nodes shows it")
        return 0
    follower = Follower(actor, _write)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: follower.stop(number))
    # On each loss, Ray prints the reports of its own processes; the job also reports the loss.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            status = follower.run()
        finally:
            ray.shutdown()
    assert status is not None
    return status


def require_ray(user: str) -> Any:
    """Return the module `ray`, which `user` needs.

    Raises:
        UnfitError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UnfitError(f"{user} needs the package ray: {install_command('ray')}") from None
    return ray


def connect(user: str, address: str, advice: str) -> None:
    """Connect this process to a cluster.

    Args:
        user: the feature that needs the cluster, for messages.
        address: see `run_on_ray`.
        advice: how to get another cluster, for messages.

    Raises:
        ConfigError: there is no such cluster.
        UnfitError: Ray is not installed.
    """
    ray = require_ray(user)
    where = "auto" if address == "ray" else address
    try:
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster can be reached at {address} ({error}); {advice}") from None


def submit(
    name: str,
    words: Sequence[str],
    workers: int,
    resources: dict[str, float],
    *,
    detached: bool = False,
    function: "SentFunction | None" = None,
    variables: dict[str, str] | None = None,
) -> Any:
    """Start a job on the cluster to which this process is connected; return the actor of its coordinator.

    Args:
        name: see `run_on_ray`.
        words: see `run_on_ray`.
        workers: number of workers.
        resources: the resources of each worker.
        detached: whether the job continues without this process.
        function: the function that workers run; None for a script.
        variables: see `run_on_ray`.
    """
    import ray
    from lockstep.ray.control_store import NAMESPACE
    from lockstep.ray.coordinator_actor import CoordinatorActor, RayJob
    from lockstep.ray.placement import WorkerNeeds

    # A runtime environment, such as that of `ray job submit --working-dir`, has its own folder on each node.
    uploaded = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    job = RayJob(
        name=name,
        words=tuple(words),
        workers=workers,
        needs=WorkerNeeds(resources),
        folder=None if uploaded else str(Path.cwd()),
        environment=shared_variables(),
        detached=detached,
        function=function,
        is_given_variables=bool(variables),
    )
    actor: Any = (
        ray.remote(CoordinatorActor)
        .options(
            name=job.actor("coordinator"),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            num_cpus=0,
            memory=_MEMORY,
            scheduling_strategy=_on_head(ray),
        )
        .remote(job)
    )
    if variables:
        from lockstep.ray.sealing import JobSecrets, seal

        sealed = seal(JobSecrets("", variables), ray.get(actor.public_key.remote()))
        ray.get(actor.take_variables.remote(sealed))
    return actor


def _on_head(ray: Any) -> Any:
    """Return the strategy that prefers the head node, whose loss ends the cluster anyway.

    Ray takes 12 s or more to detect that another node is dead. A coordinator there would be missing for as
    long.
    """
    strategies = ray.util.scheduling_strategies
    heads = [node["NodeID"] for node in ray.nodes() if _HEAD in node["Resources"]]
    return strategies.NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"


class Follower:
    """Shows the output of a job's coordinator, and passes signals on.

    Args:
        actor: the actor of the coordinator.
        show: called with 1 for stdout or 2 for stderr, and the bytes.
    """

    def __init__(self, actor: Any, show: Callable[[int, bytes], None]) -> None:
        self._actor, self._show = actor, show
        self._signals: list[int] = []
        self._run, self._position = "", 0

    def stop(self, number: int) -> None:
        """Pass a signal on, as soon as `run` does."""
        self._signals.append(number)

    def run(self, patience: float = math.inf) -> int | None:
        """Return the exit status of the job, or None if it has not ended within `patience` seconds.

        Raises:
            UnfitError: the cluster is lost.
        """
        import ray

        errors, lost, noted = ray.exceptions, 0.0, False
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:
                while self._signals:
                    ray.get(self._actor.stop.remote(self._signals[0]), timeout=ANSWERS_WITHIN)
                    self._signals.pop(0)
                shown = ray.get(self._actor.show.remote(self._run, self._position), timeout=ANSWERS_WITHIN)
            except (errors.ActorUnavailableError, errors.GetTimeoutError, errors.ActorDiedError) as error:
                # Ray starts the actor again.
                lost = lost or time.monotonic()
                missing = time.monotonic() - lost
                if missing > (_DIED if isinstance(error, errors.ActorDiedError) else _PATIENCE):
                    raise UnfitError(f"the cluster has lost the coordinator of the job: {error}") from None
                if len(self._signals) > 1:
                    # Without its command, the job stops when its coordinator returns.
                    return 128 + self._signals[0]
                if missing > _NOTED and not noted:
                    noted = True
                    self._show(
                        2, b"lockstep: the coordinator is lost; waiting for Ray to start another one\n"
                    )
                time.sleep(_PAUSE)
                continue
            lost, noted, self._run, self._position = 0.0, False, shown.run, shown.position
            for number, data in shown.output:
                self._show(number, data)
            if shown.status is not None:
                return int(shown.status)
        return None


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data) :]
