"""The effects of a shell's variables on jobs started there, except for `TF_CONFIG`."""

import re
import site
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from ipaddress import ip_address, ip_network
from pathlib import Path

from lockstep.cluster.slurm_step import STEP_VARIABLES, SlurmTask
from lockstep.doctor.check import Finding, Sources, failure, fine, warning
from lockstep.errors import ConfigError
from lockstep.launcher.backend import BACKENDS, is_legacy
from lockstep.system.cuda import LISTED
from lockstep.system.environment import (
    LEGACY_KERAS,
    PUBLIC,
    legacy_keras,
    slurm_variable,
    switched_off,
    visible_gpus,
)
from lockstep.system.prose import count, printable, shortened

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

FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
PLATFORMS = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
_WITHOUT_GPU = "cpu"
_OF_GPUS = {"cuda", "gpu"}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_MODULES = ("keras", *BACKENDS, "numpy")
_METADATA = (".dist-info", ".egg-info")
_SECRET = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)
_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Shell:
    """The environment of jobs that are started in a shell.

    Attributes:
        variables: all environment variables.
        folder: the current folder.
        gpus: the number of GPUs that the driver lists.
        visible: the names of the GPUs that jobs see.
        missing: the entries of `PYTHONPATH` and `LD_PRELOAD` that do not exist.
        hiding: the modules with which the current folder and entries of `PYTHONPATH` hide installed ones.
    """

    variables: Mapping[str, str]
    folder: Path
    gpus: int
    visible: Sequence[str]
    missing: Collection[Path]
    hiding: Mapping[Path, Sequence[str]]

    def display(self, name: str) -> str:
        """Return the value of a variable for display, or an empty string if it is not set."""
        return plain(self.variables.get(name, ""))


def look_at_shell(sources: Sources) -> Shell:
    """Look at all variables, and at the files that they name."""
    variables, folder, installed = sources.environment, sources.folder, sources.package_folders
    installed = _site_folders() if installed is None else installed
    searched = [*_search_path(variables, folder), folder]
    libraries = (Path(name) for name in _preloaded(variables))
    return Shell(
        variables,
        folder,
        len(visible_gpus({}, sources.gpu_folder)),
        visible_gpus(variables, sources.gpu_folder),
        {path for path in (*searched, *libraries) if not _exists(path)},
        {path: modules for path in searched if (modules := hidden_modules(path, installed))},
    )


def _search_path(variables: Mapping[str, str], folder: Path) -> list[Path]:
    entries = variables.get("PYTHONPATH", "")
    return [Path(entry) if entry else folder for entry in entries.split(":")] if entries else []


def _preloaded(variables: Mapping[str, str]) -> list[str]:
    return re.findall(r"[^\s:]+", variables.get("LD_PRELOAD", ""))


def plain(text: str) -> str:
    """Return a text without control characters, shortened if it is long."""
    return shortened(printable(text), _MAX_SHOWN)


def judge_visible_gpus(shell: Shell) -> Iterator[Finding]:
    """Judge whether `CUDA_VISIBLE_DEVICES` hides GPUs."""
    if LISTED not in shell.variables:
        return
    value, shown = shell.display(LISTED), shell.visible
    facts = {"value": value, "shown": list(shown), "there": shell.gpus}
    if not shown:
        hidden = f", of which the driver has {shell.gpus}" if shell.gpus else ""
        yield warning(
            f"{value!r} hides all GPUs{hidden}: jobs compute on the CPU",
            f"unset {LISTED} to use GPUs, or name some with lockstep run --devices",
            facts,
        )
    elif len(shown) < len(shell.variables[LISTED].split(",")):
        yield warning(
            f"{value!r} shows {count(len(shown), 'GPU')} and hides the following ones",
            f"name only GPUs in {LISTED}",
            facts,
        )
    else:
        names = plain(", ".join(shown))
        yield fine(f"names {count(len(shown), 'GPU')} ({names}), by default one per worker", facts)


def judge_effect(name: str, shell: Shell) -> Iterator[Finding]:
    """Report the effect of a variable of `EFFECTS`."""
    value = shell.display(name)
    if name in switched_off(shell.variables):
        yield warning(
            f"{value!r} disables deterministic operations: equal bits on GPUs are not guaranteed",
            f"unset {name}, or remove that part: Lockstep sets what is necessary",
            {"value": value},
        )
    elif shell.variables.get(name, "").strip():
        yield fine(f"{value}: {EFFECTS[name]}", {"value": value})


