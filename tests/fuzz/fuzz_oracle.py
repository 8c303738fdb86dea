"""Decides from the results of a program's runs whether Lockstep has a fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Line = Mapping[str, Any]
"""A worker's line on a program: {"found": digests by name}, {"refused": ...} or {"error": ...}.

That of the chief also has "named", the parts of the program which notes name as computed per replica.
"""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a program.

    Attributes:
        kind: "same" (equal bits for every W), "true" (also equal to plain Keras), "named" (plain Keras
            computes other values, and a note names why), "refused" by name,
            "invalid" (Keras fails too), "follows" (a fault that the program does not have alone), or a fault:
            "lost" (a worker printed no line), "differs" (for another W), "wrong" (plain Keras computes other
            values, and no note says so), "fails" (not by name).
        says: the difference or the message.
    """

    kind: str
    says: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether Lockstep has a fault."""
        return self.kind in ("lost", "differs", "wrong", "fails")


def judge(
    runs: Mapping[str, Sequence[Line | None]],
    plain: Line | None,
    arrays: tuple[Path, Path] | None,
    tolerance: float,
) -> Verdict:
    """Return the verdict on a program.

    Args:
        runs: by the name of a run ("W = 1"), each worker's line; None where there is none.
        plain: the line of plain Keras.
        arrays: files with the arrays of Lockstep and of plain Keras, if they must agree.
        tolerance: the largest relative distance of arrays, in norm.
    """
    lines = [(f"{run}, worker {i}", line) for run, each in runs.items() for i, line in enumerate(each)]
    for where, line in lines:
        if line is None:
            return Verdict("lost", f"{where} said nothing")
    if all(line and "error" in line for line in (plain, *(line for _, line in lines))):
        # Messages of Keras may name shapes, which depend on the replica.
        assert plain is not None
        return Verdict("invalid", f"{plain['error']}: {plain['says']}")
    notes = {run: each[0]["named"] for run, each in runs.items() if each[0] and "named" in each[0]}
    if len(set(notes.values())) > 1:
        return Verdict("differs", f"notes: {notes}")
    named = next(iter(notes.values()), "")
    lines = [(where, {key: line[key] for key in line if key != "named"}) for where, line in lines if line]
    where, first = lines[0]
    for other, line in lines[1:]:
        if line != first:
            return Verdict("differs", f"{where}: {_brief(first, line)}; {other}: {_brief(line, first)}")
    if "refused" in first:
        return Verdict("refused", f"{first['refused']}: {first['says']}")
    if "error" in first:
        return Verdict("fails", f"{first['error']}: {first['says']}")
    if plain is None or "found" not in plain:
        return Verdict("same", "" if plain is None else f"plain Keras: {plain.get('says')}")
    if arrays is None:
        return Verdict("same")
    wrong = _distance(np.load(arrays[0]), np.load(arrays[1]), tolerance)
    if wrong:
        return Verdict("named", named) if named else Verdict("wrong", wrong)
    return Verdict("true", f"named in vain: {named}" if named else "")


def _brief(line: Line | None, other: Line | None) -> str:
    if line is None or "found" not in line:
        return str(dict(line or {}))[:600]
    theirs = (other or {}).get("found", {})
    return "found " + ", ".join(
        f"{name} {digest[:12]}" for name, digest in line["found"].items() if theirs.get(name) != digest
    )


def _distance(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float) -> str:
    """Describe the arrays that differ by more than `tolerance`; "" if none does."""
    if set(ours) != set(theirs):
        return f"only one has {sorted(set(ours) ^ set(theirs))}"
    far = []
    for name in ours:
        one, other = (np.asarray(arrays[name], dtype="float64") for arrays in (ours, theirs))
        if one.shape != other.shape:
            far.append(f"{name}: shapes {one.shape} and {other.shape}")
            continue
        broken = np.isfinite(one) != np.isfinite(other)
        if broken.any():
            far.append(f"{name}: {one.ravel()[:4]} and {other.ravel()[:4]}")
            continue
        finite = np.isfinite(one)
        apart, scale = np.linalg.norm((one - other)[finite]), np.linalg.norm(other[finite])
        if apart > tolerance * scale + 1e-5 * tolerance / 3e-4:
            far.append(f"{name}: {apart / (scale or 1):.1e} apart, {one.ravel()[:4]} and {other.ravel()[:4]}")
    return "; ".join(far)
