"""The GPUs that CUDA shows for values of `CUDA_VISIBLE_DEVICES`."""

import pytest

from lockstep.system.cuda import visibility
from lockstep.system.nvml import Gpu

GPUS = (
    Gpu(0, uuid="GPU-aa11"),
    Gpu(1, uuid="GPU-aa22", instances=("MIG-1111", "MIG-1122")),
    Gpu(2, uuid="GPU-bb33"),
)


@pytest.mark.parametrize(
    ("listed", "indices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        (" ", ()),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("0,-1,2", (0,)),
        # CUDA uses the number at the beginning of a name.
        ("1gpu,+2", (1, 2)),
        ("GPU-bb33,GPU-aa11", (2, 0)),
        ("GPU-b", (2,)),
        ("MIG-1122", (1,)),
        ("MIG-1111,MIG-1122", (1, 1)),
    ],
)
def test_values_that_cuda_accepts(listed: str | None, indices: tuple[int, ...]) -> None:
    found = visibility(GPUS, listed)
    assert (found.indices, found.problem) == (indices, "")


@pytest.mark.parametrize(
    ("listed", "indices", "problem"),
    [
        ("0,7", (0,), "'7' identifies none of the 3 GPUs here"),
        ("7,0", (), "'7' identifies none of the 3 GPUs here"),
        ("0,7,1", (0,), "'7' identifies none of"),
        ("GPU-cc", (), "'GPU-cc' identifies none of"),
        ("GPU-aa", (), "'GPU-aa' identifies several of"),
        ("MIG-9", (), "'MIG-9' identifies none of"),
        ("all", (), "'all' identifies none of"),
        ("0,,1", (0,), "'' and '0' are names of different kinds"),
        (",0", (), "'' identifies none of"),
        ("0,GPU-aa22", (0,), "'GPU-aa22' and '0' are names of different kinds"),
        ("GPU-aa22,1", (1,), "'1' and 'GPU-aa22' are names of different kinds"),
        ("0,0", (), "'0' is listed twice"),
        ("1,0,2,1", (), "'1' is listed twice"),
        ("GPU-bb33,GPU-b", (), "'GPU-b' is listed twice"),
        # CUDA stops before this entry.
        ("1,9,1", (1,), "'9' identifies none of"),
    ],
)
def test_values_that_cuda_does_not_accept(listed: str, indices: tuple[int, ...], problem: str) -> None:
    found = visibility(GPUS, listed)
    assert found.indices == indices
    assert found.problem.startswith(problem)


def test_numbers_and_uuids_are_distinguished() -> None:
    assert [visibility(GPUS, listed).by_number for listed in ("0", "GPU-aa11", "", None)] == [
        True,
        False,
        False,
        False,
    ]


def test_an_empty_name_matches_no_gpu() -> None:
    assert visibility(GPUS[:1], ",0").indices == ()


def test_on_a_machine_without_gpus() -> None:
    assert visibility((), None).indices == ()
    assert visibility((), "0").problem.startswith("'0' identifies none of the 0 GPUs here")
