"""Variables of a shell: their effects on jobs are reported, secrets are not."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.slurm import SlurmClusterResolver
from lockstep.doctor.check import Finding, Rating, Sources, judge, look
from lockstep.doctor.checkup import CHECKS
from lockstep.doctor.environment import EFFECTS, hidden_modules, uncovered_names, without_secrets
from lockstep.errors import ConfigError
from lockstep.system.environment import device_variables, job_environment, switched_off


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Return a folder in which the driver lists two GPUs."""
    folder = tmp_path / "gpus"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (folder / name).mkdir(parents=True)
    return folder


def findings(folder: Path, variables: dict[str, str], **options: Any) -> list[Finding]:
    places = {"folder": folder, "package_folders": [], "gpu_folder": folder / "no driver"} | options
    checks = CHECKS["environment"]
    return judge("environment", checks, look(checks, Sources(environment=variables, **places)))


def single(folder: Path, variables: dict[str, str], **options: Any) -> Finding:
    [finding] = findings(folder, variables, **options)
    assert finding.section == "environment"
    assert bool(finding.remedy) == (finding.rating is not Rating.FINE)
    json.dumps(finding.facts)
    return finding


def test_no_relevant_variable_is_set(tmp_path: Path) -> None:
    assert findings(tmp_path, {"HOME": "/home/me", "OMP_NUM_THREADS": ""}) == []


def test_the_environment_of_this_test_can_be_judged() -> None:
    checks = CHECKS["environment"]
    assert judge("environment", checks, look(checks, Sources(environment={**os.environ, "NPROC": "2"})))


@pytest.mark.parametrize(
    ("value", "rating", "reason"),
    [
        ("-1", Rating.WARNING, "'-1' hides all GPUs: jobs compute on the CPU"),
        ("", Rating.WARNING, "'' hides all GPUs: jobs compute on the CPU"),
        ("0", Rating.FINE, "names 1 GPU (0)"),
        ("1, GPU-8932f937", Rating.FINE, "names 2 GPUs (1, GPU-8932f937)"),
        ("0,-1,1", Rating.WARNING, "'0,-1,1' shows 1 GPU and hides the following"),
        ("0,", Rating.WARNING, "'0,' shows 1 GPU and hides the following"),
    ],
)
def test_visible_gpus(tmp_path: Path, value: str, rating: Rating, reason: str) -> None:
    finding = single(tmp_path, {"CUDA_VISIBLE_DEVICES": value})
    assert reason in finding.reason
    assert (finding.name, finding.rating) == ("CUDA_VISIBLE_DEVICES", rating)


def test_hidden_gpus_are_counted(tmp_path: Path, driver: Path) -> None:
    finding = single(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"}, gpu_folder=driver)
    assert finding.reason == "'-1' hides all GPUs, of which the driver has 2: jobs compute on the CPU"


def test_variables_that_lockstep_sets_are_reported(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"}
    own |= {"TF_NUM_INTEROP_THREADS", "NPROC", "PYTHONHASHSEED"}
    for name in own:
        finding = single(tmp_path, {name: "77"})
        assert finding.rating is Rating.FINE
        assert finding.reason.startswith("77: Lockstep sets its own value for workers")
        assert job_environment(0, 1, {name: "77"})[name] != "77"


def test_variables_that_workers_inherit_are_reported(tmp_path: Path) -> None:
    for name in ("XLA_FLAGS", "JAX_ENABLE_X64"):
        assert "applies to workers too" in single(tmp_path, {name: "77"}).reason
        assert job_environment(0, 1, {name: "77"})[name] == "77"


@pytest.mark.parametrize("name", ["TF_FORCE_GPU_ALLOW_GROWTH", "XLA_PYTHON_CLIENT_PREALLOCATE"])
@pytest.mark.parametrize("shared", [True, False])
def test_variables_of_shared_gpus_are_reported(tmp_path: Path, name: str, shared: bool) -> None:
    assert "Lockstep sets its own value if workers share a GPU" in single(tmp_path, {name: "x"}).reason
    assert (name in device_variables({name: "x"}, "0", shared)) is shared


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", "--xla_dump_to=/x --xla_gpu_deterministic_ops=false"),
        ("TF_DETERMINISTIC_OPS", "0"),
        ("TF_DETERMINISTIC_OPS", ""),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
    ],
)
def test_disabled_deterministic_operations_are_a_warning(tmp_path: Path, name: str, value: str) -> None:
    assert switched_off({name: value}) == (name,)
    finding = single(tmp_path, {name: value})
    assert (finding.name, finding.rating) == (name, Rating.WARNING)
    assert finding.reason.startswith(f"'{value}' disables deterministic operations")


