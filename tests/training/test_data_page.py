"""The ways of docs/data.md to read data: the number of workers changes no bit, and plain Keras agrees."""

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from object_server import store_server

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
WAYS = dict(re.findall(r"\n## ([\w ]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
PACKAGES = {
    "Parquet": ("jax", ["pyarrow.parquet", "s3fs"]),
    "Hugging Face datasets": ("torch", ["torch", "datasets", "pyarrow.parquet", "s3fs"]),
    "WebDataset": ("jax", ["webdataset", "s3fs"]),
    "TFRecord": ("tensorflow", ["tensorflow"]),
}
"""For each way, a backend and the packages."""
SEEDED = """
import keras

keras.utils.set_random_seed(1)
"""
TRAINING = """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
model.compile("adam", "binary_crossentropy")
history = model.fit(train, epochs=2, verbose=0)
print("losses", *history.history["loss"])
"""
ROWS, FILES = 600, 3
PATIENCE = 1800.0
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = (X.sum(1) > 0).astype("float32")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which programs find the store."""
    with store_server("s3", tmp_path_factory.mktemp("store")) as found:
        yield found | {"AWS_DEFAULT_REGION": found["AWS_REGION"]}


def parquet(rows: slice) -> tuple[str, bytes]:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    table = pyarrow.table({"x": list(X[rows]), "y": Y[rows]})
    pyarrow.parquet.write_table(table, file, row_group_size=32)
    return "parquet/part-{}.parquet", file.getvalue()


def archive(rows: slice) -> tuple[str, bytes]:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for number, (x, y) in enumerate(zip(X[rows], Y[rows], strict=True)):
            for name, values in (("x", x), ("y", y)):
                content = io.BytesIO()
                np.save(content, values)
                member = tarfile.TarInfo(f"{number:04}.{name}.npy")
                member.size = content.tell()
                content.seek(0)
                made.addfile(member, content)
    return "archives/part-{}.tar", file.getvalue()


def write_records(folder: Path) -> None:
    import tensorflow as tf

    folder.mkdir()
    for number, rows in enumerate(parts()):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for x, y in zip(X[rows], Y[rows], strict=True):
                lists = {name: tf.train.FloatList(value=np.ravel(v)) for name, v in (("x", x), ("y", y))}
                features = {name: tf.train.Feature(float_list=values) for name, values in lists.items()}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


def parts() -> list[slice]:
    size = ROWS // FILES
    return [slice(size * number, size * (number + 1)) for number in range(FILES)]


def upload(variables: dict[str, str], made: Callable[[slice], tuple[str, bytes]]) -> None:
    import s3fs

    store = s3fs.S3FileSystem(
        key=variables["AWS_ACCESS_KEY_ID"],
        secret=variables["AWS_SECRET_ACCESS_KEY"],
        client_kwargs={"endpoint_url": variables["AWS_ENDPOINT_URL"], "region_name": variables["AWS_REGION"]},
    )
    for number, rows in enumerate(parts()):
        name, content = made(rows)
        store.pipe(f"bucket/{name.format(number)}", content)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_read_data(way: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    backend, packages = PACKAGES[way]
    for package in packages:
        pytest.importorskip(package)
    environment = os.environ | {"KERAS_BACKEND": backend, "HF_HOME": str(tmp_path / "cache")}
    if "s3://" in WAYS[way]:
        store = request.getfixturevalue("variables")
        environment |= store
        upload(store, archive if way == "WebDataset" else parquet)
    else:
        write_records(tmp_path / "records")
    scoped = "with strategy.scope():" + TRAINING.replace("\n", "\n    ")
    training = scoped if "strategy" in WAYS[way] else TRAINING
    (tmp_path / "train.py").write_text(SEEDED + WAYS[way] + training)

    def run(*words: str) -> tuple[str, str]:
        """Run the script; return its losses, and the digest or nothing."""
        command = [sys.executable, *words, "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        assert "every worker reads the whole dataset" not in done.stderr
        (losses,) = {line for line in done.stdout.splitlines() if line.startswith("losses ")}
        return losses, "".join(re.findall("digest ([0-9a-f]{64}) of model", done.stderr))

    job = ("-m", "lockstep", "run", "--backend", backend, "--replicas", "3")
    losses, digest = run(*job, "-n", "1")
    assert len(digest) == 64
    assert run(*job, "-n", "3") == (losses, digest)
    if way != "WebDataset":
        # With one process, its function is called for all archives, in another order of rows.
        of_plain_keras, _ = run()
        found, wanted = (np.array(line.split()[1:], float) for line in (losses, of_plain_keras))
        assert np.allclose(found, wanted, rtol=1e-5, atol=0.0)


def test_the_page_and_the_test_have_the_same_ways() -> None:
    assert WAYS.keys() == PACKAGES.keys()
