"""Environment variables, which only this module of the package reads, and the environment of workers."""

import hashlib
import json
import os
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.errors import ConfigError
from lockstep.system.cgroups import cpu_quota
from lockstep.system.cuda import GPU_FOLDER, LISTED, read_machine, shown_gpus

_PREFIX = "LOCKSTEP_"
_PARENT = f"{_PREFIX}PARENT"
_FIRST_PORT = 20000
_XLA_DETERMINISTIC = "xla_gpu_deterministic_ops"
_CUBLAS = (":4096:8", ":16:8")
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**28)}
"""Keeps glibc from returning the memory of each step to the kernel and requesting it again."""
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Makes all threads allocate in the main arena. In the arena of another thread, an array of more than 64 MB
is mapped and unmapped, whatever the thresholds are, and on JAX, XLA allocates in such threads. On TensorFlow
and PyTorch, one arena saved nothing."""
_ARROW = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps the jemalloc in pyarrow, which Keras imports with pandas, from starting a thread: a process with two
threads cannot be forked."""
_SHARED = (
    *("CUBLAS_", "JAX_", "KERAS_", "MKL_", "OMP_", "OPENBLAS_", "PYTHONPATH", "PYTORCH_", "TF_", "TORCH_"),
    "XLA_",
)
"""Prefixes of variables that can change what a script computes."""
_NUMERIC = (
    *("CUBLAS_WORKSPACE", "JAX_", "KMP_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_"),
    *(
        "TF_CUDNN",
        "TF_DETERMINISTIC",
        "TF_DISABLE",
        "TF_ENABLE",
        "TF_NUM",
        "TF_USE",
        "TF_XLA",
        "TORCH_",
        "XLA_",
    ),
)
_NOT_NUMERIC = ("CACHE", "CONFIG", "DIR", "FILE", "HOME", "KEY", "LOG", "PASSWORD", "PATH", "SECRET", "TOKEN")
_HASH_SEED = "PYTHONHASHSEED"
_OF_TERRAFORM = ("TF_CLI_", "TF_TOKEN_", "TF_VAR_")
"""Prefixes of variables of another program, which often contain secrets."""
_OF_ONE_HOST = ("TF_CONFIG", "KERAS_HOME", "JAX_COMPILATION_CACHE_DIR", "TORCH_HOME")
KEY_FILE = f"{_PREFIX}KEY_FILE"
"""The variable with the path of the key of a job over several hosts."""
ATTEMPT = f"{_PREFIX}ATTEMPT"
"""The variable with the number of times that a job was started again; see `attempt`."""
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
"""Variables of a process that must not use the GPUs of its machine."""
ENGINE = f"{_PREFIX}ENGINE"
"""The variable with the descriptor of the socket of the engine that has started this process."""
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
RUN_DIR = f"{_PREFIX}RUN_DIR"
"""The run folder, of a script on the host that has it."""
WITNESS = f"{_PREFIX}WITNESS"
"""The value of `--witness` unless the command has one."""
PUBLIC = frozenset({KEY_FILE, RUN_DIR, WITNESS})
"""The variables of Lockstep that users set or read."""
RUN = "lockstep run"
"""The environment in the `TF_CONFIG` of workers that were not started by hand."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = {"CREDENTIALS", "KEY", "PASSWD", "PASSWORD", "SECRET", "TOKEN"}
"""The last words of the names of variables whose values are not recorded."""

_at_start = {"TF_CONFIG": os.environ.get("TF_CONFIG")}

Value = TypeVar("Value")


@dataclass(frozen=True)
class WorkerIdentity:
    """The identity of a worker's process, its agent and its run. The agent tells it everything else.

    Attributes:
        worker: the worker's id, from 0.
        run_dir: the run's own folder, absolute.
        agent: process id of the agent.
        control: inherited descriptor of the socket to the agent.
        joins: whether the worker joins a running job.
        by_hand: whether the user started this process.
        host: the name of the worker's host, as the user wrote it; empty if the job has one host.
        device_users: the number of workers that use its GPU; of several GPUs, the largest number.
    """

    worker: int
    run_dir: Path
    agent: int
    control: int
    joins: bool = False
    by_hand: bool = False
    host: str = ""
    device_users: int = 1


def parent_variable(told: str) -> dict[str, str]:
    """Return the environment variable that passes `told` to the fork server."""
    return {_PARENT: told}


def parent_told(environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of `parent_variable`, or an empty string if it is not set."""
    return environ.get(_PARENT, "")


