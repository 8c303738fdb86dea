"""The private parts of Keras that Lockstep uses. A failure means that Keras has changed.

The parts that Lockstep replaces are in the registry of `lockstep.worker.patch_registry`, which names missing
ones; `test_patches.py` installs all of them.
"""

import inspect
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state
from keras.src.losses import loss as losses
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import module_utils, rng_utils

from lockstep.data.batch import GlobalBatch
from lockstep.keras import assignments
from lockstep.keras.state.callback_states import KEPT

CHANGED = f"Keras {keras.__version__} has changed a private part that {{}} stands on: {{}}"


def model() -> keras.Model:
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize(
    ("file", "owner", "name"),
    [
        ("keras/backends/jax.py", keras.Model, "_flatten_layers"),
        ("keras/backends/jax.py", keras.Layer, "metrics_variables"),
        ("keras/backends/jax.py", keras.optimizers.Optimizer, "stateless_apply"),
        ("keras/backends/fused.py", keras.optimizers.Optimizer, "_get_variable_index"),
        ("keras/backends/fused.py", keras.optimizers.Optimizer, "_backend_update_step"),
        ("keras/backends/losses.py", losses, "reduce_weighted_values"),
        ("keras/backends/losses.py", losses, "reduce_values"),
        ("keras/backends/losses.py", losses, "apply_mask"),
        ("keras/backends/losses.py", losses, "scale_loss_for_distribution"),
        ("keras/input/fit_inputs.py", array_slicing, "convert_to_sliceable"),
        ("keras/input/fit_inputs.py", array_slicing, "train_validation_split"),
        ("keras/input/fit_inputs.py", PyDatasetAdapter, "_standardize_batch"),
        ("keras/input/fit_inputs.py", PyDatasetAdapter, "_get_iterator"),
        ("keras/parameter_server/embedding_tables.py", keras.Operation, "symbolic_call"),
        ("keras/fit/callbacks.py", keras.callbacks.ModelCheckpoint, "_save_model"),
        ("keras/fit/callbacks.py", keras.callbacks.ModelCheckpoint, "_should_save_model"),
        ("keras/fit/callbacks.py", keras.callbacks.ModelCheckpoint, "_get_file_path"),
        ("keras/fit/callbacks.py", keras.callbacks.BackupAndRestore, "_save_model"),
        ("keras/fit/callbacks.py", keras.callbacks.ProgbarLogger, "_reset_progbar"),
        ("keras/fit/callbacks.py", keras.callbacks.ProgbarLogger, "_maybe_init_progbar"),
        ("keras/fit/callbacks.py", keras.callbacks.ProgbarLogger, "_finalize_progbar"),
    ],
)
def test_a_private_part_exists(file: str, owner: Any, name: str) -> None:
    assert hasattr(owner, name), CHANGED.format(file, f"{owner.__name__}.{name}")


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
    kept = global_state.get_global_attribute("global_seed_generator")
    assert isinstance(kept, keras.random.SeedGenerator), CHANGED.format("keras/randomness.py", "global_state")


def test_a_generator_keeps_the_seed_that_it_was_given() -> None:
    assert keras.random.SeedGenerator(7)._initial_seed == 7
    assert keras.random.SeedGenerator()._initial_seed is None


def test_keras_keeps_the_seed_of_the_script() -> None:
    keras.utils.set_random_seed(5)
    kept = rng_utils.get_random_seed(), global_state.get_global_attribute(rng_utils.GLOBAL_RANDOM_SEED)
    assert kept == (5, 5), CHANGED.format("keras/randomness.py", "rng_utils.get_random_seed")
    keras.utils.clear_session()
    assert rng_utils.get_random_seed() is None


def test_keras_keeps_whether_tensorflow_can_be_imported() -> None:
    assert hasattr(module_utils.tensorflow, "_available"), CHANGED.format(
        "keras/state/settings.py", "module_utils.tensorflow"
    )
    assert not module_utils.LazyModule("never_there").available


def test_a_csv_logger_has_its_file() -> None:
    logger = vars(keras.callbacks.CSVLogger("log.csv"))
    assert {"csv_file", "filename", "append", "sep"} <= logger.keys(), CHANGED.format(
        "keras/fit/callbacks.py", "CSVLogger"
    )


def test_callbacks_keep_their_state_under_known_names() -> None:
    for kind, names in KEPT.items():
        source = "".join(inspect.getsource(base) for base in kind.__mro__[:-1])
        missing = [name for name in names if f"self.{name}" not in source and name != "rows"]
        assert not missing, CHANGED.format("keras/state/callback_states.py", f"{kind.__name__}.{missing}")


def test_a_jax_model_has_a_flag_for_the_state_of_its_variables() -> None:
    assert model()._jax_state_synced is True, CHANGED.format("keras/backends/jax.py", "_jax_state_synced")


def test_a_loss_is_reduced_once_through_a_function_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def reduce(values: Any, **options: Any) -> Any:
        seen.append(sorted(options))
        return values

    monkeypatch.setattr(losses, "reduce_weighted_values", reduce)
    keras.losses.MeanSquaredError()(np.zeros((2, 1)), np.zeros((2, 1)))
    expected = [["dtype", "mask", "reduction", "sample_weight"]]
    assert seen == expected, CHANGED.format("keras/backends/losses.py", "Loss.__call__")
    made = model()
    tracker = made._loss_tracker
    assert any(v is tracker.total for v in made.metrics_variables), CHANGED.format(
        "keras/backends/losses.py", "_loss_tracker"
    )


def test_layers_list_their_random_generators() -> None:
    generators = [len(layer._seed_generators) for layer in model()._flatten_layers()]
    assert sum(generators) == 1, CHANGED.format("keras/backends/jax.py", "Layer._seed_generators")


def test_the_array_adapter_keeps_its_inputs() -> None:
    adapter = ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2)
    parts = adapter._num_samples, adapter._batch_size, len(adapter._inputs)
    assert parts == (5, 2, 2), CHANGED.format("keras/input/fit_inputs.py", "ArrayDataAdapter")
    assert can_convert_arrays((np.zeros(3), None, None))


def test_a_data_adapter_may_be_given_as_the_input() -> None:
    class Mine(DataAdapter):  # type: ignore[misc]
        num_batches = 1

    mine = Mine()
    assert EpochIterator(mine).data_adapter is mine, CHANGED.format("keras/patches.py", "get_data_adapter")


def test_fit_validates_with_a_cached_input() -> None:
    source = inspect.getsource(inspect.unwrap(keras.Model.fit))
    assert "_use_cached_eval_dataset" in source, CHANGED.format("keras/patches.py", "Trainer.fit")


def test_the_jax_train_step_applies_its_optimizer_without_state() -> None:
    source = inspect.getsource(keras.Model.train_step)
    assert source.count("optimizer.stateless_apply") == 1, CHANGED.format(
        "keras/backends/jax.py", "train_step"
    )


def test_jax_passes_a_global_batch_through_to_the_train_function() -> None:
    import lockstep.keras.backends.jax

    assert lockstep.keras.backends.jax.JaxBackend
    batch = GlobalBatch(1, lambda rows: None, lambda: b"")
    assert keras.tree.map_structure(jax.device_put, batch) is batch


def test_a_traced_step_returns_an_unchanged_variable_as_the_same_object() -> None:
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
    names = global_state.get_global_attribute("object_name_uids")
    assert names is not None, CHANGED.format("keras/parameter_server/embedding_tables.py", "auto_name")
    before = names["dense"]
    keras.layers.Dense(1)
    assert names["dense"] == before + 1
