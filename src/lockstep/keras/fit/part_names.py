"""The names of the parts of a program, as notes show them, and which differences of a step a name explains.

A trial names a part that compares examples, or that it could not try. If such a part makes a step differ from
that of plain Keras, its name explains the difference (`lockstep.keras.fit.witness`).
"""

from collections.abc import Container, Sequence

OF_LOSSES = ("the loss ", "the sum of losses ", "compute_loss of ", "train_step of ", "test_step of ")
"""The beginnings of the names of parts that change the loss."""

METRIC, FIGURE = "the metric ", "the figure "
"""The beginnings of the names of a metric, and of a figure that no metric has."""

OF_METRICS = (METRIC, FIGURE)
"""The beginnings of the names of parts that may be exact if they are computed from the whole batch."""

VARIABLES = "the variable "
"""The beginning of the name of a state of a layer."""

OCCURRENCES = "with repeated ids of an Embedding"
"""The end of the name of an optimizer that distinguishes occurrences of an id."""

DRAWS = "random numbers of "
"""The beginning of the name of a function, or of one of `LIBRARIES`, that draws numbers."""

LIBRARIES = ("Python", "NumPy")
"""Libraries with a global generator, whose draws are not equal for all rows."""

UNTRIED = " (possibly: it could not be tested)"
"""The end of the name of a part that a trial did not show."""

SIZE_OF_ROWS = "its rows, "
"""The beginning of the reason why a part is not computed from the whole batch."""

LATER = " (update "
"""The beginning of what the name of a gradient of a later update has in brackets."""


def without_remarks(name: str) -> str:
    """Return the name of a part without what notes add to it in brackets."""
    return name.partition(f" ({SIZE_OF_ROWS}")[0].removesuffix(UNTRIED)


def explaining(
    part: str,
    names: Sequence[str],
    updated: Container[str] = (),
    outputs: Sequence[str] = (),
    updates: int = 1,
) -> list[str]:
    """Return the named parts of a program that may make a part of a step differ.

    A metric, a figure or the state of a layer explains only itself. An optimizer explains its updated
    variables, and the values that follow from them in the same step. Random numbers that are equal for all
    rows explain nothing. Anything else changes the gradients, and with them everything but an update from
    given gradients, which only the program's own step may change.

    Args:
        part: the part of a step.
        names: the named parts of the program.
        updated: the paths of the variables that optimizers change.
        outputs: the names of outputs, with which Keras begins the figures of their metrics.
        updates: the number of updates in the step.
    """
    return [name for name in names if _explains(without_remarks(name), part, updated, outputs, updates)]


def _explains(name: str, part: str, updated: Container[str], outputs: Sequence[str], updates: int) -> bool:
    if name.startswith(METRIC):
        metric = name.removeprefix(METRIC)
        starts = ["", *(f"{output}_" for output in outputs)]
        figures = [f"{start}{weighted}{metric}" for start in starts for weighted in ("", "weighted_")]
        return part in (f"state of {metric}", *figures)
    if name.startswith(FIGURE):
        figure, _, _ = name.removeprefix(FIGURE).rpartition(" of ")
        return part in (figure, f"state of {figure}")
    if name.startswith(VARIABLES):
        return part == f"state {name.removeprefix(VARIABLES)}"
    kind, _, path = part.partition(" ")
    if name.endswith(OCCURRENCES):
        if updates > 1:
            # All but the gradients of the first update may follow from an update.
            return kind != "gradient" or LATER in path
        return kind == "update" or (kind == "state" and path in updated)
    if kind == "update":
        return name.startswith("train_step of ")
    return not name.startswith(DRAWS) or name.removeprefix(DRAWS) in LIBRARIES
