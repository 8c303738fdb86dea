"""`lockstep diff` and `lockstep rerun` on runs of a script."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_server import IMPORTS_OF_JOBS, CommandServers
from lockstep.launcher.import_scan import imports_for_training
from lockstep.observability.digest_log import segments, thinned
from lockstep.system.environment import job_environment

SCRIPT = Path(__file__).with_name("training.py")
PATIENCE = 1200.0

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def command(
    commands: CommandServers,
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    tmp_path_factory: Any,
) -> Command:
    """Run `lockstep` with these arguments in a new folder; return the result."""
    folder = tmp_path_factory.mktemp("runs")
    variables = environment | lean(SCRIPT, "jax") | {"KERAS_BACKEND": "jax"}
    importing = job_environment(0, 1, variables, backend="jax")
    imports = (*IMPORTS_OF_JOBS, *imports_for_training("jax"))

    def run(*words: str) -> Any:
        whole = ["-m", "lockstep", *words]
        return commands.run(whole, variables, PATIENCE, imports, importing, folder=folder)

    run.folder = folder  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="module")
def trained(command: Command) -> Callable[..., str]:
    """Train once for each name; return the name of the run's folder."""
    known: set[str] = set()

    def train(name: str, options: str, *arguments: str) -> str:
        if name not in known:
            words = ["run", "--run-dir", name, *options.split(), str(SCRIPT), *arguments]
            done = command(*words)
            assert done.returncode == 0, done.stderr
            known.add(name)
        return name

    return train


@pytest.mark.ci
def test_runs_with_other_numbers_of_workers_are_equal(command: Command, trained: Callable[..., str]) -> None:
    two, one = trained("two", "-n 2"), trained("one", "-n 1 --replicas 2")
    done = command("diff", two, one)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("the runs are equal in 16 recorded training steps, the last of which is step 16\n")


@pytest.mark.ci
def test_folders_that_cannot_be_compared(command: Command, trained: Callable[..., str]) -> None:
    two = trained("two", "-n 2")
    (command.folder / "empty").mkdir(exist_ok=True)  # type: ignore[attr-defined]
    (command.folder / "empty" / "events.jsonl").touch()  # type: ignore[attr-defined]
    for other, why in (("missing", "nor the folder of a run"), ("empty", "has no digest log")):
        done = command("diff", two, other)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.ci
def test_a_run_without_servers_is_not_repeated_in_one_process(
    command: Command, trained: Callable[..., str]
) -> None:
    done = command("rerun", "--one-process", trained("two", "-n 2"), "--run-dir", "again")
    assert (done.returncode, done.stdout) == (2, "")
    assert "repeat it in one process with lockstep run -n 1 --replicas 2" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (command.folder / "again").exists()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_is_repeated(command: Command, trained: Callable[..., str]) -> None:
    done = command("rerun", trained("two", "-n 2"), "--run-dir", "again")
    assert done.returncode == 0, done.stderr
    assert "the models at the end are equal to the last bit (digest " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["from the start", "from its checkpoint of step 4"])
def test_steps_that_were_not_recorded_are_found_by_repeating(
    command: Command, trained: Callable[..., str], begin: str
) -> None:
    kinds, options = ("one", "label"), "-n 1 --replicas 2"
    if "checkpoint" in begin:
        kinds, options = ("one-saved", "label-saved"), f"{options} --checkpoint-every 2 --keep 9"
    for name in kinds:
        saved = f" --checkpoint {name}-checkpoints" * ("checkpoint" in begin)
        trained(name, options + saved, *["label"] * name.startswith("label"))
        folder = command.folder / f"thin-{name}"  # type: ignore[attr-defined]
        shutil.copytree(command.folder / name, folder)  # type: ignore[attr-defined]
        for path in segments(folder / "digests"):
            path.write_bytes(thinned(path.read_bytes(), 5))
    runs = [f"thin-{name}" for name in kinds]
    vague = command("diff", "--json", *runs)
    assert vague.returncode == 1
    assert json.loads(vague.stdout)["not_recorded"] == ["the steps between"]
    exact = command("diff", "--json", "--rerun", *runs)
    assert exact.returncode == 1, exact.stderr
    assert exact.stderr.count(f" {begin} up to step ") == 2
    data = json.loads(exact.stdout)
    assert (data["step"], data["place"], data["rows"]) == (7, "input", {"0": [5]})
    assert [head["name"] for head in data["heads"]] == ["arguments of the script"]


@pytest.mark.slow
def test_runs_with_one_replica(command: Command, trained: Callable[..., str]) -> None:
    first, other = trained("single", "-n 1"), trained("single-label", "-n 1", "label")
    done = command("diff", first, first)
    assert done.stdout.startswith("the states of the runs are equal at")
    done = command("diff", "--json", first, other)
    assert done.returncode == 1
    assert json.loads(done.stdout)["place"] == "state"
