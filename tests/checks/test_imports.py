"""The import table: the packages that each package may import. Dependencies point one way.

docs/rooms.md draws the rooms and the layers of `keras/`.
"""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
FRAMEWORKS = {"keras", "jax", "tensorflow", "torch"}

# From the bottom to the top: each room imports only rooms above it in this table.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
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
        *("coordinator", "errors", "observability", "parameter_server", "protocol", "supervisor", "system"),
        *("topology", "version", "worker"),
    },
    # It only reads what runs have recorded.
    "diff": {"checkpoint", "errors", "observability", "parameter_server", "system"},
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
        *("supervisor", "system", "transport", "version", "worker"),
    },
    "strategy": {
        *("cluster", "errors", "keras", "launcher", "parameter_server", "protocol", "rendezvous", "system"),
        "worker",
    },
    "doctor": {"cluster", "collectives", "errors", "hosts", "launcher", "system", "worker"},
    "functions": {"errors", "observability", "system", "worker"},
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
            "version",
            "worker",
        ),
    },
    "notebook": {"cli", "errors", "functions", "protocol", "system", "worker"},
    "__main__": {"cli"},
    "__init__": {
        *("callbacks", "cluster", "cluster_resolver", "data", "keras", "notebook", "parameter_server"),
        *("ray", "strategy", "version", "worker"),
    },
}

# The layers of keras/: each module and package imports only from its own row and the rows above it.
KERAS_LAYERS: tuple[set[str], ...] = (
    {"private"},
    {
        *(
            "assignments",
            "choices",
            "worker_exchange",
            "devices",
            "host_report",
            "load_failures",
            "model_digest",
            "nests",
            "numbered_calls",
            "call_turns",
            "per_replica",
        ),
        *(
            "python_state",
            "python_values",
            "reached_objects",
            "randomness",
            "scaled_sums",
            "seeds",
            "small_program",
            "burn_in_program",
            "tf_per_replica",
            "tf_random_ops",
            "variables",
        ),
    },
    {"backends"},
    {"python_replicas", "changed_values", "kept_saves", "rounds", "shared_saves"},
    {"round_verification", "state_verification", "step_digests", "verdicts", "verification"},
    {"state"},
    {"replica_run"},
    {"input"},
    {"parameter_server", "sidecar_evaluator"},
    {"fit"},
    {"patches", "tf_checkpoints"},
)

# The only files that use private parts of Keras and its backends: each states what Lockstep relies on.
PRIVATE_FILES = (
    *("keras/private/common.py", "keras/private/jax.py", "keras/private/tensorflow.py"),
    *("keras/private/torch.py", "worker/private_modules.py"),
)

PRIVATE_MODULE = re.compile(r"(keras\.src|jax\._src|tensorflow\.(core|python)|torch\._[A-Za-z]\w*)(\.\w+)*")

DOCUMENTED = {"_exit", "_getframe", "_replace"}
"""Names of Python that begin with an underscore, but are public."""

NOT_OF_FRAMEWORKS = {
    "keras/input/shards.py": {"_Retval"},  # a type of operations
    "keras/parameter_server/remote_values.py": {"_value"},
    "keras/randomness.py": {"_inst", "_rand"},  # of Python and NumPy
    "observability/job_metrics.py": {"_info", "_total"},  # parts of names of metrics
    "keras/call_turns.py": {"_DummyThread"},  # of Python
    "worker/script_threads.py": {"_target"},
    "strategy/cluster_coordinator.py": {"_coordinator", "_trial_value", "_worker_value"},
}
"""Private names of Lockstep's objects in other files, and of other libraries, by the file that uses them."""


