"""The private parts of other libraries that Lockstep uses. A failure means that a library has changed.

Each message names the part, and the one file that is to be changed. This file imports none of these files
itself, so that it can tell what a library lacks that they import. The parts that Lockstep replaces are in
the registry of `lockstep.worker.patch_registry`, which names missing ones; `test_patches.py` installs all.
`test_tensorflow.py` and `test_torch.py` run the first tests again, in processes with their backends.
"""

import ast
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import lockstep
from lockstep.data.batch import GlobalBatch

BACKEND = keras.backend.backend()
ROOT = Path(lockstep.__file__).parent
FILES = (*sorted((ROOT / "keras/private").glob("[a-z]*.py")), ROOT / "worker/private_modules.py")
"""The only files that use private parts of Keras and its backends; see tests/checks/test_imports.py."""
MODULES = {"keras": r"keras\.src", "jax": r"jax\._src", "tensorflow": r"tensorflow\.python"}
"""The packages of private modules, by library."""
GLOBAL_STATE = "keras.src.backend.common.global_state"
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="a test of Keras on jax")
OWN = frozenset(("_function", "_name", "_replace"))
"""Attributes that a class of a private file gives itself, and one of named tuples."""
REPLACED = frozenset(("_jax_state", "_setattr_hook", "_symbolic_build", "_use_cached_eval_dataset"))
"""Names that other tests of this file and `test_patches.py` check."""


def changed(part: str, file: str = "keras/private/common.py") -> str:
    """Return what to do about a part that does other than Lockstep relies on."""
    return f"keras {keras.__version__} has changed {part}: change src/lockstep/{file}, which relies on it"


class Uses(NamedTuple):
    """The files that use private parts: by the full names of parts of modules, and by attributes."""

    modules: Mapping[str, list[str]]
    attributes: Mapping[str, list[str]]


@functools.cache
def uses() -> Uses:
    modules, attributes = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path in FILES:
        file, nodes = str(path.relative_to(ROOT)), [*ast.walk(ast.parse(path.read_text()))]
        found = sorted({*named_modules(nodes)})
        for name in found:
            modules[name].append(file)
        known = {name.rpartition(".")[2] for name in found} | {*defined(nodes)}
        for name in sorted({*private_attributes(nodes)} - known):
            attributes[name].append(file)
    return Uses(modules, attributes)


def named_modules(nodes: list[ast.AST]) -> Iterator[str]:
    """The full names of private modules, and of what is imported from them, used or replaced of them."""
    pattern, names = re.compile(rf"({'|'.join(MODULES.values())})(\.\w+)*"), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and pattern.fullmatch(node.module or ""):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Constant) and pattern.fullmatch(str(node.value)):
            yield str(node.value)
    yield from names.values()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield f"{names[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            owner, name = node.elts
            if isinstance(owner, ast.Name) and owner.id in names and isinstance(name, ast.Constant):
                yield f"{names[owner.id]}.{name.value}"


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """The names that a file gives to its own functions, classes and variables."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.Module):
            yield from (one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.ClassDef))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def private_attributes(nodes: list[ast.AST]) -> Iterator[str]:
    """The names of private attributes, also in strings."""
    for node in nodes:
        text = ""
        if isinstance(node, ast.Attribute):
            text = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if re.fullmatch(r"_[A-Za-z]\w*", text):
            yield text


def lacks(library: str, part: str, files: list[str]) -> str:
    """Return what to do about a part that a library does not have."""
    version = getattr(sys.modules[library], "__version__", "")
    names = " and ".join(f"src/lockstep/{file}" for file in files)
    return f"{library} {version} has no {part}: change {names}, the only place that uses it"


def moved_modules(library: str) -> list[str]:
    """Return what to do about each part of a library's private modules that it does not have."""
    missing = dict[str, str]()
    for name, files in modules_of(library).items():
        try:
            part(name)
        except (AttributeError, ImportError):
            missing[name] = lacks(library, name, files)
    # Of a module that is missing, everything is.
    return [text for name, text in missing.items() if not any(name.startswith(f"{one}.") for one in missing)]


def modules_of(library: str) -> dict[str, list[str]]:
    """Return the parts of a library's private modules that are used on this backend, with their files."""
    found = {}
    for name, files in uses().modules.items():
        kind = re.match(r"keras\.src\.backend\.(jax|tensorflow|torch)\.", name)
        if re.match(MODULES[library], name) and (not kind or kind[1] == BACKEND):
            found[name] = files
    return found


