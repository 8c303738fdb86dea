"""Updates by a fused kernel beside those that Keras makes of the same gradients."""

from typing import Any

import keras
import numpy as np

from lockstep.keras.backends import fused
from lockstep.keras.backends.multi_update import Update

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

SHAPES = ((3, 5), (5,), (70, 33), (), (4, 4))
STEPS = 12
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
WITH_KERNEL: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "its options": ("Adam", {"learning_rate": 0.02, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3}),
    "decay": ("AdamW", {"weight_decay": 0.05}),
    "schedule": ("Adam", {"learning_rate": SCHEDULE}),
    "clipped": ("Adam", {"global_clipnorm": 0.5}),
    "average": ("Adam", {"use_ema": True, "ema_overwrite_frequency": 4}),
}
WITHOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "amsgrad": ("Adam", {"amsgrad": True}),
    "accumulated": ("Adam", {"gradient_accumulation_steps": 3}),
    "another": ("Nadam", {}),
}


def weights() -> list[Any]:
    """Return variables; on PyTorch, the last one has its columns in sequence in memory."""
    generator = np.random.default_rng(0)
    drawn = [keras.Variable(generator.standard_normal(shape), dtype="float32") for shape in SHAPES[:-1]]
    return [*drawn, keras.Variable(keras.initializers.Orthogonal(seed=1), shape=SHAPES[-1], dtype="float32")]


def gradients(step: int) -> list[Any]:
    generator = np.random.default_rng([1, step])
    return [
        keras.ops.convert_to_tensor(generator.standard_normal(shape).astype("float32")) for shape in SHAPES
    ]


def made(name: str, options: dict[str, Any], by_update: bool, in_graph: bool) -> np.ndarray[Any, Any]:
    variables = weights()
    optimizer = getattr(keras.optimizers, name)(**options)
    optimizer.build(variables)
    update = Update(optimizer, variables)

    def apply(values: list[Any]) -> None:
        if by_update:
            update.apply(values)
        else:
            optimizer.apply(values, variables)

    if in_graph:
        apply = tf.function(apply)
    for step in range(STEPS):
        apply(gradients(step))
    state = [*variables, *optimizer.variables]
    return np.concatenate([keras.ops.convert_to_numpy(each).ravel().astype("float64") for each in state])


def main() -> None:
    calls = []
    backend = keras.backend.backend()
    kernel = fused._KERNELS[backend]

    def counted(*given: Any) -> None:
        calls.append(1)
        kernel(*given)

    fused._KERNELS[backend] = counted
    for in_graph in (False, True) if backend == "tensorflow" else (False,):
        for label, (name, options) in {**WITH_KERNEL, **WITHOUT}.items():
            calls.clear()
            ours, theirs = (made(name, options, by_update, in_graph) for by_update in (True, False))
            distance = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            equal = bool((ours == theirs).all())
            print(f"{label}: kernel {bool(calls)}, near {bool(distance < 1e-6)}, equal {equal}")


if __name__ == "__main__":
    main()
