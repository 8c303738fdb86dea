"""What CUDA makes of `CUDA_VISIBLE_DEVICES`."""

import pytest

from lockstep.doctor.gpus import Gpu
from lockstep.doctor.shown import shown

GPUS = (
    Gpu(0, uuid="GPU-aa11"),
    Gpu(1, uuid="GPU-aa22", instances=("MIG-1111", "MIG-1122")),
    Gpu(2, uuid="GPU-bb33"),
)


@pytest.mark.parametrize(
    ("listed", "places"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        (" ", ()),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("0,-1,2", (0,)),
        # CUDA takes the number that a name begins with.
        ("1gpu,+2", (1, 2)),
        ("GPU-bb33,GPU-aa11", (2, 0)),
        ("GPU-b", (2,)),
        ("MIG-1122", (1,)),
        ("MIG-1111,MIG-1122", (1, 1)),
    ],
)
def test_what_cuda_takes(listed: str | None, places: tuple[int, ...]) -> None:
    found = shown(GPUS, listed)
    assert (found.places, found.problem) == (places, "")


@pytest.mark.parametrize(
    ("listed", "places", "problem"),
    [
        ("0,7", (0,), "'7' is none of the 3 GPUs here"),
        ("7,0", (), "'7' is none of the 3 GPUs here"),
        ("0,7,1", (0,), "'7' is none of"),
        ("GPU-cc", (), "'GPU-cc' is none of"),
        # It means two.
        ("GPU-aa", (), "'GPU-aa' is none of"),
        ("MIG-9", (), "'MIG-9' is none of"),
        ("all", (), "'all' is none of"),
        ("0,,1", (0,), "'' is of another kind than '0'"),
        (",0", (), "'' is none of"),
        ("0,GPU-aa22", (0,), "'GPU-aa22' is of another kind than '0'"),
        ("GPU-aa22,1", (1,), "'1' is of another kind"),
        ("0,0", (), "'0' is listed twice"),
        ("1,0,2,1", (), "'1' is listed twice"),
        ("GPU-bb33,GPU-b", (), "'GPU-b' is listed twice"),
        # It stops before it comes to that.
        ("1,9,1", (1,), "'9' is none of"),
    ],
)
def test_what_cuda_does_not_take(listed: str, places: tuple[int, ...], problem: str) -> None:
    found = shown(GPUS, listed)
    assert found.places == places
    assert found.problem.startswith(problem)


def test_numbers_and_uuids_are_told_apart() -> None:
    assert [shown(GPUS, listed).by_number for listed in ("0", "GPU-aa11", "", None)] == [
        True,
        False,
        False,
        False,
    ]


def test_a_name_that_is_empty_is_not_the_only_gpu() -> None:
    assert shown(GPUS[:1], ",0").places == ()


def test_on_a_machine_without_gpus() -> None:
    assert shown((), None).places == ()
    assert shown((), "0").problem.startswith("'0' is none of the 0 GPUs here")
