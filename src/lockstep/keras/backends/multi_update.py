"""Steps that update weights several times, or use them after an update: one round for each update.

Each round runs the step again. It makes the updates of earlier rounds from their totals, and records its own
update. There the step ends, unless it can run to its end without the new weights. That last round also
computes metrics, layer state and logs. Only totals are kept from round to round, so a step remains a pure
function of state, examples and seed.

So any worker can compute any replica in any round. The cost is that a round repeats the computations before
its update. On JAX and TensorFlow, it omits unneeded parts, such as the backward pass of an earlier update. A
step with one update whose weights are not used afterwards, such as Keras's own, takes one round and costs
nothing more.

A step whose Python runs each time (on PyTorch, or with `run_eagerly`) may differ from the step before. It can
make other updates or none, log other figures, or assign other variables. So each computation of a round shows
its form (`StepForm`), and only the forms of one step must be equal: the digest of the form travels with the
round, next to that of the examples. Where the replicas of a step differ, because a condition depends on their
examples, all workers refuse the step and name the difference. A worker whose replicas have no examples
computes replica 0 in such a step to learn its form. In these steps, a round continues after its update until
it needs the new weights.

Optimizers are found as attributes of the model and its layers, in lists and dictionaries too. On JAX, Keras
threads the variables of one optimizer through a step: several optimizers need a compiled model each, as in
`examples/gan.py`. A step that changes weights without its optimizers, for example to clip them, is refused: a
layer's constraints can do that. A weight that no update changes, such as a slow copy of another weight, is
layer state.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import keras
import numpy as np

from lockstep.errors import ModelError
from lockstep.keras.backends.fused import Kernel, fused, kernel_of
from lockstep.keras.private.common import trained_by, with_values
from lockstep.worker.patch_registry import replaced


class EndOfRound(BaseException):
    """Ends a step or function at an update, or when it reads weights that are not known yet.

    It is not an Exception, so that the handlers of the step do not catch it.
    """


_BINARY = [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "xor",
    "or",
]
_OPERATORS = [
    *("int", "float", "complex", "bool", "index", "round", "len", "iter", "getitem", "setitem", "contains"),
    *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "str", "format", "array"),
    *("jax_array", *_BINARY, *(f"r{name}" for name in _BINARY)),
]
"""Special methods that Python looks up in the class of a value, each without its underscores."""


class UnknownValue:
    """The value of a variable between an update and the reduce that determines it; any use ends the round."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EndOfRound

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise EndOfRound


def _end_round(*args: Any, **kwargs: Any) -> NoReturn:
    raise EndOfRound


for _name in _OPERATORS:
    setattr(UnknownValue, f"__{_name}__", _end_round)


ApplyCall = Callable[[list[Any], list[Any]], object]
"""Applies an optimizer to gradients and variables."""


_PARAMETERS = {"apply": ("grads", "trainable_variables"), "apply_gradients": ("grads_and_vars",)}
"""The parameters of the methods of Keras's optimizers that make an update."""


