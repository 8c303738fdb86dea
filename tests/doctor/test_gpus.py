"""Findings on GPUs, and on builds for CUDA."""

import json
from dataclasses import replace

import pytest

from lockstep.doctor.check import Finding, Rating, judge
from lockstep.doctor.checkup import CHECKS
from lockstep.doctor.gpus import Gpus, describe, judge_build, look_at_gpus
from lockstep.system.nvml import Driver, Gpu, GpuMemory, GpuReading, Process

GIB = 2**30
DRIVER = Driver("570.124.06", (12, 8))
H100 = Gpu(
    0,
    "NVIDIA H100",
    "GPU-aa",
    "00000000:1B:00.0",
    GpuMemory(80 * GIB, 20 * GIB, 60 * GIB),
    GpuMemory(128 * GIB, GIB, 127 * GIB),
    34,
    75.5,
    700.0,
    3,
    (Process(41, "python", 12 * GIB), Process(42, "", None)),
    slowdown=89,
    capability=(9, 0),
)
V100 = replace(H100, index=1, name="Tesla V100", uuid="GPU-bb", capability=(7, 0))
LOST = Gpu(1, "NVIDIA H100", "GPU-cc", "00000000:2B:00.0", fault="it has fallen off the bus")
DENIED = Gpu(0, fault="this process may not use it", denied=True)


def judged(*gpus: Gpu, listed: str | None = None, order: str | None = None) -> dict[str, Finding]:
    findings = findings_on(GpuReading(DRIVER, gpus), listed, order)
    for finding in findings:
        json.dumps(finding.facts)
        assert bool(finding.remedy) == (finding.rating > Rating.FINE)
    return {finding.name: finding for finding in findings}


def findings_on(reading: GpuReading, listed: str | None = None, order: str | None = None) -> list[Finding]:
    return judge("gpus", CHECKS["gpus"], {look_at_gpus: Gpus(reading, listed, order)})


def built(cuda: str | None, *gpus: Gpu, driver: Driver | None = DRIVER, backend: str = "jax") -> Finding:
    finding = judge_build(GpuReading(driver, gpus or (H100,)), backend, cuda, "9.10.2" if cuda else None)
    json.dumps(finding.facts)
    return finding


def test_several_gpus_of_different_models() -> None:
    old = Gpu(1, "GeForce GT 710", temperature=41, processes=())
    rows = judged(H100, old)
    assert list(rows) == ["driver", "GPU 0", "GPU 1"]
    assert rows["driver"].reason == "570.124.06, for CUDA up to 12.8"
    assert rows["driver"].facts == {"version": "570.124.06", "cuda": (12, 8)}
    assert rows["GPU 0"].reason == (
        "NVIDIA H100, memory 20.0 of 80.0 GiB, BAR1 1.0 of 128.0 GiB, temperature 34 C, power 76 of 700 W, "
        "utilization 3 %, processes 41 python (12.0 GiB), 42"
    )
    assert rows["GPU 1"].reason == "GeForce GT 710, temperature 41 C, processes none"
    assert {row.rating for row in rows.values()} == {Rating.FINE}


def test_the_facts_contain_all_values() -> None:
    facts = judged(H100)["GPU 0"].facts
    assert facts["memory"] == {"total": 80 * GIB, "used": 20 * GIB, "free": 60 * GIB}
    assert facts["processes"][0] == {"pid": 41, "name": "python", "memory": 12 * GIB}
    assert (facts["bar1"]["used"], facts["power_limit"], facts["uuid"], facts["shown"]) == (
        GIB,
        700.0,
        "GPU-aa",
        True,
    )


def test_a_gpu_that_reports_nothing() -> None:
    assert describe(Gpu(3)) == "an unknown model"
    assert judged(Gpu(0))["GPU 0"].rating == Rating.FINE


def test_no_gpu_is_fine() -> None:
    (only,) = findings_on(GpuReading(None))
    assert (only.rating, only.reason) == (Rating.FINE, "no GPU; workers compute on the CPU")
    (only,) = findings_on(GpuReading(None, (), "none on the PCI bus, and no driver"), "0")
    assert only.reason == "no GPU (none on the PCI bus, and no driver); workers compute on the CPU"


