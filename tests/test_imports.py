"""The import table: which package may import which. Dependencies point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parent
FRAMEWORKS = {"keras", "jax", "tensorflow", "torch"}

BASE = {
    "errors",
    "topology",
    "request",
    "config",
    "clock",
    "paths",
    "files",
    "events",
    "cgroups",
    "memory",
    "locks",
    "notes",
    "prose",
    "sources",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "clock": {"errors"},
    "topology": {"errors"},
    "request": set(),
    "config": {"cgroups", "errors", "topology"},
    "paths": {"errors"},
    "files": set(),
    "cgroups": set(),
    "memory": {"cgroups"},
    "locks": {"files"},
    "notes": set(),
    "prose": set(),
    "program": set(),
    "sources": set(),
    "events": {"clock", "files"},
    "collectives": BASE,
    "control": BASE,
    "data": BASE,
    "checkpoint": BASE,
    "cluster": BASE,
    "cluster_resolver": {"cluster"},
    "job": BASE | {"collectives", "checkpoint"},
    "keras": BASE | {"data", "job", "collectives", "checkpoint"},
    "strategy": BASE | {"cluster", "keras", "job", "local_devices", "rendezvous"},
    "callbacks": {"keras"},
    "local_devices": BASE | {"job", "program"},
    "importing": set(),
    "seeding": {"importing"},
    "downloads": {"config", "errors", "files", "importing", "locks", "paths"},
    "writes": {"sources"},
    "compiled": {"errors", "files", "importing", "notes"},
    "tf_distribute": {"errors", "importing"},
    "membership": BASE | {"checkpoint", "collectives", "control", "job"},
    "persistence": BASE | {"checkpoint", "control", "job"},
    "worker": BASE
    | {
        "collectives",
        "compiled",
        "control",
        "downloads",
        "importing",
        "job",
        "keras",
        "membership",
        "persistence",
        "seeding",
        "tf_distribute",
        "writes",
    },
    "parent": BASE | {"control", "downloads", "worker"},
    "exchanges": BASE | {"collectives", "control"},
    "rendezvous": BASE | {"cluster", "control", "job", "program"},
    "coordinator": BASE | {"collectives", "control", "exchanges"},
    "run_command": BASE | {"checkpoint", "collectives", "control", "exchanges"},
    "doctor": BASE | {"cluster", "control"},
    "trial": {"job"},
    "cli": BASE | {"checkpoint", "control", "doctor", "run_command"},
    "needs": set(),
    "errand": {"errors", "needs"},
    "called": {"errand", "job"},
    "launched": {"cli", "control", "errand", "errors"},
    "launching": BASE | {"control", "errand", "job"},
    "__main__": {"cli"},
    "__init__": {"callbacks", "cluster", "cluster_resolver", "data", "job", "keras", "launching", "strategy"},
}


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def unit(path: Path) -> str:
    """The row of the table that a file belongs to: its package, or its own name at the top."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_point_one_way(path: Path) -> None:
    own = unit(path)
    inside = {name.split(".")[1] for name in imported(path) if name.startswith("lockstep.")}
    units = {part for part in inside if (ROOT / part).is_dir() or (ROOT / f"{part}.py").exists()}
    assert units - {own} <= ALLOWED[own]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_keras_package_and_a_program_of_our_own_import_a_framework(path: Path) -> None:
    frameworks = {name.split(".")[0] for name in imported(path)} & FRAMEWORKS
    assert not frameworks or unit(path) in ("keras", "trial")


def test_private_parts_of_keras_are_touched_in_stated_files_only() -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("keras.src") for name in imported(path))
    }
    assert files <= {
        "keras/input/inputs.py",
        "keras/input/visits.py",
        "keras/backends/losses.py",
        "keras/state/randomness.py",
        "keras/state/settings.py",
        "keras/backends/tensorflow.py",
        "keras/backends/torch.py",
    }


@pytest.mark.parametrize("module", ["lockstep", "lockstep.cli", "lockstep.worker", "lockstep.job"])
def test_importing_loads_no_framework(module: str) -> None:
    script = f"import sys, {module}; print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_public_names() -> None:
    assert lockstep.__all__ == [
        "ClusterSpec",
        "CommunicationImplementation",
        "CommunicationOptions",
        "DistributedDataset",
        "DistributedIterator",
        "DistributedValues",
        "InputContext",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ReduceOp",
        "ReplicaContext",
        "SidecarEvaluator",
        "Strategy",
        "__version__",
        "callbacks",
        "cluster_resolver",
        "digest",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
        "is_chief",
        "launch",
        "load_checkpoint",
        "show_input",
    ]
