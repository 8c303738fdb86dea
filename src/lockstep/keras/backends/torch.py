"""Keras on PyTorch: the only file that touches the private parts of its PyTorch trainer.

Keras's own `train_step` runs once per replica on the model's variables, with `optimizer.apply` replaced by a
recorder; afterwards the variables have their old values again. The total is applied to the same variables.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras import randomness
from lockstep.keras.backends.contract import Execution, Kind, Partial, Total
from lockstep.keras.backends.eager import Tensors
from lockstep.keras.backends.logs import LogReport, StepResults, mapped
from lockstep.keras.backends.losses import by_density, divided, observed, weighed_gradients
from lockstep.keras.backends.multi_update import Left, Recording, Rounds, Update, hidden, refuse_own_update
from lockstep.keras.backends.steps import build_by_call, refuse_integer_state, refuse_overwriting_gradients
from lockstep.keras.backends.tensors import (
    borrowed,
    copied,
    figure,
    int32,
    on_host,
    promise_equal_bits,
    seeded,
    versions,
    weighted,
)
from lockstep.keras.seeds import GOLDEN
from lockstep.keras.variables import VariableState, assign, optimizers_of, seed_positions
from lockstep.worker import job
from lockstep.worker.patch_registry import PATCHES


class TorchBackend:
    """Keras's PyTorch backend behind the contract `lockstep.keras.backends.contract.Backend`."""

    def __init__(self) -> None:
        self._prepared = False

    def build(self, model: Any, kind: Kind, batch: Callable[[], Any]) -> None:
        """Make a model's variables by calling it on symbols."""
        build_by_call(model, kind, batch)

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
        return lambda batches: step(None, batches[0])[0]

    def held(self, model: Any) -> "TorchState":
        """Return the state of the training steps of `model`."""
        return TorchState(model)

    def watched(
        self, model: Any, function: Any, execute: Callable[[Execution], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Return `f(batches) -> logs`, as `TorchTrainer` calls it with a list of one batch."""
        return lambda batches: execute(Execution(None, lambda: (function(batches), None), lambda: None))[0]

    def settle(self) -> None:
        """Do nothing: `apply` has read its total when it returns."""

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor's memory in place (on a CPU), or copy it to the host."""
        return on_host(array) if isinstance(array, torch.Tensor) else np.asarray(array)

    def _prepare(self) -> None:
        """Switch to equal bits; say so where the script has switched back since."""
        if self._prepared:
            if not torch.are_deterministic_algorithms_enabled():
                warnings.warn(
                    "the script has disabled torch.use_deterministic_algorithms: equal bits are no "
                    "longer guaranteed",
                    stacklevel=3,
                )
            return
        self._prepared = True
        promise_equal_bits(job.current().context.threads)


@dataclass(frozen=True)
class Slot:
    """A tensor that keeps layer state from step to step, under the path by which messages name it."""

    path: str
    tensor: torch.Tensor
    is_seed: bool = False

    @property
    def dtype(self) -> str:
        """The dtype as Keras writes it."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def advances_alike(self) -> bool:
        """Whether each replica adds the same: seeds, and the steps that PyTorch's normalization counts."""
        return self.is_seed or self.path.endswith("num_batches_tracked")


@dataclass(frozen=True)
class Before:
    """The variables when a replica's step begins.

    Attributes:
        kept: copies of the layer state that the step may change, by position.
        state: how often each piece of layer state was written to.
        trainable: how often each trainable variable was written to, not counting updates.
        updated: the variables that updates of earlier rounds have changed, with copies, by their ids.
    """

    kept: Mapping[int, torch.Tensor]
    state: Sequence[int]
    trainable: list[int]
    updated: dict[int, tuple[torch.Tensor, torch.Tensor]]


class TorchState(VariableState):
    """The state of a model's steps: variables, and the buffers of PyTorch's own modules."""

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return what steps read and write by the paths of the variables."""
        return {**super().named_state(state), **module_buffers(self._model)}

    def load(self, state: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Give the variables, and the buffers of PyTorch's own modules, the values of `arrays`."""
        buffers = module_buffers(self._model)
        kept = {name: array for name, array in arrays.items() if name not in buffers}
        assign(self._model, kept, whole=True)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(borrowed(arrays[name]))


def module_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the state of PyTorch's own modules, which Keras wraps but does not know, by path."""
    # A layer lists those of the layers within it as well.
    found = {
        id(tensor): (f"{layer.path}/{name}", tensor)
        for layer in model._flatten_layers()
        for name, tensor in layer.named_buffers()
    }
    return dict(found.values())


class TorchProgram(TorchState):
    """One kind of step of one model; see `lockstep.keras.backends.contract.Program`. `state` is None."""

    def __init__(self, model: Any, kind: Kind) -> None:
        super().__init__(model)
        self._kind = kind
        self._state = _state_of(model)
        self._tensors = [slot.tensor for slot in self._state]
        self._seeds = {i for i, slot in enumerate(self._state) if slot.is_seed}
        self._trainable = [variable.value for variable in model.trainable_variables]
        self._metrics = [variable.value for variable in model.metrics_variables]
        self._changing: list[int] | None = None
        # To look for them takes longer than a small layer.
        self._optimizers = optimizers_of(model)
        self._rounds = Rounds()
        self._updates: list[Update] = []
        self._report: LogReport | None = None
        self._outputs: list[tuple[int, Any]] = []

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Compute one replica's part; the model's variables have their old values afterwards."""
        data = keras.tree.map_structure(copied, share.data())
        with self._as_replica(share) as before, random_numbers(share.seed ^ share.replica * GOLDEN):
            partial = self._run(data, share, earlier, before)
            self._refuse_own_updates(before)
            if partial is not None and self._rounds.complete(len(earlier)):
                with torch.no_grad():
                    partial |= self._changes(before, share)
        return self.compute(state, share, earlier) if partial is None else partial

    def complete(self, number: int) -> bool:
        """Whether a round is the step's last."""
        return self._rounds.complete(number)

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the sums to the model's variables."""
        with torch.no_grad():
            totals = [divided(self._model, total) for total in totals]
            last = totals[-1]
            for update, total in zip(self._updates, totals, strict=False):
                self._update(update, total)
            for i in self._changing or ():
                tensor = self._tensors[i]
                tensor.add_(borrowed(last[f"state/{i}"], tensor.device))
            if self._report is None:
                return None, None
            for i, metric in enumerate(self._metrics):
                metric.add_(borrowed(last[f"metric/{i}"], metric.device))
            return mapped(figure, self._report.assembled(last)), None

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _run(
        self, data: Any, share: Share, earlier: Sequence[Total], before: Before
    ) -> dict[str, Any] | None:
        """Run the user's own step and return what it contributes, apart from variables it changed.

        None: the step turned out to go on after the round's update, and has to be run again.
        """
        model, weight = self._model, share.weight
        if self._kind == "predict":
            with torch.no_grad():
                self._outputs.append((share.replica, model.predict_step(data)))
            return {}
        with observed(model, weight) as (densities, results):
            if self._kind == "test":
                with torch.no_grad():
                    logs = model.test_step(data)
                    partial: dict[str, Any] | None = self._own_figures(logs, results, weight)
            else:
                partial = self._train(data, weight, earlier, before, results)
        if partial is None or not self._rounds.complete(len(earlier)):
            return partial
        partial |= {f"metric/{i}": metric.detach().clone() for i, metric in enumerate(self._metrics)}
        with torch.no_grad():
            return partial if earlier else by_density(model, partial, densities, weight)

    def _train(
        self, data: Any, weight: float, earlier: Sequence[Total], before: Before, results: StepResults
    ) -> dict[str, Any] | None:
        number = len(earlier)
        leaves = self._rounds.leaves(number)
        logs = None
        with ExitStack() as stack:
            recording = Recording(
                number,
                leaves,
                self._updates,
                lambda index: self._repeat(self._updates[index], earlier[index], before),
                lambda update: stack.enter_context(hidden(update)),
            )
            stack.enter_context(recording.of(self._model, self._optimizers))
            weighed = stack.enter_context(weighed_gradients(self._model, weight))
            with suppress(Left):
                logs = self._model.train_step(data)
        if logs is None and not leaves:
            self._rounds.leave(number)
            return None
        if recording.update is not None and number == len(self._updates):
            self._updates.append(recording.update)
        return self._gradients(recording, 1.0 if weighed else weight) | (
            {} if logs is None else self._own_figures(logs, results, weight)
        )

    def _gradients(self, recording: Recording, weight: float) -> dict[str, Any]:
        """Return the weighted gradients of a round's update, and for which variables there are any.

        A replica whose loss does not reach a variable contributes zeros to it.
        """
        if recording.update is None:
            return {}
        present = [float(gradient is not None) for gradient in recording.gradients]
        gradients = weighted(recording.gradients, [v.value for v in recording.update.variables], weight)
        return {"present": torch.tensor(present)} | {f"gradient/{i}": g for i, g in enumerate(gradients)}

    def _repeat(self, update: Update, total: Total, before: Before) -> None:
        """Make the update of an earlier round, for the rest of the step."""
        now = versions(self._trainable)
        with torch.no_grad():
            if not update.optimizer.built:
                update.optimizer.build(update.variables)
            for variable in update.changed:
                tensor = variable.value
                before.updated.setdefault(id(tensor), (tensor, tensor.detach().clone()))
            self._update(update, total)
        for i, (old, new) in enumerate(zip(now, versions(self._trainable), strict=True)):
            before.trainable[i] += new - old

    def _update(self, update: Update, total: Total) -> None:
        gradients = [
            borrowed(total[f"gradient/{i}"], variable.value.device) if present else None
            for i, (variable, present) in enumerate(zip(update.variables, total["present"], strict=True))
        ]
        if not only_reads_gradients(update.optimizer):
            gradients = [None if g is None else g.clone() for g in gradients]
        update.apply(gradients)

    @contextmanager
    def _as_replica(self, share: Share) -> Iterator[Before]:
        """Within the block the variables are a replica's: own seeds, metrics at zero, no gradients."""
        watched = range(len(self._state)) if self._changing is None else {*self._changing, *self._seeds}
        kept = {i: self._tensors[i].detach().clone() for i in watched}
        metrics = [metric.detach().clone() for metric in self._metrics]
        with torch.no_grad():
            for i in self._seeds:
                self._tensors[i][0] ^= int32(share.replica * GOLDEN)
            for metric in self._metrics:
                metric.zero_()
        self._forget_gradients()
        try:
            before = Before(kept, versions(self._tensors), versions(self._trainable), {})
            yield before
        finally:
            with torch.no_grad():
                for tensor, value in before.updated.values():
                    tensor.copy_(value)
                for i, value in kept.items():
                    self._tensors[i].copy_(value)
                for metric, value in zip(self._metrics, metrics, strict=True):
                    metric.copy_(value)
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        for tensor in self._trainable:
            tensor.grad = None

    def _refuse_own_updates(self, before: Before) -> None:
        for i, version in enumerate(versions(self._trainable)):
            if version != before.trainable[i]:
                refuse_own_update(self._model.trainable_variables[i].path)

    def _changes(self, before: Before, share: Share) -> dict[str, Any]:
        """Return what the step did to the layers' state, in the form in which it adds up."""
        changed = {i for i, version in enumerate(versions(self._tensors)) if version != before.state[i]}
        if self._changing is None:
            # Writes through `tensor.data` leave no trace but the value.
            unseen = before.kept.keys() - changed - self._seeds
            changed |= {i for i in unseen if not torch.equal(before.kept[i], self._tensors[i])}
            self._changing = sorted(changed)
        for i in changed - set(self._changing):
            raise ModelError(
                f"the step changes {self._state[i].path!r}, but its first step did not; every step of "
                "every replica must change the same variables"
            )
        return {f"state/{i}": self._change(i, before.kept[i], share) for i in self._changing}

    def _change(self, i: int, old: torch.Tensor, share: Share) -> torch.Tensor:
        slot = self._state[i]
        new = self._tensors[i].detach()
        if slot.advances_alike:
            # Replica 0, whose seeds are the model's own, speaks for all.
            return new - old if share.replica == 0 else torch.zeros_like(old)
        if not old.is_floating_point():
            refuse_integer_state(slot)
        # What has not changed stays, even if it is infinite.
        return torch.where(new == old, torch.zeros_like(old), new - old).mul_(share.weight)

    def _own_figures(self, logs: Any, results: StepResults, weight: float) -> dict[str, Any]:
        """Return the figures that the user's own step made, beyond the metrics' results, weighted."""
        self._report = LogReport(self._model, logs, results)
        own = {name: keras.ops.convert_to_tensor(v, "float32") for name, v in self._report.figures.items()}
        self._report.figures.clear()
        return {name: value.detach() * weight for name, value in own.items()}


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Within the block all global random states follow from `seed`; afterwards they are what they were."""
    with randomness.random_numbers(seed), seeded(seed):
        yield


def refuse_unsupported(model: Any, kind: Kind) -> None:
    """Raise ModelError for what this backend cannot do, or not over replicas."""
    if model.steps_per_execution > 1:
        raise ModelError(
            f"steps_per_execution is {model.steps_per_execution}: with the PyTorch backend, Keras runs one "
            "step at a time; compile the model with steps_per_execution=1"
        )
    if kind == "train":
        refuse_overwriting_gradients(model)


def _state_of(model: Any) -> list[Slot]:
    """Return the layers' state: Keras's variables, then the buffers of PyTorch's own modules."""
    seeds, metrics = seed_positions(model), {id(variable) for variable in model.metrics_variables}
    slots = [
        Slot(variable.path, variable.value, i in seeds)
        for i, variable in enumerate(model.non_trainable_variables)
        if id(variable) not in metrics
    ]
    return slots + [Slot(path, tensor) for path, tensor in module_buffers(model).items()]


def only_reads_gradients(optimizer: Any) -> bool:
    """Whether `optimizer` is one of Keras's own, none of which writes to its gradients or keeps them."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return all(type(part).__module__.startswith("keras.") for part in (optimizer, inner))


class EagerTorch:
    """Tensors of PyTorch, which anybody may write to."""

    def __init__(self) -> None:
        _install()
        promise_equal_bits(job.current().context.threads)

    @contextmanager
    def apart(self, seed: int) -> Iterator[None]:
        """Within the block a replica computes; it begins without gradients."""
        before, _running.computation = _running.computation, _Computation()
        try:
            with random_numbers(seed):
                yield
            _running.computation.refuse_changed_buffers()
        finally:
            _running.computation.restore()
            _running.computation = before

    def kept(self, variable: Any) -> Any:
        """Return a copy of the value of a variable."""
        return variable._value.detach().clone()

    def own(self, leaf: Any) -> Any:
        """Return a copy of a leaf."""
        return copied(leaf)

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor's memory in place (on a CPU), or copy it to the host."""
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        array = array.detach()
        return on_host(array if array.layout == torch.strided else array.to_dense())

    def through(
        self, leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `meet(leaves)`, for which gradients are computed by `gradient`."""
        return list(_Through.apply(meet, gradient, *leaves))

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update, reading the gradients where they are."""
        pairs = zip(update.variables, gradients, strict=True)
        tensors = [None if g is None else borrowed(g, variable.value.device) for variable, g in pairs]
        if not only_reads_gradients(update.optimizer):
            tensors = [None if tensor is None else tensor.clone() for tensor in tensors]
        with torch.no_grad():
            update.apply(tensors)


class _Through(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, meet: Any, gradient: Any, *leaves: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(meet(leaves))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(upstream))


class _Computation:
    """What one replica's computation does to tensors past Keras."""

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._buffers: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}

    def begin_backward(self, roots: Iterable[Any]) -> None:
        """Put the gradients aside that a backward pass from `roots` would add to, where none was before."""
        for leaf in _leaves_behind(roots):
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def begin_forward(self, module: torch.nn.Module) -> None:
        """Keep the buffers that a module may be about to change; not all of its writes leave a trace."""
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in self._buffers:
                kept = buffer.detach().clone()
                self._buffers[id(buffer)] = f"{type(module).__name__}.{name}", buffer, kept

    def refuse_changed_buffers(self) -> None:
        """Raise ModelError if a module of PyTorch's own keeps state of what it has computed."""
        for name, buffer, kept in self._buffers.values():
            if not torch.equal(buffer, kept):
                raise ModelError(
                    f"the function passed to strategy.run changes {name}, the state of a module of "
                    "PyTorch's own, which replicas share only in model.fit; use a layer of Keras instead "
                    "(keras.layers.BatchNormalization), or put the module into evaluation mode"
                )

    def restore(self) -> None:
        """Let tensors have the gradients, and modules the state, that they had before."""
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        with torch.no_grad():
            for _, buffer, kept in self._buffers.values():
                buffer.copy_(kept)


class _ReplicaThread(threading.local):
    computation: _Computation | None = None


_running = _ReplicaThread()


def _install() -> None:
    """Learn of passes of PyTorch while a replica computes."""
    if not PATCHES.has(__name__):
        PATCHES.replace(__name__, torch.autograd, "backward", _noticed)
    _listen()


def _noticed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _running.computation is not None:
            _running.computation.begin_backward([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        original(tensors, *args, **kwargs)

    return backward


@functools.cache
def _listen() -> None:
    """Learn of forward passes: PyTorch has a hook for them."""

    def forward(module: torch.nn.Module, inputs: Any) -> None:
        if _running.computation is not None:
            _running.computation.begin_forward(module)

    torch.nn.modules.module.register_module_forward_pre_hook(forward)


def _leaves_behind(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward pass from `roots` gives gradients to."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