def test_a_gpu_without_a_driver_is_a_warning() -> None:
    (only,) = findings_on(GpuReading(None, (), "there is a device, but no driver", "install it"))
    assert (only.rating, only.remedy) == (Rating.WARNING, "install it")
    assert only.reason == "there is a device, but no driver; workers compute on the CPU"


def test_a_driver_without_gpus() -> None:
    driver, gpus = findings_on(GpuReading(DRIVER, (), "the driver does not support it", "look"))
    assert (driver.rating, gpus.rating) == (Rating.FINE, Rating.WARNING)
    assert findings_on(GpuReading(Driver("570.124.06", None)))[0].reason == "570.124.06"


def test_a_lost_gpu_that_jobs_use_is_a_failure() -> None:
    rows = judged(H100, LOST)
    lost = rows["GPU 1"]
    assert lost.rating == Rating.FAILURE
    assert lost.reason == "NVIDIA H100 at 00000000:2B:00.0: it has fallen off the bus"
    assert "dmesg" in lost.remedy
    assert "until then, name the UUIDs of the others" in lost.remedy
    assert rows["GPU 0"].rating == Rating.FINE
    assert "until then" not in judged(replace(LOST, index=0))["GPU 0"].remedy


def test_a_lost_gpu_that_jobs_do_not_use_is_a_warning() -> None:
    lost = judged(H100, LOST, listed="GPU-aa")["GPU 1"]
    assert lost.rating == Rating.WARNING
    assert lost.reason.endswith("CUDA_VISIBLE_DEVICES hides it")


def test_gpus_assigned_to_other_jobs_are_fine() -> None:
    mine = replace(H100, index=1)
    rows = judged(DENIED, mine, listed="0")
    assert rows["GPU 0"].rating == Rating.FINE
    assert rows["GPU 0"].reason == "this process may not use it"
    # CUDA counts only GPUs that it may use.
    assert rows["CUDA_VISIBLE_DEVICES"].facts["shown"] == [1]
    assert rows["GPU 1"].facts["shown"]


def test_no_permitted_gpu_is_a_warning() -> None:
    rows = judged(DENIED, replace(DENIED, index=1), listed="0")
    assert "CUDA_VISIBLE_DEVICES" not in rows
    assert rows["GPU 1"].rating == Rating.WARNING
    assert "/dev/nvidia1" in rows["GPU 1"].remedy


@pytest.mark.parametrize(
    ("gpu", "reason", "remedy"),
    [
        (replace(H100, temperature=89), "throttled because it is hot (from 89 C)", "fans"),
        (replace(H100, throttled=("thermal",), slowdown=None), "throttled because it is hot", "fans"),
        (replace(H100, repair_pending=True), "is pending replacement", "--gpu-reset -i 0"),
        (replace(H100, repair_failed=True), "could not be replaced", "replace the GPU"),
        (replace(H100, instances=()), "no instance exists", "-mig 0"),
    ],
)
def test_a_gpu_with_a_problem_is_a_warning(gpu: Gpu, reason: str, remedy: str) -> None:
    row = judged(gpu)["GPU 0"]
    assert row.rating == Rating.WARNING
    assert row.reason.startswith("NVIDIA H100, memory 20.0 of 80.0 GiB")
    assert reason in row.reason
    assert remedy in row.remedy
    # For a GPU that no job uses, this does not matter.
    assert judged(gpu, listed="")["GPU 0"].rating == Rating.FINE


@pytest.mark.parametrize(
    "gpu",
    [
        replace(H100, temperature=88),
        replace(H100, temperature=99, slowdown=None),
        replace(H100, temperature=None),
        replace(H100, instances=("MIG-1",)),
        replace(H100, memory=GpuMemory(80 * GIB, 72 * GIB, 8 * GIB)),
    ],
)
def test_a_gpu_just_within_the_limits_is_fine(gpu: Gpu) -> None:
    assert judged(gpu)["GPU 0"].rating == Rating.FINE