@pytest.mark.parametrize(
    ("name", "value"), [("TF_DETERMINISTIC_OPS", "1"), ("CUBLAS_WORKSPACE_CONFIG", ":16:8")]
)
def test_enabled_deterministic_operations_are_fine(tmp_path: Path, name: str, value: str) -> None:
    assert single(tmp_path, {name: value}).rating is Rating.FINE


@pytest.mark.parametrize(
    ("name", "value", "gpus", "rating", "reason"),
    [
        (
            "JAX_PLATFORMS",
            "cpu",
            True,
            Rating.WARNING,
            "cpu: JAX computes on the CPU despite 2 visible GPUs",
        ),
        ("JAX_PLATFORM_NAME", "CPU", True, Rating.WARNING, "CPU: JAX computes on the CPU"),
        ("JAX_PLATFORMS", "cpu,cuda", True, Rating.WARNING, "JAX computes on the CPU"),
        ("JAX_PLATFORMS", "cpu", False, Rating.FINE, "cpu: where JAX computes"),
        ("JAX_PLATFORMS", "cuda", True, Rating.FINE, "cuda: where JAX computes"),
        (
            "JAX_PLATFORMS",
            "cuda",
            False,
            Rating.WARNING,
            "JAX uses only GPUs and fails because none is visible",
        ),
        ("JAX_PLATFORM_NAME", "gpu", False, Rating.WARNING, "JAX uses only GPUs and fails"),
        ("JAX_PLATFORMS", "cuda,cpu", False, Rating.FINE, "where JAX computes"),
    ],
)
def test_platforms_of_jax(
    tmp_path: Path, driver: Path, name: str, value: str, gpus: bool, rating: Rating, reason: str
) -> None:
    finding = single(tmp_path, {name: value}, gpu_folder=driver if gpus else tmp_path / "none")
    assert reason in finding.reason
    assert (finding.name, finding.rating) == (name, rating)


