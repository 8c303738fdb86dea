"""Runs a function on several workers from a notebook or any other program."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import ConfigError
from lockstep.functions.caller_streams import CallerStreams
from lockstep.functions.history import RunHistory
from lockstep.functions.options import command_options, env_values, tag_values
from lockstep.functions.transport import Giver, ResultBox, pack
from lockstep.functions.worker import WORKER
from lockstep.protocol.job_spec import AFTER_GRACE, GRACE
from lockstep.protocol.local_steps import LocalSteps
from lockstep.system.child_process import command_of
from lockstep.system.run_folder import RUNS, fresh_folder, remove_where_empty
from lockstep.worker import job

Result = TypeVar("Result")

_NAME = "lockstep.launch"
_PIECE = 64 * 1024
_END_PATIENCE = GRACE + AFTER_GRACE
"""Seconds that an interrupted job may take to end, with a last checkpoint."""


def launch(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int = 2,
    replicas: int | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    accept_changes: bool = False,
    input: str | None = None,
    exact_batch: bool = False,
    local_steps: LocalSteps | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    tags: Sequence[str] = (),
) -> Result:
    """Run `function(*args, **kwargs)` on several workers of this machine, and return the chief's result.

    `launch` runs a function as `lockstep run` runs a script, with the same bits. Every worker is a new
    process that runs the whole function. The function creates its own strategy, model and data. The output of
    the chief appears here while it trains. Ctrl-C, or interrupting the cell, ends the job.

    The function, its arguments and its result are pickled with cloudpickle (`keras-lockstep[notebook]`) and
    passed only to processes that this one starts. Arguments and results can be numbers, strings, arrays,
    lists and dicts, such as `model.fit(...).history` or `model.get_weights()`. They cannot be objects that
    belong to one process, such as a strategy, a `tf.data.Dataset` or an open file. Keras pickles its own
    models, which is slow: return the weights or save the model instead. If a model is an argument, compile it
    again in the strategy's scope.

    Args:
        function: a function, which may be defined in a notebook cell.
        args: its arguments.
        kwargs: its keyword arguments.
        workers: number of worker processes. It does not affect the result.
        replicas: number of parts into which each batch is split; by default the number of workers.
        backend: the value of `KERAS_BACKEND` for the workers.
        seed: the seed of all random numbers; 0 by default.
        timeout: seconds for which others wait for a worker before it is killed as stuck; 600 by default.
        run_dir: folder for the logs and events of the run; `runs/<function>-<time>` by default.
        checkpoint: folder, or URL of an object store, in which to save checkpoints; training resumes from the
            newest one there.
        accept_changes: whether to resume even if settings of the model, optimizer, loss or callbacks differ
            from those of the checkpoint.
        input: "divided", the default; or "joint", with which each worker reads the whole dataset. This
            affects the result only if items of a dataset draw random numbers, or with `AutoShardPolicy.FILE`
            or `DATA`.
        exact_batch: whether losses and metrics that compare the examples of a batch are those of one process
            however many outputs replicas have to exchange for them.
        local_steps: how many steps of `fit` each replica takes by itself before the replicas are averaged; by
            default, all replicas take each step together.
        tensorboard: folder in which to write metrics and times for TensorBoard.
        env: variables of the function, which are recorded with the run. If a value is None, the variable must
            be set here, and only its name is recorded: use this for secrets.
        tags: words for this run, such as "lr=0.1". `lockstep runs` shows them and selects runs by them.

    Raises:
        ConfigError: an argument is wrong, or this process is itself a worker.
        InputError: an object that the function needs cannot be pickled. The message names it.
        UnfitError: cloudpickle is not installed; or a folder for TensorBoard is set, and tensorboard is not
            installed.
        JobError: the function raised on a worker, or the job ended for another reason.

    Example:
        >>> import lockstep
        >>> def train():
        ...     import keras
        ...     import numpy as np
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model.fit(np.ones((8, 3)), np.ones(8), batch_size=4, verbose=0).history
        >>> history = lockstep.launch(train, workers=2, backend="jax")
        >>> len(history["loss"])
        1
    """
    if job.is_worker():
        raise ConfigError(f"{_NAME} cannot be called in a worker: it starts its own job")
    numbers = {"workers": workers, "replicas": replicas, "seed": seed, "timeout": timeout}
    others = {"backend": backend, "checkpoint": checkpoint, "input": input}
    flags = {"accept-changes": accept_changes, "exact-batch": exact_batch}
    folders = {"run-dir": run_dir, "tensorboard": tensorboard}
    local = {"local-steps": local_steps and local_steps.text}
    repeated = {"env": env_values(_NAME, env), "tag": tag_values(_NAME, tags)}
    options = command_options(_NAME, {**numbers, **others, **local, **flags, **folders, **repeated})
    with contextlib.ExitStack() as closing:
        parts = {f"args[{at}]": value for at, value in enumerate(args)}
        parts |= {f"kwargs[{name!r}]": value for name, value in (kwargs or {}).items()}
        call_file = pack(_NAME, function, args, kwargs or {}, parts)
        closing.callback(os.close, call_file)
        box = ResultBox.create()
        closing.callback(box.close)
        folder_of_run = run_dir
        if folder_of_run is None:
            name = str(getattr(function, "__name__", "function")).strip("<>")
            folder_of_run = fresh_folder(RUNS, name, time.time())
            options.append(f"--run-dir={folder_of_run}")
            closing.callback(remove_where_empty, folder_of_run)
        folder = Path(folder_of_run)
        history = RunHistory(folder)
        status = _run(call_file, box, options)
        returned = box.read()
    if returned.giver is Giver.COMMAND:
        raise returned.value
    if status != 0 or returned.giver is Giver.NONE:
        raise history.error(status)
    return returned.value  # type: ignore[no-any-return]


def _run(call_file: int, box: ResultBox, options: Sequence[str]) -> int:
    """Run the command, show its output, and return its exit status."""
    descriptors = (call_file, box.descriptor)
    inherited = [str(descriptor) for descriptor in descriptors]
    # The function exists only in this job, so nothing can run it once more beside it.
    words = ["run", *options, "--witness", "off", "-m", WORKER, *inherited]
    arguments = [str(os.getpid()), ",".join(inherited), str(box.descriptor), *words]
    process = subprocess.Popen(
        command_of("lockstep.notebook.command", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=descriptors,
        # Only this process gets Ctrl-C and a notebook's interrupt, and forwards them once.
        start_new_session=True,
    )
    with process, _Relay(process) as relay:
        try:
            relay.run(None)
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            relay.run(_END_PATIENCE)
            raise
        finally:
            # This has no effect if the command has ended. Otherwise, the agent ends all other processes.
            process.kill()


class _Relay:
    """Copies the pipes of a process to the streams of this one."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._selector = selectors.DefaultSelector()
        self._streams = CallerStreams()
        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, number)

    def __enter__(self) -> "_Relay":
        return self

    def __exit__(self, *exception: object) -> None:
        self._selector.close()

    def run(self, seconds: float | None) -> None:
        """Copy until both pipes are closed, which the command does when it ends, or for at most `seconds`."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._selector.get_map():
            patience = None if end is None else end - time.monotonic()
            if patience is not None and patience <= 0:
                return
            for key, _ in self._selector.select(patience):
                data = os.read(key.fd, _PIECE)
                if not data:
                    self._selector.unregister(key.fileobj)
                self._streams.write(key.data, data)
