"""All rows: what `make bench` prints. BACKENDS names Keras backends, or all; JAX alone by default."""

import os

import allreduce
import checkpoints
import cnn
import joining
import overhead
import recovery


def main() -> None:
    allreduce.main()
    names = os.environ.get("BACKENDS") or "jax"
    for backend in cnn.PEERS if names == "all" else names.split():
        print()
        cnn.main(backend)
    for other in (overhead, recovery, joining, checkpoints):
        print()
        other.main()


if __name__ == "__main__":
    main()
