"""The whole output of `lockstep doctor`, to the last character, on two machines and over hosts.

After a change of texts, LOCKSTEP_GOLDEN=write pytest tests/doctor/test_golden.py writes the files anew; their
diff is the review.
"""

import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.doctor import bug_report, checkup, machine, report, versions
from lockstep.doctor.check import Check, Finding, Sources, look
from lockstep.doctor.checkup import examine
from lockstep.doctor.links import examine_links
from lockstep.doctor.machine import Clocks, Cores, HostMemory, Limits, SharedMemoryTest, Space, System
from lockstep.doctor.redaction import Identity
from lockstep.doctor.versions import LOCKSTEP, Packages
from lockstep.launcher.backend import Wishes
from lockstep.system.nvml import Driver, Gpu, GpuMemory, GpuReading, Process
from lockstep.system.programs import ProgramResult

GOLDEN = Path(__file__).parent / "golden"
GIB = 2**30
NEEDS = ("keras>=3.12", 'jax>=0.7; extra == "jax"', 'torch>=2.6; extra == "torch"', "numpy>=1.26")
H200 = Gpu(
    0,
    "NVIDIA H200",
    "GPU-aa",
    "00000000:1B:00.0",
    GpuMemory(140 * GIB, 20 * GIB, 120 * GIB),
    GpuMemory(256 * GIB, GIB, 255 * GIB),
    34,
    75.5,
    700.0,
    3,
    (Process(41, "python", 12 * GIB),),
    slowdown=89,
    capability=(9, 0),
)


def lines(*parts: dict[str, object]) -> str:
    return "".join(json.dumps(part) + "\n" for part in parts)


def computes(cuda: str | None, *devices: str) -> ProgramResult:
    built = {"version": "1.0", "cuda": cuda, "cudnn": None if cuda is None else "91002"}
    tried = ({"device": device, "fault": "", "same": True} for device in devices)
    return ProgramResult(0, lines({"built": built}, {"devices": devices}, *tried), "", 6.0)


class Fine:
    """A machine with two GPUs on which everything works."""

    environment: Mapping[str, str] = {
        "KERAS_BACKEND": "jax",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4",
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
        "PYTHONPATH": "modules",
        "LD_PRELOAD": "libc.so.6",
        "https_proxy": "http://me:secret@proxy:3128",
        "no_proxy": "localhost,127.0.0.1",
        "SLURM_JOB_ID": "1",
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "evaluator", "index": 0}}
        ),
    }
    packages = Packages(
        {LOCKSTEP: "0.1", "keras": "3.15.1", "jax": "0.10.2", "torch": "2.13.0", "numpy": "2.3"},
        {LOCKSTEP: NEEDS, "keras": ("numpy",)},
    )
    wishes = Wishes(variable="jax")
    importable = ("jax", "torch")
    reading = GpuReading(Driver("570.124.06", (12, 8)), (H200, replace(H200, index=1, uuid="GPU-bb")))
    facts: Mapping[Any, object] = {
        machine.look_at_system: System("Linux", "x86_64", "6.1", ""),
        machine.look_at_instructions: "AVX512",
        machine.look_at_cores: Cores(8, 8, 4.5),
        machine.look_at_memory: HostMemory(32 * 10**9, 20 * 10**9, None),
        machine.look_at_shared_memory: SharedMemoryTest(2**24, ""),
        machine.look_at_shared_files: Space(8 * 10**9, "", "/dev/shm"),
        machine.look_at_limits: Limits(4096, 2**20, None, 30_000),
        machine.look_at_disk: Space(80 * 10**9, "", "runs/ in the current folder"),
        machine.look_at_clocks: Clocks("tsc", 5e-8, 0.0, 1.8e9, 1.7e9),
    }
    programs: Mapping[str, Sequence[ProgramResult]] = {
        "backend_probe jax": [computes("12.4", "cpu:0", "cuda:0", "cuda:1")],
        "backend_probe torch": [computes("12.4", "cpu", "cuda:0", "cuda:1")],
        "small_program": [ProgramResult(0, "0.02\n", "", 4.0), ProgramResult(0, "0.026\n", "", 4.0)],
        "trial_program": [ProgramResult(0, "", "", 8.4)],
    }