def files_with(name: str) -> list[str]:
    """Return the files for private parts that have a name; those of `keras/` that have one that is public."""
    some = [path for path in FILES if re.search(rf"\b{name}\b", path.read_text())]
    some = some or [path for path in sorted((ROOT / "keras").rglob("*.py")) if name in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in some]


def part(name: str) -> Any:
    """Import a module or something in it by its full name."""
    module, _, rest = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(part(module), rest)


def model() -> Any:
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    made.optimizer.build(made.trainable_variables)
    return made


def compiled_metrics() -> Any:
    made = part("keras.src.trainers.compile_utils.CompileMetrics")([], ["mse"])
    made.build(np.zeros((2, 1)), np.zeros((2, 1)))
    return made


def excluding() -> Any:
    made = model().optimizer
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


def array_adapter() -> Any:
    adapter = part("keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter")
    return adapter(np.zeros(3), batch_size=2)


def dataset_adapter() -> Any:
    return part("keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter")


def tensorflow() -> Any:
    return sys.modules["tensorflow"]


def torch() -> Any:
    return sys.modules["torch"]


def mapped(**options: Any) -> Any:
    return tensorflow().data.Dataset.range(4).map(lambda number: number + 1, **options)


def seeded_context() -> Any:
    tensorflow().random.set_seed(1)
    return context_module().context()


def context_module() -> Any:
    return part("tensorflow.python.eager.context")


OWNERS: tuple[tuple[str, Callable[[], Any], str], ...] = (
    ("", lambda: keras.Model, "_aggregate_additional_loss _flatten_layers"),
    ("", lambda: keras.Operation, "symbolic_call"),
    ("", lambda: model()._compile_loss, "_flat_losses"),
    (
        "",
        model,
        "_call_has_training_arg _compile_loss _compile_metrics _compute_loss _functional _loss_tracker",
    ),
    ("", model, "metrics_variables"),
    ("", compiled_metrics, "_flat_metrics _flat_weighted_metrics"),
    ("", lambda: compiled_metrics()._flat_weighted_metrics[0], "output_name"),
    ("", lambda: model().layers[0], "_inbound_nodes _outbound_nodes _seed_generators"),
    (
        "",
        lambda: model().layers[1],
        "_loss_ids _losses _losses_override _trainable_variables",
    ),
    ("", lambda: model()._functional, "_inputs_struct _nodes_by_depth"),
    (
        "",
        lambda: keras.Sequential([keras.Input((1,)), keras.layers.Embedding(3, 2)]).layers[0],
        "_embeddings",
    ),
    (
        "",
        lambda: model().optimizer,
        "_backend_update_step _clip_gradients _get_variable_index _learning_rate _lock _momentums",
    ),
    ("", lambda: model().optimizer, "_trainable_variables _use_weight_decay _velocities"),
    ("", excluding, "_exclude_from_weight_decay _exclude_from_weight_decay_pattern"),
    ("", lambda: keras.Variable(0.0), "_deferred_initialize _direct_assign _shape _value"),
    ("", lambda: keras.random.SeedGenerator(7), "_initial_seed"),
    ("", array_adapter, "_batch_size _inputs _num_samples"),
    ("", dataset_adapter, "_get_iterator _standardize_batch"),
    ("", lambda: part("keras.src.utils.module_utils.tensorflow"), "_available"),
    ("", lambda: part("keras.src.utils.file_utils"), "get_file urlretrieve"),
    ("", lambda: keras.callbacks.ModelCheckpoint, "_get_file_path _save_model _should_save_model"),
    (
        "",
        lambda: keras.callbacks.BackupAndRestore("folder"),
        "_save_model _training_metadata_path _weights_path",
    ),
    ("", lambda: keras.callbacks.ProgbarLogger, "_finalize_progbar _maybe_init_progbar _reset_progbar"),
    ("jax", lambda: keras.optimizers.Optimizer, "stateless_apply"),
    ("jax", model, "_jax_state_synced"),
    ("jax", lambda: part("jax._src.compilation_cache"), "get_file_cache"),
    ("jax", lambda: part("keras.src.backend.jax.trainer.JAXEpochIterator"), "_get_iterator"),
    ("tensorflow", lambda: mapped(num_parallel_calls=2), "_deterministic _num_parallel_calls"),
    ("tensorflow", lambda: mapped(num_parallel_calls=2), "_use_unbounded_threadpool"),
    ("tensorflow", mapped, "_as_serialized_graph _common_args _force_synchronous _input_dataset _inputs"),
    ("tensorflow", mapped, "_map_func _preserve_cardinality _use_inter_op_parallelism _variant_tensor"),
    ("tensorflow", mapped, "_flat_structure _functions"),
    ("tensorflow", lambda: mapped()._map_func, "_func _input_structure"),
    ("tensorflow", lambda: mapped().batch(2), "_batch_size _drop_remainder"),
    ("tensorflow", lambda: mapped().prefetch(2), "_buffer_size"),
    ("tensorflow", lambda: mapped().repeat(2), "_count"),
    ("tensorflow", lambda: mapped().take(2), "_count"),
    ("tensorflow", lambda: mapped().skip(2), "_count"),
    ("tensorflow", lambda: tensorflow().TensorSpec((2,)), "_batch"),
    ("tensorflow", lambda: tensorflow().function(lambda: 1), "_autograph"),
    (
        "tensorflow",
        lambda: tensorflow().function(lambda: tensorflow().constant(1)).get_concrete_function(),
        "_call_flat",
    ),
    ("tensorflow", lambda: tensorflow().train.Checkpoint()._saver, "_graph_view"),
    ("tensorflow", seeded_context, "_rng _seed context_switches"),
    ("tensorflow", context_module, "async_wait context eager_mode"),
    ("", lambda: keras.metrics.MeanMetricWrapper(abs), "_fn _fn_kwargs"),
    ("torch", torch, "_foreach_mul_"),
    ("torch", lambda: torch().nn.modules.batchnorm, "_BatchNorm"),
    ("torch", lambda: torch().nn.modules.dropout, "_DropoutNd"),
    ("torch", lambda: torch().zeros(1), "_version"),
    ("torch", lambda: torch().zeros(1).to_sparse(), "_indices _values"),
    ("torch", lambda: torch().utils.data.DataLoader([1]), "_get_iterator _iterator"),
)
"""Objects with private attributes that the source uses: the backend, or "" for all, an object, and names."""


