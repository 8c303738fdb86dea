"""The private parts of Keras that do not depend on a backend: only this file changes when Keras changes one.

Keras makes no promises about modules below `keras.src` and attributes that begin with an underscore.
Docstrings say what Lockstep relies on, in all versions of `docs/versions.md`. `get_file`, which is replaced
before Keras is imported, is in `lockstep.worker.private_modules`.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import keras
from keras.src import backend
from keras.src.losses import loss as loss_functions
from keras.src.models.model import Trainer
from keras.src.saving import saving_api, saving_lib
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter,
    data_adapter_utils,
    py_dataset_adapter,
    tf_dataset_adapter,
    torch_data_loader_adapter,
)
from keras.src.utils import module_utils, rng_utils

from lockstep.worker.patch_registry import Part, replaced
from lockstep.worker.private_modules import KERAS_GLOBAL_STATE

global_state = importlib.import_module(KERAS_GLOBAL_STATE)

# Random numbers

random_seed_dtype = backend.random_seed_dtype
"""Returns the dtype of the two numbers that are the seed of an operation on this backend."""

KERAS_SEED = "seed_generator_state"
"""Part of the name of the variable with a generator's state, also of the one for layers without their own."""

BACKEND_RANDOM = backend.random
"""The module of the backend's random operations.

`normal`, `uniform`, `randint` and `truncated_normal` are called as (shape, ...), and `dropout` is called as
(inputs, rate, noise_shape, seed).
"""

RANDOM_MODULES = ("keras.src.random.", "keras.src.backend.")
"""The packages through which an operation of `keras.random` reaches that of the backend."""

_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def global_generator() -> Any:
    """Return the generator of Keras's random operations without a seed, or None if there is none yet.

    Keras creates it for the first such operation.
    """
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: Any) -> None:
    """Make Keras call `next()` of `generator` for random operations without a seed."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def script_seed() -> int | None:
    """Return the seed of `keras.utils.set_random_seed`, or None without one. `clear_session` removes it."""
    seed: int | None = global_state.get_global_attribute(rng_utils.GLOBAL_RANDOM_SEED)
    return seed


def set_script_seed(seed: int | None) -> None:
    """Set the result of `script_seed`, without seeding a generator."""
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)


def explicit_seed(generator: keras.random.SeedGenerator) -> int | None:
    """Return the seed with which the program has created a generator, or None if Keras has drawn one."""
    seed: int | None = generator._initial_seed
    return seed


# Variables

ASSIGN = "_direct_assign"
"""The method of `keras.Variable` by which all assignments outside of a `StatelessScope` set the value."""

INITIALIZE = "_deferred_initialize"
"""The method of `keras.Variable` that sets the first value of one that a `StatelessScope` has created."""


def stored_value(variable: Any) -> Any:
    """Return the array, tensor or variable of the backend that a variable holds, or None before it has one.

    `variable.value` may return another object: in a `StatelessScope`, or in another dtype under autocast.
    Within `fit` on JAX, Keras moves the values out of the variables.
    """
    return getattr(variable, "_value", None)


@contextmanager
def with_values(variables: Sequence[Any], values: Iterable[Any]) -> Iterator[None]:
    """Within the block, variables have any objects as their values. Afterwards, they have their old values.

    Keras reads a value only through `variable.value`, and does not check it.
    """
    before = [variable._value for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


@contextmanager
def with_parts(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Within the block, variables have values of other shapes. Afterwards, they have their old values.

    An optimizer compares the shape of a variable with that of the value that it assigns.
    """
    before = [(variable, variable._value, variable._shape) for variable, _ in values]
    try:
        for variable, value in values:
            variable._value, variable._shape = value, tuple(value.shape)
        yield
    finally:
        for variable, value, shape in before:
            variable._value, variable._shape = value, shape


# Models and layers

SYMBOLIC_BUILD = "_symbolic_build"
"""The method of `keras.Model` that creates all variables of a model by one call with symbolic inputs.

Its argument `iterator` yields (step, step, [batch]), of which it uses the first.
"""

