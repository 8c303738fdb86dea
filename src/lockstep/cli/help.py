"""Help: commands whose modules are imported only when they are used, and options in groups."""

import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

_ALL = "lockstep.help_all"


class LazyGroup(click.Group):
    """A group of commands, some of which are in modules that its help does not import.

    Args:
        elsewhere: the module of each of these commands, and the first sentence of its help.
    """

    def __init__(self, *arguments: Any, elsewhere: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.elsewhere = elsewhere

    def load_all(self) -> None:
        """Import all modules. Afterwards, the attribute `commands` has all commands."""
        for name in self.elsewhere:
            self.add_command(self._load(name))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*self.commands, *self.elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; import its module if it is elsewhere."""
        if cmd_name in self.elsewhere:
            return self._load(cmd_name)
        if (command := super().get_command(ctx, cmd_name)) is None:
            # Click suggests similar names, for which it must know all names.
            self.load_all()
        return command

    def _load(self, name: str) -> click.Command:
        module, _ = self.elsewhere[name]
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command."""
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        commands = {name: click.Command(name, help=text) for name, (_, text) in self.elsewhere.items()}
        commands |= self.commands
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, commands[name].get_short_help_str(limit)) for name in sorted(commands)]
            )


class GroupedCommand(click.Command):
    """A command with many options: `--help` shows those that most users need, `--help-all` shows all.

    Args:
        groups: the names of options by group; `--help` shows the first group. Options that no group names are
            in the last one.
    """

    def __init__(self, *arguments: Any, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.groups = groups
        self._help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show all options and exit.",
        )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with `--help-all` and `--help`."""
        *params, help_option = super().get_params(ctx)
        return [*params, self._help_all, help_option]

    def grouped(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the visible options of each group."""
        first, *_ = self.groups
        *_, last = self.groups
        homes = {name: group for group, names in self.groups.items() for name in names}
        homes |= dict.fromkeys(("--help-all", *self.get_help_option_names(ctx)), first)
        options: dict[str, list[click.Option]] = {group: [] for group in self.groups}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and not option.hidden:
                options[next((homes[name] for name in option.opts if name in homes), last)].append(option)
        return options

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the first group, and the names of the others; or all options."""
        groups, shows_all = self.grouped(ctx), ctx.meta.get(_ALL)
        first, *others = groups
        for group in groups if shows_all else (first,):
            records = [option.get_help_record(ctx) for option in groups[group]]
            with formatter.section(group):
                formatter.write_dl([record for record in records if record is not None])
        if not shows_all:
            width = formatter.width - max(map(len, others)) - 6
            with formatter.section("More options, which --help-all describes"):
                formatter.write_dl([(group, _listed(groups[group], width)) for group in others])


def _listed(options: Sequence[click.Option], width: int) -> str:
    """Return the names of options as lines of a paragraph that is not wrapped again: names have hyphens."""
    names = ", ".join(max(option.opts, key=len) for option in options)
    return f"\b\n{textwrap.fill(names, width, break_on_hyphens=False)}"


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()