@functools.cache
def has_moved() -> bool:
    return any(moved_modules(library) for library in MODULES if library in ("keras", BACKEND))


@pytest.fixture(autouse=True)
def skipped_after_a_move(request: pytest.FixtureRequest) -> None:
    """Leave a message about moved modules alone: other tests would fail where these are imported."""
    first = (test_private_modules_have_the_parts_in_use, test_a_private_part_exists)
    if request.function not in first and has_moved():
        pytest.skip("modules have moved: test_private_modules_have_the_parts_in_use names them")


@pytest.mark.parametrize("library", MODULES)
def test_private_modules_have_the_parts_in_use(library: str) -> None:
    if library not in ("keras", BACKEND):
        pytest.skip(f"a test of Keras on {library}")
    assert modules_of(library)
    moved = moved_modules(library)
    assert not moved, "\n".join(moved)


@pytest.mark.parametrize(
    ("backend", "owner", "name"),
    [(backend, owner, name) for backend, owner, names in OWNERS for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else "of",
)
def test_a_private_part_exists(backend: str, owner: Callable[[], Any], name: str) -> None:
    if backend not in ("", BACKEND):
        pytest.skip(f"a test of Keras on {backend}")
    try:
        found = owner()
    except (AttributeError, ImportError):
        if has_moved():
            pytest.skip("a module has moved")
        raise
    assert hasattr(found, name), lacks(backend or "keras", f"{name} of {found!r}", files_with(name))


def test_each_private_attribute_in_use_has_a_test() -> None:
    from lockstep.keras.private import common

    known = {name for _, _, names in OWNERS for name in names.split()} | OWN | REPLACED
    # An attribute that a Keras does not have changes nothing there.
    known |= common.OWN_ATTRIBUTES | common.MODEL_ATTRIBUTES
    for table in (common.CHANGED_BY_TRAINING, common.SET_BY_PROCESS):
        known.update(name for names in table.values() for name in names)
    unknown = {name: files for name, files in uses().attributes.items() if name not in known}
    assert not unknown, f"add these private parts of other libraries to OWNERS: {unknown}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_moved_module_is_described_with_the_file_to_change(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(path.relative_to(ROOT))
    libraries = [library for library in MODULES if library in ("keras", BACKEND)]
    moved = {library: [n for n, f in modules_of(library).items() if file in f] for library in libraries}
    if not any(moved.values()):
        pytest.skip(f"no module on {BACKEND}")
    for library, names in moved.items():
        for name in names:
            package, _, rest = name.rpartition(".")
            if not isinstance(owner := part(package), ModuleType):
                continue
            with monkeypatch.context() as moving:
                part(name)
                if name in sys.modules:
                    moving.setitem(sys.modules, name, None)
                moving.delattr(owner, rest, raising=False)
                version = sys.modules[library].__version__
                expected = f"{library} {version} has no {name}: change src/lockstep/{file}, the only place"
                assert [text[: len(expected)] for text in moved_modules(library)] == [expected]


def test_a_missing_attribute_is_described_with_the_file_to_change() -> None:
    for name, file in (("_flatten_layers", "keras/private/common"), ("_version", "keras/private/torch")):
        with pytest.raises(AssertionError) as error:
            test_a_private_part_exists("", list, name)
        expected = f"keras {keras.__version__} has no {name} of []: change src/lockstep/{file}.py, the only"
        assert str(error.value).startswith(expected)


def test_a_private_part_is_in_one_file() -> None:
    several = {name: files for name, files in uses().modules.items() if len(files) > 1}
    assert not several


@pytest.mark.slow
@on_jax
def test_the_tests_describe_a_module_that_the_files_cannot_import(tmp_path: Path) -> None:
    name = "keras.src.utils.rng_utils"
    moving = f"import sys, keras\nsys.modules[{name!r}] = None\ndel keras.src.utils.rng_utils\n"
    (tmp_path / "moving.py").write_text(moving)
    tests = f"{__file__}::test_private_modules_have_the_parts_in_use"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "moving", "-p", "no:cacheprovider", tests]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT.parent}", "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert f"has no {name}: change src/lockstep/keras/private/common.py, the only place" in done.stdout


