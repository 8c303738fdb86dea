"""The processor of this machine, and how to limit the instruction sets that libraries use."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

_CPUINFO = Path("/proc/cpuinfo")


class _InstructionSet(NamedTuple):
    """An instruction set of x86-64: its feature in the kernel's list, and its names in three libraries."""

    name: str
    feature: str
    onednn: str


_LARGEST_FIRST = (
    _InstructionSet("AMX", "amx_tile", "AVX512_CORE_AMX"),
    _InstructionSet("AVX512", "avx512f", "AVX512_CORE"),
    _InstructionSet("AVX2", "avx2", "AVX2"),
    _InstructionSet("AVX", "avx", "AVX"),
    _InstructionSet("SSE4_2", "sse4_2", "SSE41"),
)
CHOOSING_VARIABLES = (
    *("XLA_FLAGS", "ONEDNN_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS"),
    *("MKL_CBWR", "ATEN_CPU_CAPABILITY"),
)
"""The environment variables with which libraries choose their code for a processor."""

_NAMES = tuple(each.name for each in _LARGEST_FIRST)


@cache
def processor_model(file: Path = _CPUINFO) -> str:
    """Return the name of this machine's processor; "unknown" if the kernel does not report it."""
    return _field(file, "model name", "CPU part") or "unknown"


@cache
def processor_features(file: Path = _CPUINFO) -> str:
    """Return the features of this machine's processor that the kernel lists, in alphabetical order."""
    return " ".join(sorted(_field(file, "flags", "Features").split())) or "unknown"


def instruction_set(features: str) -> str:
    """Return the largest instruction set of x86-64 in `processor_features`, or an empty string."""
    names = features.split()
    return next((each.name for each in _LARGEST_FIRST if each.feature in names), "")


def smallest(sets: tuple[str, ...]) -> str:
    """Return the smallest of several results of `instruction_set`, or an empty string if one is empty."""
    return "" if "" in sets else max(sets, key=_NAMES.index)


def limit_of(backend: str, name: str) -> str:
    """Return the environment variables that limit a backend to an instruction set, for a command line.

    See `xla_cpu_max_isa` of XLA, `ONEDNN_MAX_CPU_ISA` of oneDNN and `MKL_CBWR` of Intel's MKL; of these,
    only MKL's mode `COMPATIBLE` exists on all processors.
    """
    xla = f"XLA_FLAGS=--xla_cpu_max_isa={name}"
    onednn = f"ONEDNN_MAX_CPU_ISA={_LARGEST_FIRST[_NAMES.index(name)].onednn}"
    return {"jax": xla, "tensorflow": f"{xla} {onednn}", "torch": f"{onednn} MKL_CBWR=COMPATIBLE"}[backend]


def limited(environment: Mapping[str, str], limit: str) -> dict[str, str]:
    """Return an environment with a limit of `limit_of`, whose flags follow those of the environment."""
    variables = dict(part.split("=", 1) for part in limit.split())
    if "XLA_FLAGS" in variables:
        variables["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {variables['XLA_FLAGS']}".strip()
    return {**environment, **variables}


def common_limit(name: str) -> str:
    """Return the instruction set to which hosts with a larger one are limited, or an empty string.

    Nearly all processors of x86-64 have AVX2.
    """
    return "AVX2" if name in _NAMES[: _NAMES.index("AVX2")] else ""


def _field(file: Path, *names: str) -> str:
    try:
        text = file.read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
