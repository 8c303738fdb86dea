"""The GPUs of each worker."""

import re

import pytest

from lockstep.errors import ConfigError
from lockstep.launcher.gpu_assignment import assign, choose, describe_sharing, parse_devices, spread, visible
from lockstep.protocol.job_spec import Devices
from lockstep.system.nvml import Gpu

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
        ("0", 1, (Devices("0", 1),)),
        ("0", 2, (Devices("0", 2), Devices("0", 2))),
        ("0+1", 2, (Devices("0,1", 2), Devices("0,1", 2))),
        ("0,1", 2, (Devices("0", 1), Devices("1", 1))),
        ("0+1,1,2", 3, (Devices("0,1", 2), Devices("1", 2), Devices("2", 1))),
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
        (("4", "5"), 1, [("4", 1), ("5", 1)]),
        (("4", "5"), 2, [("4", 1), ("5", 1)]),
        (("4", "5"), 3, [("4", 2), ("4", 2), ("5", 1)]),
        (("4",), 2, [("4", 2), ("4", 2)]),
    ],
)
def test_spread(gpus: tuple[str, ...], workers: int, visible: list[tuple[str, int]]) -> None:
    assert spread(gpus, workers) == tuple(Devices(*entry) for entry in visible)


WHOLE = (Gpu(0, uuid="GPU-aa11"), Gpu(1, uuid="GPU-aa22"))
PARTS = (Gpu(0, uuid="GPU-aa11"), Gpu(1, uuid="GPU-bb22", instances=("MIG-1111", "MIG-1122")))
UNDIVIDED = (Gpu(0, uuid="GPU-aa11", instances=()),)
HERE = "here, and CUDA stops there"
MIXED = "'GPU-aa22' and '0' are names of different kinds, and CUDA stops there"
LISTS = "nvidia-smi -L lists their names"


@pytest.mark.parametrize(
    ("gpus", "listed", "workers", "each"),
    [
        (WHOLE, None, 1, ["0:1", "1:1"]),
        (WHOLE, None, 2, ["0:1", "1:1"]),
        (WHOLE, None, 3, ["0:2", "0:2", "1:1"]),
        (WHOLE, "1", 2, ["1:2", "1:2"]),
        (WHOLE, "GPU-aa22,GPU-aa11", 2, ["GPU-aa22:1", "GPU-aa11:1"]),
        (WHOLE, "GPU-aa2", 1, ["GPU-aa2:1"]),
        (WHOLE, "", 2, []),
        (WHOLE, "-1", 2, []),
        (WHOLE, "0,-1,1", 2, ["0:2", "0:2"]),
        (WHOLE, "0,7", 2, ["0:2", "0:2", f"'7' identifies none of the 2 GPUs {HERE}"]),
        (
            WHOLE,
            "0,GPU-aa22",
            1,
            ["0:1", "'GPU-aa22' and '0' are names of different kinds, and CUDA stops there"],
        ),
        (WHOLE, "7", 2, f"'7' identifies none of the 2 GPUs {HERE}"),
        (WHOLE, "0,0", 2, "'0' is listed twice, which CUDA treats as an error"),
        (WHOLE, "GPU-cc", 1, f"'GPU-cc' identifies none of the 2 GPUs {HERE}"),
        (WHOLE, "GPU-aa", 1, f"'GPU-aa' identifies several of the 2 GPUs {HERE}"),
        (PARTS, None, 3, ["0:1", "MIG-1111:1", "MIG-1122:1"]),
        (PARTS, "MIG-1122,MIG-1111", 2, ["MIG-1122:1", "MIG-1111:1"]),
        (PARTS, "1", 2, ["1:2", "1:2"]),
        (PARTS, "MIG-11", 1, f"'MIG-11' identifies several of the 2 GPUs {HERE}"),
        (PARTS, "MIG-9", 1, f"'MIG-9' identifies none of the 2 GPUs {HERE}"),
        (PARTS, "GPU-bb22/1", 1, f"'GPU-bb22/1' identifies none of the 2 GPUs {HERE}"),
        (UNDIVIDED, None, 2, []),
        (
            UNDIVIDED,
            "0",
            2,
            "'0' identifies a GPU that is partitioned (MIG) and has no instance, and CUDA stops there",
        ),
        ((), None, 2, []),
        ((), "0", 1, ["0:1"]),
        (None, "MIG-x,MIG-y", 2, ["MIG-x:1", "MIG-y:1"]),
        (None, None, 2, []),
    ],
)
def test_what_each_worker_gets_from_the_variable(
    gpus: tuple[Gpu, ...] | None, listed: str | None, workers: int, each: list[str] | str
) -> None:
    """NAME:WORKERS for each worker, then what a note says; a text is the refusal."""
    prefix = f"CUDA_VISIBLE_DEVICES={listed}: "
    if isinstance(each, str):
        with pytest.raises(ConfigError, match=f"^{re.escape(prefix + each)}; it shows no GPU. "):
            visible(gpus, listed)
        return
    names, problem = visible(gpus, listed)
    notes = [problem.removeprefix(prefix)] if problem else []
    assert [f"{mine.visible}:{mine.users}" for mine in spread(names, workers, gpus)] + notes == each