def test_an_optimizer_lists_the_variables_it_was_built_for() -> None:
    made = model()
    made.optimizer.build(made.trainable_variables)
    listed = len(made.optimizer._trainable_variables)
    assert listed == 2, changed("Optimizer._trainable_variables")


def test_an_observer_is_called_before_variables_are_created_and_assigned() -> None:
    calls: list[tuple[str, Any]] = []

    class Observer:
        def on_create(self, variable: Any) -> None:
            calls.append(("create", variable))

        def on_assign(self, variable: Any) -> None:
            calls.append(("assign", getattr(variable, "_value", None)))

    from lockstep.keras import assignments

    assignments.install()
    before = assignments.count()
    with assignments.observed_by(Observer()):
        variable = keras.Variable(np.zeros(2))
        variable.assign_add(np.ones(2))
    variable.assign(np.zeros(2))
    message = changed("Variable._direct_assign")
    assert calls[0] == ("create", variable), message
    assert calls[-1][0] == "assign", message
    assert np.asarray(calls[-1][1]).tolist() == [0, 0], message
    assert assignments.count() >= before + 2, message


def test_random_operations_without_a_seed_draw_from_a_generator_of_a_known_name() -> None:
    keras.random.uniform((1,))
    kept = part(f"{GLOBAL_STATE}.get_global_attribute")("global_seed_generator")
    assert isinstance(kept, keras.random.SeedGenerator), changed("global_seed_generator")
    for generator in (kept, keras.random.SeedGenerator(1, name="own")):
        assert "seed_generator_state" in generator.state.name, changed("SeedGenerator.state")


def test_keras_keeps_the_seed_of_the_script() -> None:
    keras.utils.set_random_seed(5)
    rng_utils = part("keras.src.utils.rng_utils")
    global_attribute = part(f"{GLOBAL_STATE}.get_global_attribute")
    kept = rng_utils.get_random_seed(), global_attribute(rng_utils.GLOBAL_RANDOM_SEED)
    assert kept == (5, 5), changed("rng_utils.GLOBAL_RANDOM_SEED")
    keras.utils.clear_session()
    assert rng_utils.get_random_seed() is None


def test_keras_sets_the_seed_of_the_script_by_a_function_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.worker.private_modules import KERAS_GLOBAL_STATE, KERAS_SCRIPT_SEED

    noted: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        part(KERAS_GLOBAL_STATE), "set_global_attribute", lambda name, value: noted.append((name, value))
    )
    keras.utils.set_random_seed(5)
    assert (KERAS_SCRIPT_SEED, 5) in noted, changed("set_global_attribute", "worker/private_modules.py")


def test_keras_imports_optional_packages_lazily() -> None:
    lazy = part("keras.src.utils.module_utils").LazyModule("never_there")
    assert lazy._available is None, changed("LazyModule")
    assert not lazy.available, changed("LazyModule")


def test_a_csv_logger_has_its_file() -> None:
    logger = vars(keras.callbacks.CSVLogger("log.csv"))
    assert {"csv_file", "filename", "append", "sep"} <= logger.keys(), changed(
        "CSVLogger", "keras/fit/callbacks.py"
    )