def test_hidden_gpus_do_not_count_for_jax(tmp_path: Path, driver: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cuda"}
    hidden, platforms = findings(tmp_path, variables, gpu_folder=driver)
    assert (hidden.name, platforms.name) == ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
    assert platforms.rating is Rating.WARNING


def test_the_fraction_of_gpu_memory(tmp_path: Path) -> None:
    name, other = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    assert single(tmp_path, {name: ".5"}).rating is Rating.FINE
    assert "'half' is not a number: JAX fails on a GPU" in single(tmp_path, {name: "half"}).reason
    both = findings(tmp_path, {name: ".5", other: ".5"})
    assert [finding.rating for finding in both] == [Rating.WARNING] * 2


def test_long_values_are_shortened_without_control_characters(tmp_path: Path) -> None:
    reason = single(tmp_path, {"XLA_FLAGS": "\x1b[31m\n" + "x" * 5000}).reason
    assert reason.startswith("?[31m?xxx")
    assert len(reason) < 400


def test_values_of_unknown_variables_are_not_shown(tmp_path: Path) -> None:
    variables = dict.fromkeys(EFFECTS, "1") | {"AWS_SECRET_ACCESS_KEY": "hidden", "LOCKSTEP_X": "hidden"}
    assert "hidden" not in repr(findings(tmp_path, variables))


@pytest.mark.parametrize(
    ("make", "hides"),
    [
        ({"keras.py": ""}, ("keras",)),
        ({"numpy/__init__.py": ""}, ("numpy",)),
        ({"torch.py": "", "jax.py": ""}, ("jax", "torch")),
        ({"tensorflow/notes.txt": "", "kerasx.py": "", "jax.txt": ""}, ()),
        ({"jax/__init__.py": "", "jax-0.7.dist-info/METADATA": ""}, ()),
    ],
)
def test_modules_that_hide_installed_ones_are_found(
    tmp_path: Path, make: dict[str, str], hides: tuple[str, ...]
) -> None:
    for name, text in make.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hidden_modules(tmp_path, [tmp_path / "elsewhere"]) == hides
    assert hidden_modules(tmp_path, [tmp_path]) == ()


def test_an_installation_can_hide_another_one(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "keras").mkdir(parents=True)
        (tmp_path / folder / "keras" / "__init__.py").write_text("")
        (tmp_path / folder / "keras-3.12.dist-info").mkdir()
    assert hidden_modules(tmp_path / "one", [tmp_path / "two"]) == ("keras",)


def test_an_archive_can_hide_modules(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("torch/__init__.py", "")
    (tmp_path / "broken.zip").write_text("PK")
    assert hidden_modules(tmp_path / "all.zip", []) == ("torch",)
    assert hidden_modules(tmp_path / "broken.zip", []) == ()


def test_the_search_imports_no_module(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    assert hidden_modules(tmp_path, []) == ("torch",)


def test_python_path(tmp_path: Path) -> None:
    good, bad, absent = tmp_path / "good", tmp_path / "bad", tmp_path / "absent"
    for folder in (good, bad):
        folder.mkdir()
    (bad / "numpy.py").write_text("")
    finding = single(tmp_path, {"PYTHONPATH": f"{good}:{absent}"})
    assert finding.rating is Rating.FINE
    assert finding.reason.endswith(f"; {absent} does not exist")
    finding = single(tmp_path, {"PYTHONPATH": f"{good}:{bad}"})
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith(f"{bad} has a module numpy")
    assert single(tmp_path, {"PYTHONPATH": f"{bad}"}, package_folders=[bad]).rating is Rating.FINE


def test_a_module_in_the_current_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("")
    finding = single(tmp_path, {})
    assert (finding.name, finding.rating) == ("current folder", Rating.WARNING)
    assert finding.facts["modules"] == ["keras"]


def test_a_removed_current_folder_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert single(Path(), {"PYTHONPATH": "here::"}).rating is Rating.FINE


def test_preloaded_libraries_are_reported(tmp_path: Path) -> None:
    there, absent = tmp_path / "there.so", tmp_path / "absent.so"
    there.write_text("")
    assert single(tmp_path, {"LD_PRELOAD": f"{there} libc.so.6:$LIB/x.so"}).rating is Rating.FINE
    finding = single(tmp_path, {"LD_PRELOAD": f"{there} {absent}"})
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith(f"{absent} does not exist")
    assert findings(tmp_path, {"LD_PRELOAD": " "}) == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://proxy:3128", "http://proxy:3128"),
        ("http://me:secret@proxy:3128", "http://***@proxy:3128"),
        ("http://me:se@cr/et@proxy:3128", "http://***@proxy:3128"),
        ("me:secret@proxy:3128", "***@proxy:3128"),
        ("socks5h://me:sec\nret@proxy", "socks5h://***@proxy"),
        ("http://secret@proxy", "http://***@proxy"),
    ],
)
def test_secrets_are_not_shown(tmp_path: Path, given: str, shown: str) -> None:
    assert without_secrets(given) == shown
    finding = single(tmp_path, {"HTTPS_PROXY": given})
    assert f"HTTPS_PROXY={shown}" in finding.reason
    assert "secret" not in repr(finding)


@pytest.mark.parametrize(
    ("no_proxy", "out"),
    [
        ("", ["localhost", "127.0.0.1"]),
        ("example.org,localhost", ["127.0.0.1"]),
        ("127.0.0.1", ["localhost"]),
        (" LOCALHOST , 127.0.0.0/8", []),
        ("*", []),
        ("localhost:80,127.0.0.10,::1/128", ["localhost", "127.0.0.1"]),
    ],
)
def test_local_names_that_no_proxy_does_not_cover(tmp_path: Path, no_proxy: str, out: list[str]) -> None:
    assert uncovered_names(no_proxy) == out
    for name in ("no_proxy", "NO_PROXY"):
        finding = single(tmp_path, {"http_proxy": "http://proxy:1", name: no_proxy})
        assert finding.name == "proxies"
        assert finding.rating is (Rating.WARNING if out else Rating.FINE)
        assert finding.facts["left_out"] == out


def test_no_proxy_without_a_proxy_is_ignored(tmp_path: Path) -> None:
    assert findings(tmp_path, {"no_proxy": "x", "http_proxy": ""}) == []


def test_variables_of_workers_are_a_warning(tmp_path: Path) -> None:
    finding = single(tmp_path, {"LOCKSTEP_WORKER": "1", "LOCKSTEP_SEED": "0"})
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("LOCKSTEP_SEED, LOCKSTEP_WORKER: only workers use these")
    assert "LOCKSTEP_WORKER" not in job_environment(0, 1, {"LOCKSTEP_WORKER": "1"})


def test_variables_that_users_set_or_read_are_no_warning(tmp_path: Path) -> None:
    variables = {"LOCKSTEP_KEY_FILE": "/k", "LOCKSTEP_RUN_DIR": "/r", "LOCKSTEP_WITNESS": "off"}
    assert findings(tmp_path, variables) == []


STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}


