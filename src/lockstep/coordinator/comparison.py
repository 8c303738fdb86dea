"""The verdict of a comparison with one process: its words, its file in the folder of a run, and the cache."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.system.files import read_regular, replace
from lockstep.system.paths import RunPaths
from lockstep.system.prose import count

MOST_CACHED = 1000
"""The largest number of results in the cache."""

NOT_COMPARED = "not compared with one process"
_COMPARED = "compared with one process"
NO_CALL = "the script has called no fit, evaluate or predict on replicas"
"""Why nothing is compared in loops that Lockstep does not drive."""


def verdict(result: Mapping[str, Any], mode: str = "") -> str:
    """Return the verdict of a comparison, as the last line of a run shows it.

    Args:
        result: `compared`, the fields of events `StepCompared`; `ended`, how the script would have continued;
            and `failed`, its error.
        mode: an option with which the run takes different training steps from those that were compared.
    """
    steps = [step for step in result["compared"] if not step["reason"]]
    if not steps:
        reasons = [step["reason"] for step in result["compared"]]
        reasons += [result["ended"], result["failed"].strip().rpartition("\n")[2]]
        return f"{NOT_COMPARED}: {next(filter(None, reasons), NO_CALL)}"
    named = [part for step in steps for part in step["differences"]]
    if parts := unnamed(result):
        words = _differ(len(parts))
    else:
        words = f"{_differ(len(named))}, as noted" if named else "equal"
    if all(step["kind"] != "train" for step in steps):
        words += " (no training step)"
    elif mode:
        words += f" (without {mode})"
    return f"{_COMPARED}: {words}"


def unnamed(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the differences that no note names, with the calls of the script."""
    return [
        (step["call"], part)
        for step in result["compared"]
        for part in step["differences"]
        if not part["named"]
    ]


def _differ(parts: int) -> str:
    return f"{count(parts, 'part')} {'differs' if parts == 1 else 'differ'}"


def save_verdict(paths: RunPaths, text: str, result: Mapping[str, Any] | None = None) -> None:
    """Save the words of the last line, and the result if there is one; do nothing if that fails."""
    with contextlib.suppress(OSError):
        replace(paths.comparison, json.dumps({"verdict": text, **(result or {})}, indent=2).encode())


def read_verdict(paths: RunPaths, *, ended: bool = True) -> str:
    """Return the verdict in the folder of a run.

    It is empty if no comparison was wanted, or if a run that has not ended may still be compared.
    """
    verdict = str(read_fields(paths.comparison).get("verdict", ""))
    return verdict if ended or verdict != NOT_COMPARED else ""


def name_of_cached(words: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    """Return the name in the cache of a result that counts for all runs with equal arguments.

    Args:
        words: everything on the command line that may affect a comparison.
        records: the first events `ProgramRecorded`, `SettingsRecorded` and `DigestsRecorded` of a run.
    """
    facts: list[Any] = [*words]
    for record in records:
        if record["event"] == "digests":
            # The hashes of data and results do not count.
            facts.append(record["steps"][0].get("shapes"))
        else:
            facts.append({name: record[name] for name in record if name not in ("time", "worker")})
    return f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.json"


def cache_result(path: Path, result: Mapping[str, Any]) -> None:
    """Save a result in a file of the cache, which loses its oldest ones beyond `MOST_CACHED`."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(path, json.dumps(result).encode())
        oldest_first = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for file in oldest_first[:-MOST_CACHED]:
            file.unlink(missing_ok=True)


def read_fields(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if it cannot be read."""
    try:
        fields = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