def entries(package: Path) -> set[str]:
    """Names of the modules and packages in a package."""
    return {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def sources() -> list[Path]:
    """The files of the package."""
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def imported(path: Path, *, types: bool = False) -> set[str]:
    """Absolute names of all modules that a file imports, wherever it does, perhaps also for types."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if types else executed(tree):
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


def test_dependencies_point_one_way() -> None:
    wrong = {}
    for path in sources():
        inside = {name.split(".")[1] for name in imported(path) if name.startswith("lockstep.")}
        units = {part for part in inside if (ROOT / part).is_dir() or (ROOT / f"{part}.py").exists()}
        wrong[str(path.relative_to(ROOT))] = units - {unit(path)} - ALLOWED[unit(path)]
    assert {file: names for file, names in wrong.items() if names} == {}


def test_only_the_keras_package_and_a_program_of_our_own_import_a_framework() -> None:
    own = ("doctor/backend_probe.py", "doctor/trial_program.py")
    others = [path for path in sources() if unit(path) != "keras" and str(path.relative_to(ROOT)) not in own]
    wrong = {path: {name.split(".")[0] for name in imported(path)} & FRAMEWORKS for path in others}
    assert {str(path): names for path, names in wrong.items() if names} == {}


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


def test_no_modules_import_each_other_not_even_for_types() -> None:
    paths = {module_name(path): path for path in ROOT.rglob("*.py")}
    others = paths.keys() - {"lockstep"}
    graph = {name: imported(path, types=True) & others - {name} for name, path in paths.items()}
    TopologicalSorter(graph).prepare()


def pictures(page: Path) -> list[list[str]]:
    """Return the names at the beginnings of the lines of each indented block of a page."""
    blocks = re.findall(r"(?:^    .*\n)+", page.read_text(), re.MULTILINE)
    lines = [re.findall(r"^    (?! )(.+?)(?:  .*)?$", block, re.MULTILINE) for block in blocks]
    return [[name.rstrip("/") for line in block for name in re.split(r"/?, ", line)] for block in lines]


def test_the_pictures_have_the_rooms_and_the_layers_from_top_to_bottom() -> None:
    rooms, layers, *_ = pictures(Path(__file__).parents[2] / "docs" / "rooms.md")
    # Those that start everything are not in it.
    assert set(rooms) == set(ALLOWED) - {"__main__", "__init__"}
    for index, room in enumerate(rooms):
        assert not ALLOWED[room] & set(rooms[:index]), f"{room} imports a room above it"
    others = "the other modules"
    level = {name: number for number, names in enumerate(KERAS_LAYERS) for name in names} | {others: 1}
    assert [level[name] for name in layers] == sorted((level[name] for name in layers), reverse=True)
    assert {name for name in level if level[name] != 1} | {others} == set(layers)


def test_the_root_holds_rooms_and_public_modules_only() -> None:
    assert entries(ROOT) == set(ALLOWED)


def test_the_docstring_of_each_room_is_one_sentence() -> None:
    for path in sources():
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text())
            assert len(tree.body) == 1 or path.parent in (ROOT, ROOT / "keras", ROOT / "ray"), path
            assert (ast.get_docstring(tree) or "").endswith("."), path


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    # tf.distribute has this name in two places.
    assert [name for name, times in names.items() if times > 1] == ["MultiWorkerMirroredStrategy"]


def private_names(nodes: list[ast.AST], *, of_self: bool) -> Iterator[tuple[int, str]]:
    """Yield the lines and private names of attributes: of the own object, or of others and in strings."""
    texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        name = ""
        if isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            name = node.attr if is_self is of_self else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            name = "" if of_self else node.value
        if name.startswith("_") and re.fullmatch(r"_[A-Za-z]\w*", name):
            yield node.lineno, name


def dotted(node: ast.expr) -> str:
    """Return the full name that an expression consists of; empty for others."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_modules(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the lines and names of private modules of frameworks, and of what is in them."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        for name in names:
            if PRIVATE_MODULE.fullmatch(name):
                yield node.lineno, name


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names of the functions, classes, variables and attributes that a file defines."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names |= {str(node.slice.value)} if isinstance(node.slice, ast.Constant) else set()
    return names


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr | ast.stmt)]


@functools.cache
def known_names() -> tuple[set[str], set[str]]:
    """Return the private names of frameworks in the files for them, and the names of all other files."""
    ours: set[str] = set()
    theirs: set[str] = set()
    for path in ROOT.rglob("*.py"):
        nodes = nodes_of(path)
        if str(path.relative_to(ROOT)) in PRIVATE_FILES:
            theirs |= {name for _, name in private_names(nodes, of_self=False)}
        else:
            ours |= own_names(nodes)
    return theirs - DOCUMENTED, ours


def private_uses(nodes: list[ast.AST], file: str) -> list[str]:
    """Return a sentence about each use of a private part of a framework in the source of a file."""
    theirs, ours = known_names()
    fine = (own_names(nodes) - theirs) | DOCUMENTED | NOT_OF_FRAMEWORKS.get(file, set())
    found = [
        *private_modules(nodes),
        *(one for one in private_names(nodes, of_self=False) if one[1] not in fine),
        # A method or attribute that a class inherits from a framework.
        *(one for one in private_names(nodes, of_self=True) if one[1] not in fine | ours),
    ]
    return [
        f"{file}, line {line}, uses {name}, a private part of another library: use it in one of "
        f"{', '.join(PRIVATE_FILES)}, in a function or constant that says what Lockstep relies on"
        for line, name in sorted(set(found))
    ]


def test_private_parts_of_frameworks_are_used_in_the_files_for_them_only() -> None:
    files = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    assert set(PRIVATE_FILES) <= files.keys()
    uses = [private_uses(nodes_of(path), file) for file, path in files.items() if file not in PRIVATE_FILES]
    assert not any(uses), "\n".join(one for some in uses for one in some)


def test_a_use_of_a_private_part_elsewhere_is_described() -> None:
    names = [
        ("import keras.src.utils", "keras.src.utils"),
        ("from keras.src import losses", "keras.src.losses"),
        ("from jax import _src", "jax._src"),
        ("keras.src.losses", "keras.src.losses"),
        ("import_module('tensorflow.python.eager.context')", "tensorflow.python.eager.context"),
        ("torch._foreach_mul_(some, 2)", "_foreach_mul_"),
        ("model._new_part", "_new_part"),
        ("getattr(model, '_new_part')", "_new_part"),
        ("self._new_part()", "_new_part"),
        ("super()._save_model()", "_save_model"),
        ("self._value = variable._value", "_value"),
    ]
    for line, name in names:
        nodes = ast.walk(ast.parse(f"self.fine = _fine = 1\n_fine\n{line}"))
        uses = private_uses([*nodes], "keras/devices.py")
        assert any(f"keras/devices.py, line 3, uses {name}, a private part" in use for use in uses), uses
        assert all("line 3" in use for use in uses)


def test_importing_loads_no_framework() -> None:
    modules = [
        "lockstep",
        "lockstep.cli.main",
        "lockstep.launcher.worker_main",
        "lockstep.ray.fitting",
        "lockstep.worker.job",
    ]
    script = f"import sys, {', '.join(modules)}; print(sorted({FRAMEWORKS | {'ray'}!r} & set(sys.modules)))"
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
        "LocalSteps",
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
        "Server",
        "ServerEmbedding",
        "SidecarEvaluator",
        "Strategy",
        "__version__",
        "callbacks",
        "cluster_resolver",
        "digest",
        "gather",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
        "is_chief",
        "launch",
        "load_checkpoint",
        "show_input",
    ]
