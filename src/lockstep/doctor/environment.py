"""The effects of a shell's variables on jobs started there."""

import re
import site
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from ipaddress import ip_address, ip_network
from pathlib import Path

from lockstep.cluster.slurm_step import STEP_VARIABLES, SlurmTask
from lockstep.doctor.finding import Finding, Rating, Section
from lockstep.errors import ConfigError
from lockstep.launcher.backend import is_legacy
from lockstep.system.environment import LEGACY_KERAS, legacy_keras, slurm_variable, switched_off, visible_gpus
from lockstep.system.prose import count, printable

_ROWS = Section("environment")

_LISTED = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_MAX_SHOWN = 120

_THREADS = "Lockstep sets its own value for workers; a script without Lockstep uses this one"
_SHARED_GPU = "Lockstep sets its own value if workers share a GPU; otherwise this one applies"
_BITS = "applies to workers too; it may change the bits of results"
EFFECTS: Mapping[str, str] = {
    "KERAS_BACKEND": "the backend of jobs unless lockstep run --backend names another",
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
    "OPENBLAS_NUM_THREADS": _THREADS,
    "TF_NUM_INTRAOP_THREADS": _THREADS,
    "TF_NUM_INTEROP_THREADS": _THREADS,
    "NPROC": _THREADS,
    "PYTHONHASHSEED": "Lockstep sets its own value for workers, from the job's seed",
    "XLA_FLAGS": f"{_BITS}, and JAX fails on a flag that it does not know",
    "JAX_ENABLE_X64": f"if true, JAX keeps 64-bit numbers; {_BITS}",
    "TF_FORCE_GPU_ALLOW_GROWTH": f"whether TensorFlow allocates GPU memory as needed. {_SHARED_GPU}",
    "XLA_PYTHON_CLIENT_PREALLOCATE": f"whether JAX allocates GPU memory at the start. {_SHARED_GPU}",
    "TF_DETERMINISTIC_OPS": "Lockstep keeps it for workers with a GPU",
    "CUBLAS_WORKSPACE_CONFIG": "Lockstep keeps it for workers with a GPU",
}
"""The effects of variables for which every value is fine."""

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PLATFORMS = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
_WITHOUT_GPU = "cpu"
_OF_GPUS = {"cuda", "gpu"}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_SECRET = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)
_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Shell:
    """The environment to inspect.

    Attributes:
        environ: all variables.
        folder: the current folder of jobs started there.
        installed: folders where packages are installed.
        driver: the folder where the driver lists GPUs.
    """

    environ: Mapping[str, str]
    folder: Path
    installed: Sequence[Path]
    driver: Path

    def display(self, name: str) -> str:
        """Return the value of a variable for display."""
        return plain(self.environ[name])


def examine_environment(
    environ: Mapping[str, str],
    folder: Path = Path(),
    installed: Sequence[Path] | None = None,
    driver: Path = _DRIVER,
) -> list[Finding]:
    """Return the findings on all variables except `TF_CONFIG`, one for each effect on a job.

    Args:
        environ: the variables.
        folder: the current folder of jobs started there.
        installed: folders where packages are installed; by default those of this Python.
        driver: the folder where the driver lists GPUs.
    """
    shell = Shell(environ, folder, _site_folders() if installed is None else installed, driver)
    findings = [finding for check in _CHECKS for finding in check(shell)]
    if not findings and "TF_CONFIG" not in environ:
        return [_ROWS.fine("variables", "no variable that affects a job is set")]
    return findings


def plain(text: str) -> str:
    """Return a text without control characters, shortened if it is long."""
    text = printable(text)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def without_secrets(proxy: str) -> str:
    """Return the address of a proxy without user name and password."""
    return _SECRET.sub(lambda found: f"{found[1] or ''}***@", proxy)


def uncovered_names(no_proxy: str) -> list[str]:
    """Return the names of this machine that `no_proxy` does not cover."""
    entries = [entry.strip().lower() for entry in no_proxy.split(",")]
    return [name for name in _LOCAL if not any(_covers(entry, name) for entry in entries)]


def _visible_devices(shell: Shell) -> Iterator[Finding]:
    if _LISTED not in shell.environ:
        return
    named = len(shell.environ[_LISTED].split(","))
    shown, there = visible_gpus(shell.environ), visible_gpus({}, shell.driver)
    facts = {"value": shell.display(_LISTED), "shown": list(shown), "there": len(there)}
    if not shown:
        found = f", of which the driver has {len(there)}" if there else ""
        yield _ROWS.warning(
            _LISTED,
            f"{shell.display(_LISTED)!r} hides all GPUs{found}: jobs compute on the CPU",
            f"unset {_LISTED} to use GPUs, or name some with lockstep run --devices",
            **facts,
        )
    elif len(shown) < named:
        yield _ROWS.warning(
            _LISTED,
            f"{shell.display(_LISTED)!r} shows {count(len(shown), 'GPU')} and hides the following ones",
            f"let {_LISTED} name only GPUs",
            **facts,
        )
    else:
        reason = f"names {count(len(shown), 'GPU')} ({plain(', '.join(shown))}), by default one per worker"
        yield _ROWS.fine(_LISTED, reason, **facts)