def test_memory_used_by_other_processes_is_a_warning() -> None:
    full = replace(H100, memory=GpuMemory(80 * GIB, 79 * GIB, GIB))
    row = judged(full)["GPU 0"]
    assert row.rating == Rating.WARNING
    assert row.reason.endswith("only 1.0 GiB of its memory is free: 41 python (12.0 GiB) and 42 use it")
    assert "kill 41 42; or name other GPUs in CUDA_VISIBLE_DEVICES" in row.remedy
    for unseen in (None, ()):
        assert "another container" in judged(replace(full, processes=unseen))["GPU 0"].remedy


def test_all_problems_of_a_gpu_are_reported() -> None:
    row = judged(replace(H100, throttled=("thermal",), repair_pending=True))["GPU 0"]
    assert "hot" in row.reason
    assert "pending" in row.reason
    assert "fans" in row.remedy
    assert "reset" in row.remedy


@pytest.mark.parametrize(
    ("listed", "rating", "reason"),
    [
        ("-1", Rating.FINE, "'-1' shows no GPU: workers compute on the CPU"),
        ("", Rating.FINE, "'' shows no GPU: workers compute on the CPU"),
        ("1", Rating.FINE, "'1' shows GPU 1"),
        ("1,0", Rating.FINE, "'1,0' shows GPU 1 and 0"),
        (
            "0,7",
            Rating.WARNING,
            "'7' identifies none of the 2 GPUs here, and CUDA stops there: it shows GPU 0",
        ),
        (
            "GPU-zz",
            Rating.WARNING,
            "'GPU-zz' identifies none of the 2 GPUs here, and CUDA stops there: it shows no GPU",
        ),
        ("0,0", Rating.WARNING, "'0' is listed twice, which CUDA treats as an error: it shows no GPU"),
    ],
)
def test_cuda_visible_devices(listed: str, rating: Rating, reason: str) -> None:
    row = judged(H100, replace(H100, index=1, uuid="GPU-bb"), listed=listed)["CUDA_VISIBLE_DEVICES"]
    assert (row.rating, row.reason) == (rating, reason)


def test_hidden_gpus_are_marked() -> None:
    rows = judged(H100, V100, listed="GPU-bb")
    assert rows["GPU 0"].reason.endswith("; CUDA_VISIBLE_DEVICES hides it")
    assert not rows["GPU 0"].facts["shown"]
    assert rows["GPU 1"].facts["shown"]


@pytest.mark.parametrize(
    ("listed", "order", "rating"),
    [
        ("0", None, Rating.WARNING),
        ("1,0", "FASTEST_FIRST", Rating.WARNING),
        ("0", "PCI_BUS_ID", Rating.FINE),
        ("0,1", None, Rating.FINE),
        ("GPU-bb", None, Rating.FINE),
    ],
)
def test_numbers_are_ambiguous_for_different_models(listed: str, order: str | None, rating: Rating) -> None:
    assert judged(H100, V100, listed=listed, order=order)["CUDA_VISIBLE_DEVICES"].rating == rating


@pytest.mark.parametrize("cuda", ["12.8", "12.4", "12", "11.8", "10.2", "12.5.1"])
def test_a_driver_runs_its_own_cuda_and_older_ones(cuda: str) -> None:
    finding = built(cuda)
    assert finding.rating == Rating.FINE
    assert finding.reason == f"built for CUDA {cuda} and cuDNN 9.10.2, which the driver supports"
    assert not finding.remedy


def test_a_newer_minor_version_works_without_ptx() -> None:
    finding = built("12.9")
    assert finding.rating == Rating.FINE
    assert "but the driver supports up to 12.8: only code" in finding.reason


def test_a_newer_major_version_does_not_work() -> None:
    finding = built("13.0")
    assert finding.rating == Rating.WARNING
    assert finding.reason.endswith("which the driver, 570.124.06, does not support")
    assert finding.remedy == "install a driver, 580.65.06 or newer, or a jax built for CUDA 12"
    assert built("14.0").remedy == "install a newer driver, or a jax built for CUDA 12"


