"""All rows: what `make bench` prints. BACKENDS names Keras backends; JAX alone by default."""

import os

import allreduce
import cnn


def main() -> None:
    allreduce.main()
    for backend in (os.environ.get("BACKENDS") or "jax").split():
        print()
        cnn.main(backend)


if __name__ == "__main__":
    main()
