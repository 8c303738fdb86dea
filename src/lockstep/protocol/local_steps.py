"""Local steps: how many steps each replica takes by itself, and how the results are combined."""

from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.errors import ConfigError

Outer = Literal["average", "nesterov"]
"""What an outer step does with the mean change of the weights: `average` adds it; `nesterov` takes a step of
SGD with Nesterov momentum along it."""

Changes = Literal["exact", "int8"]
"""How the changes of weights are sent: `exact`, or rounded to small integers (`int8`), in a quarter of the
bytes of single precision."""

Slots = Literal["average", "reset"]
"""The optimizer's slots at the beginning of an outer step: the `average` of those that the replicas have had,
or their initial values (`reset`), which are not sent."""

_FORM = (
    "give H, then any of nesterov (or nesterov,LEARNING_RATE,MOMENTUM), int8 and reset, in this order: "
    "20,nesterov,0.7,0.9,int8,reset"
)


@dataclass(frozen=True)
class LocalSteps:
    """Each replica takes `steps` training steps by itself, then Lockstep averages the replicas' changes.

    Attributes:
        steps: H, 1 or more.
        outer: `average` adds the mean change to the weights. `nesterov` makes it the gradient of an outer
            optimizer, SGD with Nesterov momentum.
        learning_rate: the outer optimizer's learning rate; more than 0.
        momentum: the outer optimizer's momentum; at least 0, and less than 1.
        changes: `int8` sends the changes of weights as small integers, in a quarter of the bytes. Each is
            rounded by about 1 % of the largest change near it.
        slots: `reset` begins each outer step with the optimizer's initial state, and does not send its slots.

    Raises:
        ConfigError: a value is wrong.

    Example:
        >>> import lockstep
        >>> local_steps = lockstep.LocalSteps(20, outer="nesterov")
        >>> strategy = lockstep.MultiWorkerMirroredStrategy(local_steps=local_steps)
    """

    steps: int
    outer: Outer = "average"
    learning_rate: float = 0.7
    momentum: float = 0.9
    changes: Changes = "exact"
    slots: Slots = "average"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"local steps: the number of steps is {self.steps!r}; give 1 or more")
        if self.outer not in get_args(Outer):
            raise ConfigError(f"local steps: outer is {self.outer!r}; give 'average' or 'nesterov'")
        if self.changes not in get_args(Changes):
            raise ConfigError(f"local steps: changes is {self.changes!r}; give 'exact' or 'int8'")
        if self.slots not in get_args(Slots):
            raise ConfigError(f"local steps: slots is {self.slots!r}; give 'average' or 'reset'")
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"local steps: the learning rate is {self.learning_rate!r}; give more than 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local steps: the momentum is {self.momentum!r}; give 0 or more, less than 1")

    @property
    def text(self) -> str:
        """The equivalent value of `--local-steps`."""
        words = [str(self.steps)]
        if self.outer != "average":
            words += [self.outer, repr(self.learning_rate), repr(self.momentum)]
        if self.changes != "exact":
            words.append(self.changes)
        if self.slots != "average":
            words.append(self.slots)
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> "LocalSteps":
        """Return the local steps that a value of `--local-steps` describes.

        Raises:
            ConfigError: it does not have this form, or a value is wrong.
        """
        steps, *rest = text.split(",")
        slots = rest.pop() if rest and rest[-1] == "reset" else "average"
        changes = rest.pop() if rest and rest[-1] == "int8" else "exact"
        outer, numbers = (rest[0], rest[1:]) if rest else ("average", [])
        try:
            if len(numbers) > 2 or (numbers and outer == "average"):
                raise ValueError
            sent = {"changes": changes, "slots": slots}
            return cls(int(steps), outer, *map(float, numbers), **sent)  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(f"--local-steps {text}: {_FORM}") from None
