"""Completion in a shell, beyond commands and options: names of running jobs, run folders, scripts."""

import click
from click.shell_completion import CompletionItem


def complete_job(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of running jobs that begin with `incomplete`."""
    from lockstep.coordinator.run_lookup import known_jobs

    return _beginning(incomplete, known_jobs())


def complete_run(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of running jobs and of runs in `runs`; without any, the shell completes a folder."""
    from lockstep.coordinator.run_lookup import known_jobs, run_folders

    names = dict.fromkeys([*known_jobs(), *run_folders()])
    return _beginning(incomplete, list(names)) or [CompletionItem(incomplete, type="dir")]


def complete_script(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete a file, unless the script is the name of a module."""
    return [] if context.params.get("module") else [CompletionItem(incomplete, type="file")]


def _beginning(incomplete: str, names: list[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
