"""The help of commands: short where most people look, whole where asked, and quick."""

import subprocess
import sys

import click
import pytest

from lockstep.cli.help import LazyGroup
from lockstep.cli.main import _ELSEWHERE, cli
from lockstep.cli.run import _GROUPS, run


def test_help_imports_no_command() -> None:
    """Help takes a quarter of a second at most, most of which would be imports."""
    script = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from lockstep.cli.main import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "heavy = {'msgspec', 'asyncio', 'ssl', 'subprocess', 'psutil', 'numpy', 'rich', 'cryptography'}\n"
        "rooms = 'cli.run', 'cli.page', 'coordinator', 'hosts', 'launcher', 'observability', 'protocol'\n"
        "heavy |= {'lockstep.' + name for name in rooms}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", sorted(_ELSEWHERE))
def test_the_first_sentence_of_a_command_elsewhere_is_its_own(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help is not None
    assert command.help.partition("\n")[0] == _ELSEWHERE[name][1]


def test_programs_that_read_the_commands_of_the_group_get_all() -> None:
    group = LazyGroup("lockstep", elsewhere=_ELSEWHERE)
    group.load_all()
    assert group.commands.keys() == _ELSEWHERE.keys() == {*group.list_commands(click.Context(group))}


def test_click_knows_all_commands_when_it_suggests_one() -> None:
    group = LazyGroup(elsewhere={"run": _ELSEWHERE["run"]})
    context = click.Context(group)
    assert group.get_command(context, "rnu") is None
    assert [*group.commands] == ["run"]


def test_the_help_of_run_shows_what_people_need_and_names_the_rest() -> None:
    context = click.Context(run, info_name="run")
    groups = run.grouped(context)
    first, *others = groups
    lines = run.get_help(context).splitlines()
    described = [line.split()[0].rstrip(",") for line in lines if line.startswith("  -")]
    assert len(described) == len(groups[first]) <= 14
    whole = " ".join(lines)
    assert all(option.opts[-1] in whole for group in others for option in groups[group])


def test_help_all_describes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit):
        run.make_context("run", ["--help-all"])
    described = {
        line.split()[0].rstrip(",") for line in capsys.readouterr().out.splitlines() if line[:3] == "  -"
    }
    options = [param for param in run.params if isinstance(param, click.Option) and not param.hidden]
    assert all(described.intersection(option.opts) for option in options)


def test_every_name_in_a_group_is_an_option() -> None:
    """An option in no group is in the last one."""
    options = {name for param in run.params for name in param.opts}
    assert [name for names in _GROUPS.values() for name in names if name not in options] == []