class UpdateCall:
    """A call of a method that makes an update, which the program may have defined: an `ApplyCall`.

    The first arguments are those of Keras, whatever their names. The program may have added others.

    Args:
        name: the name of the method.
        method: the method, bound to the optimizer.
        arguments: the arguments.

    Attributes:
        name: the name of the method.
        gradients_and_variables: a list of the gradients, and a list of the variables or None.
    """

    def __init__(self, name: str, method: Callable[..., Any], arguments: inspect.BoundArguments) -> None:
        self.name = name
        self._method = method
        self._args, self._kwargs = arguments.args, arguments.kwargs
        names = _PARAMETERS[name]
        self._positional = len(self._args[: len(names)])
        self._by_name = names[self._positional :]
        values = [*self._args[: self._positional], *(self._kwargs.get(name) for name in self._by_name)]
        if name == "apply_gradients":
            pairs = list(values[0])
            values = [[gradient for gradient, _ in pairs], [variable for _, variable in pairs]]
        variables = None if values[1] is None else list(values[1])
        self.gradients_and_variables: tuple[list[Any], Any] = list(values[0]), variables
        self._status: AbstractContextManager[Any] = nullcontext()
        if keras.backend.backend() == "tensorflow":
            from lockstep.keras.private.tensorflow import autograph_status

            # AutoGraph may be disabled where the update is made.
            self._status = autograph_status()

    @classmethod
    def of(
        cls, name: str, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "UpdateCall":
        """Return a call of a bound method with these arguments."""
        return cls(name, method, inspect.signature(method).bind(*args, **kwargs))

    @property
    def others(self) -> Mapping[str, Any]:
        """The arguments that Keras does not know, by their names or positions."""
        positional = {str(i): value for i, value in enumerate(self._args) if i >= self._positional}
        return positional | {name: self._kwargs[name] for name in self._kwargs if name not in self._by_name}

    @property
    def text(self) -> str:
        """The other arguments as a text."""
        plain = (bool, int, float, str, type(None))
        leaves = [(name, leaf) for name, value in self.others.items() for leaf in keras.tree.flatten(value)]
        return ", ".join(
            f"{name} {leaf!r}" if isinstance(leaf, plain) else f"{name} of {type(leaf).__qualname__}"
            for name, leaf in leaves
        )

    def refuse_tensors(self) -> None:
        """Raise ModelError if another argument is a tensor: one call makes the update of all replicas."""
        for leaf in keras.tree.flatten([*self.others.values()]):
            if keras.ops.is_tensor(leaf) or isinstance(leaf, np.ndarray | np.generic):
                raise ModelError(
                    f"{self.name} of the program's optimizer gets an array or a tensor besides gradients, "
                    "and each replica may pass another one: pass a number that is equal on all replicas"
                )

    def __call__(self, gradients: list[Any], variables: list[Any]) -> Any:
        """Call the method with other gradients, and with other variables if they were passed."""
        pairs = self.name == "apply_gradients"
        values = [list(zip(gradients, variables, strict=True))] if pairs else [gradients, variables]
        named = dict(zip(self._by_name, values[self._positional :], strict=True))
        passed = {name: value for name, value in named.items() if name in self._kwargs}
        args = (*values[: self._positional], *self._args[self._positional :])
        with self._status:
            return self._method(*args, **{**self._kwargs, **passed})


@dataclass(frozen=True)
class Update:
    """An update that each step makes.

    Attributes:
        optimizer: the optimizer that makes it.
        variables: the variables that it updates.
        plain: whether its bits are those of Keras's own update.
        call: makes the update from the gradients and the variables; None for the `apply` of the optimizer's
            class.
    """

    optimizer: Any
    variables: list[Any]
    plain: bool = False
    call: ApplyCall | None = None

    @property
    def changed(self) -> list[Any]:
        """The variables that the update changes."""
        return [*self.variables, *self.optimizer.variables]

    @cached_property
    def kernel(self) -> Kernel | None:
        """The fused kernel for the update, if there is one. It neither keeps nor changes the gradients."""
        return None if self.plain else kernel_of(self.optimizer, self.variables)

    @cached_property
    def text(self) -> str:
        """The optimizer, the variables and other arguments, which are equal on all workers."""
        updated = f"{self.optimizer.name} updates {', '.join(variable.path for variable in self.variables)}"
        return f"{updated} with {self.others}" if self.others else updated

    @property
    def others(self) -> str:
        """The arguments that Keras does not know, which are equal on all workers."""
        return self.call.text if isinstance(self.call, UpdateCall) else ""

    def is_like(self, other: "Update | None") -> bool:
        """Whether both updates have the same optimizer, variables and other arguments."""
        if other is None or self.optimizer is not other.optimizer or self.others != other.others:
            return False
        return [id(variable) for variable in self.variables] == [id(variable) for variable in other.variables]

    def apply(self, gradients: list[Any]) -> None:
        """Apply the optimizer, even if its `apply` is replaced."""
        with fused(self.optimizer, self.kernel):
            if self.call is None:
                type(self.optimizer).apply(self.optimizer, gradients, self.variables)
            else:
                self.call(gradients, self.variables)


class RoundCount:
    """The number of rounds of a step or function. A round is the last until its computation adds one."""

    def __init__(self) -> None:
        self._last = 0

    def ends_early(self, number: int) -> bool:
        """Whether round `number`, from 0, ends at its update."""
        return number < self._last

    def add_after(self, number: int) -> None:
        """Add a round after round `number`."""
        self._last = number + 1

    def is_last(self, number: int) -> bool:
        """Whether round `number`, which was computed, is the last."""
        return number >= self._last


@dataclass
class RoundForm:
    """The form of a round, which its computation has shown, and which is equal for all replicas of a step.

    Attributes:
        update: the round's own update; None if the step makes none in it.
        ended: whether the step has run to its end, so that the round is its last.
    """

    update: Update | None = None
    ended: bool = True


class StepForm:
    """The rounds of a step, as they were computed last.

    A step that runs as Python may differ from the step before: it may make other updates, or none. So each
    computation of a round shows its form again, and `Round` compares the replicas' forms.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, RoundForm] = {}
        self._updates: list[Update] = []

    def show(self, number: int, update: Update | None = None, *, ended: bool = True) -> None:
        """Set the form of round `number`, from 0, which was computed; see `RoundForm`."""
        if update is not None and update.call is None:
            # An earlier update that is equal may have compiled functions.
            equal = next((earlier for earlier in self._updates if earlier.is_like(update)), None)
            if equal is None:
                self._updates.append(update)
            update = equal or update
        self._rounds[number] = RoundForm(update, ended)

    @property
    def trained(self) -> list[Any]:
        """The variables of the updates that were computed last in each round."""
        updates = [form.update for form in self._rounds.values() if form.update is not None]
        return [variable for update in updates for variable in update.variables]

    def is_last(self, number: int) -> bool:
        """Whether round `number`, which was computed, is the last."""
        return self._rounds[number].ended

    def updates(self, rounds: int) -> list[Update]:
        """Return the updates of the first `rounds` rounds, which were computed."""
        forms = [self._rounds[number] for number in range(rounds)]
        return [form.update for form in forms if form.update is not None]

    def text(self, number: int) -> str:
        """Return the form of a round as a text, equal on workers whose replicas compute the same values."""
        form = self._rounds[number]
        update = "no update" if form.update is None else form.update.text
        return f"{update}, {'then the end' if form.ended else 'then a use of the new weights'}"


class UpdateRecorder:
    """Replaces `apply` of optimizers in one replica's computation of one round.

    It makes the updates of earlier rounds, records the round's own update, and ends the round at any later
    one. Backends whose weights are variables use it. `lockstep.keras.replica_run.merges` extends it to all
    merges of a function.

    Attributes:
        gradients: the gradients of the round's own update, None for a variable without one. The list is empty
            before the update.
        update: the round's own update, once the replica has reached it.
    """

    def __init__(
        self,
        number: int,
        ends_early: bool,
        expected: Sequence[Update | None],
        repeat: Callable[[int], None],
        on_update: Callable[[Update], None],
        *,
        copies: bool = True,
    ) -> None:
        """Prepare round `number`.

        Args:
            number: the number of the round, from 0.
            ends_early: whether the round ends at its update.
            expected: the known updates of this and other rounds; None for a round with another kind of merge.
            repeat: makes the update of the earlier round whose number it gets.
            on_update: is called with the round's own update if the replica continues after it.
            copies: whether to copy the gradients, because the step may change them after the update: it may
                clear them, or variables in which it has added them up.
        """
        self._number = number
        self._ends_early = ends_early
        self._expected = expected
        self._repeat = repeat
        self._on_update = on_update
        self._copies = copies
        self._reached = 0
        self.gradients: list[Any] = []
        self.update: Update | None = None

    def apply(
        self, optimizer: Any, grads: Any, trainable_variables: Any = None, call: ApplyCall | None = None
    ) -> None:
        """Repeat or record the next update, which `call` makes; see `Update`.

        Raises:
            EndOfRound: the round ends here.
            ModelError: the update differs from the expected one.
        """
        grads = list(grads)
        if not grads:
            # Keras does nothing if there are no gradients.
            return
        if isinstance(call, UpdateCall):
            call.refuse_tensors()
        variables = trained_by(optimizer) if trainable_variables is None else trainable_variables
        update = Update(optimizer, list(variables), call=call)
        number = self._next_number()
        if number < len(self._expected):
            _refuse_another(update, self._expected[number])
        if number < self._number:
            self._repeat(number)
            return
        self.gradients = [None if g is None else _copy(g) for g in grads] if self._copies else grads
        self.update = update
        if self._ends_early:
            raise EndOfRound
        self._on_update(update)

    def _next_number(self) -> int:
        """Return the number of the next update or merge; end the round if it comes after the round's own."""
        number, self._reached = self._reached, self._reached + 1
        if number > self._number:
            raise EndOfRound
        return number

    @contextmanager
    def replacing_apply(self, model: Any, optimizers: Iterable[Any], *, varies: bool) -> Iterator[None]:
        """Within the block, `apply` of the optimizers of a model calls this recorder.

        An `apply_gradients` of the program's own also calls it, and gets the gradients of all replicas.

        Args:
            model: the model whose step is the block.
            optimizers: the optimizers of the model.
            varies: whether another step may apply one of them if this step does not.

        Raises:
            ModelError: the block has trained the model without any of them.
        """
        applied = list(optimizers)
        with ExitStack() as stack:
            for optimizer in applied:
                names = ["apply", *(["apply_gradients"] if overrides_apply_gradients(optimizer) else [])]
                for name in names:
                    is_own = name == "apply_gradients" or name in vars(optimizer)
                    replacement = partial(self._called, optimizer, name, getattr(optimizer, name), is_own)
                    stack.enter_context(replaced(optimizer, name, replacement))
            yield
        if not (self._reached or (varies and applied)) and model.trainable_variables:
            raise ModelError(
                "train_step applies no optimizer of the model: use self.optimizer, or keep the "
                "optimizer as an attribute of the model"
            )

    def _called(
        self,
        optimizer: Any,
        name: str,
        method: Callable[..., Any],
        is_own: bool,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Repeat or record an update that a method of an optimizer makes.

        Args:
            optimizer: the optimizer.
            name: the name of the method.
            method: the method.
            is_own: whether the update is not that of the optimizer's class, which may be compiled.
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        if not is_own and not kwargs and len(args) <= len(_PARAMETERS[name]):
            # Keras calls it like this in each step.
            self.apply(optimizer, *args)
            return None
        call = UpdateCall.of(name, method, args, kwargs)
        self.apply(optimizer, *call.gradients_and_variables, call if is_own or call.others else None)
        # Keras does this too.
        return optimizer.iterations if name == "apply_gradients" else None


def overrides_apply_gradients(optimizer: Any) -> bool:
    """Whether an optimizer has an `apply_gradients` of the program's own."""
    plain = keras.optimizers.Optimizer.apply_gradients
    return (
        "apply_gradients" in vars(optimizer)
        or getattr(type(optimizer), "apply_gradients", plain) is not plain
    )


def _copy(gradient: Any) -> Any:
    # Arrays of JAX do not change, but variables that hold them do.
    jax = keras.backend.backend() == "jax"
    return keras.ops.convert_to_tensor(gradient) if jax else keras.ops.copy(gradient)


def refuse_own_update(name: str) -> NoReturn:
    """Raise ModelError: a step assigns a trainable variable itself."""
    raise ModelError(
        f"the step assigns the variable {name!r} itself; weights and the variables of optimizers change "
        "through self.optimizer.apply, or that of another optimizer that is an attribute of the model; "
        "limit weights with constraints of their layers; assign a learning rate outside of the step, and "
        "create a variable that is not a weight with trainable=False"
    )


def _refuse_another(update: Update, expected: Update | None) -> None:
    if not update.is_like(expected):
        raise ModelError(
            "a replica applies a different optimizer from before in the same step, or applies it to "
            "different variables, or with different arguments: all replicas must make the same updates in "
            "the same order, in each round; look for conditions on their examples, on the time or on what "
            "the step itself has changed in Python"
        )


def hidden(update: Update) -> AbstractContextManager[None]:
    """Within the block, the variables that an update would have changed have unknown values."""
    changed = update.changed
    return with_values(changed, [UnknownValue() for _ in changed])
