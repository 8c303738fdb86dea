"""Computes the same results repeatedly on some cores, for `lockstep doctor --burn-in`.

    python -P -m lockstep.keras.burn_in_program CORES SECONDS

CORES are numbers with commas between them. The process moves from one to the next, and computes on each of
them with each kind of input. It writes a JSON object to stdout. `cores` has, by core and kind, the hashes of
the results and how often each occurred. `changes` is the number of changes of memory to which nothing writes.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from lockstep.keras.small_program import repeatable_bits
from lockstep.system.memory import available_memory

KINDS = 4
"""Number of kinds of inputs."""
_BLOCK = 64 << 20
"""Bytes of the block of memory, at most."""
_LOOK = 1.0
"""Seconds from one look at the block to the next."""


def burn_in(cores: Sequence[int], seconds: float) -> dict[str, object]:
    """Compute for some time, at least once with each kind on each core."""
    end = time.monotonic() + seconds
    block = np.arange(min(_BLOCK, available_memory() // 8) // 8, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    expected, changes, looked = xxhash.xxh3_64_intdigest(block.data), 0, time.monotonic()
    compute = [repeatable_bits(kind) for kind in range(KINDS)]
    counts = {core: [Counter[str]() for _ in compute] for core in cores}
    done = False
    while not done:
        for core, hashes in counts.items():
            _move_to(core)
            for kind, function in enumerate(compute):
                hashes[kind][function()] += 1
        done = time.monotonic() >= end
        if done or time.monotonic() - looked >= _LOOK:
            looked, digest = time.monotonic(), xxhash.xxh3_64_intdigest(block.data)
            # A second look at the same bytes may be correct. Then the first one computed a wrong hash.
            changes += digest != expected
            expected = digest
    return {"cores": counts, "changes": changes}


def _move_to(core: int) -> None:
    """Let all threads run on only one core, because backends compute in their own threads."""
    for task in Path("/proc/self/task").iterdir():
        # A thread may have ended.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


if __name__ == "__main__":
    print(json.dumps(burn_in([*map(int, sys.argv[1].split(","))], float(sys.argv[2]))))
