"""`lockstep doctor` in working and in broken environments."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FRAMEWORKS = ("jax", "tensorflow", "torch")
IN_PROCESS = """
import sys
from lockstep.cli.main import main
sys.argv = ["lockstep", "doctor", "--json", "--no-train"]
try:
    main()
finally:
    print(sorted({"keras", "jax", "tensorflow", "torch"} & set(sys.modules)), file=sys.stderr)
"""


def doctor(folder: Path, *options: str, script: str = "", **variables: str) -> tuple[int, str, str]:
    command = ["-c", script] if script else ["-m", "lockstep", "doctor", *options]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=folder,
        env=os.environ | variables,
    )
    return done.returncode, done.stdout, done.stderr


def rows(out: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(out)["findings"]}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of modules that shadow the installed ones, each broken differently."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (folder / "tensorflow.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    (folder / "torch.py").write_text("import sys\nprint('hello from torch')\nsys.exit(3)\n")
    return folder


@pytest.fixture
def only_jax(tmp_path: Path) -> Path:
    """A folder of modules that hide the other backends, which take long to import."""
    folder = tmp_path / "only-jax"
    folder.mkdir()
    for name in ("tensorflow", "torch"):
        (folder / f"{name}.py").write_text(f"raise ImportError('no {name}')\n")
    return folder


@pytest.mark.slow
def test_the_report_has_the_rate_and_the_hash_of_a_training(tmp_path: Path, only_jax: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    variables = {"KERAS_BACKEND": "jax", "PYTHONPATH": str(only_jax)}
    first, second = (doctor(empty, "--json", **variables) for _ in range(2))
    status, out, err = first
    assert status == json.loads(out)["status"]
    assert status < 2, err
    found = rows(out)
    (computed,) = (row for name, row in found.items() if name.startswith("jax computes on "))
    assert computed["facts"]["same"]
    trained = found["2 workers on jax"]["facts"]
    assert trained["images_per_second"] > 0
    assert len(trained["hash"]) == 64
    assert rows(second[1])["2 workers on jax"]["facts"]["hash"] == trained["hash"]
    assert "training on jax with 2 workers" in err
    # It writes nothing to its working directory.
    assert not list(empty.iterdir())


def test_backends_that_crash_are_rows_of_the_report(tmp_path: Path, broken: Path) -> None:
    status, out, _ = doctor(tmp_path, "--json", KERAS_BACKEND="jax", PYTHONPATH=str(broken))
    assert status == 2
    found = rows(out)
    assert found["jax"]["verdict"] == "failure"
    assert "SIGSEGV" in found["jax"]["reason"]
    assert found["not tested"]["section"] == "training"
    others = [
        name for name in ("tensorflow", "torch") if name in found and found[name]["section"] == "backends"
    ]
    assert others == ["tensorflow", "torch"]
    assert [found[name]["verdict"] for name in others] == ["warning"] * 2
    assert found["tensorflow"]["reason"].endswith("libcudart.so.12: cannot open")
    assert found["torch"]["reason"].endswith("exited with status 3: hello from torch")


@pytest.mark.ci
def test_a_training_that_fails_is_a_failure(tmp_path: Path, broken: Path) -> None:
    (broken / "jax.py").unlink()
    # The probe computes without Keras; a job does not.
    (broken / "keras.py").write_text("raise ImportError('half installed')\n")
    status, out, _ = doctor(tmp_path, "--json", KERAS_BACKEND="jax", PYTHONPATH=str(broken))
    assert status == 2
    assert rows(out)["2 workers on jax"]["verdict"] == "failure"


def test_an_unknown_backend_is_a_failure(tmp_path: Path, broken: Path) -> None:
    status, out, _ = doctor(
        tmp_path, "--no-train", KERAS_BACKEND="theano", PYTHONPATH=str(broken), COLUMNS="300"
    )
    assert status == 2
    assert "KERAS_BACKEND=theano: expected one of" in " ".join(out.split())
    assert out.splitlines()[-1].startswith("jobs will not work here")


def test_no_framework_is_imported_into_the_command(tmp_path: Path, broken: Path) -> None:
    _, out, err = doctor(tmp_path, script=IN_PROCESS, PYTHONPATH=str(broken))
    assert "versions" in {finding["section"] for finding in json.loads(out)["findings"]}
    assert err.splitlines()[-1] == "[]"


def test_a_report_for_a_bug_has_no_secrets_and_no_names(tmp_path: Path, broken: Path) -> None:
    home = tmp_path / "mariana"
    home.mkdir()
    broken.rename(home / "broken")
    (home / "broken" / "tensorflow.py").write_text(
        "import os\nhost = 'trench-7.deep.example.org, 10.9.8.7'\n"
        "raise ImportError(f'{os.environ[\"HF_TOKEN\"]} of mariana at {host}')\n"
    )
    hidden = {
        "HF_TOKEN": "swordfish-and-chips",
        "MY_PASSWORD": "p4ss w0rd",
        "USER": "mariana",
        "HOSTNAME": "trench-7.deep.example.org",
        "https_proxy": "http://diver:oxygen@gate.example.net:3128",
        "MASTER_ADDR": "10.9.8.7",
    }
    tasks = (
        '{"cluster": {"worker": ["trench-8:2222", "10.9.8.8:2222"]}, "task": {"type": "worker", "index": 0}}'
    )
    status, out, _ = doctor(
        tmp_path,
        "--report",
        "--no-train",
        **hidden,
        HOME=str(home),
        PYTHONPATH=f"{home}/broken:{home}/gone",
        XLA_FLAGS="--xla_dump_to=/scratch/mariana/" + "x" * 80 + "swordfish-and-chips",
        TF_CONFIG=tasks,
        KERAS_BACKEND="jax",
    )
    lines = out.splitlines()
    assert (status, lines[0], lines[-1]) == (2, "```text", "```")
    assert "<secret> of <user> at <host>, <address>" in out
    assert "  FAIL  jax: " in out
    assert "<home>/broken" in out
    assert "XLA_FLAGS=--xla_dump_to=/scratch/<user>/" in out
    names = ("swordfish", "p4ss", "mariana", "trench", "deep.example", "diver", "oxygen", "gate.", "10.9.8.")
    assert [name for name in names if name in out] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--watch", "1"), "No such option"),
        (("--csv", "x"), "No such option"),
        (("--no-train", "--hosts", "a,b"), "--hosts cannot be combined with --no-train"),
        (("--report", "--json"), "--report cannot be combined with --json, --hosts or --burn-in"),
        (("--no-train", "--burn-in", "1m"), "--burn-in cannot be combined with --no-train"),
        (("--burn-in", "soon"), "--burn-in soon: give a time such as 30s or 2m, of at most 24h"),
        (("--report", "--hosts", "a,b"), "--report cannot be combined with --json, --hosts or --burn-in"),
    ],
)
def test_incompatible_options_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    status, _, err = doctor(tmp_path, *options)
    assert status == 2
    assert message in err


@pytest.mark.ci
def test_a_report_that_cannot_be_written_is_a_one_line_failure(tmp_path: Path, broken: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m lockstep doctor --no-train"
    for output, status in ((">/dev/full", 2), (">&-", 2), ("--json >/dev/full", 2), ("| true", 2)):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{command} {output}"],
            stderr=subprocess.PIPE,
            text=True,
            timeout=1200,
            cwd=tmp_path,
            env=os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(broken)},
        )
        assert done.returncode == status
        assert "Traceback" not in done.stderr
        assert ("cannot write the report: No space left" in done.stderr) == ("full" in output)


def test_the_report_is_ascii_on_an_ascii_terminal(tmp_path: Path, broken: Path) -> None:
    (tmp_path / "\xe9").mkdir()
    path = f"{broken}:{tmp_path}/\xe9-gone"
    status, out, err = doctor(
        tmp_path, "--no-train", KERAS_BACKEND="jax", PYTHONPATH=path, PYTHONIOENCODING="ascii"
    )
    assert status == 2, err
    assert out.isascii()


def test_a_machine_that_cannot_start_processes_is_reported_in_rows(tmp_path: Path, broken: Path) -> None:
    script = """
import resource
from lockstep.cli.main import main
import lockstep.doctor.command, sys
sys.argv = ["lockstep", "doctor", "--json"]
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
main()
"""
    status, out, err = doctor(tmp_path, script=script, KERAS_BACKEND="jax", PYTHONPATH=str(broken))
    assert status == 2, err
    assert rows(out)["jax"]["reason"] == "it could not be started: Too many open files"


def test_a_check_that_raises_is_not_a_warning(tmp_path: Path, broken: Path) -> None:
    script = """
import sys
from lockstep.cli.main import main
from lockstep.doctor import checkup

def fail(checks, sources):
    raise KeyError("unforeseen")

checkup.look = fail
sys.argv = ["lockstep", "doctor", "--no-train"]
main()
"""
    status, out, err = doctor(tmp_path, script=script, PYTHONPATH=str(broken))
    assert (status, out) == (2, "")
    assert "KeyError: 'unforeseen'" in err
    assert err.splitlines()[-1] == "lockstep: InternalError: the check itself failed: 'unforeseen'"