def _table(shell: Shell) -> Iterator[Finding]:
    off = switched_off(shell.environ)
    for name, effect in EFFECTS.items():
        value = shell.environ.get(name, "")
        if name in off:
            yield _ROWS.warning(
                name,
                f"{plain(value)!r} disables deterministic operations: equal bits on GPUs are not guaranteed",
                f"unset {name}, or remove that part: Lockstep sets what is necessary",
                value=plain(value),
            )
        elif value.strip():
            yield _ROWS.fine(name, f"{plain(value)}: {effect}", value=plain(value))


def _platforms(shell: Shell) -> Iterator[Finding]:
    gpus = visible_gpus(shell.environ, shell.driver)
    for name in _PLATFORMS:
        names = [each.strip().lower() for each in shell.environ.get(name, "").split(",") if each.strip()]
        if not names:
            continue
        value = shell.display(name)
        if names[0] == _WITHOUT_GPU and gpus:
            reason = f"{value}: JAX computes on the CPU despite {count(len(gpus), 'visible GPU')}"
            yield _ROWS.warning(name, reason, f"unset {name} to use GPUs", value=value)
        elif set(names) <= _OF_GPUS and not gpus:
            reason = f"{value}: JAX uses only GPUs and fails because none is visible"
            yield _ROWS.warning(name, reason, f"unset {name}, or make GPUs visible", value=value)
        else:
            yield _ROWS.fine(name, f"{value}: where JAX computes, in workers too", value=value)


def _fractions(shell: Shell) -> Iterator[Finding]:
    given = [name for name in _FRACTIONS if shell.environ.get(name)]
    for name in given:
        value = shell.display(name)
        if len(given) > 1:
            reason = f"{value}: JAX refuses to use a GPU if both names of this variable are set"
            yield _ROWS.warning(name, reason, f"unset {_FRACTIONS[1]}, the old name", value=value)
        elif not _is_number(shell.environ[name]):
            reason = f"{value!r} is not a number: JAX fails on a GPU"
            yield _ROWS.warning(name, reason, f"unset {name}, or give a fraction such as 0.5", value=value)
        else:
            reason = f"{value}: the fraction of GPU memory that JAX may use, in workers too"
            yield _ROWS.fine(name, reason, value=value)


def _old_keras(shell: Shell) -> Iterator[Finding]:
    value = legacy_keras(shell.environ)
    if value is not None and is_legacy(value):
        reason = f"{shell.display(LEGACY_KERAS)}: tf.keras is Keras 2, and lockstep run refuses to start"
        yield Finding(
            "environment", LEGACY_KERAS, Rating.FAILURE, reason, f"unset {LEGACY_KERAS}", {"value": value}
        )


def _python_path(shell: Shell) -> Iterator[Finding]:
    value = shell.environ.get("PYTHONPATH", "")
    if not value:
        return
    folders = [Path(entry) if entry else shell.folder for entry in value.split(":")]
    missing = [plain(str(folder)) for folder in folders if not _exists(folder)]
    facts = {"folders": [plain(str(folder)) for folder in folders], "missing": missing}
    hiding = {folder: modules for folder in folders if (modules := hidden_modules(folder, shell.installed))}
    for folder, modules in hiding.items():
        yield _ROWS.warning(
            "PYTHONPATH",
            f"{plain(str(folder))} has {_modules(modules)}, which programs import instead of the installed "
            "packages",
            "remove this folder from PYTHONPATH, or rename these files",
            modules=list(modules),
            **facts,
        )
    if not hiding:
        absent = (
            f"; {', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist" if missing else ""
        )
        yield _ROWS.fine("PYTHONPATH", f"workers search it before the installed packages{absent}", **facts)


def _current_folder(shell: Shell) -> Iterator[Finding]:
    if modules := hidden_modules(shell.folder, shell.installed):
        yield _ROWS.warning(
            "current folder",
            f"it has {_modules(modules)}, which a script in this folder imports instead of the installed "
            "packages",
            "rename these files",
            modules=list(modules),
        )


def _preload(shell: Shell) -> Iterator[Finding]:
    libraries = re.findall(r"[^\s:]+", shell.environ.get("LD_PRELOAD", ""))
    missing = [each for each in libraries if "/" in each and "$" not in each and not _exists(Path(each))]
    facts = {"libraries": libraries, "missing": missing}
    if missing:
        reason = (
            f"{plain(', '.join(missing))} does not exist: the loader reports that when any process starts"
        )
        yield _ROWS.warning("LD_PRELOAD", reason, "unset LD_PRELOAD, or correct it", **facts)
    elif libraries:
        yield _ROWS.fine("LD_PRELOAD", f"{plain(', '.join(libraries))}: loaded into every worker", **facts)


