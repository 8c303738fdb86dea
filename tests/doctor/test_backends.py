"""Findings on backends, judged from complete and incomplete reports of their processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.doctor import backends
from lockstep.doctor.backends import ProbeReport
from lockstep.doctor.check import Finding, Rating
from lockstep.doctor.gpus import Gpus
from lockstep.system.nvml import Gpu, GpuReading
from lockstep.system.programs import ProgramResult

BUILT = {"built": {"version": "1.0", "cuda": None, "cudnn": None}}
FOR_CUDA = {"built": {"version": "1.0", "cuda": "12.8", "cudnn": "91002"}}
CPU = {"devices": ["cpu"]}
COMPUTED = {"device": "cpu", "fault": "", "same": True}


def report(*parts: dict[str, Any], status: int | None = 0, errors: str = "") -> ProbeReport:
    return ProbeReport.of(
        ProgramResult(status, "".join(json.dumps(part) + "\n" for part in parts), errors, 14.0)
    )


def judged(report: ProbeReport, gpus: int = 0, *, chosen: bool = True) -> list[Finding]:
    reading = GpuReading(None, tuple(map(Gpu, range(gpus))), "" if gpus else "no NVIDIA driver")
    return backends.judge_probe("jax", report, Gpus(reading), chosen=chosen)


def test_a_backend_that_computes_is_fine() -> None:
    findings = judged(report(BUILT, CPU, COMPUTED))
    assert [finding.rating for finding in findings] == [Rating.FINE] * 2
    assert findings[-1].name == "jax computes on cpu"
    assert findings[-1].reason == "the same bits twice"


@pytest.mark.parametrize(("chosen", "rating"), [(True, Rating.FAILURE), (False, Rating.WARNING)])
def test_a_failed_import_is_reported(chosen: bool, rating: Rating) -> None:
    (finding,) = judged(report(status=1, errors="Traceback\nImportError: libfoo.so"), chosen=chosen)
    assert finding.rating == rating
    assert finding.reason == "during import it exited with status 1: ImportError: libfoo.so"


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ([BUILT], "while listing its devices"),
        ([BUILT, CPU], "while computing on cpu"),
        ([BUILT, CPU, COMPUTED], "at exit"),
    ],
)
def test_a_crash_is_reported_with_the_last_stage(parts: list[dict[str, Any]], where: str) -> None:
    finding = judged(report(*parts, status=-11))[-1]
    assert finding.rating == Rating.FAILURE
    assert finding.reason == f"{where} it was killed by SIGSEGV"


def test_a_hanging_backend_is_reported_with_the_time() -> None:
    finding = judged(report(BUILT, status=None))[-1]
    assert finding.reason == "while listing its devices it was still running after 14 s"
    assert "try again" in finding.remedy
    assert finding.rating == Rating.FAILURE


@pytest.mark.parametrize(("seconds", "slow"), [(14.0, False), (45.0, True)])
def test_a_slow_backend_is_a_warning(seconds: float, slow: bool) -> None:
    fast = report(BUILT, CPU, COMPUTED)
    findings = judged(replace(fast, result=replace(fast.result, seconds=seconds)))
    verdicts = {finding.name: finding.rating for finding in findings}
    assert verdicts.get("jax is slow") == (Rating.WARNING if slow else None)
    assert max(verdicts.values()) == (Rating.WARNING if slow else Rating.FINE)


def test_a_slow_training_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / backends.RESULT).write_text('{"images_per_second": 5, "hash": "0"}')
    verdicts = [
        backends.judge_training("jax", ProgramResult(status, "", "", seconds), tmp_path)[0].rating
        for status, seconds in ((0, 5.0), (0, 45.0), (None, 60.0))
    ]
    assert verdicts == [Rating.FINE, Rating.WARNING, Rating.FAILURE]


def test_an_incomplete_line_is_ignored() -> None:
    cut = ProgramResult(-9, json.dumps(BUILT) + "\n" + '{"devi', "", 1.0)
    assert ProbeReport.of(cut).devices is None


def test_a_device_that_fails_and_one_that_is_not_deterministic() -> None:
    failed = {"device": "cuda:0", "fault": "RuntimeError: no kernel image", "same": False}
    other = {"device": "cuda:1", "fault": "", "same": False}
    devices = {"devices": ["cuda:0", "cuda:1"]}
    first, second = judged(report(BUILT, devices, failed, other))[-2:]
    assert (first.rating, first.reason) == (Rating.FAILURE, "RuntimeError: no kernel image")
    assert (second.rating, second.name) == (Rating.WARNING, "jax computes on cuda:1")


def test_a_cuda_build_that_does_not_see_a_visible_gpu_is_a_warning() -> None:
    findings = {finding.name: finding for finding in judged(report(FOR_CUDA, CPU, COMPUTED), 1)}
    assert findings["jax sees the GPU"].rating == Rating.WARNING
    assert "jax sees the GPU" not in {finding.name for finding in judged(report(FOR_CUDA, CPU, COMPUTED))}


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ([], "during import"),
        ([BUILT], "while listing its devices"),
        ([BUILT, CPU], "while computing on cpu"),
    ],
)
def test_an_incomplete_report_is_a_failure_despite_status_0(parts: list[dict[str, Any]], where: str) -> None:
    finding = judged(report(*parts))[-1]
    assert finding.rating == Rating.FAILURE
    assert finding.reason == f"{where} it exited with status 0"


def test_other_output_is_ignored() -> None:
    noise = ["welcome", "5", "null", "[1]", '{"built": 3}', '{"device": 1}', '{"devices": 2}', "[" * 10**5]
    parts = [json.dumps(part) for part in (BUILT, CPU, COMPUTED)]
    lines = [line for part in parts for line in (*noise, part)]
    findings = judged(ProbeReport.of(ProgramResult(0, "\n".join(lines), "", 1.0)))
    assert [finding.rating for finding in findings] == [Rating.FINE] * 2


def test_a_process_that_cannot_be_started_is_reported() -> None:
    (finding,) = judged(ProbeReport.of(ProgramResult(None, "", "", 0.0, "Too many open files")))
    assert finding.reason == "it could not be started: Too many open files"
    assert "ulimit" in finding.remedy


def test_what_a_limit_costs_is_reported() -> None:
    limit = "XLA_FLAGS=--xla_cpu_max_isa=AVX2"
    without, limited = (ProgramResult(0, f"some warning\n{seconds}\n", "", 4.0) for seconds in (0.02, 0.026))
    (finding,) = backends.judge_limit("jax", limit, without, limited)
    assert (finding.rating, finding.reason) == (
        Rating.FINE,
        f"a small program takes about 1.3 times as long with {limit}",
    )
    failed = ProgramResult(1, "", "Unknown flag in XLA_FLAGS", 4.0)
    (finding,) = backends.judge_limit("jax", limit, without, failed)
    assert (finding.rating, finding.reason) == (
        Rating.WARNING,
        "a small program exited with status 1: Unknown flag in XLA_FLAGS",
    )
    assert f"KERAS_BACKEND=jax {limit} " in finding.remedy
