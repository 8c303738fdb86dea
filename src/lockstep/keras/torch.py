"""Keras on PyTorch: the only file that touches the private parts of its PyTorch trainer.

Keras's own `train_step` runs once a replica on the model's variables, with `optimizer.apply` replaced by a
recorder; afterwards the variables have their old values again. The total is applied to the same variables.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from lockstep import job
from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras.contract import Kind, Partial, Total
from lockstep.keras.digest import named_arrays
from lockstep.keras.steps import (
    only_application,
    refuse_integer_state,
    replaced,
    seed_positions,
)

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: spreads consecutive replica ids over the seeds."""

_REMEDY = (
    "on the PyTorch backend it has to call self.optimizer.apply exactly once, with the gradients of all "
    "trainable variables"
)


class TorchBackend:
    """Keras's PyTorch backend behind the contract `lockstep.keras.contract.Backend`."""

    def __init__(self) -> None:
        self._prepared = False

    def program(self, model: Any, kind: Kind) -> "TorchProgram":
        """Prepare a step of a built model."""
        self._prepare()
        refuse_unsupported(model, kind)
        if model.jit_compile:
            # What torch.compile makes of a step depends on the shapes that a process has seen before.
            warnings.warn(
                "jit_compile=True is ignored: on the PyTorch backend several replicas run their steps "
                "uncompiled, so that the results do not depend on the number of workers",
                stacklevel=2,
            )
        return TorchProgram(model, kind)

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: Kind) -> Any:
        """Return `f(batches) -> logs or outputs`, as `TorchTrainer` calls it with a list of one batch."""

        def function(batches: Sequence[Any]) -> Any:
            return step(None, batches[0])[0]

        return function

    def settle(self) -> None:
        """Do nothing: `apply` has read its total when it returns."""

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor's memory in place (on a CPU), or copy it to the host."""
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        tensor = array.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _prepare(self) -> None:
        """Switch to equal bits; say so where the script has switched back since."""
        if self._prepared:
            if not torch.are_deterministic_algorithms_enabled():
                warnings.warn(
                    "the script has switched off torch.use_deterministic_algorithms: equal bits are no "
                    "longer promised",
                    stacklevel=3,
                )
            return
        self._prepared = True
        # Without it, threads add what falls on one element (the gradient of indexing) in any order.
        torch.use_deterministic_algorithms(True, warn_only=True)
        # It comes with filling all new memory, which finds reads of what nobody wrote, and costs a pass.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # It would choose algorithms by how long they take.
        torch.backends.cudnn.benchmark = False
        # The number of threads decides in which order sums are added.
        threads = job.current().threads
        if threads and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Application:
    """One call of `optimizer.apply`: what it was given."""

    gradients: list[Any]
    variables: list[Any]


@dataclass(frozen=True)
class Slot:
    """A tensor that keeps layer state from step to step, under the path by which messages name it."""

    path: str
    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        """The dtype as Keras writes it."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def is_counter(self) -> bool:
        """Whether this is the count of steps that PyTorch's own normalization keeps."""
        return self.path.endswith("num_batches_tracked")


@dataclass(frozen=True)
class Before:
    """The variables when a replica's step begins.

    Attributes:
        kept: copies of the layer state that the step may change, by position.
        state: how often each piece of layer state was written to.
        trainable: how often each trainable variable was written to.
    """

    kept: Mapping[int, torch.Tensor]
    state: Sequence[int]
    trainable: Sequence[int]


