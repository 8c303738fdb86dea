"""All rows: what `make bench` prints. BACKENDS names Keras backends, or all; JAX alone by default."""

import os

import allreduce
import checkpoints
import joining
import overhead
import placement
import recovery
import scaling
import training
from models import COMPARED
from ways import PEERS


def main() -> None:
    allreduce.main()
    names = os.environ.get("BACKENDS") or "jax"
    for backend in PEERS if names == "all" else names.split():
        for model in COMPARED:
            print()
            training.main(backend, model)
        print()
        training.main(backend, further=True)
    for other in (placement, scaling, overhead, recovery, joining, checkpoints):
        print()
        other.main()


if __name__ == "__main__":
    main()