CACHED_VALIDATION = "_use_cached_eval_dataset"
"""The option with which `fit` calls `evaluate`, which then reads the input of its first call."""

TRACKED_CONTAINERS = "keras.src.utils.tracking"
"""The module of the containers that replace lists, dicts and sets among the attributes of layers.

An iteration over them yields their elements.
"""


KERAS_HOLDERS: tuple[type, ...] = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
)
"""The classes whose instances a step may change."""

CHANGED_PLACES = "_lockstep_changed_places"
"""An attribute of models of Lockstep's own, set past Keras's tracking of attributes."""

CHOICES = "_lockstep_choices"
"""The attribute of compiled models with their `lockstep.keras.choices.Choices`, set in the same way."""

TRACE_SEED = "_lockstep_trace_seed"
"""The attribute of models with the seed of their traces, set in the same way."""

TRACES = "_lockstep_traces"
"""The attribute of compiled models with the `lockstep.keras.backends.traces.Traces` of their steps."""

OWN_ATTRIBUTES: frozenset[str] = frozenset(
    {
        CHANGED_PLACES,
        CHOICES,
        TRACES,
        TRACE_SEED,
        # These belong to layers, models, metrics, losses and optimizers: variables, parts, settings, and
        # caches of calls.
        "_allow_non_tensor_positional_args",
        "_auto_config",
        "_build_shapes_dict",
        "_built",
        "_call_context_args",
        "_call_has_context_arg",
        "_call_has_mask_arg",
        "_call_has_training_arg",
        "_call_signature",
        "_called",
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_compiled_trainable_state",
        "_compute_loss_has_training_arg",
        "_convert_input_args",
        "_distribute_strategy",
        "_distribution_strategy",
        "_dtype_policy",
        "_eval_epoch_iterator",
        "_exclude_from_weight_decay_cache",
        "_functional",
        "_inbound_nodes",
        "_initial_epoch",
        "_input_spec",
        "_inputs",
        "_inputs_struct",
        "_iterations",
        "_jax_state",
        "_jax_state_synced",
        "_jit_compile",
        "_layers",
        "_learning_rate",
        "_lock",
        "_loss_ids",
        "_loss_tracker",
        "_losses",
        "_losses_override",
        "_metrics",
        "_momentums",
        "_nodes",
        "_nodes_by_depth",
        "_non_trainable_variables",
        "_operations",
        "_operations_by_depth",
        "_outbound_nodes",
        "_outputs",
        "_outputs_struct",
        "_parent_path",
        "_path",
        "_remat_mode",
        "_run_eagerly",
        "_saved_model_arg_spec",
        "_saved_model_inputs_spec",
        "_seed_generators",
        "_supports_masking",
        "_tracked",
        "_tracker",
        "_trainable",
        "_trainable_variables",
        "_trainable_variables_indices",
        "_variables",
        "_velocities",
        "autocast",
        "build",
        "built",
        "call_signature_parameters",
        "name",
        "quantize",
        "supports_jit",
        # These belong to modules of PyTorch; on that backend, every layer is one.
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_is_full_backward_hook",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "training",
        # These belong to objects that TensorFlow tracks.
        "_self_name_based_restores",
        "_self_saveable_object_factories",
        "_self_setattr_tracking",
        "_self_unconditional_checkpoint_dependencies",
        "_self_unconditional_deferred_dependencies",
        "_self_unconditional_dependency_names",
        "_self_update_uid",
    }
)
"""The attributes of `KERAS_HOLDERS` that Keras and its backends keep and change themselves.

They hold variables and parts, which are compared and restored as such, and what Keras remembers of calls,
which does not change what a step computes.
"""

MODEL_ATTRIBUTES: frozenset[str] = frozenset(
    {
        "compiled",
        "history",
        "output_names",
        "predict_function",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
        "unrolled_steps_per_execution",
    }
)
"""The attributes that Keras keeps in models only: a layer of the program may use their names."""


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """Return a model and all layers within it, each once, an outer one before its inner ones."""
    layers: list[Any] = model._flatten_layers(include_self=include_self)
    return layers


