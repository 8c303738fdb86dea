"""The strategy with parameter servers, and their tasks, named as in `tf.distribute`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol, runtime_checkable

from lockstep.cluster.resolver import ClusterResolver
from lockstep.cluster.spec import ClusterDef, ClusterSpec
from lockstep.cluster.tf_config_resolver import TFConfigClusterResolver
from lockstep.errors import ConfigError, InputError, ModelError
from lockstep.keras import assignments
from lockstep.keras.assignments import observed_by
from lockstep.keras.fit.served import ScheduledFunctions
from lockstep.keras.parameter_server.function_calls import FunctionCalls, ScheduleContext
from lockstep.keras.parameter_server.function_chief import ChiefCalls
from lockstep.keras.parameter_server.function_one_process import OneProcessCalls
from lockstep.keras.parameter_server.function_run import ScopeVariables
from lockstep.keras.parameter_server.function_server import ServerCalls
from lockstep.keras.parameter_server.function_worker import WorkerCalls
from lockstep.keras.parameter_server.per_worker import PerWorkerDataset, process_dataset
from lockstep.keras.parameter_server.process import ServerOptions
from lockstep.keras.parameter_server.remote_values import Calls, LocalCalls
from lockstep.keras.replica_run.merges import current_replica
from lockstep.keras.replica_run.runner import SingleReplicaRunner
from lockstep.keras.seeds import seed_of
from lockstep.parameter_server.partitioners import Partitioner
from lockstep.parameter_server.tasks import TaskType
from lockstep.rendezvous.take_part import take_part_with_servers
from lockstep.strategy.options import ReduceOp
from lockstep.strategy.strategy import Strategy
from lockstep.worker.job import Job

_CALLS: dict[TaskType, type[FunctionCalls]] = {"chief": ChiefCalls, "worker": WorkerCalls, "ps": ServerCalls}
"""What runs scheduled functions, by the type of the process's task."""