@pytest.mark.parametrize(
    ("version", "newest", "cuda", "works"),
    [
        ("450.51.06", (11, 0), "11.0", True),
        ("450.51.06", (11, 0), "11.8", False),
        ("450.80.02", (11, 0), "11.8", True),
        ("470.256.02", (11, 4), "12.0", False),
        ("525.60.13", (12, 0), "12.9", True),
        ("525.60.11", (12, 0), "12.9", False),
        # Before CUDA 11, newer minor versions do not work.
        ("418.87", (10, 1), "10.2", False),
        # The installed CUDA is newer than that of the driver.
        ("535.183.01", (13, 0), "13.0", True),
        ("535.183.01", None, "12.9", True),
        ("535.183.01", None, "13", False),
        ("580.65.06", None, "13.1", True),
        ("of an unknown version", None, "12.4", False),
    ],
)
def test_the_oldest_driver_that_runs_a_build(
    version: str, newest: tuple[int, int] | None, cuda: str, works: bool
) -> None:
    finding = built(cuda, driver=Driver(version, newest))
    assert (finding.rating == Rating.FINE) == works
    assert bool(finding.remedy) != works


def test_a_build_without_code_for_a_gpu_is_a_warning() -> None:
    driver = Driver("580.65.06", (13, 0))
    finding = built("13.0", H100, V100, driver=driver)
    assert finding.rating == Rating.WARNING
    assert finding.reason.endswith("which has no code for Tesla V100")
    assert built("12.8", H100, V100, driver=driver).rating == Rating.FINE
    assert built("13.0", H100, replace(V100, capability=None), driver=driver).rating == Rating.FINE
    assert built("13.0", replace(V100, capability=(7, 5)), driver=driver).rating == Rating.FINE


@pytest.mark.parametrize(
    ("backend", "newest", "remedy"),
    [
        ("jax", (12, 8), "pip install 'jax[cuda12]'"),
        ("jax", (13, 1), "pip install 'jax[cuda13]'"),
        ("jax", (14, 0), "pip install 'jax[cuda13]'"),
        ("jax", (11, 4), "install a driver, 525.60.13 or newer, and a jax built for CUDA"),
        ("jax", None, "pip install 'jax[cuda12]'"),
        ("tensorflow", (12, 8), "pip install 'tensorflow[and-cuda]'"),
        ("torch", (12, 8), "install it for CUDA 12, as pytorch.org/get-started describes"),
        ("other", (12, 8), "install a other built for CUDA 12"),
    ],
)
def test_a_build_without_cuda_on_a_machine_with_gpus(
    backend: str, newest: tuple[int, int] | None, remedy: str
) -> None:
    finding = built(None, H100, LOST, driver=Driver("570.124.06", newest), backend=backend)
    assert finding.rating == Rating.WARNING
    assert finding.reason == "built without CUDA, so it computes on the CPU, despite 1 GPU"
    assert finding.remedy == remedy


@pytest.mark.parametrize("cuda", [None, "12.8", "13.0"])
def test_every_build_is_fine_without_a_usable_gpu(cuda: str | None) -> None:
    for reading in (
        GpuReading(None),
        GpuReading(DRIVER),
        GpuReading(DRIVER, (LOST,)),
        GpuReading(None, (), "x", "y"),
    ):
        finding = judge_build(reading, "jax", cuda, None)
        assert (finding.rating, finding.remedy) == (Rating.FINE, "")
        assert finding.reason.endswith("and there is no GPU that it could use")


@pytest.mark.parametrize(
    ("given", "shown"),
    [("91002", "9.10.2"), ("8902", "8.9.2"), ("9.8.0.87", "9.8.0.87"), ("9", "9")],
)
def test_the_version_of_cudnn(given: str, shown: str) -> None:
    reason = judge_build(GpuReading(DRIVER, (H100,)), "torch", "12.8", given).reason
    assert reason.startswith(f"built for CUDA 12.8 and cuDNN {shown}, ")


def test_an_invalid_cuda_version_is_not_judged() -> None:
    assert built("unknown").rating == Rating.FINE
