"""Making the variables of a model before its first step, as that step would make them.

Keras on JAX and PyTorch calls the model on symbols. On TensorFlow it leaves the variables to the first step,
which works for models that cannot be called: those whose own step calls their parts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras

from lockstep.keras.backends.contract import Kind
from lockstep.keras.backends.steps import replaced
from lockstep.keras.replica_run import assignments
from lockstep.keras.state.variables import optimizers_of


def build_by_call(model: Any, kind: Kind, batch: Callable[[], Any]) -> None:
    """Call the model, its metrics and its losses as Keras does before a loop."""
    if kind != "predict":
        model._symbolic_build(iterator=((0, 0, [batch()]) for _ in range(1)))
    elif not model.built:
        with keras.StatelessScope():
            model(keras.utils.unpack_x_y_sample_weight(batch())[0])


def has_own_step(model: Any, kind: Kind) -> bool:
    """Whether a step of the program's own stands for Keras's."""
    name = f"{kind}_step"
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)


@contextmanager
def undone(model: Any) -> Iterator[None]:
    """Within the block a step may run: optimizers only make their variables, and others get theirs back.

    For a step that runs eagerly.
    """
    firsts = _Firsts()
    assignments.install()
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(replaced(optimizer, "apply", partial(_only_build, optimizer)))
        try:
            with assignments.heard_by(firsts):
                yield
        finally:
            for variable, value in firsts.values.values():
                variable.assign(value)


class _Firsts:
    """The values that variables had before they were assigned for the first time, by the variables' ids."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, Any]] = {}

    def made(self, variable: Any) -> None:
        """Do nothing: its first value is its own."""

    def assigned(self, variable: Any) -> None:
        """Keep the value that is about to be replaced."""
        if id(variable) not in self.values:
            self.values[id(variable)] = variable, variable.numpy()


def _only_build(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    if trainable_variables is not None and not optimizer.built:
        optimizer.build(list(trainable_variables))