def test_callbacks_keep_their_state_under_known_names() -> None:
    from lockstep.keras.private.common import CHANGED_BY_TRAINING, SET_BY_PROCESS

    for kind, names in (*CHANGED_BY_TRAINING.items(), *SET_BY_PROCESS.items()):
        source = "".join(inspect.getsource(base) for base in kind.__mro__[:-1])
        missing = [name for name in names if not re.search(rf"\b{name}\b", source)]
        assert not missing, changed(f"{kind.__name__}.{missing}")


def test_a_loss_is_reduced_once_through_a_function_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def reduce(values: Any, **options: Any) -> Any:
        seen.append(sorted(options))
        return values

    monkeypatch.setattr(part("keras.src.losses.loss"), "reduce_weighted_values", reduce)
    keras.losses.MeanSquaredError()(np.zeros((2, 1)), np.zeros((2, 1)))
    expected = [["dtype", "mask", "reduction", "sample_weight"]]
    assert seen == expected, changed("Loss.__call__")
    made = model()
    tracker = made._loss_tracker
    assert any(v is tracker.total for v in made.metrics_variables), changed("Trainer._loss_tracker")


def test_the_array_adapter_keeps_its_inputs() -> None:
    module = part("keras.src.trainers.data_adapters.array_data_adapter")
    adapter = module.ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2)
    parts = adapter._num_samples, adapter._batch_size, len(adapter._inputs)
    assert parts == (5, 2, 2), changed("ArrayDataAdapter")
    assert module.can_convert_arrays((np.zeros(3), None, None))


def test_a_data_adapter_may_be_given_as_the_input() -> None:
    class Mine(part("keras.src.trainers.data_adapters.data_adapter.DataAdapter")):  # type: ignore[misc]
        num_batches = 1

    mine = Mine()
    iterator = part("keras.src.trainers.epoch_iterator.EpochIterator")(mine)
    assert iterator.data_adapter is mine, changed("get_data_adapter")


def test_fit_validates_with_a_cached_input() -> None:
    source = inspect.getsource(inspect.unwrap(keras.Model.fit))
    assert "_use_cached_eval_dataset" in source, changed("Trainer.fit")


@on_jax
def test_the_jax_train_step_applies_its_optimizer_without_state() -> None:
    source = inspect.getsource(keras.Model.train_step)
    assert source.count("optimizer.stateless_apply") == 1, changed(
        "Trainer.train_step", "keras/backends/jax.py"
    )


@on_jax
def test_jax_passes_a_global_batch_through_to_the_train_function() -> None:
    import jax

    import lockstep.keras.backends.jax

    assert lockstep.keras.backends.jax.JaxBackend
    batch = GlobalBatch(1, 3, lambda rows: None, lambda: b"")
    assert keras.tree.map_structure(jax.device_put, batch) is batch


@on_jax
def test_a_traced_step_returns_an_unchanged_variable_as_the_same_object() -> None:
    import jax

    made = model()
    state = [[v.value for v in group] for group in (made.trainable_variables, made.non_trainable_variables)]
    same: list[bool] = []

    def step(trainable: Any, rest: Any) -> Any:
        outputs, after = made.predict_step((trainable, rest), (np.zeros((1, 2), "float32"),))
        same.extend(new is old for old, new in zip(rest, after, strict=True))
        return outputs

    jax.jit(step)(*state)
    assert same == [True], changed("StatelessScope", "keras/backends/jax.py")


def test_a_graph_shows_its_operations_and_their_arguments() -> None:
    given = keras.KerasTensor((None, 2))
    function = keras.Function(given, keras.ops.add(given, 1.0))
    nodes = [node for some in function._nodes_by_depth.values() for node in some if not node.is_input]
    assert [one.arguments.args[1] for one in nodes] == [1.0], changed("Function._nodes_by_depth")
    assert nodes[0].operation is not None


def test_a_layer_keeps_its_table_among_its_variables_and_its_place_in_graphs() -> None:
    layer = keras.layers.Embedding(3, 2)
    made = keras.Sequential([keras.Input((1,)), layer])
    assert layer._trainable_variables[0] is layer._embeddings, changed("Embedding._embeddings")
    assert len(layer._inbound_nodes) == 1, changed("Operation._inbound_nodes")
    assert made._functional._inputs_struct is not None, changed("Functional._inputs_struct")


def test_keras_counts_the_names_that_it_has_given() -> None:
    keras.layers.Dense(1)
    names = part(f"{GLOBAL_STATE}.get_global_attribute")("object_name_uids")
    assert names is not None, changed("auto_name")
    before = names["dense"]
    keras.layers.Dense(1)
    assert names["dense"] == before + 1
