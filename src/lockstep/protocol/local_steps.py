"""Local steps: how many steps each replica takes by itself, and how the results become one."""

from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.errors import ConfigError

Outer = Literal["average", "nesterov"]
"""What an outer step does with the mean change of the weights: `average` adds it; `nesterov` takes a step of
SGD with Nesterov momentum along it."""

_FORM = "give H, or H,nesterov, or H,nesterov,LEARNING_RATE,MOMENTUM, such as 20,nesterov,0.7,0.9"


@dataclass(frozen=True)
class LocalSteps:
    """Each replica takes `steps` training steps by itself; then the replicas' changes are averaged.

    Attributes:
        steps: H, 1 or more.
        outer: `average` adds the mean change to the weights. `nesterov` makes it the gradient of an outer
            optimizer, SGD with Nesterov momentum.
        learning_rate: that of the outer optimizer; more than 0.
        momentum: that of the outer optimizer; at least 0, and less than 1.

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

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"local steps: the number of steps is {self.steps!r}; give 1 or more")
        if self.outer not in get_args(Outer):
            raise ConfigError(f"local steps: outer is {self.outer!r}; give 'average' or 'nesterov'")
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"local steps: the learning rate is {self.learning_rate!r}; give more than 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local steps: the momentum is {self.momentum!r}; give 0 or more, less than 1")

    @property
    def text(self) -> str:
        """The value of `--local-steps` that means the same."""
        if self.outer == "average":
            return str(self.steps)
        return f"{self.steps},{self.outer},{self.learning_rate!r},{self.momentum!r}"

    @classmethod
    def parse(cls, text: str) -> "LocalSteps":
        """Return the meaning of a value of `--local-steps`.

        Raises:
            ConfigError: it does not have the form of one, or a value is wrong.
        """
        steps, *rest = text.split(",")
        outer, numbers = (rest[0], rest[1:]) if rest else ("average", [])
        try:
            if len(numbers) > 2 or (numbers and outer == "average"):
                raise ValueError
            return cls(int(steps), outer, *map(float, numbers))  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(f"--local-steps {text}: {_FORM}") from None