class TorchProgram:
    """One kind of step of one model; see `lockstep.keras.contract.Program`. `state` is None."""

    def __init__(self, model: Any, kind: Kind) -> None:
        self._model = model
        self._kind = kind
        self._seeds = seed_positions(model)
        self._state = _state_of(model)
        self._trainable = [variable.value for variable in model.trainable_variables]
        self._metrics = [v.value for v in model.metrics_variables] if kind != "predict" else []
        self._changing: list[int] | None = None
        self._updated: list[Any] = []
        self._metric_names: frozenset[str] | None = None
        self._log_names: tuple[str, ...] = ()
        self._outputs: list[tuple[int, Any]] = []

    def compute(self, state: Any, share: Share) -> Partial:
        """Compute one replica's part; the model's variables have their old values afterwards."""
        data = keras.tree.map_structure(_tensor, share.data())
        with self._as_replica(share) as before, random_numbers(share.seed ^ share.replica * _GOLDEN):
            partial = self._run(data, share)
            with torch.no_grad():
                partial |= {f"metric/{i}": metric.detach().clone() for i, metric in enumerate(self._metrics)}
                partial |= self._changes(before, share)
        return partial

    def apply(self, state: Any, total: Total) -> tuple[Any, Any]:
        """Apply the sum to the model's variables."""
        with torch.no_grad():
            if self._updated:
                self._update(total)
            for i, slot in enumerate(self._state):
                if f"state/{i}" in total:
                    slot.tensor.add_(_like(total[f"state/{i}"], slot.tensor))
            if self._kind == "predict":
                return None, None
            for i, metric in enumerate(self._metrics):
                metric.add_(_like(total[f"metric/{i}"], metric))
            logs = self._model.get_metrics_result()
        logs |= {name[4:]: value.copy() for name, value in total.items() if name.startswith("log/")}
        return {name: _figure(logs[name]) for name in self._log_names}, None

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return what the step reads and writes by the paths of the variables."""
        model = self._model
        groups = [model.trainable_variables, model.non_trainable_variables]
        if self._kind == "train" and model.optimizer is not None:
            groups.append(model.optimizer.variables)
        if self._kind != "predict":
            groups.append(model.metrics_variables)
        variables = [variable for group in groups for variable in group]
        named = dict(named_arrays(variables, [variable.value for variable in variables]))
        return named | dict(model.named_buffers())

    def _run(self, data: Any, share: Share) -> dict[str, Any]:
        """Run Keras's own step and return what it contributes, apart from variables it changed."""
        model = self._model
        if self._kind == "train":
            with recorded_apply(model.optimizer) as record:
                logs = model.train_step(data)
            return self._gradients(record, share.weight) | self._own_logs(logs, share.weight)
        with torch.no_grad():
            if self._kind == "test":
                return self._own_logs(model.test_step(data), share.weight)
            self._outputs.append((share.replica, model.predict_step(data)))
            return {}

    def _gradients(self, record: list[Application], weight: float) -> dict[str, Any]:
        """Return the weighted gradients, and for which variables there are any.

        A replica whose loss does not reach a variable contributes zeros to it.
        """
        if not record and not self._trainable:
            return {}
        application = only_application(record, _REMEDY)
        variables = application.variables
        self._updated = self._updated or variables
        if [id(v) for v in variables] != [id(v) for v in self._updated]:
            raise ModelError(
                "train_step applies its optimizer to other variables than at its first step; compile the "
                "model again after changing which of its layers are trainable"
            )
        present = [float(gradient is not None) for gradient in application.gradients]
        gradients = _weighted(application.gradients, variables, weight)
        return {"present": torch.tensor(present)} | {f"gradient/{i}": g for i, g in enumerate(gradients)}

    def _update(self, total: Total) -> None:
        gradients = [
            _like(total[f"gradient/{i}"], variable.value) if present else None
            for i, (variable, present) in enumerate(zip(self._updated, total["present"], strict=True))
        ]
        optimizer = self._model.optimizer
        if not _only_reads_gradients(optimizer):
            gradients = [None if g is None else g.clone() for g in gradients]
        optimizer.apply(gradients, self._updated)

    @contextmanager
    def _as_replica(self, share: Share) -> Iterator[Before]:
        """Within the block the variables are a replica's: own seeds, metrics at zero, no gradients."""
        watched = range(len(self._state)) if self._changing is None else {*self._changing, *self._seeds}
        kept = {i: self._state[i].tensor.detach().clone() for i in watched}
        metrics = [metric.detach().clone() for metric in self._metrics]
        with torch.no_grad():
            for i in self._seeds:
                self._state[i].tensor[0] ^= _signed(share.replica * _GOLDEN)
            for metric in self._metrics:
                metric.zero_()
        self._forget_gradients()
        try:
            yield Before(kept, self._versions(), _versions(self._trainable))
        finally:
            with torch.no_grad():
                for i, value in kept.items():
                    self._state[i].tensor.copy_(value)
                for metric, value in zip(self._metrics, metrics, strict=True):
                    metric.copy_(value)
            self._forget_gradients()

    def _versions(self) -> list[int]:
        return _versions(slot.tensor for slot in self._state)

    def _forget_gradients(self) -> None:
        for tensor in self._trainable:
            tensor.grad = None

    def _changes(self, before: Before, share: Share) -> dict[str, Any]:
        """Return what the step did to the layers' state, in the form in which it adds up."""
        for i, version in enumerate(_versions(self._trainable)):
            if version != before.trainable[i]:
                path = self._model.trainable_variables[i].path
                raise ModelError(f"the step changes the trainable variable {path!r} itself; {_REMEDY}")
        changed = [i for i, version in enumerate(self._versions()) if version != before.state[i]]
        if self._changing is None:
            # Writes through `tensor.data` leave no trace but the value.
            unseen = before.kept.keys() - changed - self._seeds
            changed += [i for i in unseen if not torch.equal(before.kept[i], self._state[i].tensor)]
            self._changing = sorted(changed)
        for i in set(changed) - set(self._changing):
            raise ModelError(
                f"the step changes {self._state[i].path!r}, which its first step left alone; every step of "
                "every replica has to change the same variables"
            )
        return {f"state/{i}": self._change(i, before.kept[i], share) for i in self._changing}

    def _change(self, i: int, old: Any, share: Share) -> Any:
        slot = self._state[i]
        new = slot.tensor.detach()
        if i in self._seeds or slot.is_counter:
            # Every replica advances these by the same amount: replica 0 speaks for all.
            return new - old if share.replica == 0 else torch.zeros_like(old)
        if not old.is_floating_point():
            refuse_integer_state(slot)
        return (new - old).mul_(share.weight)

    def _own_logs(self, logs: Any, weight: float) -> dict[str, Any]:
        """Return the logs that the user's own step made, beyond the metrics' results, weighted."""
        self._log_names = tuple(logs)
        if self._metric_names is None:
            with torch.no_grad():
                self._metric_names = frozenset(self._model.get_metrics_result())
        own = logs.keys() - self._metric_names
        values = {name: keras.ops.convert_to_tensor(logs[name], "float32") for name in sorted(own)}
        return {f"log/{name}": value.detach() * weight for name, value in values.items()}