def judge_platform(name: str, shell: Shell) -> Iterator[Finding]:
    """Judge where a variable of `PLATFORMS` lets JAX compute."""
    names = [each.strip().lower() for each in shell.variables.get(name, "").split(",") if each.strip()]
    value, facts = shell.display(name), {"value": shell.display(name)}
    if not names:
        return
    if names[0] == _WITHOUT_GPU and shell.visible:
        reason = f"{value}: JAX computes on the CPU despite {count(len(shell.visible), 'visible GPU')}"
        yield warning(reason, f"unset {name} to use GPUs", facts)
    elif set(names) <= _OF_GPUS and not shell.visible:
        reason = f"{value}: JAX uses only GPUs and fails because none is visible"
        yield warning(reason, f"unset {name}, or make GPUs visible", facts)
    else:
        yield fine(f"{value}: where JAX computes, in workers too", facts)


def judge_fraction(name: str, shell: Shell) -> Iterator[Finding]:
    """Judge whether JAX accepts a variable of `FRACTIONS`."""
    value, facts = shell.display(name), {"value": shell.display(name)}
    if not value:
        return
    if all(shell.variables.get(each) for each in FRACTIONS):
        reason = f"{value}: JAX refuses to use a GPU if both names of this variable are set"
        yield warning(reason, f"unset {FRACTIONS[1]}, the old name", facts)
    elif not _is_number(shell.variables[name]):
        reason = f"{value!r} is not a number: JAX fails on a GPU"
        yield warning(reason, f"unset {name}, or give a fraction such as 0.5", facts)
    else:
        yield fine(f"{value}: the fraction of GPU memory that JAX may use, in workers too", facts)


def judge_legacy_keras(shell: Shell) -> Iterator[Finding]:
    """Judge whether `tf.keras` is Keras 2."""
    value = legacy_keras(shell.variables)
    if value is not None and is_legacy(value):
        reason = f"{shell.display(LEGACY_KERAS)}: tf.keras is Keras 2, and lockstep run refuses to start"
        yield failure(reason, f"unset {LEGACY_KERAS}", {"value": value})


def judge_python_path(shell: Shell) -> Iterator[Finding]:
    """Judge whether `PYTHONPATH` hides installed modules."""
    folders = _search_path(shell.variables, shell.folder)
    if not folders:
        return
    missing = [plain(str(folder)) for folder in folders if folder in shell.missing]
    facts = {"folders": [plain(str(folder)) for folder in folders], "missing": missing}
    hiding = [folder for folder in dict.fromkeys(folders) if folder in shell.hiding]
    for folder in hiding:
        modules = shell.hiding[folder]
        yield warning(
            f"{plain(str(folder))} has {_modules(modules)}, which programs import instead of the installed "
            "packages",
            "remove this folder from PYTHONPATH, or rename these files",
            {"modules": list(modules), **facts},
        )
    if not hiding:
        verb = "does" if len(missing) == 1 else "do"
        absent = f"; {', '.join(missing)} {verb} not exist" if missing else ""
        yield fine(f"workers search it before the installed packages{absent}", facts)


def judge_current_folder(shell: Shell) -> Iterator[Finding]:
    """Judge whether a script in the current folder imports other modules than the installed ones."""
    if modules := shell.hiding.get(shell.folder):
        yield warning(
            f"it has {_modules(modules)}, which a script in this folder imports instead of the installed "
            "packages",
            "rename these files",
            {"modules": list(modules)},
        )


def judge_preload(shell: Shell) -> Iterator[Finding]:
    """Judge whether the libraries in `LD_PRELOAD` exist."""
    libraries = _preloaded(shell.variables)
    files = [name for name in libraries if "/" in name and "$" not in name]
    missing = [name for name in files if Path(name) in shell.missing]
    facts = {"libraries": libraries, "missing": missing}
    if missing:
        reason = (
            f"{plain(', '.join(missing))} does not exist: the loader reports that when any process starts"
        )
        yield warning(reason, "unset LD_PRELOAD, or correct it", facts)
    elif libraries:
        yield fine(f"{plain(', '.join(libraries))}: loaded into every worker", facts)


