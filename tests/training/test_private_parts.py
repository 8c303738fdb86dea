"""The private parts of other libraries that Lockstep uses. A failure means that a library has changed.

The source says which files use a part. The parts that Lockstep replaces are in the registry of
`lockstep.worker.patch_registry`, which names missing ones; `test_patches.py` installs all of them.
`test_tensorflow.py` and `test_torch.py` run the first tests again, in processes with their backends.
"""

import ast
import functools
import importlib
import inspect
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import lockstep
from lockstep.data.batch import GlobalBatch
from lockstep.keras import assignments
from lockstep.keras.state import callback_states

BACKEND = keras.backend.backend()
ROOT = Path(lockstep.__file__).parent
MODULES = {"keras": r"keras\.src", "jax": r"jax\._src", "tensorflow": r"tensorflow\.python"}
"""The packages of private modules, by library."""
GLOBAL_STATE = "keras.src.backend.common.global_state"
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="a test of Keras on jax")
CHANGED = f"Keras {keras.__version__} has changed a private part that {{}} stands on: {{}}"
OWN = frozenset(("_error", "_function", "_lock", "_replace", "_step", "_stored", "_Retval", "_power"))
"""Names of Lockstep that several of its files use, and parts of strings."""
REPLACED = frozenset(("_jax_state", "_setattr_hook", "_symbolic_build", "_use_cached_eval_dataset"))
"""Names that other tests of this file and `test_patches.py` check."""


class Uses(NamedTuple):
    """Where the source uses private parts: files by the full names of parts of modules, and by attributes."""

    modules: Mapping[str, list[str]]
    attributes: Mapping[str, list[str]]


@functools.cache
def uses() -> Uses:
    modules, attributes = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path in sorted(path for room in ("keras", "worker") for path in (ROOT / room).rglob("*.py")):
        file, nodes = str(path.relative_to(ROOT)), [*ast.walk(ast.parse(path.read_text()))]
        found = sorted({*named_modules(nodes)})
        for name in found:
            modules[name].append(file)
        if file.startswith("keras/"):
            known = {name.rpartition(".")[2] for name in found} | {*defined(nodes)}
            for name in sorted({*private_attributes(nodes)} - known):
                attributes[name].append(file)
    return Uses(modules, attributes)