def _proxies(shell: Shell) -> Iterator[Finding]:
    names = [name for each in _PROXIES for name in (each, each.upper()) if shell.environ.get(name)]
    if not names:
        return
    shown = ", ".join(f"{name}={plain(without_secrets(shell.environ[name]))}" for name in names)
    reason = f"{shown}: Lockstep's workers use no proxy; downloads, gRPC and the Kubernetes client may"
    out = uncovered_names(shell.environ.get("no_proxy") or shell.environ.get("NO_PROXY", ""))
    if not out:
        yield _ROWS.fine("proxies", reason, set=names, left_out=out)
        return
    yield _ROWS.warning(
        "proxies",
        f"{reason}. no_proxy does not contain {' and '.join(out)}: scripts use the proxy even for servers on "
        "this machine",
        f"export no_proxy={','.join(out)}${{no_proxy:+,$no_proxy}}",
        set=names,
        left_out=out,
    )


def _own_variables(shell: Shell) -> Iterator[Finding]:
    names = sorted(name for name in shell.environ if name.startswith("LOCKSTEP_"))
    if names:
        yield _ROWS.warning(
            "LOCKSTEP_*",
            f"{plain(', '.join(names))}: only workers use these and remove them at their start; "
            "lockstep run removes them",
            "unset them: they are left over, or belong to another program",
            names=names,
        )


def _slurm(shell: Shell) -> Iterator[Finding]:
    if not any(name.startswith("SLURM_") for name in shell.environ):
        return

    def variable(name: str) -> str | None:
        return slurm_variable(name, shell.environ)

    missing = [f"SLURM_{name}" for name in STEP_VARIABLES if variable(name) is None]
    if missing:
        reason = f"not a task of a job step, for which srun sets {', '.join(missing)}"
        yield _ROWS.fine("SLURM_*", f"{reason}; only lockstep run --slurm needs them", missing=missing)
        return
    try:
        task = SlurmTask.read(variable)
    except ConfigError as error:
        yield _ROWS.warning("SLURM_*", f"lockstep run --slurm refuses them: {error}", "use srun")
        return
    tasks = sum(tasks for _, tasks in task.hosts)
    reason = (
        f"this is task {task.rank} of {tasks} on {count(len(task.hosts), 'host')}; lockstep run --slurm "
        "makes them one job, and without --slurm each is a job of its own"
    )
    yield _ROWS.fine("SLURM_*", reason, rank=task.rank, tasks=tasks, hosts=len(task.hosts))


_CHECKS: tuple[Callable[[Shell], Iterator[Finding]], ...] = (
    _visible_devices,
    _table,
    _platforms,
    _fractions,
    _old_keras,
    _python_path,
    _current_folder,
    _preload,
    _proxies,
    _own_variables,
    _slurm,
)


def _site_folders() -> tuple[Path, ...]:
    names = (*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    users = (site.getusersitepackages(),) if site.ENABLE_USER_SITE else ()
    return tuple(dict.fromkeys(map(Path, (*names, *users))))


def _covers(entry: str, name: str) -> bool:
    if entry in ("*", name):
        return True
    try:
        return ip_address(name) in ip_network(entry, strict=False)
    except (ValueError, TypeError):
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _modules(names: Sequence[str]) -> str:
    return f"{'a module' if len(names) == 1 else 'modules'} {' and '.join(names)}"


NAMES = ("keras", "jax", "tensorflow", "torch", "numpy")
_METADATA = (".dist-info", ".egg-info")


def hidden_modules(folder: Path, installed: Sequence[Path]) -> tuple[str, ...]:
    """Return the modules of `NAMES` that a folder hides if it precedes those of installed packages.

    A folder where packages are installed hides a module only if the module is also installed elsewhere.

    Args:
        folder: to search.
        installed: where packages are installed.
    """
    try:
        folder = folder.resolve()
        if any(folder == each.resolve() for each in installed):
            return ()
    except OSError:
        # The current folder may no longer exist.
        return ()
    found = [name for name in NAMES if _finds(name, folder)]
    return tuple(
        name
        for name in found
        if not _is_installed(name, folder) or any(_finds(name, each) for each in installed)
    )


def _finds(name: str, folder: Path) -> bool:
    spec = PathFinder.find_spec(name, [str(folder)])
    # A folder without __init__.py has no origin and hides no module.
    return spec is not None and spec.origin is not None


def _is_installed(name: str, folder: Path) -> bool:
    return any(entry.name.endswith(_METADATA) for entry in folder.glob(f"{name}[-_]*"))
