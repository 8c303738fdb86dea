"""Checkpoints of a job in plain Keras, without the command."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, InputError
from lockstep.keras.state.naming import parts, renamed_slots, renumbered
from lockstep.keras.variables import all_variables, assign, named_arrays, step_state

layers = keras.layers
Launch = Callable[..., Any]
Keep = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """The output of a job of a backend, and its folder."""

    @functools.cache
    def run(backend: str, *options: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("trained")
        keeping = f"-n 2 --checkpoint {folder / 'kept'} --checkpoint-every 10"
        done = launch(keeping, "loading.py", "train", str(folder), *options, backend=backend)
        assert done.status == 0, done.stderr
        return done, folder

    return run


def lines(text: str, *marks: str) -> list[str]:
    return [line for line in text.splitlines() if line.split()[0] in marks]


def predictions(text: str) -> list[float]:
    (line,) = lines(text, "predictions")
    return [float(figure.strip("[],'")) for figure in line.split()[1:]]


@pytest.mark.ci
def test_a_model_receives_its_whole_state_of_the_job(
    trained: Callable[..., tuple[Any, Path]], plain: Callable[..., str], thorough_backend: str
) -> None:
    run, folder = trained(thorough_backend)
    text = plain("loading.py", "load", str(folder / "kept"), backend=thorough_backend)
    kept = ("weights", "optimizer", "random", "metrics")
    assert lines(text, *kept) == lines(run.stdout, *kept) != []
    assert predictions(text) == pytest.approx(predictions(run.stdout), abs=1e-3)
    (loaded,) = lines(text, "loaded")
    assert "step-000000000010'), 'name': 'current', 'step': 10, 'call': 'fit 1', 'call_step': 10" in loaded


@pytest.mark.ci
def test_the_next_step_is_the_one_after_loading_keras_own_file(
    trained: Callable[..., tuple[Any, Path]], plain: Callable[..., str], thorough_backend: str
) -> None:
    folder = trained(thorough_backend)[1]
    text = plain("loading.py", "step", str(folder / "kept"), str(folder), backend=thorough_backend)
    after_checkpoint, after_file = lines(text, "step")
    assert after_checkpoint == after_file


@pytest.mark.ci
@pytest.mark.parametrize(
    ("made", "loaded"),
    [
        ("jax", "torch"),
        pytest.param("jax", "tensorflow", marks=pytest.mark.slow),
        pytest.param("torch", "tensorflow", marks=pytest.mark.slow),
        pytest.param("tensorflow", "jax", marks=pytest.mark.slow),
    ],
)
def test_another_backend_loads_the_same_bits(
    trained: Callable[..., tuple[Any, Path]], plain: Callable[..., str], made: str, loaded: str
) -> None:
    if "torch" in (made, loaded):
        pytest.importorskip("torch")
    run, folder = trained(made)
    text = plain("loading.py", "load", str(folder / "kept"), backend=loaded)
    kept = ("weights", "optimizer", "random", "metrics")
    assert lines(text, *kept) == lines(run.stdout, *kept) != []
    assert predictions(text) == pytest.approx(predictions(run.stdout), abs=1e-3)


@pytest.mark.slow
def test_the_state_of_pytorch_modules_is_loaded(
    trained: Callable[..., tuple[Any, Path]], plain: Callable[..., str]
) -> None:
    pytest.importorskip("torch")
    run, folder = trained("torch", "module")
    text = plain("loading.py", "load", str(folder / "kept"), "module", backend="torch")
    kept = ("weights", "module", "optimizer", "metrics")
    assert lines(text, *kept) == lines(run.stdout, *kept)
    assert "num_batches_tracked" in text


def small(*, width: int = 4, compiled: Any = "adam", dtype: str = "float32", last: bool = True) -> Any:
    """A small model whose layers Keras numbers."""
    inner = [layers.Dense(width, dtype=dtype), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([layers.Input((3,)), *inner, *([layers.Dense(1)] if last else [])])
    if compiled:
        model.compile(compiled, "mse")
    return model


def changed(model: Any) -> Any:
    """Set each variable of a model and of its optimizer to distinct values."""
    random = np.random.default_rng(len(model.variables))
    if getattr(model, "optimizer", None) is not None:
        model.optimizer.build(model.trainable_variables)
    for variable in step_state(model).values():
        values = random.uniform(1, 9, variable.shape)
        variable.assign(values.astype(keras.backend.standardize_dtype(variable.dtype)))
    return model


def values(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable.value).tolist() for variable in all_variables(model)]


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Save a checkpoint of models as a job does: the current one, and the unshared variables of others."""

    def write(step: int, current: Any, *others: Any, at: str = "kept", training: Any = None) -> Path:
        arrays = {f"current/{name}": variable.value for name, variable in step_state(current).items()}
        own = {id(variable) for variable in all_variables(current)}
        for index, other in enumerate(others):
            variables = [variable for variable in all_variables(other) if id(variable) not in own]
            named = named_arrays(variables, variables)
            arrays |= {f"model {index}/{name}": variable.value for name, variable in named.items()}
        manifest = {"job": {"backend": "jax"}, "training": training or {"call": "fit 1", "steps": 0}}
        contents = Contents(step, manifest, {name: np.array(value) for name, value in arrays.items()})
        return Store(tmp_path / at).write(contents)

    return write