@pytest.mark.parametrize(
    ("gpus", "text", "workers", "each"),
    [
        (WHOLE, "0", 2, ["0:2", "0:2"]),
        (WHOLE, "0,GPU-aa11", 2, ["0:2", "GPU-aa11:2"]),
        (WHOLE, "0+1,1", 2, ["0,1:2", "1:2"]),
        (WHOLE, "0,0", 2, ["0:2", "0:2"]),
        (WHOLE, "0,2", 2, f"'2' identifies none of the 2 GPUs {HERE}; {LISTS}"),
        (WHOLE, f"0,{UUID}", 2, f"'{UUID}' identifies none of the 2 GPUs {HERE}; {LISTS}"),
        (WHOLE, "GPU-aa11+GPU-aa1", 1, "GPU-aa11+GPU-aa1 names a GPU twice"),
        (WHOLE, "0+GPU-aa22", 1, f"{MIXED}; {LISTS}"),
        (PARTS, "MIG-1111,MIG-1122", 2, ["MIG-1111:1", "MIG-1122:1"]),
        (PARTS, "1,MIG-1111", 2, ["1:2", "MIG-1111:2"]),
        (PARTS, "MIG-1111+MIG-1122", 1, "CUDA lets a process use only one MIG instance"),
        ((), "0", 1, "this machine has no GPU (see lockstep doctor)"),
        (None, "0,1", 2, ["0:1", "1:1"]),
    ],
)
def test_what_each_worker_gets_from_the_option(
    gpus: tuple[Gpu, ...] | None, text: str, workers: int, each: list[str] | str
) -> None:
    if isinstance(each, str):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'--devices {text}: {each}')}$"):
            assign(parse_devices(text, gpus), workers, gpus)
        return
    devices = assign(parse_devices(text, gpus), workers, gpus)
    assert [f"{mine.visible}:{mine.users}" for mine in devices] == each


@pytest.mark.parametrize(
    ("each", "said"),
    [
        (["0", "1"], ""),
        (["0", "0", "1"], "2 workers share GPU 0"),
        (["0", "0", "1", "1"], "up to 2 workers share each of GPU 0 and GPU 1"),
    ],
)
def test_a_note_names_the_gpus_that_workers_share(each: list[str], said: str) -> None:
    assert describe_sharing(assign(tuple((name,) for name in each), len(each))) == said


ALONE = tuple(Devices(name) for name in "012")
PAIRS = (Devices("0", 2), Devices("0", 2), Devices("1", 2), Devices("1", 2))


@pytest.mark.parametrize(
    ("entries", "slot", "used", "faults", "chosen"),
    [
        (ALONE, 1, "0", "", "1"),
        (ALONE, 1, "0", "1", "2"),
        (ALONE, 1, "02", "1", None),
        (ALONE, 1, "0", "12", None),
        (ALONE, 2, "012", "", None),
        (PAIRS, 1, "01", "", "0"),
        (PAIRS, 1, "1", "0", "1"),
        (PAIRS, 1, "1", "01", None),
        ((Devices("0,1"), Devices("2,3")), 0, "23", "1", None),
    ],
)
def test_the_gpus_of_a_replacement(
    entries: tuple[Devices, ...], slot: int, used: str, faults: str, chosen: str | None
) -> None:
    mine = choose(entries[slot], entries, used, faults)
    assert (mine and mine.visible) == chosen


@pytest.mark.parametrize(
    ("entries", "used", "chosen"), [(ALONE, "0", "2"), (ALONE, "02", "1"), (PAIRS, "0", "1")]
)
def test_the_gpu_of_a_worker_that_leaves_is_used_last(
    entries: tuple[Devices, ...], used: str, chosen: str
) -> None:
    mine = choose(entries[1], entries, used, "", yielding="1")
    assert mine is not None
    assert mine.visible == chosen
