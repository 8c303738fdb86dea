"""All rows: what `make bench` prints. BACKENDS names Keras backends, or all; JAX alone by default."""

import os

import allreduce
import cnn


def main() -> None:
    allreduce.main()
    names = os.environ.get("BACKENDS") or "jax"
    for backend in cnn.PEERS if names == "all" else names.split():
        print()
        cnn.main(backend)


if __name__ == "__main__":
    main()