def build_symbolically(model: Any, batch: Callable[[], Any]) -> None:
    """Create the variables of a model, its metrics and losses, and its optimizer by `SYMBOLIC_BUILD`.

    `batch` is called only if one of these is not built.
    """
    model._symbolic_build(iterator=((0, 0, [batch()]) for _ in range(1)))


def modules_of(layer: Any) -> list[Any]:
    """Return the PyTorch modules that a layer wraps, including inner ones; other layers have none."""
    if not isinstance(layer, keras.layers.TorchModuleWrapper):
        return []
    return list(layer.module.modules())


def seed_generators(layer: Any) -> Sequence[Any]:
    """Return the generators that are attributes of a layer, without those of its inner layers."""
    generators: Sequence[Any] = layer._seed_generators
    return generators


def takes_training(model: Any) -> bool:
    """Whether the `call` of a model has the argument `training`."""
    return bool(model._call_has_training_arg)


@contextmanager
def run_eagerly(model: Any) -> Iterator[None]:
    """Within the block, Keras makes steps of a model that run eagerly."""
    before = model.run_eagerly, model.jit_compile
    model.run_eagerly, model.jit_compile = True, False
    try:
        yield
    finally:
        model.run_eagerly, model.jit_compile = before


def symbolic_inputs(model: Any) -> Any:
    """Return the nest of symbolic inputs of a functional or a built sequential model, or None for others."""
    return getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)


def nodes_of(function: keras.Function) -> Iterator[Any]:
    """Yield the nodes of a function's graph.

    A node has its `operation`, the `arguments` of the call, and `is_input`.
    """
    for nodes in function._nodes_by_depth.values():
        yield from nodes


def embedding_table(layer: Any) -> Any:
    """Return the variable from which an `Embedding`'s lookups take rows, or None if it is not built."""
    return getattr(layer, "_embeddings", None)


def own_trainable_variables(layer: Any) -> list[Any]:
    """Return the list in which a layer keeps its own trainable variables, without those of inner layers.

    Keras reads it again for each `trainable_variables`, so another element replaces a variable.
    """
    variables: list[Any] = layer._trainable_variables
    return variables


_OBJECT_NAMES = "object_name_uids"
"""The global attribute of Keras with the number of objects of each name; None before the first."""


