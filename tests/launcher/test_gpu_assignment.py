"""The GPUs of each worker."""

import re
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launcher.gpu_assignment import assign, describe_sharing, parse_devices, spread
from lockstep.protocol.job_spec import Devices
from lockstep.system.environment import visible_gpus

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0", (("0",),)),
        ("0,1", (("0",), ("1",))),
        ("0+1, 2+3", (("0", "1"), ("2", "3"))),
        (f"{UUID},MIG-{UUID}/1/0", ((UUID,), (f"MIG-{UUID}/1/0",))),
    ],
)
def test_parse(text: str, entries: tuple[tuple[str, ...], ...]) -> None:
    assert parse_devices(text) == entries


@pytest.mark.parametrize("text", ["", "0,", "a", "0++1", "-1", "0;1", "0 1"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--devices {text}: ") + ".* is not a GPU"):
        parse_devices(text)


def test_parse_refuses_a_gpu_twice_in_a_worker() -> None:
    with pytest.raises(ConfigError, match=r"^--devices 1,0\+0: 0\+0 names a GPU twice$"):
        parse_devices("1,0+0")


@pytest.mark.parametrize(
    ("text", "workers", "devices"),
    [
        ("0", 1, (Devices("0", False),)),
        ("0", 2, (Devices("0", True), Devices("0", True))),
        ("0+1", 2, (Devices("0,1", True), Devices("0,1", True))),
        ("0,1", 2, (Devices("0", False), Devices("1", False))),
        ("0+1,1,2", 3, (Devices("0,1", True), Devices("1", True), Devices("2", False))),
    ],
)
def test_assign(text: str, workers: int, devices: tuple[Devices, ...]) -> None:
    assert assign(parse_devices(text), workers) == devices


def test_assign_refuses_another_number() -> None:
    with pytest.raises(ConfigError, match=r"^--devices has 3 entries for 2 workers: "):
        assign(parse_devices("0,1,2"), 2)


@pytest.mark.parametrize(
    ("gpus", "workers", "visible"),
    [
        ((), 2, []),
        (("4", "5"), 1, [("4", False)]),
        (("4", "5"), 2, [("4", False), ("5", False)]),
        (("4", "5"), 3, [("4", True), ("4", True), ("5", False)]),
        (("4",), 2, [("4", True), ("4", True)]),
    ],
)
def test_spread(gpus: tuple[str, ...], workers: int, visible: list[tuple[str, bool]]) -> None:
    assert spread(gpus, workers) == tuple(Devices(*entry) for entry in visible)


def test_parse_refuses_a_number_without_a_gpu() -> None:
    message = "--devices 0,2: there is no GPU 2; this machine has 2 GPUs, numbered from 0"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_devices("0,2", ("0", "1"))
    assert parse_devices(f"1,{UUID}", ("0", "1")) == (("1",), (UUID,))


@pytest.mark.parametrize(
    ("listed", "workers", "each", "sharing"),
    [
        (None, 1, ["0"], ""),
        (None, 2, ["0", "1"], ""),
        (None, 3, ["0", "0", "1"], "2 workers share GPU 0"),
        (None, 4, ["0", "0", "1", "1"], "up to 2 workers share each of GPU 0 and GPU 1"),
        ("1", 2, ["1", "1"], "2 workers share GPU 1"),
        ("0,7", 2, ["0", "0"], "2 workers share GPU 0"),
        ("0,0", 2, ["0", "0"], "2 workers share GPU 0"),
        ("MIG-x,MIG-y", 2, ["MIG-x", "MIG-y"], ""),
        (UUID, 1, [UUID], ""),
        ("", 2, [], ""),
        ("-1", 2, [], ""),
        ("7", 2, [], ""),
    ],
)
def test_what_each_worker_gets(
    listed: str | None, workers: int, each: list[str], sharing: str, tmp_path: Path
) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    devices = spread(visible_gpus(environment, tmp_path), workers)
    assert [mine.visible for mine in devices] == each
    assert describe_sharing(devices) == sharing
