"""`lockstep run --run-dir s3://...` with a real server: the store has the run folder, whatever happens."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from lockstep.checkpoint import run_upload
from lockstep.checkpoint.object_store import name_for
from lockstep.checkpoint.run_files import INDEX
from lockstep.cli.parameter_types import Run
from lockstep.system.paths import RunPaths
from object_server import SECRET, FaultyServer, store_server

obstore = pytest.importorskip("obstore", reason="obstore is not installed")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

URL = "s3://bucket/job"
OPTIONS = ("--witness", "off", "-n", "2")
WORKS = """
print("worker", me, flush=True)
barrier()
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with store_server("s3", tmp_path_factory.mktemp("s3")) as variables:
        yield variables


@pytest.fixture
def store(variables: dict[str, str]) -> Iterator[FaultyServer]:
    with FaultyServer(variables) as server:
        yield server
    backing = opened(variables)
    obstore.delete(backing, names(backing))


def opened(variables: dict[str, str]) -> Any:
    return obstore.store.from_url(
        URL,
        client_options={"allow_http": True},
        endpoint=variables["AWS_ENDPOINT_URL"],
        access_key_id="key",
        secret_access_key=SECRET,
        region="us-east-1",
    )


def names(backing: Any) -> list[str]:
    return [entry["path"] for page in obstore.list(backing) for entry in page]


def stored(variables: dict[str, str], below: str = "") -> dict[str, bytes]:
    """Return the files in the store, without the index."""
    backing = opened(variables)
    return {
        name: bytes(obstore.get(backing, name).bytes())
        for name in names(backing)
        if name != INDEX and name.startswith(below)
    }


def local(folder: Path) -> dict[str, bytes]:
    """Return the files of the run folder on this machine."""
    files = [path for path in (folder / "runs" / name_for(URL)).rglob("*") if path.is_file()]
    return {
        path.relative_to(folder / "runs" / name_for(URL)).as_posix(): path.read_bytes()
        for path in files
        if path != RunPaths(path.parent).store_mark
    }


def events(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files["events.jsonl"].splitlines()]


def lockstep_command(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )


@pytest.mark.ci
def test_the_store_has_the_whole_run_and_commands_show_it(
    lockstep: Any, store: FaultyServer, variables: dict[str, str], tmp_path: Path
) -> None:
    script = lockstep.script(
        WORKS + "open(os.path.join(os.environ['LOCKSTEP_RUN_DIR'], f'mine-{me}'), 'w').write('kept')\n"
    )
    done = lockstep.run(*OPTIONS, script, run=URL, **store.variables)
    assert done.status == 0, done.err
    files = stored(variables)
    assert files == local(tmp_path)
    assert {"events.jsonl", "worker-0.log", "worker-1.log", "mine-0", "mine-1"} <= files.keys()
    assert b'"finished"' in files["events.jsonl"]
    assert done.notes[0] == f"lockstep: the run folder runs/{name_for(URL)} is uploaded to {URL}"
    assert not any(word in done.err for word in ("uploads", "lacks", SECRET))
    assert not any(SECRET.encode() in data for data in files.values())

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shown = lockstep_command(elsewhere, "logs", URL, "--worker", "1", **store.variables)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "worker 1\n", "")
    report = lockstep_command(elsewhere, "report", URL, **store.variables)
    assert report.stdout.startswith("job: finished"), report.stderr
    assert (elsewhere / "report.html").stat().st_size > 10_000
    listed = lockstep_command(elsewhere, "runs", "--csv", URL, **store.variables)
    assert listed.stdout.count("\n") == 2, listed.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["report.html"]
    refused = lockstep_command(elsewhere, "top", URL, **store.variables)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"lockstep: ConfigError: {URL}: this command takes a run of this")
    absent = lockstep_command(elsewhere, "report", f"{URL}/other", **store.variables)
    assert absent.stderr == f"lockstep: ConfigError: there is no run in {URL}/other\n"
    above = lockstep_command(elsewhere, "report", f"{URL}/..", **store.variables)
    assert above.stderr == f"lockstep: ConfigError: there is no run in {URL}/..\n"

    # The next job, on another machine, continues the files.
    again = lockstep_command(
        elsewhere,
        "run",
        "--run-dir",
        URL,
        *OPTIONS,
        f"../{script}",
        **{
            **store.variables,
            "ANNOUNCEMENTS": "",
        },
    )
    assert again.returncode == 0, again.stderr
    continued = stored(variables)
    assert continued == local(elsewhere)
    assert continued["events.jsonl"].startswith(files["events.jsonl"])
    assert continued["worker-1.log"] == files["worker-1.log"] * 2


