"""The job that the options of `lockstep run` describe: its specification, with all defaults resolved."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.object_store import folder_of
from lockstep.errors import ConfigError
from lockstep.hosts.where import Here, Hosts, Listen
from lockstep.launcher.backend import (
    Choice,
    Wishes,
    choose_backend,
    refuse_legacy_keras,
    require_tensorflow,
)
from lockstep.launcher.gpu_assignment import assign, parse_devices, spread, visible
from lockstep.launcher.import_scan import setting_of
from lockstep.protocol.job_spec import (
    Checkpoints,
    Devices,
    JobLimits,
    JobSpec,
    Verification,
    default_threads,
)
from lockstep.protocol.local_steps import LocalSteps
from lockstep.system.clock import parse_seconds
from lockstep.system.cuda import LISTED, cuda_of, read_machine, too_old
from lockstep.system.environment import (
    LEGACY_KERAS,
    attempt,
    keras_backend,
    legacy_keras,
    parse_variables,
    usable_cores,
    variable,
)
from lockstep.system.notes import note
from lockstep.system.process_limits import check_limits
from lockstep.system.prose import count
from lockstep.topology import place
from lockstep.worker.script import Script

if TYPE_CHECKING:
    from lockstep.checkpoint.held import HeldCheckpoint

Place = Here | Hosts | Listen
"""Where the workers of a job run that this process begins."""

WITHOUT_GPU = 2


def spec_of(options: dict[str, Any], where: Place, held: "HeldCheckpoint | None" = None) -> JobSpec:
    """Return the job; with `held`, it resumes from this checkpoint of another host."""
    # This precedes the creation of the run's folder, so that a rejected command leaves no trace.
    checkpoints, past = _checkpoints(options, held)
    choice = backend_of(options, past.get("backend"))
    here = where if isinstance(where, Here) else None
    gpus, driver = read_machine() if here is not None else (None, None)
    entries = parse_devices(here.devices, gpus) if here is not None and here.devices is not None else None
    names, problem = visible(gpus, variable(LISTED)) if here is not None and entries is None else ((), "")
    if problem:
        note(problem)
    wanted = len(entries) if entries is not None else len(names) or WITHOUT_GPU
    others, replicas = other_processes(options), options["replicas"] or past.get("replicas")
    workers = where.processes or min(wanted, replicas or wanted) + others
    if workers < others + 1:
        servers = options["servers"]
        raise ConfigError(
            f"there is room for {workers}, but a job with --ps {servers} has a chief, "
            f"{count(servers, 'parameter server')} and at least one worker: {servers + 2} processes in total"
        )
    replicas = replicas or workers
    if others and options["one_process"]:
        workers = 1
    check_numbers(workers, replicas, options["min_workers"])
    if options["update"] == "divided" and options["allow_unlike"]:
        raise ConfigError("--update divided compares the states of workers, so it excludes --allow-unlike")
    threads = options["threads"] or past.get("threads") or 0
    if not threads and here is not None:
        threads = default_threads([(usable_cores(), replicas)])
    if here is not None:
        check_limits(workers, threads)
    devices: tuple[Devices, ...] = (
        spread(names, workers, gpus) if entries is None else assign(entries, workers, gpus)
    )
    if devices and choice.backend and (old := too_old(driver, choice.backend, cuda_of(choice.backend))):
        note(old)
    if checkpoints is not None and checkpoints.resume is not None:
        _compare(checkpoints.resume, past, choice.backend)
    return JobSpec(
        target=options["script"],
        module=options["module"],
        arguments=options["arguments"],
        workers=workers,
        replicas=replicas,
        threads=threads,
        seed=past.get("seed", JobSpec.seed) if options["seed"] is None else options["seed"],
        joint_input=(options["reading"] or _past_reading(past)) == "joint" or bool(others),
        divided_update=options["update"] == "divided",
        limits=JobLimits(
            timeout=options["timeout"],
            grace=parse_seconds(options["grace"], "--grace"),
            min_workers=options["min_workers"],
            max_restarts=options["max_restarts"],
            avoid_host_after=options["avoid_host_after"] or 0,
        ),
        accepts_changes=options["accept_changes"],
        tf_distribute=options["tf_distribute"],
        adopts=not options["no_adopt"],
        run_dir=Path(),
        job_restarts=attempt()[0],
        named_hosts=options["named_hosts"],
        tags=tuple(dict.fromkeys(options["tags"])),
        tee=options["tee"],
        backend=choice.backend,
        chosen=str(choice),
        devices=devices,
        checkpoints=checkpoints,
        hosts=where.hosts if isinstance(where, Hosts) else (),
        plain=options["plain"],
        standby=options["standby"] or "",
        verification=_verification(options, replicas),
        exact_batch=options["exact_batch"],
        local_steps=_local_steps(options, replicas),
        allow_unlike=options["allow_unlike"],
        parameter_servers=options["servers"] or 0,
        digests=options["digests"],
        checks=options["checks"],
        kept_steps=options["kept_steps"],
        order=options["order"],
        env=parse_variables(options["env"]),
    )


def resumed_spec(options: dict[str, Any], where: Place, begun: JobSpec, held: "HeldCheckpoint") -> JobSpec:
    """Return the job over hosts that resumes from the newest checkpoint of all of them."""
    newest_here = begun.checkpoints.resume if begun.checkpoints is not None else None
    if newest_here is not None:
        from lockstep.checkpoint.hand_over import held_of

        if held.is_same(held_of(newest_here)):
            return begun
    spec = spec_of(options, where, held)
    # An engine may have found fewer hosts than the job will have.
    began = replace(spec, workers=begun.workers, hosts=begun.hosts)
    return replace(began, run_dir=begun.run_dir, run_store=begun.run_store, inherited=begun.inherited)


def _checkpoints(
    options: dict[str, Any], held: "HeldCheckpoint | None"
) -> tuple[Checkpoints | None, Mapping[str, Any]]:
    """Return the checkpoints to save, and the facts in the checkpoint that the job resumes from."""
    if options["checkpoint"] is None:
        return None, {}
    import msgspec

    from lockstep.checkpoint.resume import newest, note_on_end, refuse_another_job
    from lockstep.checkpoint.scheduler import parse_every
    from lockstep.checkpoint.store import Store

    every = parse_every(options["every"])
    folder, lease = folder_of(options["checkpoint"]), options["lease"]
    location = folder if lease is None else lease.url
    newest_saved: tuple[Path | None, Mapping[str, Any], str]
    if held is None:
        newest_saved = newest(folder, note, location) or (None, {}, "")
    else:
        newest_saved = (
            Store(folder).path(held.step),
            msgspec.to_builtins(held.job),
            note_on_end(location, held.step) if held.finished else "",
        )
    resume, past, finished = newest_saved
    if finished:
        note(finished)
    if resume is not None:
        affecting = {name: options[name] for name in ("replicas", "seed", "threads")}
        refuse_another_job(resume, past, affecting | {"input": options["reading"]})
    as_written = os.fspath(options["checkpoint"])
    saved = Checkpoints(
        folder,
        every.steps,
        every.seconds,
        options["keep"],
        resume=resume,
        given=as_written,
        store=lease,
    )
    return saved, past


def refuse_with_servers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that jobs with parameter servers do not support."""
    names = ("replicas", "checkpoint", "devices", "verify_every")
    refused = [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
    refused += ["--min-workers"] if options["min_workers"] > 1 else []
    refused += ["--update"] if options["update"] == "divided" else []
    refused += ["--local-steps"] if options["local_steps"] else []
    reasons = {
        "--replicas": "a step is one batch on one worker",
        "--checkpoint": "use keras.callbacks.BackupAndRestore or ModelCheckpoint",
        "--devices": "all processes share the visible GPUs; set CUDA_VISIBLE_DEVICES",
        "--verify-every": "lockstep rerun repeats the whole run",
        "--min-workers": "workers do not wait for one another",
        "--update": "the servers have the optimizer's state",
        "--local-steps": "workers train asynchronously",
    }
    if refused:
        raise ConfigError(f"--ps cannot be combined with {refused[0]}: {reasons[refused[0]]}")


def _past_reading(past: Mapping[str, Any]) -> str:
    """Return how the workers of the job to resume read input: jointly, according to older checkpoints."""
    return str(past.get("input", "joint")) if past else "divided"


def _compare(resume: Path, past: Mapping[str, Any], backend: str) -> None:
    """Raise ConfigError if the backend differs from the checkpoint's; note changed library versions."""
    from lockstep.checkpoint.resume import note_on_versions, refuse_another_backend

    refuse_another_backend(resume, past, backend)
    if text := note_on_versions(resume, past):
        note(text)


def _verification(options: Mapping[str, Any], replicas: int) -> Verification:
    every, verifies_all = options["verify_every"], options["verify_replicas"] == "all"
    if every is not None and replicas < 2:
        raise ConfigError(
            "--verify-every needs at least 2 replicas: Keras itself computes the only one; lockstep rerun "
            "repeats a whole run in another process, and compares the bits"
        )
    if every is not None and options["allow_unlike"]:
        raise ConfigError("--verify-every compares the bits of workers, so it excludes --allow-unlike")
    if every is not None and options["update"] == "divided":
        raise ConfigError(
            "--verify-every compares the states of workers, so it excludes --update divided, with which they "
            "share one"
        )
    if every is None and verifies_all:
        raise ConfigError("--verify-replicas all needs --verify-every K")
    if every is None and options["avoid_host_after"] is not None:
        raise ConfigError("--avoid-host-after needs --verify-every K, which names workers")
    return Verification(every or 0, verifies_all)


def _local_steps(options: Mapping[str, Any], replicas: int) -> str:
    text: str = options["local_steps"]
    if not text:
        return ""
    if options["update"] == "divided":
        raise ConfigError("--local-steps excludes --update divided: an update averages the whole state")
    if replicas == 1:
        note("--local-steps has no effect with one replica, which takes all steps by itself")
    return LocalSteps.parse(text).text


def other_processes(options: Mapping[str, Any]) -> int:
    """Return the number of processes of a job that are not workers to the user: a chief and servers.

    They are processes like the workers. Outside of `fit`, each has a replica.
    """
    return options["servers"] + 1 if options["servers"] else 0


def check_numbers(workers: int, replicas: int, least: int) -> None:
    """Raise ConfigError if a job with these replicas, and `least` workers, cannot start with `workers`."""
    place(replicas, tuple(range(workers)))
    if least > workers:
        raise ConfigError(f"--min-workers {least} is more than the {workers} workers to start with")


def backend_of(options: Mapping[str, Any], past: str | None) -> Choice:
    """Return the Keras backend of the job, and why; `past` is that of the checkpoint to resume from."""
    variable, configured = keras_backend()
    source = Script(options["script"], options["module"]).source()
    script, overrides = (source and setting_of(source, "KERAS_BACKEND")) or (None, False)
    _refuse_legacy_keras(source)
    wishes = Wishes(
        option=options["backend"],
        script=script,
        overrides=overrides,
        variable=variable,
        checkpoint=past,
        configured=configured,
        tf_distribute=options["tf_distribute"],
    )
    if wishes.tf_distribute:
        require_tensorflow(_is_installed, sys.executable)
    return choose_backend(wishes, _is_installed, sys.executable)


def _refuse_legacy_keras(source: Path | None) -> None:
    value, always = (source and setting_of(source, LEGACY_KERAS)) or (None, False)
    if value is not None and (always or legacy_keras() is None):
        refuse_legacy_keras(value, "the script")
    else:
        refuse_legacy_keras(legacy_keras())


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