class ParameterServerStrategy(Strategy):
    """Trains models asynchronously, with the weights on parameter servers.

    Workers do not wait for one another. `lockstep run --ps 2 -n 3 train.py` starts a chief, three workers and
    two parameter servers, and all run the script. A step of `fit` is one batch on one worker. The worker
    reads the weights and computes gradients. The servers update the weights with Keras's optimizer as
    gradients arrive. Outside of `fit`, all processes have the same state, and divide the work of `evaluate`
    and `predict`. `lockstep.ClusterCoordinator` runs custom loops. Without `--ps`, the job has one process,
    and `fit` is Keras's own.

    Args:
        cluster_resolver: the value of the property of this name. It does not select the workers.
        variable_partitioner: how to divide variables among the servers; None places each on one server.
        max_staleness: the largest number of updates of the weights after a step reads them and before it
            updates them; with 0, one worker computes at a time; None for no limit.

    Raises:
        ConfigError: the job has several workers and no parameter servers, or `TF_CONFIG` has parameter
            servers and `lockstep run` has not started this process.
        InputError: `max_staleness` is negative.
        BackendError: Keras runs on a backend that is not supported.

    Example:
        >>> import keras, lockstep
        >>> import numpy as np
        >>> strategy = lockstep.ParameterServerStrategy(
        ...     variable_partitioner=lockstep.MinSizePartitioner(max_shards=2), max_staleness=8
        ... )
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 3)), np.ones(8), batch_size=4, verbose=0)
        >>> strategy.has_servers
        False
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        max_staleness: int | None = None,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise InputError(f"max_staleness is {max_staleness}; expected 0 or more, or None for any")
        take_part_with_servers()
        super().__init__()
        if not self._job.context.has_servers and self._job.view.replicas > 1:
            if self._job.settings.checks:
                self._job.end_check(
                    "the script trains with parameter servers, whose steps are not those of one process"
                )
            raise ConfigError(
                f"this job has {self._job.view.replicas} replicas and no parameter servers: start it with "
                "`lockstep run --ps P -n N`"
            )
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        self._options = ServerOptions(variable_partitioner, max_staleness)
        # One worker computes a step.
        self._runner = SingleReplicaRunner()
        self._coordinator: Any = None
        self._program: _Program = _LocalProgram()
        if self._job.context.has_servers:
            self._program = _ServedProgram(self._job, self._methods.functions, self._options)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Let the job train the models that are compiled within the block."""
        with self._methods.scope(self._entered, self._options), self._entered(), self._program.scope():
            yield self

    @property
    def num_replicas_in_sync(self) -> int:
        """1: a step is one batch on one worker."""
        return 1

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster's tasks and of this process's task."""
        return self._resolver

    @property
    def has_servers(self) -> bool:
        """Whether this process belongs to a job with parameter servers."""
        return self._program.has_servers

    def per_worker_dataset(self, make: Callable[[], Any], number: int) -> PerWorkerDataset:
        """Return a dataset that each worker creates for itself.

        Args:
            make: creates the dataset.
            number: the number of the dataset, which determines its random numbers.
        """
        job = self._job
        return PerWorkerDataset(
            make,
            # A process that replaces a lost worker has that worker's task.
            lambda: seed_of(job.settings.seed, "dataset", number, job.process),
            seed_of(job.settings.seed, "dataset", number),
            lambda: (job.process, job.replacement),
        )

    def function_calls(self) -> Calls:
        """Return the object that runs scheduled functions.

        In a job, it ends at the next `fit`, with a function of another strategy, and with the script.
        """
        return self._program.function_calls()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` in a scheduled function, or in a process without a job.

        Raises:
            ModelError: the job has parameter servers, and the caller is not a scheduled function.
        """
        if current_replica() is not None:
            return fn(*args, **(kwargs or {}))
        self._program.begin_loop("strategy.run")
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Return the value, or its sum or mean along an axis."""
        return self._runner.reduce(ReduceOp.of(reduce_op), value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the value."""
        return value

    def steps(self, count: int, state: Mapping[str, Any], checkpoint: Any = None) -> Iterator[int]:
        """Yield the numbers of steps in a process without a job.

        Raises:
            ModelError: the job has parameter servers.
        """
        self._program.begin_loop("strategy.steps")
        return super().steps(count, state, checkpoint)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return the dataset: a batch is for one worker."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """Return the dataset `dataset_fn(InputContext())`, which each process creates now."""
        return process_dataset(dataset_fn)


class _Program(Protocol):
    """How this process runs the functions and loops of the program.

    Attributes:
        has_servers: whether parameter servers have the weights.
    """

    has_servers: bool

    def scope(self) -> AbstractContextManager[None]:
        """Return a context in which the program creates variables."""

    def function_calls(self) -> Calls:
        """Return the object that runs scheduled functions."""

    def begin_loop(self, name: str) -> None:
        """Raise ModelError if `strategy.run` and `strategy.steps` are not supported."""


class _LocalProgram:
    """The program in one process, which runs everything itself."""

    has_servers = False

    def __init__(self) -> None:
        self._calls: LocalCalls | None = None

    def scope(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def function_calls(self) -> LocalCalls:
        """Return the object that runs functions where they are scheduled."""
        self._calls = self._calls or LocalCalls()
        return self._calls

    def begin_loop(self, name: str) -> None:
        """Do nothing."""


class _ServedProgram:
    """The program in a process of a job with parameter servers, whose workers run the functions.

    Args:
        job: the job.
        functions: the functions of all strategies.
        options: the options of the strategy.
    """

    has_servers = True

    def __init__(self, job: Job, functions: ScheduledFunctions, options: ServerOptions) -> None:
        self._job, self._functions, self._options = job, functions, options
        self._variables = ScopeVariables()
        self._calls: FunctionCalls | None = None
        assignments.install()
        job.at_completion(self._close)
        functions.of_strategy(self._join, self._close)

    def scope(self) -> AbstractContextManager[None]:
        """Return a context that records the variables that the program creates."""
        return observed_by(self._variables)

    def function_calls(self) -> FunctionCalls:
        """Return the calls in progress, or begin new ones."""
        if self._calls is None:
            self._functions.end()
            program = ScheduleContext(
                job=self._job,
                scope=self._variables,
                options=self._options,
                number=self._functions.number,
                joining=self._functions.joining,
                ended=self._functions.changed,
                trained=self._functions.steps_taken,
            )
            calls = OneProcessCalls if self._job.settings.in_one_process else _CALLS[program.task]
            self._calls = calls(program)
        return self._calls

    def begin_loop(self, name: str) -> None:
        """Raise ModelError."""
        raise ModelError(
            f"{name} with parameter servers works in functions that a lockstep.ClusterCoordinator schedules; "
            "use fit, a ClusterCoordinator, or MultiWorkerMirroredStrategy in a job without --ps"
        )

    def _join(self) -> None:
        if self._calls is not None:
            self._calls.join()

    def _close(self) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            self._functions.closed(calls.name, calls.close())


@runtime_checkable
class ServerDef(Protocol):
    """A task of a cluster as a `tf.train.ServerDef`. An empty name means that there is none."""

    @property
    def cluster(self) -> ClusterDef:
        """The cluster."""

    @property
    def job_name(self) -> str:
        """The job of the task."""

    @property
    def task_index(self) -> int:
        """The index of the task in its job."""

    @property
    def protocol(self) -> str:
        """The prefix of addresses."""


class Server:
    """Represents a task of a cluster in programs of `tf.distribute`. It does not listen at an address.

    The tasks of a job are the processes that `lockstep run` starts. `TF_CONFIG` names each of them the chief,
    because all of them run the code of the chief. So a program that calls `join` in the tasks "worker" and
    "ps" does not reach this call.

    Args:
        server_or_cluster_def: the cluster, as a `ClusterSpec`, a `tf.train.ClusterDef`, or a mapping from
            names of jobs to addresses. A `tf.train.ServerDef` also has the defaults of the next three.
        job_name: the job of the task; by default the only one.
        task_index: the index of the task in its job; by default that of the only one.
        protocol: the prefix of `target`; by default "grpc".
        config: ignored.
        start: ignored.

    Raises:
        ConfigError: the cluster is invalid.
        ValueError: the cluster does not have this task.

    Example:
        >>> import lockstep
        >>> lockstep.Server({"worker": ["a:1"], "ps": ["b:1"]}, job_name="ps", task_index=0).target
        'grpc://b:1'
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | ClusterDef | ServerDef | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        cluster_def = server_or_cluster_def
        if isinstance(cluster_def, ServerDef):
            job_name = job_name or cluster_def.job_name or None
            task_index = cluster_def.task_index if task_index is None else task_index
            protocol = protocol or cluster_def.protocol
            cluster_def = cluster_def.cluster
        cluster = ClusterSpec(cluster_def)
        if job_name is None and len(cluster.jobs) == 1:
            (job_name,) = cluster.jobs
        if job_name is None:
            raise ValueError(f"job_name is missing: the cluster has the jobs {', '.join(cluster.jobs)}")
        if task_index is None and cluster.num_tasks(job_name) == 1:
            (task_index,) = cluster.task_indices(job_name)
        if task_index is None:
            raise ValueError(
                f"task_index is missing: the job {job_name} has {cluster.num_tasks(job_name)} tasks"
            )
        self._target = f"{protocol or 'grpc'}://{cluster.task_address(job_name, task_index)}"

    @property
    def target(self) -> str:
        """The address of the task, with the protocol."""
        return self._target

    def start(self) -> None:
        """Do nothing, because there is nothing to start."""

    def join(self) -> NoReturn:
        """Raise ConfigError, because this process does not serve and would wait forever."""
        raise ConfigError(
            f"Server.join() waits for the server at {self._target}, which does not exist: start all tasks "
            "with `lockstep run --ps P -n N train.py`, or each one with `lockstep run --tf-config --ps P "
            "train.py`, and let each process run the chief's part of the program"
        )
