"""Each worker downloads the files that the arguments name: plain ones and archives, some of them again."""

import sys
from pathlib import Path

import keras

import lockstep

# From here on, the job continues without a lost worker.
lockstep.MultiWorkerMirroredStrategy()
origin, cache, *names = sys.argv[1:]
for name in names:
    path = keras.utils.get_file(
        name,
        f"{origin}/{name}",
        cache_dir=cache,
        extract=name.endswith(".zip"),
        force_download=name.startswith("new"),
    )
    whole = Path(path, "inside.txt") if name.endswith(".zip") else Path(path)
    print(f"file {name} {whole.stat().st_size} {whole.stat().st_mtime_ns}")
