"""What a step could gain at most if gradients left for other hosts during the backward pass, on PyTorch.

    overlap.py [MODEL] [--turns N]

One process computes steps of a model, with a hook that notes when each gradient is complete. From that and
the rate of a link follows when the last byte can have left, if gradients leave at no cost, in the order in
which they are complete. The bound compares this with gradients that all leave after the backward pass. Sums,
waits and updates do not count: they are the same for both.
"""

import argparse
import os
import time

from turns import pin

pin(0)
os.environ["KERAS_BACKEND"] = "torch"

import torch  # noqa: E402

torch.set_num_threads(1)

import keras  # noqa: E402

from models import COMPARED  # noqa: E402
from report import print_row  # noqa: E402

TURNS = 9
RATES = {"1 Gbit/s": 1e9 / 8, "100 Mbit/s": 1e8 / 8}


def measure(name: str, turns: int) -> None:
    measured = COMPARED[name]
    model = measured.compiled(keras)
    x, y = map(torch.tensor, measured.examples(measured.batch))
    complete: list[tuple[float, int]] = []
    weights = [variable.value for variable in model.trainable_variables]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(
            lambda one: complete.append((time.perf_counter(), one.grad.numel() * one.grad.element_size()))
        )
    passes: dict[str, list[float]] = {"forward": [], "backward": []}
    gains: dict[str, list[float]] = {rate: [] for rate in RATES}
    for turn in range(turns + 2):
        complete.clear()
        for weight in weights:
            weight.grad = None
        begun = time.perf_counter()
        loss = model.loss(y, model(x, training=True))
        middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        if turn < 2:
            continue
        passes["forward"].append(middle - begun)
        passes["backward"].append(ended - middle)
        size = sum(count for _, count in complete)
        for rate, speed in RATES.items():
            left = begun
            for when, count in complete:
                left = max(left, when) + count / speed
            gains[rate].append((ended - begun + size / speed) / (left - begun))
    print(f"{measured.title} on torch, {measured.batch} examples, {size / 1e6:.1f} MB of gradients")
    for name, values in passes.items():
        print_row(f"{name} pass", values, "ms")
    for rate, values in gains.items():
        print_row(f"bound at {rate}", values, "times")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=COMPARED, help="all by default")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    for chosen in [options.model] if options.model else COMPARED:
        measure(chosen, options.turns)