def named_modules(nodes: list[ast.AST]) -> Iterator[str]:
    """The full names of private modules, and of what is imported from them or used of them."""
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


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """The names that a file gives to its own functions, classes, variables and attributes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def private_attributes(nodes: list[ast.AST]) -> Iterator[str]:
    """The names of private attributes of other objects than the own one, also in strings."""
    for node in nodes:
        text = ""
        if isinstance(node, ast.Attribute) and not is_own(node):
            text = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if re.fullmatch(r"_[A-Za-z]\w*", text):
            yield text


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


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
    return part("tensorflow.python.eager.context.context")()


OWNERS: tuple[tuple[str, Callable[[], Any], str], ...] = (
    ("", lambda: keras.Model, "_aggregate_additional_loss _flatten_layers"),
    ("", lambda: keras.Operation, "symbolic_call"),
    ("", model, "_call_has_training_arg _compile_loss _functional _loss_tracker metrics_variables"),
    ("", lambda: model().layers[0], "_inbound_nodes _outbound_nodes _seed_generators"),
    ("", lambda: model().layers[1], "_trainable_variables"),
    ("", lambda: model()._functional, "_inputs_struct _nodes_by_depth"),
    (
        "",
        lambda: keras.Sequential([keras.Input((1,)), keras.layers.Embedding(3, 2)]).layers[0],
        "_embeddings",
    ),
    ("", lambda: model().optimizer, "_backend_update_step _get_variable_index _learning_rate _momentums"),
    ("", lambda: model().optimizer, "_trainable_variables _velocities"),
    ("", excluding, "_exclude_from_weight_decay _exclude_from_weight_decay_pattern"),
    ("", lambda: keras.Variable(0.0), "_direct_assign _value"),
    ("", lambda: keras.random.SeedGenerator(7), "_initial_seed"),
    ("", array_adapter, "_batch_size _inputs _num_samples"),
    ("", dataset_adapter, "_get_iterator _standardize_batch"),
    ("", lambda: part("keras.src.utils.module_utils.tensorflow"), "_available"),
    ("", lambda: keras.callbacks.ModelCheckpoint, "_get_file_path _save_model _should_save_model"),
    ("", lambda: keras.callbacks.BackupAndRestore, "_save_model"),
    ("", lambda: keras.callbacks.ProgbarLogger, "_finalize_progbar _maybe_init_progbar _reset_progbar"),
    ("", lambda: random, "_inst"),
    ("", lambda: np.random.mtrand, "_rand"),
    ("jax", lambda: keras.optimizers.Optimizer, "stateless_apply"),
    ("jax", model, "_jax_state_synced"),
    ("jax", lambda: part("jax._src.compilation_cache"), "get_file_cache"),
    ("jax", lambda: part("keras.src.backend.jax.trainer.JAXEpochIterator"), "_get_iterator"),
    ("tensorflow", lambda: mapped(num_parallel_calls=2), "_deterministic _num_parallel_calls"),
    ("tensorflow", lambda: mapped(num_parallel_calls=2), "_use_unbounded_threadpool"),
    ("tensorflow", mapped, "_as_serialized_graph _common_args _force_synchronous _input_dataset _inputs"),
    ("tensorflow", mapped, "_map_func _preserve_cardinality _use_inter_op_parallelism _variant_tensor"),
    ("tensorflow", lambda: mapped()._map_func, "_func _input_structure"),
    ("tensorflow", lambda: mapped().batch(2), "_batch_size _drop_remainder"),
    ("tensorflow", lambda: mapped().prefetch(2), "_buffer_size"),
    ("tensorflow", lambda: mapped().repeat(2), "_count"),
    ("tensorflow", lambda: mapped().take(2), "_count"),
    ("tensorflow", lambda: mapped().skip(2), "_count"),
    ("tensorflow", lambda: tensorflow().TensorSpec((2,)), "_batch"),
    ("tensorflow", lambda: tensorflow().function(lambda: 1), "_autograph"),
    ("tensorflow", lambda: tensorflow().train.Checkpoint()._saver, "_graph_view"),
    ("tensorflow", seeded_context, "_rng _seed"),
    ("torch", torch, "_foreach_mul_"),
    ("torch", lambda: torch().zeros(1), "_version"),
    ("torch", lambda: torch().utils.data.DataLoader([1]), "_get_iterator _iterator"),
)
"""Objects with private attributes that the source uses: the backend, or "" for all, an object, and names."""


@pytest.mark.parametrize("library", MODULES)
def test_private_modules_have_the_parts_in_use(library: str) -> None:
    if library not in ("keras", BACKEND):
        pytest.skip(f"a test of Keras on {library}")
    missing, found = dict[str, str](), 0
    for name, files in uses().modules.items():
        kind = re.match(r"keras\.src\.backend\.(jax|tensorflow|torch)\.", name)
        if re.match(MODULES[library], name) and (not kind or kind[1] == BACKEND):
            found += 1
            try:
                part(name)
            except (AttributeError, ImportError):
                missing[name] = f"{name} (used in {', '.join(files)})"
    # Of a module that is missing, everything is.
    gone = [text for name, text in missing.items() if not any(name.startswith(f"{one}.") for one in missing)]
    assert not gone, f"{library} {part(library).__version__} has no {', no '.join(gone)}"
    assert found


@pytest.mark.parametrize(
    ("backend", "owner", "name"),
    [(backend, owner, name) for backend, owner, names in OWNERS for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else "of",
)
def test_a_private_part_exists(backend: str, owner: Callable[[], Any], name: str) -> None:
    if backend not in ("", BACKEND):
        pytest.skip(f"a test of Keras on {backend}")
    found = owner()
    files = ", ".join(uses().attributes.get(name, ["keras/backends"]))
    assert hasattr(found, name), f"{found!r} of {backend or 'keras'} has no {name} (used in {files})"


def test_each_private_attribute_in_use_has_a_test() -> None:
    known = {name for _, _, names in OWNERS for name in names.split()} | OWN | REPLACED
    for kept in (callback_states.KEPT, callback_states._PER_PROCESS):
        known.update(name for names in kept.values() for name in names)
    unknown = {name: files for name, files in uses().attributes.items() if name not in known}
    assert not unknown, f"add these private parts of other libraries to OWNERS: {unknown}"


def test_an_optimizer_lists_the_variables_it_was_built_for() -> None:
    made = model()
    made.optimizer.build(made.trainable_variables)
    listed = len(made.optimizer._trainable_variables)
    assert listed == 2, CHANGED.format(
        "keras/backends/jax.py, keras/backends/torch.py", "Optimizer._trainable_variables"
    )


def test_an_observer_is_called_before_variables_are_created_and_assigned() -> None:
    calls: list[tuple[str, Any]] = []

    class Observer:
        def on_create(self, variable: Any) -> None:
            calls.append(("create", variable))

        def on_assign(self, variable: Any) -> None:
            calls.append(("assign", getattr(variable, "_value", None)))

    assignments.install()
    before = assignments.count()
    with assignments.observed_by(Observer()):
        variable = keras.Variable(np.zeros(2))
        variable.assign_add(np.ones(2))
    variable.assign(np.zeros(2))
    changed = CHANGED.format("keras/assignments.py", "Variable._direct_assign")
    assert calls[0] == ("create", variable), changed
    assert calls[-1][0] == "assign", changed
    assert np.asarray(calls[-1][1]).tolist() == [0, 0], changed
    assert assignments.count() >= before + 2, changed


def test_random_operations_without_a_seed_draw_from_a_generator_of_a_known_name() -> None:
    keras.random.uniform((1,))
    kept = part(f"{GLOBAL_STATE}.get_global_attribute")("global_seed_generator")
    assert isinstance(kept, keras.random.SeedGenerator), CHANGED.format("keras/randomness.py", "global_state")


def test_keras_keeps_the_seed_of_the_script() -> None:
    keras.utils.set_random_seed(5)
    rng_utils = part("keras.src.utils.rng_utils")
    global_attribute = part(f"{GLOBAL_STATE}.get_global_attribute")
    kept = rng_utils.get_random_seed(), global_attribute(rng_utils.GLOBAL_RANDOM_SEED)
    assert kept == (5, 5), CHANGED.format("keras/randomness.py", "rng_utils.get_random_seed")
    keras.utils.clear_session()
    assert rng_utils.get_random_seed() is None


def test_keras_imports_optional_packages_lazily() -> None:
    assert not part("keras.src.utils.module_utils").LazyModule("never_there").available


def test_a_csv_logger_has_its_file() -> None:
    logger = vars(keras.callbacks.CSVLogger("log.csv"))
    assert {"csv_file", "filename", "append", "sep"} <= logger.keys(), CHANGED.format(
        "keras/fit/callbacks.py", "CSVLogger"
    )


def test_callbacks_keep_their_state_under_known_names() -> None:
    for kind, names in (*callback_states.KEPT.items(), *callback_states._PER_PROCESS.items()):
        source = "".join(inspect.getsource(base) for base in kind.__mro__[:-1])
        missing = [name for name in names if not re.search(rf"\b{name}\b", source) and name != "rows"]
        assert not missing, CHANGED.format("keras/state/callback_states.py", f"{kind.__name__}.{missing}")


def test_a_loss_is_reduced_once_through_a_function_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def reduce(values: Any, **options: Any) -> Any:
        seen.append(sorted(options))
        return values

    monkeypatch.setattr(part("keras.src.losses.loss"), "reduce_weighted_values", reduce)
    keras.losses.MeanSquaredError()(np.zeros((2, 1)), np.zeros((2, 1)))
    expected = [["dtype", "mask", "reduction", "sample_weight"]]
    assert seen == expected, CHANGED.format("keras/backends/losses.py", "Loss.__call__")
    made = model()
    tracker = made._loss_tracker
    assert any(v is tracker.total for v in made.metrics_variables), CHANGED.format(
        "keras/backends/losses.py", "_loss_tracker"
    )


def test_the_array_adapter_keeps_its_inputs() -> None:
    module = part("keras.src.trainers.data_adapters.array_data_adapter")
    adapter = module.ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2)
    parts = adapter._num_samples, adapter._batch_size, len(adapter._inputs)
    assert parts == (5, 2, 2), CHANGED.format("keras/input/fit_inputs.py", "ArrayDataAdapter")
    assert module.can_convert_arrays((np.zeros(3), None, None))


def test_a_data_adapter_may_be_given_as_the_input() -> None:
    class Mine(part("keras.src.trainers.data_adapters.data_adapter.DataAdapter")):  # type: ignore[misc]
        num_batches = 1

    mine = Mine()
    iterator = part("keras.src.trainers.epoch_iterator.EpochIterator")(mine)
    assert iterator.data_adapter is mine, CHANGED.format("keras/patches.py", "get_data_adapter")


def test_fit_validates_with_a_cached_input() -> None:
    source = inspect.getsource(inspect.unwrap(keras.Model.fit))
    assert "_use_cached_eval_dataset" in source, CHANGED.format("keras/patches.py", "Trainer.fit")


@on_jax
def test_the_jax_train_step_applies_its_optimizer_without_state() -> None:
    source = inspect.getsource(keras.Model.train_step)
    assert source.count("optimizer.stateless_apply") == 1, CHANGED.format(
        "keras/backends/jax.py", "train_step"
    )


@on_jax
def test_jax_passes_a_global_batch_through_to_the_train_function() -> None:
    import jax

    import lockstep.keras.backends.jax

    assert lockstep.keras.backends.jax.JaxBackend
    batch = GlobalBatch(1, lambda rows: None, lambda: b"")
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
    assert same == [True], CHANGED.format("keras/backends/jax.py", "StatelessScope")


def test_a_graph_shows_its_operations_and_their_arguments() -> None:
    given = keras.KerasTensor((None, 2))
    function = keras.Function(given, keras.ops.add(given, 1.0))
    nodes = [node for some in function._nodes_by_depth.values() for node in some if not node.is_input]
    file = "keras/parameter_server/embedding_tables.py"
    assert [one.arguments.args[1] for one in nodes] == [1.0], CHANGED.format(file, "Function._nodes_by_depth")
    assert nodes[0].operation is not None


def test_a_layer_keeps_its_table_among_its_variables_and_its_place_in_graphs() -> None:
    file = "keras/parameter_server/embedding_tables.py"
    layer = keras.layers.Embedding(3, 2)
    made = keras.Sequential([keras.Input((1,)), layer])
    assert layer._trainable_variables[0] is layer._embeddings, CHANGED.format(file, "Embedding._embeddings")
    assert len(layer._inbound_nodes) == 1, CHANGED.format(file, "Operation._inbound_nodes")
    assert made._functional._inputs_struct is not None, CHANGED.format(file, "Functional._inputs_struct")


def test_keras_counts_the_names_that_it_has_given() -> None:
    keras.layers.Dense(1)
    names = part(f"{GLOBAL_STATE}.get_global_attribute")("object_name_uids")
    assert names is not None, CHANGED.format("keras/parameter_server/embedding_tables.py", "auto_name")
    before = names["dense"]
    keras.layers.Dense(1)
    assert names["dense"] == before + 1