@contextmanager
def graph_kept(model: Any) -> Iterator[None]:
    """After the block, a model's layers are only in the graphs of symbolic calls from before the block.

    A symbolic call appends nodes to its layers, and its operations take names that later layers would get.
    """
    names = global_state.get_global_attribute(_OBJECT_NAMES)
    before = None if names is None else dict(names)
    nodes = [(layer, len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers_of(model)]
    try:
        yield
    finally:
        for layer, inbound, outbound in nodes:
            del layer._inbound_nodes[inbound:], layer._outbound_nodes[outbound:]
        if names is not None and before is not None:
            names.clear()
            names.update(before)


# Saving

SAVING = saving_api
"""The module with the functions `load_model` and `load_weights`, which the methods of models call."""

RAISE_LOADING_FAILURE: Part = saving_lib, "_raise_loading_failure"
"""Raises an error about the layers that could not load, or warns of them: (error_msgs, warn_only=).

`error_msgs` has each of these layers with the error that it raised.
"""


# Losses

REDUCE_WEIGHTED_VALUES: Part = loss_functions, "reduce_weighted_values"
"""Called once by each loss of Keras: (values, sample_weight=, mask=, reduction=, dtype=)."""

REDUCE_VALUES: Part = loss_functions, "reduce_values"
"""Called by `reduce_weighted_values` with the weighted values: (values, sample_weight, reduction)."""

SCALE_LOSS: Part = loss_functions, "scale_loss_for_distribution"
"""Called by the functions above with each mean, to divide it by the number of replicas."""

UNSCALE_LOSS: Part = loss_functions, "unscale_loss_for_distribution"
"""Called by Keras's steps and compiled losses with each loss that a metric gets, to undo `SCALE_LOSS`."""

ADDITIONAL_LOSS = "_aggregate_additional_loss"
"""The method of `keras.Model` by which `compute_loss` reduces each loss of regularizers and of `add_loss`.

On TensorFlow, it applies `SCALE_LOSS`.
"""

mask_of = backend.get_keras_mask
"""Returns the mask that a layer has attached to its output; None without one."""

set_mask = backend.set_keras_mask
"""Attaches a mask to a tensor."""

apply_mask = loss_functions.apply_mask
"""Combines weights with a mask as `reduce_weighted_values` does: (weights, mask, dtype=, reduction=)."""


def compiled_loss(model: Any) -> Any:
    """Return the loss that `compile` made, or None. It has `metrics`, and is called as (y, y_pred)."""
    return model._compile_loss


def wrapped_function(loss_or_metric: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the function that a loss or metric of Keras wraps, or None, and its options by name.

    A `LossFunctionWrapper` has a public attribute `fn`, and a `MeanMetricWrapper` a private one. The
    program's own metric may use such a name for any value, such as a variable with false negatives.
    """
    attributes = (getattr(loss_or_metric, name, None) for name in ("fn", "_fn"))
    function = next((attribute for attribute in attributes if callable(attribute)), None)
    options = getattr(loss_or_metric, "_fn_kwargs", None)
    return function, vars(loss_or_metric) if options is None else options


FLAT_LOSSES = "_flat_losses"
"""The attribute of a compiled loss with its losses in the order in which it calls them, once it is built.

They are named tuples with a `loss`, called as (y_true, y_pred, sample_weight).
"""


def flat_losses(model: Any) -> list[Any]:
    """Return the losses of a compiled model, in the order of `FLAT_LOSSES`, if it is built."""
    return [entry.loss for entry in getattr(model._compile_loss, FLAT_LOSSES, None) or ()]


def weighted_metrics(model: Any) -> list[Any]:
    """Return the lists of metrics that get the weights of a batch, if they are built."""
    lists = getattr(getattr(model, "_compile_metrics", None), "_flat_weighted_metrics", None)
    return [metrics for metrics in lists or () if metrics is not None]


def outputs_with_metrics(model: Any) -> list[str]:
    """Return the names of outputs that begin the figures of the outputs' metrics, if metrics are built."""
    compiled = getattr(model, "_compile_metrics", None)
    lists = [*(getattr(compiled, "_flat_metrics", None) or ()), *weighted_metrics(model)]
    return [metrics.output_name for metrics in lists if metrics is not None and metrics.output_name]


def compiled_metrics(model: Any) -> list[Any]:
    """Return the metrics that `compile` made. After they are built, some are containers with `metrics`."""
    loss, metrics = (getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics"))
    made = [loss_tracker(model), metrics, *([] if loss is None else loss.metrics)]
    return [metric for metric in made if metric is not None]


def loss_tracker(model: Any) -> Any:
    """Return the metric that gets the loss of each step, or None if the model was not compiled."""
    return getattr(model, "_loss_tracker", None)


TRAINER = vars(sys.modules[Trainer.__module__])
"""The global variables of the functions with which a backend trains; only these update `loss_tracker`."""


def track_loss(model: Any, added: Any, rows: Any, *arguments: Any) -> None:
    """Compute the loss and pass it to the metric of losses, as Keras's `test_step` does.

    Args:
        model: the model of the step.
        added: the sum of the losses that layers have added and of those of weights; None if there are none.
        rows: the number of examples.
        arguments: the first four of `compute_loss`.
    """
    before = model._losses_override
    vars(model)["_losses_override"] = [] if added is None else [added]
    try:
        loss = model._compute_loss(*arguments, training=False)
    finally:
        vars(model)["_losses_override"] = before
    loss_tracker(model).update_state(loss, sample_weight=rows)


def loss_total(model: Any) -> Any:
    """Return the variable in which Keras sums the losses of steps, or None if the model was not compiled."""
    tracker = loss_tracker(model)
    return None if tracker is None else tracker.total


# Optimizers

UPDATE_STEP = "_backend_update_step"
"""The method of optimizers that updates all variables: (gradients, variables, learning rate).

`apply` calls it once, after clipping and decay of weights, and then increments `iterations`.
"""

RATE = "_learning_rate"
"""The attribute with the learning rate as given: a variable, a schedule or a function."""

SET_BY_BUILD = frozenset({"_lock", "built"})
"""The attributes of an optimizer that are not variables, and that `build` changes."""


def rate_object(optimizer: Any) -> Any:
    """Return `RATE`, where `optimizer.learning_rate` would return a number."""
    return optimizer._learning_rate


@contextmanager
def kept_losses(layers: Sequence[Any]) -> Iterator[None]:
    """Within the block, layers may add losses or get those of a stateless call. They then forget both."""
    before = added_losses(layers)
    try:
        yield
    finally:
        set_added_losses(layers, before)


def added_losses(layers: Sequence[Any]) -> list[tuple[list[Any], Any]]:
    """Return the losses that layers have added, and those from a stateless call."""
    return [(list(layer._losses), layer._losses_override) for layer in layers]


def set_added_losses(layers: Sequence[Any], added: Sequence[tuple[list[Any], Any]]) -> None:
    """Set the losses of layers to a result of `added_losses`."""
    for layer, (losses, override) in zip(layers, added, strict=True):
        layer._losses[:] = losses
        vars(layer)["_losses_override"] = override


def forget_loss_ids(layers: Sequence[Any]) -> None:
    """Forget the ids of the losses that layers have added in earlier stateless calls.

    A new loss may have the id of an old one. A layer that still knew the old id would claim the new loss, and
    remove it before its next call.
    """
    for layer in layers:
        layer._loss_ids.clear()


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables for which an optimizer was built, in this order; an empty list before that."""
    variables: list[Any] = optimizer._trainable_variables
    return variables


def adam_moments(optimizer: Any, variables: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the values of the variables in which `Adam` and `AdamW` keep the first and second moments."""
    indices = [optimizer._get_variable_index(variable) for variable in variables]
    return (
        [optimizer._momentums[index].value for index in indices],
        [optimizer._velocities[index].value for index in indices],
    )


def variables_without_decay(optimizer: Any) -> Any:
    """Return the value that `exclude_from_weight_decay(var_list=...)` has set, if it was called."""
    return getattr(optimizer, "_exclude_from_weight_decay", None)


def names_without_decay(optimizer: Any) -> Any:
    """Return the value that `exclude_from_weight_decay(var_names=...)` has set, if it was called."""
    return getattr(optimizer, "_exclude_from_weight_decay_pattern", None)


def has_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Whether the weight decay of an optimizer, if it has one, applies to a variable."""
    return bool(optimizer._use_weight_decay(variable))


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Return gradients of all variables, clipped according to the settings of an optimizer."""
    result: list[Any] = optimizer._clip_gradients(gradients)
    return result


@contextmanager
def with_clipped(optimizer: Any, gradients: Sequence[Any]) -> Iterator[None]:
    """Within the block, an optimizer uses these in place of its clipped gradients."""
    with replaced(optimizer, "_clip_gradients", lambda _: list(gradients)):
        yield


@contextmanager
def knowing_finite(optimizer: Any, finite: Any) -> Iterator[None]:
    """Within the block, a `LossScaleOptimizer` takes this as the answer whether all gradients are finite."""
    with replaced(optimizer, "check_finite", lambda _: finite):
        yield


# Inputs

DataAdapter: TypeAlias = data_adapter.DataAdapter
"""The interface of inputs: `fit`, `evaluate` and `predict` use an instance of it as it is.

They read it by the `get_jax_iterator`, `get_tf_dataset` or `get_torch_dataloader` of their backend.
"""

ArrayDataAdapter: TypeAlias = array_data_adapter.ArrayDataAdapter
"""The adapter of arrays, which draws the order of the rows when a pass begins.

Its random states are NumPy's for `get_numpy_iterator`, PyTorch's for `get_torch_dataloader().batch_sampler`,
and TensorFlow's for `get_tf_dataset`.
"""

can_convert_arrays = array_data_adapter.can_convert_arrays
"""Whether `fit` uses `ArrayDataAdapter` for (x, y, sample_weight)."""

PyDatasetAdapter: TypeAlias = py_dataset_adapter.PyDatasetAdapter
"""The adapter of a `PyDataset`."""

OrderedEnqueuer: TypeAlias = py_dataset_adapter.OrderedEnqueuer
"""Keras's threads or processes for a `PyDataset`: `start()`, `get()`, which yields batches, and `stop()`."""

TFDatasetAdapter = tf_dataset_adapter.TFDatasetAdapter
"""The adapter of a `tf.data.Dataset`; on TensorFlow, a pass over its `get_tf_dataset()` begins at once."""

TorchDataLoaderAdapter = torch_data_loader_adapter.TorchDataLoaderAdapter
"""The adapter of a `DataLoader`; on PyTorch, a pass over its `get_torch_dataloader()` begins at once."""

get_data_adapter = data_adapters.get_data_adapter
"""Returns the adapter for an input of any kind: (x, y, sample_weight, class_weight=)."""

is_tf_dataset = data_adapters.is_tf_dataset
"""Whether `get_data_adapter` takes an object for a `tf.data.Dataset`."""

is_torch_dataloader = data_adapters.is_torch_dataloader
"""Whether `get_data_adapter` takes an object for a `DataLoader`."""

is_grain_dataset: Callable[[Any], bool] = getattr(data_adapters, "is_grain_dataset", lambda dataset: False)
"""Whether `get_data_adapter` takes an object for a dataset or a loader of Grain; earlier Keras takes none."""

NUM_BATCHES_FOR_TENSOR_SPEC = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC
"""The number of batches that Keras reads on TensorFlow to know the form of the batches of a `PyDataset`."""

get_tensor_spec = data_adapter_utils.get_tensor_spec
"""Returns the form that some batches have in common, with any number of examples."""

sample_weights = data_adapter_utils.class_weight_to_sample_weights
"""Returns the weights of examples: (their labels, a dict of weights by class)."""


def backend_sparse(array: Any) -> Any:
    """Return a sparse array as Keras passes it to its backend, JAX or TensorFlow."""
    utils = data_adapter_utils
    if keras.backend.backend() == "jax":
        if utils.is_scipy_sparse(array):
            return utils.scipy_sparse_to_jax_sparse(array)
        return utils.tf_sparse_to_jax_sparse(array) if utils.is_tensorflow_sparse(array) else array
    if utils.is_scipy_sparse(array):
        return utils.scipy_sparse_to_tf_sparse(array)
    return utils.jax_sparse_to_tf_sparse(array) if utils.is_jax_sparse(array) else array


def array_parts(adapter: ArrayDataAdapter) -> tuple[Any, int, int]:
    """Return a nest of the arrays of an adapter, the number of their rows, and the batch size."""
    return adapter._inputs, adapter._num_samples, adapter._batch_size


def sliceable(array: Any) -> Any:
    """Return an array in a form whose rows can be read in any order: `convert_to_numpy(form[indices])`."""
    return array_slicing.convert_to_sliceable(array, target_backend="numpy")


def sliced_array(form: Any) -> Any:
    """Return the NumPy array in a form of `sliceable`, if it reads rows without a conversion."""
    return form.array if type(form) is array_slicing.NumpySliceable else None


def split_rows(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Split off the last `fraction` of the rows of a nest of arrays, as `validation_split` does."""
    training, validation = array_slicing.train_validation_split(arrays, validation_split=fraction)
    return training, validation


def standardized(adapter: PyDatasetAdapter) -> Callable[[Any], Any]:
    """Return the function that converts a batch of a `PyDataset` to (x, y, sample_weight), as `fit` does."""
    convert: Callable[[Any], Any] = adapter._standardize_batch
    return convert


def batches_of(adapter: PyDatasetAdapter) -> Iterator[Any]:
    """Begin to read a pass with Keras's own workers; `on_epoch_begin` of the adapter starts them."""
    batches: Iterator[Any] = adapter._get_iterator()
    return batches


@contextmanager
def tensorflow_not_imported() -> Iterator[None]:
    """Within the block, keep Keras from importing TensorFlow to check for its types, which takes seconds.

    No value has such a type before the program has imported TensorFlow. Keras imports it when it reads
    `available` of a lazy module, which keeps the answer.
    """
    lazy = module_utils.tensorflow
    if "tensorflow" in sys.modules or lazy._available is not None:
        yield
        return
    lazy._available = False
    try:
        yield
    finally:
        lazy._available = None


# Callbacks


class _NoOrbaxCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces `OrbaxCheckpoint` on a version of Keras without it."""


ORBAX_CHECKPOINT: Any = getattr(keras.callbacks, "OrbaxCheckpoint", _NoOrbaxCheckpoint)
"""The class `keras.callbacks.OrbaxCheckpoint`, which earlier versions of Keras lack."""

CHANGED_BY_TRAINING: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.BackupAndRestore: (
        "_batches_seen_since_last_saving",
        "_current_epoch",
        "_last_batch_seen",
    ),
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.ModelCheckpoint: (
        "_batches_seen_since_last_saving",
        "_current_epoch",
        "_last_batch_seen",
        "best",
    ),
    ORBAX_CHECKPOINT: ("_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen", "best"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: (
        "_global_test_batch",
        "_global_train_batch",
        "_previous_epoch_iterations",
        "_train_accumulated_time",
    ),
}
"""The attributes of Keras's callbacks that training changes."""

SET_BY_PROCESS: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.Callback: ("_model", "model", "params"),
    keras.callbacks.CSVLogger: ("keys",),
    keras.callbacks.TensorBoard: ("_log_write_dir", "_train_dir", "_val_dir"),
}
"""The attributes of callbacks that each process creates itself, also in subclasses of these."""


class CheckpointWriter(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A `ModelCheckpoint` whose subclass decides where a file is written.

    Keras calls `_save_model` whenever it may save. This method asks `_should_save_model`, which also keeps
    the best value, and then writes to the path of `_get_file_path`.
    """

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        path = self._get_file_path(epoch, batch, logs)
        if self._should_save_model(epoch, batch, logs, path):
            self.save_to(path, lambda: self._write(epoch, batch, logs))

    def _write(self, epoch: int, batch: int | None, logs: Any) -> None:
        self.__dict__["_should_save_model"] = lambda *args: True
        try:
            super()._save_model(epoch, batch, logs)
        finally:
            del self.__dict__["_should_save_model"]

    def save_to(self, path: str, write: Callable[[], None]) -> None:
        """Decide about saving to a path, and call `write` to do so."""
        raise NotImplementedError


class BackupWriter(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """A `BackupAndRestore` whose subclass decides where a backup is written.

    Keras calls `_save_model` to write a backup.
    """

    def _save_model(self) -> None:
        self.save_to(self.backup_dir, super()._save_model)

    def files(self) -> tuple[str, str]:
        """Return the paths of the weights and of the position in training."""
        return self._weights_path, self._training_metadata_path

    def save_to(self, path: str, write: Callable[[], None]) -> None:
        """Decide about a backup below a path, and call `write` to write it."""
        raise NotImplementedError


class OrbaxWriter(ORBAX_CHECKPOINT):  # type: ignore[misc]
    """An `OrbaxCheckpoint` whose subclass decides where a checkpoint is written.

    Keras calls `_save_checkpoint` with the number of the checkpoint to write one, when it has counted the
    batches and kept the best value.
    """

    def _save_checkpoint(self, step: int, logs: Any = None) -> None:
        write = super()._save_checkpoint
        self.save_to(step, lambda: write(step, logs))

    def save_to(self, step: int, write: Callable[[], None]) -> None:
        """Decide about the checkpoint with a number, and call `write` to write it."""
        raise NotImplementedError


class ProgressBar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """A `ProgbarLogger` whose bar can begin and end without its events."""

    def reset(self) -> None:
        """Forget the bar of the last epoch; an update creates the next."""
        self._reset_progbar()

    def finish(self, logs: Any) -> None:
        """Print the bar of an epoch as complete, with the logs of its end."""
        self._maybe_init_progbar()
        self._finalize_progbar(logs)