def judge_proxies(shell: Shell) -> Iterator[Finding]:
    """Judge whether a proxy intercepts connections to servers on this machine."""
    variables = shell.variables
    names = [name for each in _PROXIES for name in (each, each.upper()) if variables.get(name)]
    if not names:
        return
    values = ", ".join(f"{name}={plain(without_secrets(variables[name]))}" for name in names)
    reason = f"{values}: Lockstep's workers use no proxy; downloads, gRPC and the Kubernetes client may"
    uncovered = uncovered_names(variables.get("no_proxy") or variables.get("NO_PROXY", ""))
    facts = {"set": names, "left_out": uncovered}
    if not uncovered:
        yield fine(reason, facts)
        return
    yield warning(
        f"{reason}. no_proxy does not contain {' and '.join(uncovered)}: scripts use the proxy even for "
        "servers on this machine",
        f"export no_proxy={','.join(uncovered)}${{no_proxy:+,$no_proxy}}",
        facts,
    )


def without_secrets(proxy: str) -> str:
    """Return the address of a proxy without user name and password."""
    return _SECRET.sub(lambda match: f"{match[1] or ''}***@", proxy)


def uncovered_names(no_proxy: str) -> list[str]:
    """Return the names of this machine that `no_proxy` does not cover."""
    entries = [entry.strip().lower() for entry in no_proxy.split(",")]
    return [name for name in _LOCAL if not any(_covers(entry, name) for entry in entries)]


def judge_worker_variables(shell: Shell) -> Iterator[Finding]:
    """Name variables that Lockstep passes only to workers."""
    names = sorted(name for name in shell.variables.keys() - PUBLIC if name.startswith("LOCKSTEP_"))
    if names:
        yield warning(
            f"{plain(', '.join(names))}: only workers use these and remove them at their start; "
            "lockstep run removes them",
            "unset them: they are left over, or belong to another program",
            {"names": names},
        )


def judge_slurm(shell: Shell) -> Iterator[Finding]:
    """Judge whether `lockstep run --slurm` works here."""
    if not any(name.startswith("SLURM_") for name in shell.variables):
        return

    def variable(name: str) -> str | None:
        return slurm_variable(name, shell.variables)

    missing = [f"SLURM_{name}" for name in STEP_VARIABLES if variable(name) is None]
    if missing:
        reason = f"not a task of a job step, for which srun sets {', '.join(missing)}"
        yield fine(f"{reason}; only lockstep run --slurm needs them", {"missing": missing})
        return
    try:
        task = SlurmTask.read(variable)
    except ConfigError as error:
        yield warning(f"lockstep run --slurm refuses them: {error}", "use srun")
        return
    tasks = sum(tasks for _, tasks in task.hosts)
    reason = (
        f"this is task {task.rank} of {tasks} on {count(len(task.hosts), 'host')}; lockstep run --slurm "
        "makes them one job, and without --slurm each is a separate job"
    )
    yield fine(reason, {"rank": task.rank, "tasks": tasks, "hosts": len(task.hosts)})


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


def hidden_modules(folder: Path, installed: Sequence[Path]) -> tuple[str, ...]:
    """Return the modules of frameworks that a folder hides if it precedes those of installed packages.

    A folder where packages are installed hides a module only if the module is also installed elsewhere.

    Args:
        folder: the folder to search.
        installed: the folders in which packages are installed.
    """
    try:
        folder = folder.resolve()
        if any(folder == each.resolve() for each in installed):
            return ()
    except OSError:
        # The current folder may no longer exist.
        return ()
    present = [name for name in _MODULES if _finds(name, folder)]
    return tuple(
        name
        for name in present
        if not _is_installed(name, folder) or any(_finds(name, each) for each in installed)
    )


def _finds(name: str, folder: Path) -> bool:
    spec = PathFinder.find_spec(name, [str(folder)])
    # A folder without __init__.py has no origin and does not hide a module.
    return spec is not None and spec.origin is not None


def _is_installed(name: str, folder: Path) -> bool:
    return any(entry.name.endswith(_METADATA) for entry in folder.glob(f"{name}[-_]*"))
