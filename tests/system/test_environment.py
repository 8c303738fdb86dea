"""The environment of workers, and the variables that Lockstep reads."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.system.environment import (
    WorkerIdentity,
    cache_folder,
    environment_at_start,
    forget_worker,
    job_environment,
    parse_variables,
    read_worker,
    replaced_hash_seed,
    require_variables,
    shared_variables,
    show_run_folder,
    switched_off,
    tf_config,
    unrecorded,
    usable_cores,
    variable_marks,
    visible_gpus,
    worker_environment,
)

IDENTITY = WorkerIdentity(worker=1, run_dir=Path("/runs/a b"), agent=99, control=5)


def environment_of(
    inherited: dict[str, str],
    *,
    backend: str | None = None,
    identity: WorkerIdentity = IDENTITY,
    devices: str | None = None,
) -> dict[str, str]:
    shared = job_environment(2**32 + 7, 4, inherited, backend=backend)
    return worker_environment(identity, shared, cluster=tf_config(1, 3), devices=devices)


def test_read_inverts_write() -> None:
    for changes in ({}, {"by_hand": True}, {"joins": True}, {"host": "node 1"}, {"device_users": 3}):
        identity = replace(IDENTITY, **changes)
        assert read_worker(environment_of({}, identity=identity)) == identity


def test_the_whole_environment_of_a_worker() -> None:
    inherited = {"HOME": "/home", "OMP_NUM_THREADS": "64", "LOCKSTEP_OLD": "x", "TF_CONFIG": "old"}
    assert environment_of(inherited) == {
        "HOME": "/home",
        "LOCKSTEP_WORKER": "1",
        "LOCKSTEP_RUN_DIR": "/runs/a b",
        "LOCKSTEP_AGENT": "99",
        "LOCKSTEP_CONTROL_FD": "5",
        "NPROC": "4",
        "OMP_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "4",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONHASHSEED": "7",
        "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": tf_config(1, 3),
    }


@pytest.mark.parametrize(
    ("given", "replaced"),
    [(None, ""), ("", ""), ("7", ""), ("0", "0"), ("random", "random")],
)
def test_a_hash_seed_of_the_user_that_is_replaced(given: str | None, replaced: str) -> None:
    environ = {} if given is None else {"PYTHONHASHSEED": given}
    assert replaced_hash_seed(2**32 + 7, environ) == replaced


def test_backend_and_devices_are_set_only_on_request() -> None:
    plain = environment_of({})
    asked = environment_of({}, backend="torch", devices="0,1")
    assert asked == plain | {
        "KERAS_BACKEND": "torch",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_MMAP_THRESHOLD_": "268435456",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
        "TF_DETERMINISTIC_OPS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


@pytest.mark.parametrize(("backend", "one_arena"), [("tensorflow", False), ("torch", False), ("jax", True)])
def test_glibc_keeps_the_memory_of_a_step(backend: str, one_arena: bool) -> None:
    environment = environment_of({}, backend=backend)
    assert "MALLOC_TRIM_THRESHOLD_" in environment
    assert ("MALLOC_ARENA_MAX" in environment) == one_arena


def test_the_users_settings_of_glibc_are_kept() -> None:
    environment = environment_of({"MALLOC_ARENA_MAX": "4", "MALLOC_TRIM_THRESHOLD_": "9"}, backend="jax")
    assert environment["MALLOC_ARENA_MAX"] == "4"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "9"


@pytest.mark.parametrize(
    ("quota", "counted"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_affinity_and_cgroup_quotas_limit_the_number_of_cores(
    tmp_path: Path, quota: str, counted: int | None
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "cgroup" / "job").mkdir(parents=True)
    (tmp_path / "cgroup" / "job" / "cpu.max").write_text(f"{quota}\n")
    found = usable_cores(tmp_path / "proc", tmp_path / "cgroup")
    assert found == (counted or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        ({"SLURM_CPUS_PER_TASK": "1", "SLURM_STEP_ID": "0"}, 1),
        ({"SLURM_CPUS_PER_TASK": "1"}, None),
        ({"SLURM_CPUS_PER_TASK": "9999", "SLURM_STEP_ID": "0"}, None),
        ({"SLURM_CPUS_PER_TASK": "9" * 5000, "SLURM_STEP_ID": "0"}, None),
        ({"SLURM_CPUS_PER_TASK": "0", "SLURM_STEP_ID": "0"}, 1),
        ({"SLURM_STEP_ID": "0"}, None),
    ],
)
def test_a_task_of_slurm_uses_the_cores_that_it_asks_for(
    tmp_path: Path, given: dict[str, str], counted: int | None
) -> None:
    """The script of a batch job, which is no task, may use the whole allocation."""
    assert usable_cores(tmp_path, tmp_path, given) == (counted or len(os.sched_getaffinity(0)))


def test_workers_that_share_a_gpu_allocate_memory_on_demand() -> None:
    alone = environment_of({}, devices="0")
    shared = environment_of({}, identity=replace(IDENTITY, device_users=2), devices="0")
    assert shared == alone | {
        "LOCKSTEP_DEVICE_USERS": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }


def test_settings_of_the_user_on_determinism_remain_and_are_named() -> None:
    off = {
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=false --xla_dump_to=x",
        "TF_DETERMINISTIC_OPS": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":0:0",
    }
    made = environment_of(off, devices="0")
    assert {name: made[name] for name in off} == off
    assert switched_off(off) == tuple(off)
    assert switched_off({}) == ()
    kept = environment_of({"XLA_FLAGS": "--xla_dump_to=x"}, devices="0")
    assert kept["XLA_FLAGS"] == "--xla_dump_to=x --xla_gpu_deterministic_ops=true"


def test_only_the_index_of_a_tf_config_depends_on_the_worker() -> None:
    first, second = json.loads(tf_config(0, 3)), json.loads(tf_config(1, 3))
    assert second == first | {"task": {"type": "worker", "index": 1}}
    assert first["cluster"] == {"worker": ["127.0.0.1:20000", "127.0.0.1:20001", "127.0.0.1:20002"]}


def test_the_environment_at_the_start_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "environ"
    file.write_bytes(b"HOME=/home\0EMPTY=\0FLAGS=a=b c\0")
    assert environment_at_start(file) == {"HOME": "/home", "EMPTY": "", "FLAGS": "a=b c"}
    monkeypatch.setenv("LATER", "x")
    assert "LATER" not in environment_at_start()
    file.write_bytes(b"a title\0\0\0")
    assert environment_at_start(file)["LATER"] == "x"


def test_forgetting_the_worker_keeps_other_variables() -> None:
    environment = environment_of({"HOME": "/home"})
    forget_worker(environment)
    assert [name for name in environment if name.startswith("LOCKSTEP_")] == []
    assert environment["HOME"] == "/home"
    show_run_folder(Path("/runs/a"), environment)
    assert [name for name in environment if name.startswith("LOCKSTEP_")] == ["LOCKSTEP_RUN_DIR"]
    # A difference of these names explains no difference of bits.
    assert variable_marks(["LOCKSTEP_RUN_DIR"], (), environment) == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WORKER", "-1", "expected a whole number, 0 or more"),
        ("WORKER", "٣", "expected a whole number, 0 or more"),
        ("AGENT", "0", "expected a whole number, 1 or more"),
        ("CONTROL_FD", "", "expected a whole number, 0 or more"),
        ("RUN_DIR", "runs", "expected an absolute path"),
    ],
)
def test_an_invalid_variable_is_named(name: str, value: str, expected: str) -> None:
    environment = environment_of({}) | {f"LOCKSTEP_{name}": value}
    with pytest.raises(ConfigError) as caught:
        read_worker(environment)
    assert str(caught.value) == f"LOCKSTEP_{name} is {value!r}: {expected}"


@pytest.mark.parametrize("name", [name for name in environment_of({}) if name[:5] == "LOCKS"])
def test_a_missing_variable_is_named(name: str) -> None:
    environment = environment_of({})
    del environment[name]
    with pytest.raises(ConfigError, match=f"^{name} is not set: "):
        read_worker(environment)


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        (None, ("0", "1")),
        ("", ()),
        ("-2", ()),
        ("1", ("1",)),
        ("1,-1,7", ("1",)),
        ("0,7,1", ("0",)),
        ("3", ()),
    ],
)
def test_visible_gpus(listed: str | None, gpus: tuple[str, ...], tmp_path: Path) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(environment, tmp_path) == gpus


def test_without_a_driver_no_gpu_is_visible(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path / "nix") == ()


def test_numbers_count_if_the_driver_does_not_list_its_gpus(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,4"}, tmp_path / "nix") == ("3", "4")


def test_the_cache_of_a_user_without_a_home_is_not_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/a", "HOME": "/b"}) == Path("/a/lockstep")
    assert cache_folder({"HOME": "/b"}) == Path("/b/.cache/lockstep")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cache_folder({}) == Path("~root/.cache/lockstep").expanduser()
    # No system has a user with this id.
    monkeypatch.setattr(os, "geteuid", lambda: 2**31 - 7)
    assert cache_folder({}) == Path("/nonexistent/.cache/lockstep")


def test_variables_of_the_script() -> None:
    variables = parse_variables(["COLOR=blue=green", "EMPTY=", "API_KEY", "COLOR=red"])
    assert variables == {"COLOR": "red", "EMPTY": "", "API_KEY": None}
    here = {"COLOR": "blue", "API_KEY": "abc", "OTHER": "x", "KERAS_BACKEND": "jax"}
    assert unrecorded(variables, here) == {"API_KEY": "abc"}
    assert shared_variables(variables, here) == {"COLOR": "blue", "API_KEY": "abc", "KERAS_BACKEND": "jax"}
    others = {"TF_VAR_password": "abc", "TF_TOKEN_example_org": "abc", "KERAS_HUB_TOKEN": "abc"}
    assert shared_variables((), others | {"TF_XLA_FLAGS": "1"}) == {"TF_XLA_FLAGS": "1"}
    require_variables(variables, here)
    with pytest.raises(ConfigError, match="--env API_KEY: set the variable here"):
        require_variables(variables, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected NAME=VALUE"),
        ("=x", "expected NAME=VALUE"),
        ("A B=x", "expected NAME=VALUE"),
        ("1A", "expected NAME=VALUE"),
        ("OMP_NUM_THREADS=4", "--env OMP_NUM_THREADS: --threads-per-worker sets it"),
        ("PYTHONHASHSEED=4", "--env PYTHONHASHSEED: --seed sets it"),
        ("TF_CONFIG", "the job sets it for each worker"),
        ("LOCKSTEP_WORKER=4", "Lockstep uses it itself"),
        ("WANDB_API_KEY=abc", "give --env WANDB_API_KEY, which records the name alone"),
        ("HF_TOKEN=abc", "give --env HF_TOKEN, which records the name alone"),
    ],
)
def test_variables_that_a_script_cannot_get(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variables([text])
    assert parse_variables(["TOKENIZERS_PARALLELISM=false"])


def test_marks_show_that_variables_differ_and_not_their_values() -> None:
    names = ("RATE", "API_KEY", "DATA", "MISSING", "TF_CONFIG", "XLA_FLAGS", "EMPTY")
    here = {"RATE": "0.1", "API_KEY": "abc", "DATA": "/d", "TF_CONFIG": "{}", "XLA_FLAGS": "-x", "EMPTY": ""}
    marks = variable_marks(names, ["DATA"], here)
    assert marks == {"API_KEY": "set", "DATA": "set", "EMPTY": marks["EMPTY"], "RATE": marks["RATE"]}
    assert len(marks["RATE"]) == len(marks["EMPTY"]) == 4
    assert variable_marks(names, ["DATA"], here | {"RATE": "0.2"})["RATE"] != marks["RATE"]
