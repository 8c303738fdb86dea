"""The role of this process of `lockstep run`: it begins the job, or takes another role of its task, and ends.

An engine begins the job on another host. A task of a scheduler may be that of an agent, which joins the job
of another task, of an evaluator, or of a server without work. The first host of a job with a standby joins
the job there, if the standby has taken over the job.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lockstep.cli.job_options import Place, backend_of
from lockstep.cli.job_restarts import EarlierStarts, trusted_hosts
from lockstep.cli.notifier import parse_receiver, variable_with_url
from lockstep.errors import ConfigError, NetworkError
from lockstep.hosts.task_place import TaskRole
from lockstep.hosts.where import Engine, Here, Hosts, Listen, ScheduledTask, Where
from lockstep.system.clock import parse_seconds
from lockstep.system.environment import (
    parse_variables,
    require_variables,
    set_recorded,
    take_environment,
    unrecorded,
)
from lockstep.system.notes import note
from lockstep.system.run_folder import RUNS, name_on_any_host
from lockstep.transport.addresses import is_here, resolve_host, split_address, with_port
from lockstep.worker.script import Script

_STANDBY_LOST = 60.0
"""Seconds in which the first host joins the job that its standby leads."""


def destination_of(where: Where, script: Script, options: dict[str, Any], set_words: Sequence[str]) -> Place:
    """Return the place of the job that this process begins; or take another role, and end the process.

    Args:
        where: the place that the options describe.
        script: the script of the job.
        options: the values of the options; a scheduler may set the standby.
        set_words: the words of the options that an engine passes on.
    """
    match where:
        case Engine():
            return _of_engine(where, options, set_words)
        case ScheduledTask():
            return _of_task(where, script, options)
        case Listen() if options["standby"]:
            follow_standby(where, options)
        case Hosts() if options["standby"]:
            _refuse_with_led_standby(options["standby"], encrypted=not options["plain"])
    return where


def _of_engine(engine: Engine, options: Mapping[str, Any], set_words: Sequence[str]) -> Listen:
    """Let an engine run the job, and end this process; or return where the engine's coordinator listens."""
    from lockstep.hosts.engine_link import EngineLink
    from lockstep.protocol.engine import StartCoordinator

    link = EngineLink.inherited(StartCoordinator)
    if link is None:
        from lockstep.ray.command import run_on_ray
        from lockstep.ray.placement import parse_resources, worker_needs

        workers = options["workers"]
        # All coordinators of the job use the same folder, on any node.
        name = name_on_any_host(script_name(options))
        fixed = ("run", "--on", "ray", "-n", str(workers), "--run-dir", options["run_dir"] or RUNS / name)
        words = (
            *map(str, fixed),
            *set_words,
            "--",
            options["script"],
            *options["arguments"],
        )
        needs = worker_needs(engine.cpus, engine.gpus, parse_resources(engine.resources))
        env = parse_variables(options["env"])
        require_variables(env)
        variables = unrecorded(env)
        if (url := variable_with_url(options["notify"] or "")) is not None:
            variables[url] = parse_receiver(options["notify"]).url
        status = run_on_ray(
            address=engine.address,
            name=name,
            words=words,
            workers=engine.processes,
            resources=needs,
            detached=engine.detached,
            variables=variables,
        )
        sys.exit(status)
    assert isinstance(link.start, StartCoordinator)
    return Listen(engine.processes, with_port(link.start.address), here=0, engine=link)


def _of_task(tasks: ScheduledTask, script: Script, options: dict[str, Any]) -> Here | Listen:
    """Return the place of the job that this process begins; or take another role of its task, and end."""
    from lockstep.hosts.agent_command import AgentOptions, join_and_run

    scheduler = tasks.scheduler
    task = scheduler.place(tasks.processes, tasks.here, options["servers"] or 0)
    if isinstance(options["checkpoint"], str) and not options["one_writer"]:
        options["standby"] = options["standby"] or task.standby
    match task.role:
        case TaskRole.IDLE_SERVER:
            note("a parameter server has nothing to do: the workers hold the whole state")
            sys.exit(0)
        case TaskRole.EVALUATOR:
            _evaluate(script, options)
        case TaskRole.AGENT:
            # The cluster may not know the name of this host yet.
            _, port = split_address(task.address)
            joins = AgentOptions(
                task.coordinator,
                task.here,
                port=port,
                encrypted=not options["plain"],
                tasks=task.tasks,
                task=task.task,
            )
            if scheduler.starts_all:
                # The coordinator writes to the same terminal, and gets the same signals.
                joins = replace(joins, quiet=True, grace=parse_seconds(options["grace"], "--grace"))
            else:
                joins = replace(joins, shows=True)
                note(f"{task.name} joins {task.coordinator}, which coordinates the job")
            if options["standby"]:
                joins = replace(joins, others=(options["standby"],))
            sys.exit(join_and_run(joins))
        case TaskRole.COORDINATOR:
            address, retries = with_port(task.address), not scheduler.starts_all
            where = Listen(
                task.workers, address, task.here, retries=retries, task=task.name, tasks=task.tasks
            )
            if options["standby"]:
                follow_standby(where, options)
            return where
    return Here(task.workers)


