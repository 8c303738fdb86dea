"""All rows: what `make bench` prints."""

import allreduce
import cnn


def main() -> None:
    allreduce.main()
    print()
    cnn.main()


if __name__ == "__main__":
    main()