def test_a_task_of_slurm_is_reported(tmp_path: Path) -> None:
    finding = single(tmp_path, STEP)
    assert finding.rating is Rating.FINE
    assert "this is task 2 of 3 on 2 hosts" in finding.reason


def test_an_allocation_without_a_job_step_is_reported(tmp_path: Path) -> None:
    finding = single(tmp_path, {"SLURM_JOB_ID": "1"})
    assert finding.rating is Rating.FINE
    assert "not a task of a job step, for which srun sets SLURM_STEP_ID, SLURM_PROCID" in finding.reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PROCID", "x", "SLURM_PROCID is 'x', expected a whole number"),
        ("PROCID", "3", "SLURM_PROCID 3 of SLURM_STEP_NUM_TASKS 3 does not fit the 3 tasks"),
        ("STEP_NUM_TASKS", "4", "SLURM_PROCID 2 of SLURM_STEP_NUM_TASKS 4 does not fit the 3 tasks"),
        ("STEP_NODELIST", "n[1", "is not a list of hosts"),
        ("STEP_NODELIST", "n1", "SLURM_STEP_NODELIST has 1 host, SLURM_STEP_TASKS_PER_NODE has 2"),
        ("STEP_TASKS_PER_NODE", "x", "Slurm's list of tasks is 'x'"),
    ],
)
def test_invalid_variables_of_slurm_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    broken = STEP | {f"SLURM_{name}": value}
    finding = single(tmp_path, broken)
    assert finding.rating is Rating.WARNING
    assert reason in finding.reason
    for variable, text in broken.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError):
        SlurmClusterResolver()


@pytest.mark.parametrize("value", ["1", "True"])
def test_keras_2_is_a_failure(tmp_path: Path, value: str) -> None:
    finding = single(tmp_path, {"TF_USE_LEGACY_KERAS": value})
    assert finding.rating is Rating.FAILURE
    assert "tf.keras is Keras 2" in finding.reason


def test_keras_3_is_fine(tmp_path: Path) -> None:
    assert findings(tmp_path, {"TF_USE_LEGACY_KERAS": "0"}) == []