@contextmanager
def recorded_apply(optimizer: Any) -> Iterator[list[Application]]:
    """Within the block `optimizer.apply` notes what it is given and changes nothing."""
    record: list[Application] = []

    def note(grads: Any, trainable_variables: Any = None) -> None:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        record.append(Application(list(grads), list(variables)))

    if optimizer is None:
        yield record
        return
    with replaced(optimizer, "apply", note):
        yield record


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Within the block all global random states follow from `seed`; afterwards they are what they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if _uses_gpu() else None
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which formats a stack for devices that are not there.
    torch.default_generator.manual_seed(seed % 2**64)
    if devices is not None:
        torch.cuda.manual_seed_all(seed % 2**64)
    # What a layer draws from without a generator of its own. The name keeps Keras from counting it.
    ours = keras.random.SeedGenerator(seed % 10**9, name="replica")
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, ours)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def refuse_unsupported(model: Any, kind: Kind) -> None:
    """Raise ModelError for what this backend cannot do, or not over replicas."""
    if model.steps_per_execution > 1:
        raise ModelError(
            f"steps_per_execution is {model.steps_per_execution}: with the PyTorch backend Keras takes one "
            "step at a time; compile the model with steps_per_execution=1"
        )
    if kind != "train":
        return
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"variable {variable.path!r} is overwritten by its gradient (float8 training), "
                "which cannot be averaged over replicas"
            )


def _state_of(model: Any) -> list[Slot]:
    """Return the layers' state: Keras's variables, then the buffers of PyTorch's own modules."""
    slots = [Slot(variable.path, variable.value) for variable in model.non_trainable_variables]
    return slots + [Slot(name, tensor) for name, tensor in model.named_buffers()]


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written to."""
    return [tensor._version for tensor in tensors]


def _weighted(gradients: list[Any], variables: list[Any], weight: float) -> list[Any]:
    """Return dense gradients times the weight, zeros for None."""
    dense = [
        torch.zeros_like(variable.value) if gradient is None else gradient.detach()
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    # What the backward pass left in a variable is ours alone: it is forgotten when the step ends.
    own = [g is not None and g is v.value.grad for g, v in zip(gradients, variables, strict=True)]
    torch._foreach_mul_([g for g, mine in zip(dense, own, strict=True) if mine], weight)
    return [(g if mine else g * weight).contiguous() for g, mine in zip(dense, own, strict=True)]


def _only_reads_gradients(optimizer: Any) -> bool:
    """Whether `optimizer` is one of Keras's own, none of which writes to its gradients or keeps them."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return all(type(part).__module__.startswith("keras.") for part in (optimizer, inner))


def _signed(value: int) -> int:
    """Return the lower 32 bits as a signed number: PyTorch keeps seeds in int32."""
    return (value + 2**31) % 2**32 - 2**31


def _tensor(leaf: Any) -> Any:
    """Return a copy of an input in memory of PyTorch's own.

    Its allocator aligns memory always alike: on it depends how some matrix products add.
    """
    if leaf is None:
        return None
    if isinstance(leaf, torch.Tensor):
        return keras.ops.convert_to_tensor(leaf.detach().clone(memory_format=torch.contiguous_format))
    array = np.ascontiguousarray(leaf)
    if array.dtype.kind not in "biufc":
        return keras.ops.convert_to_tensor(leaf)
    return keras.ops.convert_to_tensor(_view(array).clone(), dtype=array.dtype.name)


def _like(array: npt.NDArray[Any], tensor: torch.Tensor) -> torch.Tensor:
    """Return a part of a total for use with `tensor`: its own memory, where that is on the CPU."""
    return _view(array).to(tensor.device)


def _view(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the memory of `array`, which may be read-only: do not write to it."""
    if array.dtype == ml_dtypes.bfloat16:
        return _view(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(_Writable(array)))


class _Writable:
    """An array's memory, said to be writable: PyTorch has no read-only tensors and warns of such arrays."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _figure(value: Any) -> Any:
    """Return a figure of the logs as Python's own float, if it is one number."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.ndim == 0 else value.clone()
    return float(value) if np.ndim(value) == 0 else torch.from_numpy(value)