class Broken(Fine):
    """A machine where nothing works."""

    environment: Mapping[str, str] = {
        "CUDA_VISIBLE_DEVICES": "0,7",
        "TF_DETERMINISTIC_OPS": "0",
        "JAX_PLATFORMS": "cpu",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "half",
        "TF_USE_LEGACY_KERAS": "1",
        "PYTHONPATH": "modules:gone",
        "LD_PRELOAD": "/gone.so",
        "https_proxy": "http://me:secret@proxy:3128",
        "LOCKSTEP_WORKER": "1",
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "x",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["elsewhere:1", "nowhere:2"]}, "task": {"type": "worker", "index": 0}}
        ),
    }
    packages = Packages(
        {"keras": "3.11.3", "jax": "0.6", "torch": "2.1.0", "numpy": "1.20", LOCKSTEP: "0.1"},
        {LOCKSTEP: NEEDS, "keras": ("absent",)},
    )
    wishes = Wishes(variable="theano")
    importable = ("jax", "tensorflow", "torch")
    reading = GpuReading(
        Driver("450.51.06", (11, 0)),
        (
            replace(H200, throttled=("thermal",), repair_pending=True, memory=GpuMemory(10**9, 10**9, 0)),
            Gpu(1, "NVIDIA H200", "GPU-cc", "00000000:2B:00.0", fault="it has fallen off the bus"),
        ),
    )
    facts: Mapping[Any, object] = {
        machine.look_at_system: System("Linux", "x86_64", "4.18", "Function not implemented"),
        machine.look_at_instructions: "",
        machine.look_at_cores: Cores(8, 1, None, 3.0),
        machine.look_at_memory: HostMemory(10**9, 299 * 10**6, 5 * 10**7),
        machine.look_at_shared_memory: SharedMemoryTest(2**24, "No memory"),
        machine.look_at_shared_files: Space(None, "Permission denied", "/dev/shm"),
        machine.look_at_limits: Limits(256, 4096, 3, 9),
        machine.look_at_disk: Space(None, "Read-only file system", "the current folder"),
        machine.look_at_clocks: Clocks("hpet", 1.5e-6, 0.25, 0.0, 1e9),
    }
    programs: Mapping[str, Sequence[ProgramResult]] = {
        "backend_probe jax": [ProgramResult(-11, "", "", 1.0)],
        "backend_probe tensorflow": [replace(computes("12.4", "/device:CPU:0"), seconds=45.0)],
        "backend_probe torch": [
            ProgramResult(1, "", "Traceback\nImportError: libcudart.so.12: cannot open", 1.0)
        ],
    }


class Failing(Fine):
    """A machine where only the trials at the end fail."""

    environment: Mapping[str, str] = {}
    reading = GpuReading(None, (), "no driver")
    programs: Mapping[str, Sequence[ProgramResult]] = {
        "backend_probe jax": [computes(None, "cpu:0")],
        "backend_probe torch": [computes(None, "cpu")],
        "small_program": [
            ProgramResult(0, "0.02\n", "", 4.0),
            ProgramResult(1, "", "Unknown flag in XLA_FLAGS", 4.0),
        ],
        "trial_program": [ProgramResult(None, "", "", 60.0)],
    }


def resolve(host: str) -> str:
    if host == "nowhere":
        raise OSError(-2, "Name or service not known")
    return "192.0.2.1"  # It belongs to no machine.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "modules").mkdir()
    for number in (1, 2):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def findings(case: type[Fine], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Return the findings on a machine that is described by facts and by results of programs."""
    if case is Broken:
        (folder / "modules" / "numpy.py").write_text("")
    left = {name: list(results) for name, results in case.programs.items()}

    def start(command: Sequence[str], environment: object, grace: float) -> ProgramResult:
        line = " ".join(command)
        if "trial_program" in line:
            result = '{"images_per_second": 5123.4, "hash": "0123456789abcdef0123"}'
            Path(command[-1]).write_text(result)
        [name] = (name for name in left if name in line)
        return left[name].pop(0)

    def given(checks: Iterable[Check[Any]], sources: Sources) -> dict[Any, Any]:
        return {**look([check for check in checks if check.look not in case.facts], sources), **case.facts}

    monkeypatch.setattr(versions, "python_version", lambda: "3.11.7")
    monkeypatch.setattr(Packages, "installed", lambda: case.packages)
    monkeypatch.setattr(checkup, "look", given)
    sources = Sources(
        environment=case.environment,
        wishes=case.wishes,
        is_importable=lambda name: name in case.importable,
        gpus=lambda: case.reading,
        gpu_folder=folder / "gpus",
        resolve=resolve,
        start=start,
    )
    return examine(sources, lambda line: None, train=True)


def over_hosts() -> list[Finding]:
    def measure(pair: tuple[str, str], encrypted: bool) -> tuple[ProgramResult, dict[str, float]]:
        if "c" in pair:
            return ProgramResult(1, "", "lockstep: host c cannot take part\n  log: x\n", 1.0), {}
        rate = {"barrier": 0.00025, "bytes_per_second": 600e6 if encrypted else 900e6}
        return ProgramResult(0, "", "", 1.0), rate

    return examine_links(["a", "b", "c"], measure, lambda line: None)


def compare(name: str, rows: list[Finding], environment: Mapping[str, str]) -> None:
    rows = [
        replace(
            row,
            reason=row.reason.replace(sys.executable, "/bin/python"),
            remedy=row.remedy.replace(sys.executable, "/bin/python"),
            facts=json.loads(json.dumps(row.facts).replace(sys.executable, "/bin/python")),
        )
        for row in rows
    ]
    table = io.StringIO()
    report.show(rows, report.console(table, False))
    nobody = Identity((), (), ())
    texts = {
        f"{name}.txt": table.getvalue(),
        f"{name}.json": report.as_json(rows) + "\n",
        f"{name}.md": bug_report.markdown(rows, {"system": "Linux"}, environment, nobody),
    }
    for file, text in texts.items():
        if os.environ.get("LOCKSTEP_GOLDEN") == "write":
            (GOLDEN / file).write_text(text)
        assert text == (GOLDEN / file).read_text(), file


@pytest.mark.parametrize("case", [Fine, Broken, Failing], ids=lambda case: case.__name__.lower())
def test_the_output_on_a_machine(case: type[Fine], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(case.__name__.lower(), findings(case, folder, monkeypatch), case.environment)


def test_the_output_over_hosts() -> None:
    compare("hosts", over_hosts(), {})
