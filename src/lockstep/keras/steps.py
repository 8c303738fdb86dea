"""What the adapters of all backends need to know of a step: its one update, its generators, its limits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.errors import ModelError
from lockstep.keras.digest import named_arrays


@contextmanager
def replaced(optimizer: Any, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Within the block `optimizer.method` is `replacement`."""
    # Past the optimizer's own __setattr__, which tracks what it is given.
    vars(optimizer)[method] = replacement
    try:
        yield
    finally:
        del vars(optimizer)[method]


def only_application(record: list[Any], remedy: str) -> Any:
    """Return the one application of the optimizer that a step must have.

    Raises:
        ModelError: the step applied its optimizer never or several times.
    """
    if len(record) != 1:
        raise ModelError(f"train_step applied the model's optimizer {len(record)} times; {remedy}")
    return record[0]


def seed_positions(model: Any) -> frozenset[int]:
    """Find which of `model.non_trainable_variables` are states of random generators."""
    generators = [seed for layer in model._flatten_layers() for seed in layer._seed_generators]
    states = {id(generator.state) for generator in generators}
    return frozenset(i for i, v in enumerate(model.non_trainable_variables) if id(v) in states)


def refuse_integer_state(variable: Any) -> None:
    """Raise ModelError: the step changes layer state that is not floating-point."""
    raise ModelError(
        f"the step changes the {variable.dtype} variable {variable.path!r}: only floating-point layer state "
        "can be averaged over replicas; keep counters in a metric, or in a float32 variable"
    )


def refuse_overwriting_gradients(model: Any) -> None:
    """Raise ModelError if a trainable variable is overwritten by its gradient instead of updated."""
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"variable {variable.path!r} is overwritten by its gradient (float8 training), "
                "which cannot be averaged over replicas"
            )


def model_state(model: Any) -> Mapping[str, Any]:
    """Return the values of a model's and its optimizer's variables, by path; not within a JAX step."""
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else [])]
    return named_arrays(variables, [variable.value for variable in variables])


@contextmanager
def whole_sums(model: Any, weight: Any) -> Iterator[None]:
    """Within the block a loss that is a sum over examples counts as the replica's part of it.

    Replicas' gradients are averaged with `weight`, each replica's share of the examples; a sum divided by
    it survives that as the sum. Losses that were added to the model, regularizers for example, are means.

    Raises:
        ModelError: some of the model's losses are sums and others means.
    """
    reductions = {getattr(loss, "reduction", "mean") == "sum" for loss in keras.tree.flatten(model.loss)}
    if True not in reductions:
        yield
        return
    if False in reductions:
        raise ModelError(
            "some of the model's losses have reduction='sum' and others are means over the examples: "
            "replicas cannot weigh both; give all of them the same reduction"
        )
    compute = model._compute_loss

    def compute_whole(*args: Any, **kwargs: Any) -> Any:
        total = compute(*args, **kwargs)
        added = sum(model._aggregate_additional_loss(loss) for loss in model.losses)
        return (total - added) / keras.ops.cast(weight, total.dtype) + added

    # Past the model's own __setattr__, which tracks what it is given.
    vars(model)["_compute_loss"] = compute_whole
    try:
        yield
    finally:
        del vars(model)["_compute_loss"]