def follow_standby(where: Listen, options: Mapping[str, Any]) -> None:
    """Join the job, and end this process, if the standby has taken over the job."""
    from lockstep.hosts.agent_command import AgentOptions, join_and_run
    from lockstep.hosts.standby import is_led_at

    standby, encrypted = options["standby"], not options["plain"]
    if standby == where.address:
        raise ConfigError(f"--standby {standby} is the address of the first host; give that of another host")
    if is_led_at(standby, encrypted=encrypted):
        note(f"the job continues at {standby}, and this host joins it")
        port, spare = split_address(where.address)[1], split_address(standby)[1]
        own = where.address if port else ""
        # Its own port is free, for a coordinator. Firewalls between the tasks of a cluster allow both ports.
        joins = AgentOptions(
            standby,
            where.here,
            port=spare if where.task and spare != port else 0,
            encrypted=encrypted,
            patience=_STANDBY_LOST,
            shows=where.retries,
            others=(own,) if own else (),
            leads_at=own,
        )
        sys.exit(join_and_run(joins))


def _refuse_with_led_standby(standby: str, *, encrypted: bool) -> None:
    """Raise ConfigError if the standby has taken over the job, or cannot be on another host."""
    from lockstep.hosts.standby import continues_at, is_led_at

    with contextlib.suppress(NetworkError, OSError):
        if is_here(*resolve_host(*split_address(standby))):
            raise ConfigError(f"--standby {standby} is an address of this host; give that of another host")
    if is_led_at(standby, encrypted=encrypted):
        raise ConfigError(continues_at(standby))


def _evaluate(script: Script, options: Mapping[str, Any]) -> NoReturn:
    """Run the script in this process, which is the evaluator of its cluster and has no job."""
    take_variables(options)
    choice = backend_of(options, None)
    take_environment({"KERAS_BACKEND": choice.backend})
    note(f"an evaluator runs the script alone, {choice}")
    if options["tf_distribute"]:
        from lockstep.worker.tf_distribute_shim import replace_names

        replace_names()
    script.run()
    sys.exit(0)


def take_variables(options: Mapping[str, Any], *, all_set: bool = True) -> None:
    """Set the variables of the script here.

    Raises:
        ConfigError: a variable lacks a value and `all_set` is true, or a variable contradicts the backend of
            the options.
    """
    variables = parse_variables(options["env"])
    backend = variables.get("KERAS_BACKEND")
    if backend is not None and options["backend"] not in (None, backend):
        raise ConfigError(
            f"--env KERAS_BACKEND={backend} and --backend {options['backend']} choose different backends; "
            "give one of them"
        )
    if all_set:
        require_variables(variables)
    set_recorded(variables)


def as_before(options: dict[str, Any], destination: Place, starts: EarlierStarts) -> Place:
    """Apply the settings that a restarted job keeps, and return its place, without hosts at fault."""
    if not options["servers"]:
        options["replicas"] = options["replicas"] or starts.replicas
    options["threads"] = options["threads"] or starts.threads
    most = options["avoid_host_after"]
    if not most or not isinstance(destination, Hosts):
        return destination
    options["named_hosts"] = named = starts.named_hosts
    in_store = isinstance(options["checkpoint"], str)
    hosts = trusted_hosts(destination.hosts, named, most, options["min_workers"], in_store=in_store)
    return replace(destination, hosts=hosts)


def script_name(options: Mapping[str, Any]) -> str:
    """Return the name of the script in names of runs."""
    return options["script"] if options["module"] else Path(options["script"]).stem