def test_layers_may_have_other_numbers(keep: Keep) -> None:
    source = changed(small())
    path = keep(7, source)
    other = small()
    assert other.layers[0].path != source.layers[0].path
    assert lockstep.load_checkpoint(other, path).step == 7
    assert values(other) == values(source)
    assert other.metrics_variables[0].value == source.metrics_variables[0].value


def test_a_model_that_is_not_compiled_gets_no_optimizer(keep: Keep) -> None:
    source = changed(small())
    model = small(compiled=None)
    lockstep.load_checkpoint(model, str(keep(7, source)))
    assert values(model) == [one.tolist() for one in map(keras.ops.convert_to_numpy, source.variables)]


@pytest.mark.parametrize(
    ("other", "parts_of_message"),
    [
        (
            lambda: small(width=5),
            ["of another shape or dtype", "/kernel' (float32 [3, 4] in the checkpoint, "],
        ),
        (lambda: small(width=5), ["float32 [3, 5] in the model)", "and 3 more"]),
        (
            lambda: small(dtype="bfloat16"),
            ["(float32 [3, 4] in the checkpoint, bfloat16 [3, 4] in the model"],
        ),
        (lambda: small(last=False), ["missing in the model", "/kernel'", "/bias'"]),
        (lambda: small(compiled="sgd"), ["missing in the checkpoint: 'sgd", "missing in the model: 'adam"]),
    ],
)
def test_differences_are_named_and_nothing_is_loaded(
    keep: Keep, other: Callable[[], Any], parts_of_message: list[str]
) -> None:
    path = keep(7, changed(small()))
    model = other()
    before = values(model)
    with pytest.raises(CheckpointError) as error:
        lockstep.load_checkpoint(model, path)
    assert str(error.value).startswith(f"the checkpoint {path} does not fit model '{model.name}'")
    for part in parts_of_message:
        assert part in str(error.value)
    assert values(model)[: len(before)] == before


def test_a_model_without_variables_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([layers.Dense(2)], name="empty")
    with pytest.raises(InputError, match=r"model 'empty' is not built.*call model.build"):
        lockstep.load_checkpoint(model, tmp_path)


