"""The GPUs of a machine, their faults, and which builds for CUDA a driver supports."""

import threading
from pathlib import Path

import pytest
from tests.system.fake_nvml import LOST, NO_PERMISSION, FakeNvml, h100

from lockstep.errors import UnfitError
from lockstep.system import cuda
from lockstep.system.cuda import LimitedReader, Machine, cuda_of, faults_of, in_time, read_machine, too_old
from lockstep.system.nvml import Driver, Gpu, read

DRIVER = Driver("535.104.05", (12, 2))


def test_the_driver_lists_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeNvml(h100(0), NO_PERMISSION, LOST)
    monkeypatch.setattr(cuda.nvml, "driver_is_present", lambda: True)
    monkeypatch.setattr(cuda.nvml, "load", lambda: fake)
    machine = read_machine(tmp_path)
    assert machine.driver == Driver("570.124.06", (12, 8))
    assert [(gpu.index, gpu.fault) for gpu in machine.gpus or ()] == [
        (0, ""),
        (2, "it has fallen off the bus"),
    ]


def test_without_its_library_the_folder_of_the_driver_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read_machine(tmp_path / "nix") == Machine(())
    (tmp_path / "0000:01:00.0").mkdir()
    assert read_machine(tmp_path) == Machine((Gpu(0),))
    # A driver that lists nothing, as that of another maker.
    monkeypatch.setattr(cuda, "_DRIVERS", (tmp_path,))
    assert read_machine(tmp_path / "nix") == Machine(None)


def test_a_driver_that_hangs_is_awaited_once() -> None:
    answers, readings = threading.Event(), list[int]()

    def read() -> Machine:
        readings.append(1)
        answers.wait()
        return Machine(())

    reader = LimitedReader(read)
    assert reader.within(0.01) is None
    assert reader.within(1e6) is None
    assert len(readings) == 1
    answers.set()
    while (machine := reader.within(60.0)) is None:
        pass
    assert machine == Machine(())


def test_a_driver_that_hangs_is_named() -> None:
    hangs = threading.Event()
    with pytest.raises(UnfitError, match="driver hangs: no answer within"):
        in_time(hangs.wait, 0.01)
    hangs.set()
    assert in_time(hangs.wait) is True


def test_faults_are_found_by_all_names() -> None:
    fake = FakeNvml(h100(0), h100(1, nvmlDeviceGetTemperature=LOST), LOST)
    gpus = read(fake).gpus
    uuid = "GPU-10000000-1111-2222-3333-444444444444"
    fault = "NVIDIA H100 80GB HBM3 at 00000000:2B:00.0): it has fallen off the bus"
    assert faults_of(["0"], gpus) == {}
    assert faults_of(["0", "1"], gpus) == {"1": f"GPU 1 ({fault}"}
    assert faults_of([uuid[:6]], gpus) == {uuid[:6]: f"GPU {uuid[:6]} ({fault}"}
    # The lost one does not tell its name any more.
    assert faults_of(["GPU-2"], gpus) == {"GPU-2": "GPU GPU-2: it has fallen off the bus"}


@pytest.mark.parametrize(
    ("cuda_version", "text"),
    [
        (None, ""),
        ("12", ""),
        ("12.8", ""),
        ("11.8", ""),
        (
            "13.0",
            "torch is built for CUDA 13.0, which the driver, 535.104.05, for CUDA up to 12.2, does not "
            "support: install a driver, 580.65.06 or newer, or a torch built for CUDA 12",
        ),
    ],
)
def test_a_driver_that_is_too_old(cuda_version: str | None, text: str) -> None:
    assert too_old(DRIVER, "torch", cuda_version) == text
    assert too_old(None, "torch", cuda_version) == ""


@pytest.mark.parametrize(
    ("backend", "versions", "needs", "built"),
    [
        ("jax", {"jax": "0.10.2"}, [], None),
        ("jax", {"jax-cuda12-plugin": "0.10.2"}, [], "12"),
        ("torch", {"torch": "2.13.0+cpu"}, [], None),
        ("torch", {"torch": "2.11.0+cu128"}, [], "12.8"),
        (
            "torch",
            {"torch": "2.9.0"},
            ["nvidia-cuda-runtime-cu12==12.8.90; sys_platform == 'x'"],
            "12.8",
        ),
        ("torch", {"torch": "2.12.0"}, ["nvidia-cuda-runtime==13.0.48 ; sys_platform == 'linux'"], "13.0"),
        ("torch", {"torch": "2.12.0"}, ["filelock"], None),
        (
            *("tensorflow", {"tensorflow": "2.21.0"}),
            ["nvidia-cuda-runtime-cu12<13.0,>=12.5.82; extra == 'and-cuda'"],
            "12.5",
        ),
        ("tensorflow", {"tensorflow-cpu": "2.21.0"}, [], None),
    ],
)
def test_the_cuda_version_of_a_build_is_in_its_packages(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    versions: dict[str, str],
    needs: list[str],
    built: str | None,
) -> None:
    monkeypatch.setattr(cuda, "version_of", versions.get)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    assert cuda_of(backend) == built
