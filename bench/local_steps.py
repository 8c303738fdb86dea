"""What local steps cost in quality: the validation loss after equal numbers of steps, for several H.

    lockstep run -n 1 --replicas 4 --backend jax --witness off bench/local_steps.py [--seed N] PROBLEM
        [SETTING...]

PROBLEM is `digits` (scikit-learn's handwritten digits), `characters` (the next character of the source of
Python's `argparse` module) or `images` (patches of 16 x 16 x 3 pixels of scikit-learn's two photographs: in
which of ten parts of them are they? The rows of validation patches are in no other patch). Each line has the
training loss of one setting, and its validation loss after each epoch. `average` and `nesterov` are outer
optimizers; `int8` rounds the changes of weights, and `reset` does not send the optimizer's slots. SETTINGs,
such as `synchronous` or `20,int8`, replace all of these. The number of workers does not change a digit.
"""

import argparse
from pathlib import Path

import keras
import numpy as np

import lockstep

LAYERS = keras.layers
H = (1, 5, 20, 100)
BATCH = 64
EPOCH, EPOCHS = 200, 3
"""The number of batches of an epoch, and of epochs."""


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.images[order, :, :, None] / 16).astype("float32"), data.target[order]
    layers = [LAYERS.Conv2D(16, 3, activation="relu"), LAYERS.Flatten(), LAYERS.Dense(64, activation="relu")]
    return (x[:1400], y[:1400]), (x[1400:], y[1400:]), [*layers, LAYERS.Dense(10)]


def characters():
    text = Path(argparse.__file__).read_bytes()
    codes = np.frombuffer(text, np.uint8) & 127
    windows = np.lib.stride_tricks.sliding_window_view(codes, 33)
    order = np.random.default_rng(0).permutation(len(windows) - 8000)[:20000]
    training, validation = windows[order], windows[-6000::3]
    layers = [LAYERS.Embedding(128, 32), LAYERS.Conv1D(64, 8, padding="causal", activation="relu")]
    layers += [LAYERS.Conv1D(64, 8, padding="causal", activation="relu"), LAYERS.Dense(128)]
    return (training[:, :-1], training[:, 1:]), (validation[:, :-1], validation[:, 1:]), layers


def images():
    from sklearn.datasets import load_sample_images

    photographs = np.stack(load_sample_images().images)
    random = np.random.default_rng(0)

    def examples(count, bands):
        y = random.integers(10, size=count)
        rows = 64 * random.integers(6, size=count) + random.choice(bands, count)
        columns = 128 * (y // 2) + random.integers(112, size=count)
        places = zip(y % 2, rows, columns, strict=True)
        x = [photographs[k, row : row + 16, column : column + 16] for k, row, column in places]
        return np.stack(x).astype("float32") / 127.5 - 1, y

    layers = [LAYERS.Conv2D(16, 3), LAYERS.BatchNormalization(), LAYERS.ReLU(), LAYERS.MaxPooling2D()]
    layers += [LAYERS.Conv2D(32, 3), LAYERS.BatchNormalization(), LAYERS.ReLU()]
    return (
        examples(8000, range(33)),
        examples(2000, [48]),
        [*layers, LAYERS.GlobalAveragePooling2D(), LAYERS.Dense(10)],
    )


def repeated(arrays, rows):
    """Return so many rows, in the order of as many passes as are needed."""
    random, count = np.random.default_rng(1), len(arrays[0])
    order = np.concatenate([random.permutation(count) for _ in range(-(-rows // count))])[:rows]
    return [array[order] for array in arrays]


def parsed(text):
    """Return the meaning of a SETTING."""
    return None if text == "synchronous" else lockstep.LocalSteps.parse(text)


def main():
    problems = {"digits": digits, "characters": characters, "images": images}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", choices=problems)
    parser.add_argument("settings", nargs="*", type=parsed, metavar="SETTING")
    parser.add_argument("--seed", type=int, default=1, help="of the weights, and of the examples' order")
    options = parser.parse_args()
    settings = [
        None,
        *(lockstep.LocalSteps(h) for h in H),
        *(lockstep.LocalSteps(h, "nesterov") for h in H[1:]),
        *(lockstep.LocalSteps(h, changes="int8") for h in H[1:]),
        *(lockstep.LocalSteps(h, slots="reset") for h in H[1:]),
        *(lockstep.LocalSteps(h, changes="int8", slots="reset") for h in H[1:]),
    ]
    for local in options.settings or settings:
        keras.utils.clear_session()
        keras.utils.set_random_seed(options.seed)
        training, validation, layers = problems[options.problem]()
        x, y = repeated(training, EPOCH * BATCH)
        with lockstep.MultiWorkerMirroredStrategy(local_steps=local).scope():
            model = keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype.name), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(1e-3), loss)
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=EPOCHS,
            validation_data=validation,
            validation_batch_size=500,
            verbose=0,
        ).history
        label = "synchronous" if local is None else f"local steps {local.text}"
        steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        if lockstep.is_chief():
            losses = " ".join(f"{loss:.4f}" for loss in history["val_loss"])
            name = f"{options.problem} | seed {options.seed} | {label} | {steps} steps"
            print(f"{name} | {history['loss'][-1]:.4f} | {losses}", flush=True)


main()