@pytest.mark.parametrize(
    ("last", "is_noted"),
    [
        ('{"time":2.0,"event":"finished","status":0}\n', False),
        ('{"time":2.0,"event":"warning","text":"x"}\n', True),
        ('{"time":2.0,"event":"own","phase":"finished"}\n', True),
        ('{"time":2.0,"event":"finished","stat', True),
    ],
)
def test_a_run_whose_end_is_not_in_the_store_is_noted(
    last: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fetch_run(url: str, folder: Path, _: object) -> None:
        RunPaths(folder).events.write_text('{"time":1.0,"event":"job"}\n' + last)

    monkeypatch.setattr(run_upload, "fetch_run", fetch_run)
    with click.Context(click.Command("logs")) as context:
        Run().convert(URL, None, context)
    noted = f"lockstep: the end of the run is not in {URL}: it is shown as it was uploaded last\n"
    assert capfd.readouterr().err == (noted if is_noted else "")


def test_a_job_in_a_folder_that_cannot_be_written_uploads_its_run(
    lockstep: Any, store: FaultyServer, variables: dict[str, str], tmp_path: Path
) -> None:
    """As in a pod, with the command of lockstep export kubernetes, except for the places of workers."""
    script = tmp_path / lockstep.script(WORKS)
    exported = lockstep_command(
        *(tmp_path, "export", "kubernetes", "--image", "i", "-n", "2", "--run-dir", URL, str(script))
    )
    (container,) = list(yaml.safe_load_all(exported.stdout))[-1]["spec"]["template"]["spec"]["containers"]
    _, *words = [word for word in container["command"] if word != "--tf-config"]
    # Not even root creates a file there.
    done = lockstep_command(
        *(Path("/proc"), "run", "-n", "2", *words[1:]),
        **{**store.variables, "XDG_CACHE_HOME": str(tmp_path / "cache"), "ANNOUNCEMENTS": ""},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache/lockstep/runs" / name_for(URL)
    assert stored(variables)["events.jsonl"] == (folder / "events.jsonl").read_bytes()


def test_the_log_of_a_job_that_fails_is_in_the_store(
    lockstep: Any, store: FaultyServer, variables: dict[str, str], tmp_path: Path
) -> None:
    script = lockstep.script("if me == 1:\n    raise ValueError('planned')\n")
    done = lockstep.run(*OPTIONS, script, run=URL, **store.variables)
    assert done.status == 1
    files = stored(variables)
    assert files == local(tmp_path)
    assert b"ValueError: planned" in files["worker-1.log"]


@pytest.mark.parametrize("ends", ["killed worker", "Ctrl-C"])
def test_a_job_that_ends_early_is_in_the_store(
    lockstep: Any,
    store: FaultyServer,
    variables: dict[str, str],
    tmp_path: Path,
    is_gone: Callable[[list[int], float], bool],
    ends: str,
) -> None:
    script = lockstep.script("announce(f'worker-{me}')\nstay()\n")
    running = lockstep.start(*OPTIONS, script, run=URL, **store.variables)
    workers = running.announced(2)
    if ends == "Ctrl-C":
        running.process.send_signal(signal.SIGINT)
    else:
        signal.pidfd_send_signal(workers["worker-1"][0], signal.SIGKILL)
    done = running.end()
    assert done.status == (130 if ends == "Ctrl-C" else 137)
    assert is_gone([*workers["worker-0"], *workers["worker-1"]], 0)
    files = stored(variables)
    assert files == local(tmp_path)
    assert events(files)[-1]["event"] == "finished"
    assert events(files)[-1]["status"] == done.status


def test_a_command_that_is_killed_leaves_its_run_in_the_store(
    lockstep: Any,
    store: FaultyServer,
    variables: dict[str, str],
    tmp_path: Path,
    is_gone: Callable[[list[int], float], bool],
) -> None:
    script = lockstep.script("announce('worker')\nstay()\n")
    running = lockstep.start(*OPTIONS, script, run=URL, **store.variables)
    workers = running.announced(2)["worker"]
    upload = os.pidfd_open(running.children()[0])
    running.process.kill()
    assert is_gone([*workers, upload], 600.0)
    running.end()
    assert stored(variables) == {name: data for name, data in local(tmp_path).items() if name != "lock"}


def test_a_store_that_does_not_answer_stops_no_job(
    lockstep: Any, store: FaultyServer, variables: dict[str, str], tmp_path: Path
) -> None:
    """It takes nothing but the first check until the job has ended."""
    store.holds = lambda method, path: method == "PUT" and not path.endswith(INDEX)
    running = lockstep.start(*OPTIONS, lockstep.script(WORKS), run=URL, **store.variables)
    lines = []
    for line in running.process.stderr:
        lines.append(line)
        if line.startswith("lockstep: uploading "):
            break
    assert stored(variables) == {}
    store.released.set()
    done = running.end()
    assert done.status == 0, "".join(lines) + done.err
    assert stored(variables) == local(tmp_path)


def test_uploads_that_fail_are_named_once_and_made_up_for(
    lockstep: Any, store: FaultyServer, variables: dict[str, str], tmp_path: Path
) -> None:
    denied = []

    def deny(method: str, path: str) -> bool:
        denies = method == "PUT" and not path.endswith(INDEX) and len(denied) < 2
        if denies:
            denied.append(path)
        return denies

    store.denies = deny
    done = lockstep.run(*OPTIONS, lockstep.script(WORKS), run=URL, **store.variables)
    assert done.status == 0, done.err
    assert stored(variables) == local(tmp_path)
    (first,) = [line for line in done.notes if "cannot be uploaded now" in line]
    assert "the store refuses the credentials of this process (AccessDenied: Access Denied)" in first
    assert done.notes[-1] == f"lockstep: the run folder is complete in {URL}; 2 uploads failed before"


def test_ctrl_c_ends_the_wait_for_a_store(
    lockstep: Any, store: FaultyServer, variables: dict[str, str], tmp_path: Path
) -> None:
    store.denies = lambda method, path: method == "PUT" and not path.endswith(INDEX)
    running = lockstep.start(*OPTIONS, lockstep.script(WORKS), run=URL, **store.variables)
    for line in running.process.stderr:
        if line.startswith("lockstep: uploading "):
            break
    running.process.send_signal(signal.SIGINT)
    done = running.end()
    assert done.status == 0
    assert done.notes[-1] == (
        f"lockstep: the end of the run is not uploaded to {URL}; runs/{name_for(URL)} has everything"
    )
    assert (stored(variables), b'"finished"' in local(tmp_path)["events.jsonl"]) == ({}, True)


def test_credentials_that_the_store_refuses_are_named_before_the_job_begins(
    lockstep: Any, store: FaultyServer, tmp_path: Path
) -> None:
    store.denies = lambda method, path: True
    done = lockstep.run(*OPTIONS, lockstep.script(WORKS), run=URL, **store.variables)
    assert done.status == 2
    assert done.err.splitlines()[1:] == [
        f"lockstep: CheckpointError: {URL} cannot be read: the store refuses the credentials of this process "
        "(AccessDenied: Access Denied); renew them in its environment, or give them the permission"
    ]
    assert not (tmp_path / "runs").exists()


def test_a_job_on_this_machine_keeps_its_place(lockstep: Any, store: FaultyServer, tmp_path: Path) -> None:
    script = lockstep.script("announce('worker')\nstay()\n")
    running = lockstep.start(*OPTIONS, script, run=URL, **store.variables)
    workers = running.announced(2)["worker"]
    second = lockstep.run(*OPTIONS, script, run=URL, **store.variables)
    assert (second.status, second.out) == (2, "")
    assert f"another run uses runs/{name_for(URL)}" in second.err
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status == 143
    for pidfd in workers:
        os.close(pidfd)
