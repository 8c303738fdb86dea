"""Runs a function of a Ray program on the workers of a job on its cluster."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from lockstep.errors import ConfigError
from lockstep.functions.caller_streams import CallerStreams
from lockstep.functions.options import command_options, env_values, tag_values
from lockstep.functions.transport import held, pack, unpack_result
from lockstep.functions.worker import WORKER
from lockstep.protocol.job_spec import AFTER_GRACE, GRACE
from lockstep.protocol.local_steps import LocalSteps
from lockstep.ray.command import Follower, connect, require_ray, submit
from lockstep.ray.node import ANSWERS_WITHIN
from lockstep.ray.placement import worker_needs
from lockstep.system.environment import unrecorded
from lockstep.system.files import closed_after
from lockstep.system.run_folder import RUNS, name_on_any_host
from lockstep.worker import job

Value = TypeVar("Value")

_NAME = "lockstep.ray.fit"
_END_PATIENCE = GRACE + AFTER_GRACE
"""Seconds that an interrupted job may take to end, with a last checkpoint."""


@dataclass(frozen=True)
class Scaling:
    """The resources of its node that each worker reserves.

    Attributes:
        cpus_per_worker: CPUs of Ray.
        gpus_per_worker: GPUs of Ray.
        resources_per_worker: amounts of custom resources, by their names.

    Example:
        >>> from lockstep.ray import Scaling
        >>> Scaling(cpus_per_worker=2, resources_per_worker={"fast_disk": 1}).gpus_per_worker
        0
    """

    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    resources_per_worker: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FitResult(Generic[Value]):
    """The result of `fit`.

    Attributes:
        value: the return value of the function on the chief.
        metrics: the last metrics that a `ReportCallback` reported there; empty without one.
        checkpoint: the folder or the URL of checkpoints; None if none was given.
        path: the run folder, with logs and events.
        node: the address of the node that has the run folder.

    Example:
        >>> from pathlib import Path
        >>> from lockstep.ray import FitResult
        >>> result = FitResult(3, {"loss": 0.5}, checkpoint=None, path=Path("runs/train"), node="10.0.0.1")
        >>> result.value, result.metrics["loss"]
        (3, 0.5)
    """

    value: Value
    metrics: dict[str, float]
    checkpoint: Path | str | None
    path: Path
    node: str


def fit(
    function: Callable[..., Value],
    config: Any = None,
    *,
    workers: int = 2,
    scaling: Scaling | None = None,
    min_workers: int | None = None,
    replicas: int | None = None,
    threads_per_worker: int | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    accept_changes: bool = False,
    input: str | None = None,
    exact_batch: bool = False,
    local_steps: LocalSteps | None = None,
    tf_distribute: bool = False,
    env: Mapping[str, str | None] | None = None,
    tags: Sequence[str] = (),
) -> FitResult[Value]:
    """Run `function(config)`, or `function()` without a config, on the workers of a Ray cluster.

    `fit` runs a function as `lockstep run --on ray` runs a script, with the same bits. Every worker is a new
    process that runs the whole function. The function creates its own strategy, model and data. The output of
    the chief appears here while it trains. Ctrl-C, or interrupting the cell, ends the job. If this process is
    not connected to a cluster, it connects to that of this machine or of `RAY_ADDRESS`.

    The function, the config and the value are pickled with cloudpickle, and pass through Ray. The
    documentation of `lockstep.launch` lists the types that they can have.

    Args:
        function: a function, which may be defined in a notebook cell.
        config: its argument.
        workers: number of worker processes. It does not affect the result. The job begins with as many
            workers as the cluster has room for, and grows when nodes join.
        scaling: the resources that each worker reserves; a CPU by default.
        min_workers: below this number, training waits for workers to join; 1 by default.
        replicas: number of parts into which each batch is split; by default the number of workers.
        threads_per_worker: threads that compute one replica. It affects the result, and by default follows
            from the cores.
        backend: the value of `KERAS_BACKEND` for the workers.
        seed: the seed of all random numbers; 0 by default.
        timeout: seconds for which others wait for a worker before it is killed as stuck; 600 by default.
        run_dir: folder for the logs and events of the run, on the node of the coordinator;
            `runs/<function>-<time>` by default.
        checkpoint: folder, or URL of an object store, in which to save checkpoints; training resumes from the
            newest one there.
        accept_changes: whether to resume even if settings of the model, optimizer, loss or callbacks differ
            from those of the checkpoint.
        input: "divided", the default; or "joint", with which each worker reads the whole dataset.
        exact_batch: whether losses and metrics that compare the examples of a batch are those of one process
            however many outputs replicas have to exchange for them.
        local_steps: how many steps of `fit` each replica takes by itself before the replicas are averaged; by
            default, all replicas take each step together.
        tf_distribute: whether to replace the strategies in `tf.distribute` with Lockstep's, on every backend.
        env: variables of the function on all nodes, which are recorded with the run. If a value is None, the
            variable must be set here. Only its name is recorded, and Ray does not see its value.
        tags: words for this run, such as "lr=0.1". `lockstep runs` shows them and selects runs by them.

    Raises:
        ConfigError: an argument is wrong, there is no cluster, or this process is itself a worker.
        InputError: an object that the function needs cannot be pickled. The message names it.
        UnfitError: Ray or cloudpickle is not installed, or the cluster is lost.
        JobError: the function raised on a worker, or the job ended for another reason.

    Example:
        >>> import lockstep.ray, ray
        >>> context = ray.init(num_cpus=4, log_to_driver=False)
        >>> def train(config):
        ...     import keras
        ...     import numpy as np
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     report = lockstep.ray.ReportCallback()
        ...     x, y = np.ones((8, 3)), np.ones(8)
        ...     model.fit(x, y, batch_size=config["batch_size"], verbose=0, callbacks=[report])
        ...     return model.count_params()
        >>> result = lockstep.ray.fit(train, {"batch_size": 4}, workers=2, backend="jax")
        >>> result.value, list(result.metrics)
        (4, ['loss'])
        >>> ray.shutdown()
    """
    if job.is_worker():
        raise ConfigError(f"{_NAME} cannot be called in a worker: it starts its own job")
    scaling = scaling or Scaling()
    needs = worker_needs(scaling.cpus_per_worker, scaling.gpus_per_worker, scaling.resources_per_worker)
    values = {
        "workers": workers,
        "min-workers": min_workers,
        "replicas": replicas,
        "threads-per-worker": threads_per_worker,
        "backend": backend,
        "seed": seed,
        "timeout": timeout,
        "checkpoint": checkpoint,
        "accept-changes": accept_changes,
        "input": input,
        "exact-batch": exact_batch,
        "local-steps": local_steps and local_steps.text,
        "tf-distribute": tf_distribute,
        "env": env_values(_NAME, env),
        "tag": tag_values(_NAME, tags),
    }
    function_name = str(getattr(function, "__name__", "function")).strip("<>")
    name = name_on_any_host(function_name)
    folder = os.fspath(RUNS / name if run_dir is None else run_dir)
    options = command_options(_NAME, {**values, "run-dir": folder})
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"{_NAME}, workers={workers!r}: give a whole number, 1 or more")
    ray = require_ray(_NAME)
    from lockstep.ray.function_run import SentFunction

    sent = SentFunction(_packed(function, config), folder)
    if not ray.is_initialized():
        connect(_NAME, "ray", "start one with ray start --head, or call ray.init() before")
    words = ("run", "--on", "ray", *options, "--witness", "off", "-m", "--", WORKER)
    actor = submit(name, words, workers, needs, function=sent, variables=unrecorded(env or {}))
    follower = Follower(actor, CallerStreams().write)
    try:
        follower.run()
    except BaseException:
        follower.stop(signal.SIGINT)
        follower.run(_END_PATIENCE)
        raise
    outcome = ray.get(actor.outcome.remote(), timeout=ANSWERS_WITHIN)
    if outcome.error is not None:
        raise outcome.error
    returned = unpack_result(outcome.result)
    saved = None if checkpoint is None else os.fspath(checkpoint)
    location = saved if saved is None or "://" in saved else Path(saved)
    return FitResult(returned.value, returned.metrics, location, Path(outcome.folder), outcome.node)


def _packed(function: Callable[..., Any], config: Any) -> bytes:
    args = () if config is None else (config,)
    if isinstance(config, Mapping):
        parts = {f"config[{name!r}]": value for name, value in config.items()}
    else:
        parts = {"config": config}
    with closed_after(pack(_NAME, function, args, {}, parts)) as descriptor:
        return held(descriptor)
