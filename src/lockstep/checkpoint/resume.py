"""The checkpoint that a job resumes from, and whether it can resume from it."""

import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import msgspec

from lockstep.checkpoint.held import JobFacts
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, ConfigError
from lockstep.system.prose import count

_OPTIONS = {"threads": "threads-per-worker"}

Facts = Mapping[str, Any]
"""The facts that a checkpoint records about its job: replicas, seed, threads, input, backend, versions."""


def newest(
    folder: Path, report: Callable[[str], None], location: Path | str | None = None
) -> tuple[Path, Facts, str] | None:
    """Return the newest complete checkpoint in `folder` and the facts about its job, if there is one.

    Args:
        folder: the folder, which may not exist yet.
        report: called with a message for each newer checkpoint that is damaged.
        location: the store that the folder copies, for messages; None if there is none.

    Returns:
        Its path, the facts, and a note for the user if the job is finished; or None if there is none.

    Raises:
        CheckpointError: it was not written by a job.
    """
    checkpoint = Store(folder).newest(report)
    if checkpoint is None:
        return None
    path, contents = checkpoint
    note = note_if_finished(folder, contents.step, location or folder)
    return path, job_facts(path, contents.manifest), note


def job_facts(path: Path, manifest: Mapping[str, Any]) -> Facts:
    """Return the facts that the manifest of a checkpoint records about the job that wrote it.

    Raises:
        CheckpointError: it does not describe a job.
    """
    facts = manifest.get("job")
    try:
        msgspec.convert(facts, JobFacts)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {path} was not written by a job: cannot read 'job' in its manifest ({error})"
        ) from None
    return cast(Facts, facts)


def refuse_another_job(path: Path, facts: Facts, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of the user differs from the checkpoint and would change the result."""
    for name, value in options.items():
        past = facts.get(name, value)
        if value is not None and value != past:
            option = f"--{_OPTIONS.get(name, name)}"
            raise ConfigError(
                f"checkpoint {path} was made with {option} {past}, not {value}, which affects the "
                f"result; omit {option} to resume, or give another --checkpoint folder to start over"
            )


def refuse_another_backend(path: Path, facts: Facts, backend: str) -> None:
    """Raise ConfigError if the job would resume on a different backend."""
    past = facts.get("backend", backend)
    if past != backend:
        raise ConfigError(
            f"checkpoint {path} was made with the backend {past}, and the job would resume with {backend}, "
            f"which computes different bits from different random numbers: give --backend {past} to resume. "
            f"To start over with {backend}, give another --checkpoint folder and load the weights with "
            "lockstep.load_checkpoint"
        )


def refuse_different_job(path: Path, facts: Facts, running: Facts) -> None:
    """Raise ConfigError if the job differs from the one of the checkpoint.

    Args:
        path: the path of the checkpoint.
        facts: the facts about its job.
        running: the facts about the running job.
    """
    names = ("replicas", "seed", "threads", "input", "backend")
    differing = [name for name in names if facts.get(name, running[name]) != running[name]]
    if not differing:
        return
    before = " and ".join(_shown(name, facts[name]) for name in differing)
    now = " and ".join(_shown(name, running[name]) for name in differing)
    recorded = {name: facts[name] for name in names if name in facts}
    how = " ".join(f"--{_OPTIONS.get(name, name)} {value}" for name, value in recorded.items())
    by_hand = "run the script without `lockstep run`, with the same KERAS_BACKEND"
    raise ConfigError(
        f"checkpoint {path} was made with {before}, and this job has {now}, which affects the result: to "
        f"resume, {f'use `lockstep run {how}`' if facts['threads'] else by_hand}; to start over, give "
        "lockstep.callbacks.Checkpoint another folder"
    )


def _shown(name: str, value: Any) -> str:
    if name == "threads" and not value:
        return "the backend's own number of threads"
    forms = {"backend": "the backend {}", "seed": "seed {}", "input": "{} reading of input"}
    return forms.get(name, f"{{}} {name}").format(value)


def note_if_finished(folder: Path, step: int, location: Path | str) -> str:
    """Return a note if the job, whose newest checkpoint is of `step`, has finished."""
    return note_on_end(location, step) if Store(folder).finished() == step else ""


def note_on_end(location: Path | str, step: int) -> str:
    """Return a note on a job that has finished with its checkpoint of `step`."""
    return (
        f"the job in {location} is finished after {count(step, 'step')}: it repeats no training step and "
        "runs the rest of the script. A script that trains more steps resumes from there; to start over, "
        "give another folder"
    )


def note_on_versions(path: Path, facts: Facts) -> str:
    """Return a note on libraries with other versions than the checkpoint's, or an empty string.

    This does not import libraries. A library that no installed distribution provides is skipped.
    """
    # The name of a distribution may differ from that of its module: tensorflow-cpu provides tensorflow.
    distributions = metadata.packages_distributions()
    before, now = [], []
    for name, version in facts.get("libraries", {}).items():
        installed = sorted({metadata.version(distribution) for distribution in distributions.get(name, ())})
        if installed and _release(version) not in map(_release, installed):
            before.append(f"{name} {version}")
            now.append(f"{name} {' or '.join(installed)}")
    if not before:
        return ""
    return (
        f"checkpoint {path} was made with {' and '.join(before)}, and training continues with "
        f"{' and '.join(now)}: the bits may differ from those of an uninterrupted run"
    )


def _release(version: str) -> str:
    """Normalize a version: packages write 2.21.0rc1, and modules 2.21.0-rc1."""
    return re.sub(r"[-.]?(rc|dev|a|b)(?=\d)", r"\1", version)
