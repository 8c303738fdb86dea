"""A text classifier on real text that needs no download: which part of Python's library is this about?

    lockstep run -n 2 examples/text.py

The paragraphs come from the docstrings of Python's standard library.
"""

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np

import lockstep

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "tkinter", "xml")
WORDS = 4096
LENGTH = 40


def paragraphs(package: str) -> Iterator[str]:
    """Yield the paragraphs of the docstrings of a package of the standard library."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.relative_to(folder).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from re.split(r"\n\s*\n", ast.get_docstring(node) or "")


def encode(text: str) -> list[int]:
    """Number the words by a hash that is the same on every machine; 0 means no word."""
    words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
    numbers = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return numbers + [0] * (LENGTH - len(numbers))


def load() -> tuple[np.ndarray, np.ndarray]:
    rows, labels = [], []
    for label, package in enumerate(PACKAGES):
        seen = {text for text in paragraphs(package) if len(text.split()) >= 8}
        rows += [encode(text) for text in sorted(seen)]
        labels += [label] * len(seen)
    return np.array(rows, "int32"), np.array(labels, "int32")


def build() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 32),
            keras.layers.Conv1D(32, 3, activation="relu"),
            keras.layers.GlobalMaxPooling1D(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(len(PACKAGES)),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    x, y = load()
    held_out = np.arange(len(x)) % 5 == 0
    with strategy.scope():
        model = build()
    model.fit(
        x[~held_out],
        y[~held_out],
        batch_size=64,
        epochs=20,
        validation_data=(x[held_out], y[held_out]),
        verbose=2,
        callbacks=[keras.callbacks.EarlyStopping(monitor="loss", patience=2)],
    )
    _, accuracy = model.evaluate(x[held_out], y[held_out], verbose=0)
    print(f"accuracy on {held_out.sum()} held-out paragraphs: {accuracy:.4f}")
    print(f"digest: {lockstep.digest(model)}")


if __name__ == "__main__":
    main()
