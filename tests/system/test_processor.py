"""The processor as the kernel describes it, and the limits of instruction sets."""

from pathlib import Path

import pytest

from lockstep.system.processor import (
    instruction_set,
    limit_of,
    processor_features,
    processor_model,
    smallest,
)

CPUINFO = """\
model name : Some Processor
flags : sse4_2 fpu avx avx2

model name : Other Processor
flags : none
"""


def test_the_first_processor_is_described(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(CPUINFO)
    assert (processor_model(file), processor_features(file)) == ("Some Processor", "avx avx2 fpu sse4_2")
    assert instruction_set(processor_features(file)) == "AVX2"
    assert processor_model(tmp_path / "missing") == processor_features(tmp_path / "missing") == "unknown"
    assert instruction_set("unknown") == ""


def test_hosts_are_limited_to_what_all_have() -> None:
    assert smallest(("AVX512", "AVX2")) == smallest(("AVX2", "AMX")) == "AVX2"
    assert smallest(("AVX512", "")) == ""


@pytest.mark.parametrize(
    ("backend", "limit"),
    [
        ("jax", "XLA_FLAGS=--xla_cpu_max_isa=AVX512"),
        ("tensorflow", "XLA_FLAGS=--xla_cpu_max_isa=AVX512 ONEDNN_MAX_CPU_ISA=AVX512_CORE"),
        ("torch", "ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=COMPATIBLE"),
    ],
)
def test_each_library_has_its_name_for_an_instruction_set(backend: str, limit: str) -> None:
    assert limit_of(backend, "AVX512") == limit
