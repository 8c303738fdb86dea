"""A step that updates weights several times, or uses them after an update: one round for each update.

A round runs the step again. The updates of earlier rounds are made from their totals, which are known by
then; the round's own update is recorded, and the step is left there, unless it goes on to its end without
the new weights. That last round also gives metrics, layer state and logs. Nothing is kept from round to
round but totals, so a step stays a pure function of state, examples and seed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

from lockstep.errors import ModelError
from lockstep.keras.backends.fused import Kernel, fused, kernel_of
from lockstep.keras.backends.steps import replaced


class Left(BaseException):
    """The step is left at an update, or where it wants weights that are not known yet.

    Not an Exception: a step's own handlers must not catch it.
    """


class Unknown:
    """Stands for the value of a variable between an update and the reduce that makes it known."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Left

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Left

    def __jax_array__(self) -> NoReturn:
        raise Left

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise Left


@dataclass(frozen=True)
class Update:
    """One of the updates that each step makes: an optimizer and the variables that it is applied to."""

    optimizer: Any
    variables: list[Any]

    @property
    def changed(self) -> list[Any]:
        """The variables that the update changes."""
        return [*self.variables, *self.optimizer.variables]

    @cached_property
    def kernel(self) -> Kernel | None:
        """What makes the update in one pass, if anything does; it neither keeps nor changes gradients."""
        return kernel_of(self.optimizer, self.variables)

    def apply(self, gradients: list[Any]) -> None:
        """Apply the optimizer, even where something stands for its `apply`."""
        with fused(self.optimizer, self.kernel):
            type(self.optimizer).apply(self.optimizer, gradients, self.variables)


class Rounds:
    """How many rounds a program's steps take. Each is first computed as if it were the last."""

    def __init__(self) -> None:
        self._left = 0

    def leaves(self, number: int) -> bool:
        """Whether round `number`, counted from 0, ends at its update."""
        return number < self._left

    def leave(self, number: int) -> None:
        """Learn that round `number` cannot be the last."""
        self._left = number + 1

    def complete(self, number: int) -> bool:
        """Whether round `number`, which was computed, is the last."""
        return number >= self._left


class Recording:
    """What one replica does together with the others in one round, one thing after the other.

    What earlier rounds were for is known; the round's own is recorded; what comes later is not reached. Here
    that is `apply` of optimizers, where weights are variables; for functions of `strategy.run` see
    `lockstep.keras.replica_run.merges`.

    Attributes:
        gradients: of the round's own update; empty until the replica comes to it, None where there is none.
        update: the round's own, once the replica has come to it, if it is one.
    """

    def __init__(
        self,
        number: int,
        leaves: bool,
        known: Sequence[Update | None],
        repeat: Callable[[int], None],
        noted: Callable[[Update], None],
    ) -> None:
        """Prepare round `number`.

        Args:
            number: of the round, from 0.
            leaves: whether it ends at its update.
            known: the updates of the rounds before, or also those that were known before the replica
                computed; None for a round that was not for an update.
            repeat: makes the update of an earlier round, whose number it is given.
            noted: is told of the round's own update, if the replica computes what follows it.
        """
        self._number = number
        self._leaves = leaves
        self._known = known
        self._repeat = repeat
        self._noted = noted
        self._met = 0
        self.gradients: list[Any] = []
        self.update: Update | None = None

    def apply(self, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Do what this round does at the next application of an optimizer.

        Raises:
            Left: the round ends here, or has no use for what follows.
            ModelError: the update is another one than was known.
        """
        grads = list(grads)
        if not grads:
            # Keras's own does nothing then.
            return
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        update = Update(optimizer, list(variables))
        number = self._next()
        if number < len(self._known):
            _refuse_another(update, self._known[number])
        if number < self._number:
            self._repeat(number)
            return
        self.gradients, self.update = grads, update
        if self._leaves:
            raise Left
        self._noted(update)

    def _next(self) -> int:
        """Count what replicas do together; leave if it comes after the round's own."""
        number, self._met = self._met, self._met + 1
        if number > self._number:
            raise Left
        return number

    @contextmanager
    def of(self, model: Any, optimizers: Iterable[Any]) -> Iterator[None]:
        """Within the block this stands for `apply` of the optimizers of a model.

        Raises:
            ModelError: the block has trained without any.
        """
        with ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(replaced(optimizer, "apply", partial(self.apply, optimizer)))
            yield
        if not self._met and model.trainable_variables:
            raise ModelError(
                "train_step applies no optimizer of the model: use self.optimizer, or keep the "
                "optimizer as an attribute of the model"
            )


def refuse_own_update(name: str) -> NoReturn:
    """Raise ModelError: a step changes a trainable variable by itself."""
    raise ModelError(
        f"the step assigns the variable {name!r} itself; weights and the variables of optimizers change "
        "through self.optimizer.apply, or that of another optimizer that is an attribute of the model; "
        "limits on weights are constraints of their layers; assign a learning rate outside of the step, and "
        "create a variable that is not a weight with trainable=False"
    )


def _refuse_another(update: Update, known: Update | None) -> None:
    ids, known_ids = ([id(one) for one in each.variables] if each else [] for each in (update, known))
    if known is None or update.optimizer is not known.optimizer or ids != known_ids:
        raise ModelError(
            "the step applies another optimizer than before, or applies it to different variables: compile "
            "the model again after changing which of its layers are trainable, and let all replicas make the "
            "same updates in the same order in every step"
        )


@contextmanager
def hidden(update: Update) -> Iterator[None]:
    """Within the block nobody sees the variables that an update would have changed."""
    values = [(variable, variable._value) for variable in update.changed]
    try:
        for variable, _ in values:
            variable._value = Unknown()
        yield
    finally:
        for variable, value in values:
            variable._value = value