def read_worker(environ: Mapping[str, str] = os.environ) -> WorkerIdentity:
    """Parse the `LOCKSTEP_*` variables.

    Raises:
        ConfigError: a variable is missing or invalid; the message names it.
    """
    return WorkerIdentity(
        worker=_parse(environ, "WORKER", _count),
        run_dir=_parse(environ, "RUN_DIR", _folder),
        agent=_parse(environ, "AGENT", _positive),
        control=_parse(environ, "CONTROL_FD", _count),
        joins=f"{_PREFIX}JOINS" in environ,
        by_hand=f"{_PREFIX}BY_HAND" in environ,
        host=environ.get(f"{_PREFIX}HOST", ""),
        device_users=int(environ.get(f"{_PREFIX}DEVICE_USERS", "1")),
    )


def forget_worker(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the `LOCKSTEP_*` variables, so that a worker's children do not act as the worker."""
    for name in [name for name in environ if name.startswith(_PREFIX)]:
        del environ[name]


def show_run_folder(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell the script where the run folder is, for its own files."""
    environ[RUN_DIR] = os.fspath(folder)


def worker_environment(
    identity: WorkerIdentity,
    shared: Mapping[str, str],
    *,
    cluster: str,
    devices: str | None = None,
) -> dict[str, str]:
    """Return the whole environment of a worker.

    Args:
        identity: the result of `read_worker` in the worker.
        shared: the `job_environment`.
        cluster: its `TF_CONFIG`.
        devices: its `CUDA_VISIBLE_DEVICES`; None to leave it unchanged.
    """
    environment = {**shared, **_identity_variables(identity), "TF_CONFIG": cluster}
    if devices is not None:
        environment |= device_variables(shared, devices, identity.device_users > 1)
    return environment


def job_environment(
    seed: int, threads: int, inherited: Mapping[str, str] = os.environ, *, backend: str | None = None
) -> dict[str, str]:
    """Return the part of the environment that all workers of a job share.

    Args:
        seed: the seed of the job.
        threads: number of threads that compute one replica.
        inherited: the other variables of the workers.
        backend: the Keras backend; None to leave it unchanged.
    """
    environment = {name: value for name, value in inherited.items() if not name.startswith(_PREFIX)}
    environment = _ARROW | environment | _thread_variables(threads)
    environment[_HASH_SEED] = _hash_seed(seed)
    environment["PYTHONUNBUFFERED"] = "1"
    if backend is not None:
        environment["KERAS_BACKEND"] = backend
        environment = _MALLOC | environment
    if backend == "jax":
        environment = _ONE_ARENA | environment
    return environment


def replaced_hash_seed(seed: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's `PYTHONHASHSEED` if workers get another value, otherwise an empty string.

    Args:
        seed: the seed of the job.
        environ: the variables of the user.
    """
    value = environ.get(_HASH_SEED, "")
    return value if value != _hash_seed(seed) else ""


def _hash_seed(seed: int) -> str:
    return str(seed % 2**32)


def put_control(control: int) -> None:
    """Update the number of the descriptor of a worker's socket, which differs from that in the agent."""
    os.environ[f"{_PREFIX}CONTROL_FD"] = str(control)


def take_environment(changes: Mapping[str, str | None]) -> None:
    """Apply changes to the environment of this process; None removes a variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _at_start["TF_CONFIG"] = os.environ.get("TF_CONFIG")


def tf_config(slot: int, replicas: int, servers: int = 0) -> str:
    """Return the `TF_CONFIG` of the worker at a slot.

    It has one address per replica, which stays the same for the life of the job.
    The addresses only name the replicas; nothing listens there. Child processes of a worker inherit it; its
    "environment" field tells them that they are not one of its tasks.

    With parameter servers, every process is the chief there, because all run the program of `tf.distribute`'s
    chief.
    """
    addresses = [f"127.0.0.1:{_FIRST_PORT + replica}" for replica in range(replicas)]
    cluster, task = {"worker": addresses}, {"type": "worker", "index": slot}
    if servers:
        cluster = {"chief": addresses[:1], "worker": addresses[1:-servers], "ps": addresses[-servers:]}
        task = {"type": "chief", "index": 0}
    return json.dumps({"cluster": cluster, "task": task, "environment": RUN})


def tf_config_given() -> str | None:
    """Return the `TF_CONFIG` that this process was started with, or None if there was none."""
    return _at_start["TF_CONFIG"]


def tf_config_now() -> str | None:
    """Return the current `TF_CONFIG`, which the script may have set."""
    return os.environ.get("TF_CONFIG")


def environment_at_start(file: Path = Path("/proc/self/environ")) -> dict[str, str]:
    """Return the environment that this process was started with, without later changes."""
    lines = os.fsdecode(file.read_bytes()).split("\0")
    pairs = [line.partition("=") for line in lines if line]
    if not all(name and equals for name, equals, _ in pairs):
        # A program that has set its process title has overwritten it.
        return dict(os.environ)
    return {name: value for name, _, value in pairs}


def visible_gpus(environ: Mapping[str, str] = os.environ, folder: Path = GPU_FOLDER) -> tuple[str, ...]:
    """Return the GPUs that CUDA would show, without using any framework.

    Raises:
        UnfitError: the driver hangs.
    """
    return shown_gpus(environ.get(LISTED), read_machine(folder).gpus).names


def hide_gpus() -> None:
    """Hide all GPUs from every process that this one starts or becomes."""
    os.environ[LISTED] = ""


def show_gpus(names: Sequence[str]) -> None:
    """Let CUDA show only these GPUs to frameworks that have not yet initialized it."""
    os.environ[LISTED] = ",".join(names)


def variable(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a variable that the user has named, or None if it is not set."""
    return environ.get(name)


def key_file() -> Path | None:
    """Return the path of the key of the job, or None if it is not set."""
    return Path(path) if (path := os.environ.get(KEY_FILE)) else None


def take_engine() -> int | None:
    """Remove the variable of the engine that has started this process, and return the descriptor in it.

    Returns:
        None if no engine has started this process.
    """
    text = os.environ.pop(ENGINE, "")
    return int(text) if text.isdecimal() else None


def for_engine_process(shared: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that an engine starts.

    Args:
        shared: the user's `shared_variables`, which replace those that the engine has set.
    """
    kept = ("PYTHONPATH",)
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith((*_SHARED, "RAY_", _PREFIX))
    }
    return variables | {name: value for name, value in shared.items() if name not in kept}


def shared_variables(also: Collection[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a script must see on all hosts.

    Args:
        also: the names of variables that the user has requested; the others can change the results of a
            script, and are not secrets.
        environ: the variables of the user.
    """

    def is_shared(name: str) -> bool:
        excluded = name in _OF_ONE_HOST or name.startswith(_OF_TERRAFORM) or _is_secret(name)
        return name.startswith(_SHARED) and not excluded

    return {name: value for name, value in environ.items() if name in also or is_shared(name)}


def variable_marks(
    names: Iterable[str], hidden: Collection[str] = (), environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return marks that show whether variables of two runs differ: 4 digits of a hash of each value.

    A variable that is `hidden`, or whose name is that of a secret, has the mark `set`. Variables that are not
    set do not have marks, nor do `numeric_flags` and the variables that the job sets.
    """
    recorded_elsewhere = {*numeric_flags(environ), *_OF_JOB, "KERAS_BACKEND"}
    marks = {}
    for name in sorted(set(names).intersection(environ).difference(recorded_elsewhere)):
        secret = name in hidden or _is_secret(name)
        marks[name] = "set" if secret else hashlib.sha256(os.fsencode(environ[name])).hexdigest()[:4]
    return marks


def _is_secret(name: str) -> bool:
    return name.rpartition("_")[2] in _SECRET


def parse_variables(texts: Iterable[str]) -> dict[str, str | None]:
    """Parse the variables of `--env`: NAME=VALUE, or NAME for the user's value, which is None here.

    Raises:
        ConfigError: a name cannot be a variable of the script, or a value is a secret and would be recorded.
    """
    variables: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"--env {text}: expected NAME=VALUE, or the NAME of a variable that is set here"
            )
        if name.startswith(_PREFIX) or name in _OF_JOB:
            advice = _OF_JOB.get(name, "Lockstep uses it itself")
            raise ConfigError(f"--env {name}: {advice}")
        if equals and _is_secret(name):
            raise ConfigError(
                f"--env {name}=...: the value would be recorded, and the name says that it is a secret: set "
                f"the variable, and give --env {name}, which records the name alone"
            )
        variables[name] = value if equals else None
    return variables


def set_recorded(variables: Mapping[str, str | None]) -> None:
    """Set the variables that have a value."""
    os.environ.update({name: value for name, value in variables.items() if value is not None})


def unrecorded(
    variables: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the user's values of the variables without a value."""
    return {name: environ[name] for name, value in variables.items() if value is None and name in environ}


def require_variables(
    variables: Mapping[str, str | None], environ: Mapping[str, str] = os.environ, form: str = "--env {}"
) -> None:
    """Raise ConfigError if a variable without a value is not set; `form` names it in the message."""
    for name, value in variables.items():
        if value is None and name not in environ:
            raise ConfigError(f"{form.format(name)}: set the variable here first")


def numeric_flags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that determine how libraries compute, for a log; none contains a secret."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_NUMERIC) and not any(part in name for part in _NOT_NUMERIC)
    }


def with_temporary_folder(folder: Path) -> dict[str, str]:
    """Return the environment of a process whose temporary files are in a folder."""
    return {**os.environ, "TMPDIR": str(folder)}


def repeating(flags: Mapping[str, str], here: Collection[str] = ()) -> dict[str, str]:
    """Return the environment in which a run with these `numeric_flags` is repeated.

    Variables that follow from the number of threads are left to the job, which sets them itself.

    Args:
        flags: the flags of the run.
        here: the names of variables that keep their values in this process.
    """
    replaced = numeric_flags().keys() - set(here)
    variables = {name: value for name, value in os.environ.items() if name not in replaced}
    kept = {*_thread_variables(1), *here}
    return variables | {name: value for name, value in flags.items() if name not in kept}


def ssh_address() -> str | None:
    """Return the IP address at which the client of `ssh` has reached this host, or None without `ssh`."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None


def slurm_variable(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a variable that Slurm sets for the job step of this process, or None if it is not set."""
    return environ.get(f"SLURM_{name}")


def keras_backend(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """Return the backends in `KERAS_BACKEND` and in Keras's configuration file, or None for a missing one."""
    base = environ.get("HOME") or Path.home()
    # This is the same search as Keras's.
    home = environ.get("KERAS_HOME") or Path(base if os.access(base, os.W_OK) else "/tmp") / ".keras"
    try:
        settings = json.loads((Path(home) / "keras.json").read_text())
    except (OSError, ValueError, RecursionError):
        settings = None
    configured = settings.get("backend") if isinstance(settings, dict) else None
    return environ.get("KERAS_BACKEND"), configured if isinstance(configured, str) else None


def legacy_keras(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of the variable that makes `tf.keras` Keras 2, or None if it is not set."""
    return environ.get(LEGACY_KERAS)


def cublas_is_deterministic() -> bool:
    """Return whether cuBLAS has a workspace with which it computes equal bits each time."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in _CUBLAS


def switched_off(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the variables with which the user has disabled deterministic operations of a backend."""
    off = {
        "XLA_FLAGS": f"{_XLA_DETERMINISTIC}=false" in environ.get("XLA_FLAGS", ""),
        "TF_DETERMINISTIC_OPS": environ.get("TF_DETERMINISTIC_OPS", "1") not in ("1", "true"),
        "CUBLAS_WORKSPACE_CONFIG": environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8") not in _CUBLAS,
    }
    return tuple(name for name, is_off in off.items() if is_off)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for Lockstep's caches of this user."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "lockstep"
    return home_folder(environ) / ".cache" / "lockstep"


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's home folder, which may not exist."""
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        # In containers, a user may have no entry in the user database.
        return Path("/nonexistent")


def usable_cores(
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Return the number of cores that this process may use.

    Its affinity and cgroups limit them; in a task of a Slurm job step, also the CPUs that the step requests.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(proc / "self" / "cgroup", cgroups)
    cpus = slurm_variable("CPUS_PER_TASK", environ) if slurm_variable("STEP_ID", environ) else None
    if cpus is not None and cpus.isascii() and cpus.isdigit() and len(cpus) < 10:
        cores = min(cores, int(cpus))
    return max(1, cores if quota is None else min(cores, int(quota)))


def _identity_variables(identity: WorkerIdentity) -> dict[str, str]:
    values: dict[str, object] = {
        "WORKER": identity.worker,
        "RUN_DIR": identity.run_dir,
        "AGENT": identity.agent,
        "CONTROL_FD": identity.control,
    }
    if identity.joins:
        values["JOINS"] = "yes"
    if identity.by_hand:
        values["BY_HAND"] = "yes"
    if identity.host:
        values["HOST"] = identity.host
    if identity.device_users > 1:
        values["DEVICE_USERS"] = identity.device_users
    return {f"{_PREFIX}{name}": str(value) for name, value in values.items()}


def _thread_variables(threads: int) -> dict[str, str]:
    # The number of threads determines the order of a backend's additions, so it affects the result. XLA's
    # CPU client reads NPROC; "dynamic" would let OpenMP and MKL use fewer threads at will.
    names = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    fixed = {"TF_NUM_INTEROP_THREADS": "1", "OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"}
    return {name: str(threads) for name in names} | fixed


def device_variables(inherited: Mapping[str, str], devices: str, shared: bool) -> dict[str, str]:
    """Return the variables of a worker that computes on GPUs; see `worker_environment`."""
    # Operations on GPUs are also deterministic, unless the user has disabled that.
    flags = inherited.get("XLA_FLAGS", "")
    if _XLA_DETERMINISTIC not in flags:
        flags = f"{flags} --{_XLA_DETERMINISTIC}=true".strip()
    variables = {
        LISTED: devices,
        "XLA_FLAGS": flags,
        "TF_DETERMINISTIC_OPS": inherited.get("TF_DETERMINISTIC_OPS", "1"),
        "CUBLAS_WORKSPACE_CONFIG": inherited.get("CUBLAS_WORKSPACE_CONFIG", _CUBLAS[0]),
    }
    if shared:
        # JAX and TensorFlow would each allocate all of the memory at the start; PyTorch does not.
        variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    return variables


def _parse(environ: Mapping[str, str], name: str, convert: Callable[[str], Value]) -> Value:
    name = _PREFIX + name
    if name not in environ:
        raise ConfigError(f"{name} is not set: workers are started by `lockstep run`, not by hand")
    try:
        return convert(environ[name])
    except ValueError as error:
        raise ConfigError(f"{name} is {environ[name]!r}: {error}") from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError("expected a whole number, 1 or more")
    return int(text)


def _folder(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError("expected an absolute path")
    return Path(text)


def attempt(environ: Mapping[str, str] = os.environ) -> tuple[int, int, str]:
    """Return the number of restarts of this command's job, the remains of earlier runs, and its run folder.

    The second number is the size of `events.jsonl` before the first start, in bytes. All are empty at first.
    """
    number, _, rest = environ.get(ATTEMPT, "").partition(":")
    size, _, folder = rest.partition(":")
    return (int(number), int(size), folder) if number.isdecimal() and size.isdecimal() else (0, 0, "")


THREAD_VARIABLES = tuple(_thread_variables(1))
"""The variables that follow from the number of threads of a replica."""
_OF_JOB = {
    **dict.fromkeys(THREAD_VARIABLES, "--threads-per-worker sets it"),
    LISTED: "--devices sets it",
    _HASH_SEED: "--seed sets it",
    "TF_CONFIG": "the job sets it for each worker",
    RUN_DIR: "--run-dir sets it",
}
"""The variables that a job sets for its workers, and how."""
