"""Inputs whose examples cost more than a training step: twelve Fourier transforms of an image each."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from models.model import images

SIDE = 64
TRANSFORMS = 12
KEPT = 28
"""The side of the corner of the spectrum that the model gets, flattened."""
DIVIDED = ("DataLoader", "PyDataset", "tf.data")
"""Those whose reading the workers divide."""
SOURCES = (*DIVIDED, "tf.data, shuffled after map", "generator")

Array = np.ndarray[Any, Any]


def examples(count: int) -> tuple[Array, Array]:
    """Return raw images, and a label for each."""
    return images(count, SIDE, SIDE)


def spectrum(image: Array) -> Array:
    """Transform one image with NumPy."""
    for _ in range(TRANSFORMS):
        image = np.abs(np.fft.fft2(image)) / SIDE
    return image[:KEPT, :KEPT].reshape(-1).astype(np.float32)


def tf_spectrum(image: Any, label: Any) -> tuple[Any, Any]:
    """Transform one image with TensorFlow."""
    import tensorflow as tf

    for _ in range(TRANSFORMS):
        image = tf.abs(tf.signal.fft2d(tf.cast(image, tf.complex64))) / SIDE
    return tf.reshape(image[:KEPT, :KEPT], [KEPT * KEPT]), label


def source(name: str, x: Array, y: Array, batch: int) -> Any:
    """Return the input `name` of batches of `batch` examples, in the arrays' order unless it shuffles."""
    if name == "DataLoader":
        return loader(x, y, batch)
    if name == "PyDataset":
        return py_dataset(x, y, batch)
    if name == "generator":
        return generator(x, y, batch)
    mapped = tf_slices(x, y).map(tf_spectrum)
    if name == "tf.data, shuffled after map":
        mapped = mapped.shuffle(4 * batch, seed=1)
    return mapped.batch(batch, drop_remainder=True)


def loader(x: Array, y: Array, batch: int, sampler: Any = None) -> Any:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Spectra(Dataset[Any]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(spectrum(x[index])), int(y[index])

    return DataLoader(Spectra(), batch, sampler=sampler)


def tf_slices(x: Array, y: Array) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y))


def py_dataset(x: Array, y: Array, batch: int) -> Any:
    import keras

    class Spectra(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(x) // batch

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * batch, (index + 1) * batch)
            return np.stack([spectrum(image) for image in x[rows]]), y[rows]

    return Spectra()


def generator(x: Array, y: Array, batch: int) -> Iterator[Any]:
    """Yield batches, pass after pass."""
    while True:
        for start in range(0, len(x), batch):
            rows = slice(start, start + batch)
            yield np.stack([spectrum(image) for image in x[rows]]), y[rows]
