"""The cost of Lockstep's input beyond that of its source: arrays and all kinds of datasets.

    input.py [--turns N] [--only WORD]

One worker, on one core, without training: a step reads and checks the rows of one of two replicas.
Another row shows the same source read directly: of arrays the rows of the replica, of datasets whole batches,
since the only worker reads them entirely. Both take turns of one pass, and must give equal data.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from report import print_row
from turns import FailedError, pin

TURNS = 15
BATCH = 64
"""Images per replica."""
SEED = (0, 0, 1)
REPLICAS = 2
OWN_REPLICA = 1
"""The replica of this worker."""
GLOBAL_BATCH = BATCH * REPLICAS
ROWS = slice(OWN_REPLICA * BATCH, (OWN_REPLICA + 1) * BATCH)
SHAPES = {"28x28": ((28, 28), 468), "96x96x3": ((96, 96, 3), 16)}
"""Shapes of images, and the number of steps per pass."""
DTYPES = ("uint8", "float32")
AIM = "0.95"

Pass = Callable[[int], Iterable[Any]]


@dataclass(frozen=True)
class Case:
    """A source, read directly and through Lockstep.

    Attributes:
        name: of the source.
        steps: the number of steps of a pass.
        images: the number of images that a step reads.
        directly: yields (x, y) of each step of a pass with a number; Lockstep yields `rows` of it.
        through: yields the global batches of the same pass.
        rows: the rows of the worker's replica in the data that is read directly.
        aim: the ratio to reach, if any.
    """

    name: str
    steps: int
    images: int
    directly: Pass
    through: Pass
    rows: slice
    aim: str = ""


def main(turns: int = TURNS, only: str = "") -> None:
    pin(0)
    os.environ |= {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3", "NPROC": "1", "OMP_NUM_THREADS": "1"}
    print(f"input, {BATCH} images per replica, {turns} turns of one pass: median (p10-p90)")
    try:
        for case in cases():
            if only in case.name:
                measure(case, turns)
    except FailedError as error:
        sys.exit(str(error))


def measure(case: Case, turns: int) -> None:
    compare(case, list(case.directly(0)), list(taken(case.through(0))))
    sides: list[Pass] = [case.directly, lambda number: taken(case.through(number))]
    seconds = []
    for turn in range(1, turns + 1):
        measured = {side: timed(sides[side], turn) for side in ((0, 1) if turn % 2 else (1, 0))}
        compare(case, [measured[0][1]], [measured[1][1]])
        seconds.append([measured[side][0] for side in (0, 1)])
    images = case.steps * case.images
    print_row(f"{case.name}, directly", [images / hand for hand, _ in seconds], "images/s")
    print_row(f"{case.name}, Lockstep", [images / ours for _, ours in seconds], "images/s")
    print_row("  Lockstep / directly", [hand / ours for hand, ours in seconds], "times", case.aim)
    added = [(ours - hand) / case.steps for hand, ours in seconds]
    print_row("  added to a step", added, "us")


def taken(batches: Iterable[Any]) -> Iterator[Any]:
    """Use each global batch as a step of two workers does."""
    from lockstep.data.batch import PendingBatch

    for given_batch in batches:
        batch = given_batch.read(nullcontext) if isinstance(given_batch, PendingBatch) else given_batch
        share = batch.share(OWN_REPLICA, 1)
        data = share.data()
        batch.check()
        yield data


def timed(begin_pass: Pass, number: int) -> tuple[float, Any]:
    """Return the seconds of a pass, including its begin and end, and the data of its last step."""
    last = None
    begin = time.perf_counter()
    for data in begin_pass(number):
        last = data
    return time.perf_counter() - begin, last


def compare(case: Case, hand: list[Any], ours: list[Any]) -> None:
    import numpy as np

    same = len(hand) == len(ours) and all(
        np.array_equal(np.asarray(mine)[case.rows], np.asarray(given))
        for (mine, given) in zip(leaves(hand), leaves(ours), strict=True)
    )
    if not same:
        raise FailedError(f"{case.name}: the examples read directly and through Lockstep differ")


def leaves(steps: list[Any]) -> list[Any]:
    return [leaf for step in steps for leaf in step]


def cases() -> Iterator[Case]:
    import numpy as np

    for size, (shape, steps) in SHAPES.items():
        for dtype in DTYPES:
            count = steps * GLOBAL_BATCH
            generator = np.random.default_rng(0)
            x = generator.integers(0, 256, (count, *shape), np.uint8).astype(dtype)
            y = generator.integers(0, 10, count)
            what = f"{size} {dtype}"
            yield arrays(x, y, steps, what)
            yield in_order(x, y, steps, what)
            yield py_dataset(x, y, steps, what, scaled=False)
            yield py_dataset(x, y, steps, what, scaled=True)
            yield tf_data(x, y, steps, what, tuned=True)
            yield tf_data(x, y, steps, what, tuned=False)
            yield stream(x, y, steps, what)
            yield data_loader(x, y, steps, what)


def given(x: Any, y: Any = None, *, shuffle: bool = False, batch_size: int | None = None) -> Any:
    from lockstep.keras.input.fit_inputs import global_input
    from lockstep.keras.input.readings import ReadingWorker
    from lockstep.observability.bus import Bus
    from lockstep.protocol.job_spec import JobSettings
    from lockstep.system.clock import SystemClock
    from lockstep.topology import place
    from lockstep.worker.job import Job, JobContext, by_itself

    view = place(REPLICAS, (0,))
    job = Job(JobContext(0, Bus(SystemClock(), 0), JobSettings(threads=1)), (view, by_itself(view)))
    options: dict[str, Any] = {"shuffle": shuffle, "seed": SEED, "unsplit": False}
    return global_input(x, y, batch_size=batch_size, steps=None, **options, reader=ReadingWorker(job, 1))


def arrays(x: Any, y: Any, steps: int, what: str) -> Case:
    """Shuffled arrays, as in `fit`."""
    import numpy as np

    source = given(x, y, shuffle=True, batch_size=GLOBAL_BATCH)

    def directly(number: int) -> Iterator[Any]:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([*SEED, number])))
        order = generator.permutation(len(x))
        for start in range(ROWS.start, len(x), GLOBAL_BATCH):
            rows = order[start : start + BATCH]
            yield x[rows], y[rows]

    return Case(
        f"arrays {what}", steps, BATCH, directly, lambda _: source.get_jax_iterator(), slice(None), AIM
    )


def in_order(x: Any, y: Any, steps: int, what: str) -> Case:
    """Arrays in order, as in `evaluate` and `predict`; read directly, they are not copied."""
    source = given(x, y, batch_size=GLOBAL_BATCH)

    def directly(number: int) -> Iterator[Any]:
        for start in range(ROWS.start, len(x), GLOBAL_BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    return Case(
        f"arrays {what} in order", steps, BATCH, directly, lambda _: source.get_jax_iterator(), slice(None)
    )


def py_dataset(x: Any, y: Any, steps: int, what: str, *, scaled: bool) -> Case:
    """Batches of gathered rows, mirrored and scaled if `scaled`."""
    import keras
    import numpy as np

    order = np.random.default_rng(1).permutation(len(x))

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            rows = order[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]
            images = x[rows]
            return (images[:, :, ::-1] * np.float32(1 / 255) if scaled else images), y[rows]

    dataset = Batches()
    source = given(dataset)
    return Case(
        f"PyDataset {what}{', scaled' if scaled else ''}",
        steps,
        GLOBAL_BATCH,
        lambda _: (dataset[index] for index in range(steps)),
        lambda _: source.get_jax_iterator(),
        ROWS,
        AIM,
    )


def tf_data(x: Any, y: Any, steps: int, what: str, *, tuned: bool) -> Case:
    """A pipeline that TensorFlow tunes while it runs, or without tuning, which is faster on one core."""
    import tensorflow as tf

    def dataset() -> Any:
        batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1024, seed=1).batch(GLOBAL_BATCH)
        if tuned:
            return batches
        options = tf.data.Options()
        options.autotune.enabled = False
        return batches.prefetch(1).with_options(options)

    hand, source = dataset(), given(dataset())
    return Case(
        f"tf.data {what}{'' if tuned else ', untuned'}",
        steps,
        GLOBAL_BATCH,
        lambda _: hand.as_numpy_iterator(),
        lambda _: source.get_jax_iterator(),
        ROWS,
        AIM,
    )


def stream(x: Any, y: Any, steps: int, what: str) -> Case:
    """An endless generator."""
    import numpy as np

    def examples() -> Iterator[Any]:
        generator = np.random.default_rng(1)
        while True:
            rows = generator.integers(0, len(x), GLOBAL_BATCH)
            yield x[rows], y[rows]

    hand, batches = examples(), given(examples()).get_jax_iterator()
    return Case(
        f"generator {what}",
        steps,
        GLOBAL_BATCH,
        lambda _: islice(hand, steps),
        lambda _: islice(batches, steps),
        ROWS,
    )


def data_loader(x: Any, y: Any, steps: int, what: str) -> Case:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), GLOBAL_BATCH)
    source = given(loader)
    return Case(
        f"DataLoader {what}", steps, GLOBAL_BATCH, lambda _: loader, lambda _: source.get_jax_iterator(), ROWS
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--only", default="", metavar="WORD", help="sources whose names contain it")
    options = parser.parse_args()
    main(options.turns, options.only)