def test_the_newest_complete_checkpoint_is_loaded_and_damaged_ones_named(
    keep: Keep, capfd: pytest.CaptureFixture[str]
) -> None:
    source, model = changed(small()), small()
    whole, damaged = keep(5, source), keep(7, source)
    (damaged / "manifest.json").unlink()
    assert lockstep.load_checkpoint(model, whole.parent).path == whole
    assert capfd.readouterr().err.startswith(f"lockstep: {damaged}/manifest.json is missing")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        lockstep.load_checkpoint(model, damaged)
    (whole / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*kept is complete"):
        lockstep.load_checkpoint(model, whole.parent)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no checkpoint in .*; give the --checkpoint folder"):
        lockstep.load_checkpoint(small(), tmp_path)
    with pytest.raises(InputError, match="nowhere does not exist"):
        lockstep.load_checkpoint(small(), tmp_path / "nowhere")


def test_of_several_models_the_matching_one_is_loaded(keep: Keep) -> None:
    first, second = changed(small()), changed(small(width=5))
    path = keep(7, first, second)
    for source, width, name in ((first, 4, "current"), (second, 5, "model 0")):
        model = small(width=width)
        assert lockstep.load_checkpoint(model, path).name == name
        assert values(model) == values(source)
    with pytest.raises(CheckpointError, match=r"as 'current', .*; as 'model 0', "):
        lockstep.load_checkpoint(small(width=6), path)


def test_of_several_matching_models_one_must_be_chosen(keep: Keep) -> None:
    first, second = small(), small()
    path = keep(7, changed(first), changed(second))
    second.layers[0].kernel.assign(np.zeros((3, 4)))
    path = keep(7, first, second)
    model = small()
    with pytest.raises(InputError, match="'current', 'model 0'; choose one, such as name='current'"):
        lockstep.load_checkpoint(model, path)
    with pytest.raises(InputError, match="has no model 'model 1', only 'current', 'model 0'"):
        lockstep.load_checkpoint(model, path, name="model 1")
    lockstep.load_checkpoint(model, path, name="model 0")
    assert values(model) == values(second)
    # The variables' names identify the model.
    second.layers[0].kernel.assign(np.ones((3, 4)))
    assert lockstep.load_checkpoint(second, path).name == "model 0"
    assert values(model) == values(second)


def test_a_model_and_its_inner_model_are_loaded_separately(keep: Keep) -> None:
    inner = small()
    outer = keras.Sequential([layers.Input((3,)), inner, layers.Dense(2)])
    outer.compile("adam", "mse")
    changed(inner)
    changed(outer)
    for current, other, loadable in ((inner, outer, (inner, outer)), (outer, inner, (outer,))):
        path = keep(7, current, other)
        for model in loadable:
            before = values(model)
            for variable in all_variables(model):
                variable.assign(np.zeros(variable.shape))
            lockstep.load_checkpoint(model, path)
            assert values(model) == before


def test_an_optimizer_is_built_for_its_original_weights(keep: Keep) -> None:
    source = small()
    source.layers[0].trainable = False
    path = keep(7, changed(source))
    model = small(compiled=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    with pytest.raises(CheckpointError, match="missing in the checkpoint: 'loss_scale_optimizer"):
        lockstep.load_checkpoint(model, path)
    model = small()
    lockstep.load_checkpoint(model, path)
    assert values(model) == values(source)
    assert len(model.optimizer.variables) == 2 + 2 * 4


def test_repeated_paths_are_numbered_in_the_order_of_a_step_on_jax(keep: Keep) -> None:
    def repeated() -> Any:
        model = keras.Sequential([layers.Input((2,)), *(layers.Dense(2, name=f"same_{i}") for i in "ab")])
        for layer in model.layers:
            for variable in layer.variables:
                variable._path = f"same/{variable.name}"
        model.layers[0].trainable = False
        return model

    source, model = changed(repeated()), repeated()
    ordered = [*source.trainable_variables, *source.non_trainable_variables]
    arrays = {
        f"current/{name}": np.array(value)
        for name, value in named_arrays(ordered, [variable.value for variable in ordered]).items()
    }
    manifest = {"job": {"backend": "jax"}, "training": {"call": "fit 1", "steps": 3}}
    folder = keep(1, source).parent
    lockstep.load_checkpoint(model, Store(folder).write(Contents(3, manifest, arrays)))
    assert values(model) == values(source)


def test_a_job_resumes_only_with_a_value_for_every_variable() -> None:
    model = small()
    kept = {name: np.array(variable.value) for name, variable in step_state(model).items()}
    del kept[model.layers[0].kernel.path]
    assign(model, kept)
    before = values(changed(model))
    with pytest.raises(CheckpointError, match="a different model from the saved one: missing in"):
        assign(model, kept, whole=True)
    assert values(model) == before


def test_the_counters_of_optimizers_divide_the_names() -> None:
    names = [
        "net/dense/kernel",
        "seed/state",
        "scale/iteration",
        "scale/factor",
        "adam/iterations",
        "variable",
    ]
    weights, optimizers, rest = parts([*names, "adam/net_dense_kernel_momentum", "loss/total"])
    assert weights == names[:2]
    assert optimizers == [*names[2:], "adam/net_dense_kernel_momentum"]
    assert rest == ["loss/total"]


def test_numbers_keep_their_order() -> None:
    paths = renumbered(
        ["net_2/dense_9/w_1", "net_2/dense_10/w_1", "a_1/b"], ["net/dense/w_1", "net/dense_1/w_1"]
    )
    assert list(paths.values()) == ["net/dense/w_1", "net/dense_1/w_1", "a_1/b"]
    slots = renamed_slots(
        ["adam_3/iteration", "adam_3/net_2_dense_10_w_1_momentum"], ["adam/iteration"], paths
    )
    assert list(slots.values()) == ["adam/iteration", "adam/net_dense_1_w_1_momentum"]
