"""The import table: the packages that each package may import. Dependencies point one way."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parent
FRAMEWORKS = {"keras", "jax", "tensorflow", "torch"}

# From the bottom to the top of the picture in docs/design.md: each room imports only rooms below it there.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "topology": {"errors"},
    "system": {"errors"},
    "observability": {"system"},
    "checkpoint": {"errors", "observability", "system"},
    "protocol": {"checkpoint", "errors", "observability", "system", "topology"},
    "collectives": {"errors", "system", "topology"},
    "transport": {"checkpoint", "errors", "protocol", "system"},
    "data": {"errors", "topology"},
    "parameter_server": {"errors", "system", "topology"},
    "cluster": {"errors", "system"},
    "cluster_resolver": {"cluster"},
    "supervisor": {"observability", "protocol", "system", "topology"},
    "worker": {
        *("checkpoint", "collectives", "errors", "observability", "parameter_server", "protocol", "system"),
        *("topology", "transport"),
    },
    "keras": {
        *("checkpoint", "collectives", "data", "errors", "observability", "parameter_server", "protocol"),
        *("system", "topology", "transport", "worker"),
    },
    "callbacks": {"keras"},
    "launcher": {
        *("errors", "keras", "observability", "parameter_server", "protocol", "system", "topology"),
        *("transport", "worker"),
    },
    "coordinator": {"errors", "observability", "protocol", "supervisor", "system", "topology", "worker"},
    # It decides nothing: neither the coordinator nor the supervisor.
    "agent": {
        *("collectives", "errors", "launcher", "observability", "protocol", "system", "transport", "worker"),
    },
    # It only reads what runs publish, and asks running jobs.
    "monitoring": {
        *("coordinator", "errors", "observability", "protocol", "supervisor", "system", "topology", "worker"),
    },
    # It only reads what runs have recorded.
    "diff": {"checkpoint", "errors", "observability", "system"},
    "local_job": {
        *("agent", "collectives", "coordinator", "errors", "observability", "protocol", "supervisor"),
        *("system", "transport"),
    },
    "hosts": {
        *("agent", "checkpoint", "cluster", "collectives", "coordinator", "errors", "launcher", "local_job"),
        *("observability", "parameter_server", "protocol", "supervisor", "system", "topology", "transport"),
        "worker",
    },
    "rendezvous": {
        *("agent", "cluster", "errors", "hosts", "launcher", "local_job", "observability", "protocol"),
        *("supervisor", "system", "transport", "worker"),
    },
    "strategy": {
        *("cluster", "errors", "keras", "launcher", "parameter_server", "rendezvous", "system", "worker"),
    },
    "doctor": {"cluster", "collectives", "errors", "hosts", "launcher", "system", "worker"},
    "functions": {"errors", "system", "worker"},
    "ray": {"errors", "functions", "hosts", "keras", "protocol", "system", "transport", "worker"},
    "cli": {
        *("agent", "checkpoint", "coordinator", "diff", "doctor", "errors", "hosts", "launcher"),
        *(
            "local_job",
            "monitoring",
            "observability",
            "protocol",
            "ray",
            "supervisor",
            "system",
            "topology",
            "transport",
            "worker",
        ),
    },
    "notebook": {"cli", "errors", "functions", "system", "worker"},
    "__main__": {"cli"},
    "__init__": {
        *("callbacks", "cluster", "cluster_resolver", "data", "keras", "notebook", "parameter_server"),
        *("ray", "strategy", "worker"),
    },
}

# The layers of keras/: each module and package imports only from its own row and the rows above it.
KERAS_LAYERS: tuple[set[str], ...] = (
    {
        *(
            "assignments",
            "worker_exchange",
            "devices",
            "host_report",
            "model_digest",
            "nests",
            "numbered_calls",
            "per_replica",
        ),
        *("randomness", "seeds", "small_program", "tf_per_replica", "tf_random_ops", "variables"),
    },
    {"backends"},
    {"shared_saves", "synchronization"},
    {"step_digests", "verification"},
    {"state"},
    {"replica_run"},
    {"input"},
    {"parameter_server", "sidecar_evaluator"},
    {"fit"},
    {"patches", "tf_checkpoints"},
)


def entries(package: Path) -> set[str]:
    """Names of the modules and packages in a package."""
    return {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in the file but for type checking."""
    names: set[str] = set()
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, except what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield from executed(child)


def module_name(path: Path) -> str:
    return ".".join(("lockstep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


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
    own = ("doctor/backend_probe.py", "doctor/trial_program.py")
    assert not frameworks or unit(path) == "keras" or str(path.relative_to(ROOT)) in own


def test_rooms_import_only_rooms_below_them() -> None:
    below: set[str] = set()
    for room, allowed in ALLOWED.items():
        assert allowed <= below, room
        below.add(room)


def test_layers_of_the_keras_room_import_only_layers_above_them() -> None:
    level = {name: number for number, names in enumerate(KERAS_LAYERS) for name in names}
    assert set(level) == entries(ROOT / "keras") - {"__init__"}
    for path in (ROOT / "keras").rglob("*.py"):
        own = path.relative_to(ROOT / "keras").parts[0].removesuffix(".py")
        names = (name.split(".") for name in imported(path) if name.startswith("lockstep.keras."))
        above = {parts[2] for parts in names if level.get(parts[2], -1) > level.get(own, -1)}
        assert not above or own == "__init__", f"{path.relative_to(ROOT)} imports {above}"


def test_no_modules_import_each_other() -> None:
    paths = {module_name(path): path for path in ROOT.rglob("*.py")}
    graph = {name: imported(path) & paths.keys() - {name, "lockstep"} for name, path in paths.items()}
    TopologicalSorter(graph).prepare()


def test_the_root_holds_rooms_and_public_modules_only() -> None:
    assert entries(ROOT) == set(ALLOWED)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_the_docstring_of_each_room_is_one_sentence(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.parent not in (ROOT, ROOT / "keras", ROOT / "ray"):
        assert len(tree.body) == 1
    assert (ast.get_docstring(tree) or "").endswith(".")


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    # tf.distribute has this name in two places.
    assert [name for name, times in names.items() if times > 1] == ["MultiWorkerMirroredStrategy"]


def test_private_parts_of_keras_are_touched_in_stated_files_only() -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("keras.src") for name in imported(path))
    }
    assert files == {
        "keras/input/batch_division.py",
        "keras/input/fit_inputs.py",
        "keras/input/visits.py",
        "keras/backends/losses.py",
        "keras/parameter_server/embedding_tables.py",
        "keras/randomness.py",
        "keras/state/settings.py",
    }


@pytest.mark.parametrize(
    "module",
    [
        "lockstep",
        "lockstep.cli.main",
        "lockstep.launcher.worker_main",
        "lockstep.ray.fitting",
        "lockstep.worker.job",
    ],
)
def test_importing_loads_no_framework(module: str) -> None:
    script = f"import sys, {module}; print(sorted({FRAMEWORKS | {'ray'}!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_public_names() -> None:
    assert lockstep.__all__ == [
        "ClusterCoordinator",
        "ClusterSpec",
        "CommunicationImplementation",
        "CommunicationOptions",
        "DistributedDataset",
        "DistributedIterator",
        "DistributedValues",
        "FixedShardsPartitioner",
        "InputContext",
        "MaxSizePartitioner",
        "MinSizePartitioner",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServerStrategy",
        "PerWorkerValues",
        "ReduceOp",
        "RemoteValue",
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
