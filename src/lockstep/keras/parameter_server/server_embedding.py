"""An `Embedding` whose table is on the parameter servers only. In other jobs, it is a plain `Embedding`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.load_failures import show_refusals
from lockstep.keras.parameter_server.server_tables import (
    NO_ROWS_ON_JAX,
    ServerTable,
    represent,
    server_table,
    tables_of_job,
)
from lockstep.keras.parameter_server.table_rows import VALUES
from lockstep.keras.private.common import embedding_table, layers_of, stored_value
from lockstep.keras.replica_run.merges import current_replica
from lockstep.keras.seeds import seed_of
from lockstep.worker import job
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]

_BLOCK = 1 << 16
"""Rows that are drawn, saved and loaded at a time."""

_DIGEST = "digest"
"""The name of the digest in a saved layer."""

_INITIALIZERS = ("RandomUniform", "RandomNormal", "TruncatedNormal", "Constant", "Zeros", "Ones")
"""Keras's initializers that draw each row in the same way, however many there are."""


@keras.saving.register_keras_serializable("lockstep")
class ServerEmbedding(keras.layers.Embedding):  # type: ignore[misc]
    """A `keras.layers.Embedding` for tables that are larger than a worker's memory.

    In a job with parameter servers, each server creates and keeps a range of the rows. No process has the
    whole table. `fit` trains it like any embedding, and so do scheduled functions on TensorFlow and PyTorch.
    `evaluate` and `predict` read the rows that a batch looks up. Models are saved and weights are loaded in
    blocks of rows. In other jobs, and in a process outside of a job, it is an `Embedding` with the same
    initial values.

    The model has a variable of one row in place of the table. So its number of parameters does not include
    the table, and `get_weights` raises an error.

    Args:
        input_dim: number of rows.
        output_dim: the width of a row.
        embeddings_initializer: an initializer of Keras that draws each row in the same way, such as
            `"uniform"`. It draws blocks of 65,536 rows, each with a seed of its own.
        mask_zero: as in Keras.
        standbys: whether the standby of each server keeps a copy of its rows, so that a lost server does not
            end the job. The rows and their optimizer variables then take twice the memory of all servers.
            The layers of one model have the same value.
        **options: `name`, `dtype` and `trainable` as in Keras.

    Raises:
        ModelError: the initializer depends on the shape of the table, or an option is for whole tables.

    Example:
        >>> import keras, lockstep
        >>> import numpy as np
        >>> layer = lockstep.ServerEmbedding(1_000, 8)
        >>> layer(np.array([[1, 2], [999, -1]])).shape[-1]
        8
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        *,
        standbys: bool = True,
        **options: Any,
    ) -> None:
        self.standbys = standbys
        for name in ("embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank"):
            if options.pop(name, None) is not None:
                raise ModelError(f"a ServerEmbedding has no {name}, which is for a whole table")
        options.pop("lora_alpha", None)
        super().__init__(input_dim, output_dim, embeddings_initializer, mask_zero=mask_zero, **options)
        initializer = self.embeddings_initializer
        if type(initializer).__name__ not in _INITIALIZERS:
            raise ModelError(
                f"a ServerEmbedding draws its rows in blocks, but {type(initializer).__name__} may depend on "
                f"the shape of the whole table; use one of {', '.join(_INITIALIZERS)}"
            )
        self._seed: Any = getattr(initializer, "seed", None)
        if not isinstance(self._seed, int | None):
            raise ModelError("the initializer of a ServerEmbedding has a number as its seed, or none")
        self._table: ServerTable | None = None
        self.built: bool
        # TensorFlow cannot compile a call of Python with XLA.
        if keras.backend.backend() == "tensorflow" and job.current().context.has_servers:
            self.supports_jit = False

    def build(self, input_shape: Any = None) -> None:
        """Create the table, or its rows on this server."""
        if self.built:
            return
        current_job, rows = job.current(), self.input_dim
        served = current_job.context.has_servers
        self._embeddings = self.add_weight(
            shape=(1 if served else rows, self.output_dim),
            initializer="zeros" if served else self._created,
            name="embeddings",
            trainable=True,
        )
        if served:
            # It changes with the table, and so represents the table in comparisons of models.
            self.digest_variable = self.add_weight(
                shape=(4,), initializer="zeros", dtype="int32", name="digest", trainable=False
            )
            self._table = ServerTable(
                tables_of_job(current_job),
                self.path,
                (rows, self.output_dim),
                self.variable_dtype,
                self._drawn,
                self.standbys,
            )
            self._table.digest_variable = self.digest_variable
            represent(self._embeddings, self._table)
        self.built = True

    @property
    def embeddings(self) -> Any:
        """The variable of the table. A job with parameter servers does not have one."""
        if self._table is not None:
            raise ModelError(
                f"the table of layer {self.path!r} is on the parameter servers: look up rows by calling the "
                "layer"
            )
        return super().embeddings

    def call(self, inputs: Any) -> Any:
        """Look up rows."""
        if self._table is None:
            return super().call(inputs)
        table = self._table
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        if current_replica() is not None:
            return self._call_in_function(table, inputs)

        def read(variable: Any) -> Any:
            rows = adapter().steps().on_host(table.look_up, inputs, (self.output_dim,), table.dtype)
            return rows, partial(_refuse_gradient, self.path)

        rows = keras.ops.custom_gradient(read)(keras.ops.convert_to_tensor(self._embeddings))
        return keras.ops.cast(rows, self.compute_dtype)

    def _call_in_function(self, table: ServerTable, ids: Any) -> Any:
        """Look up rows in a scheduled function. The gradient of the variable is that of the rows."""
        backend = keras.backend.backend()
        if backend == "tensorflow":
            from lockstep.keras.parameter_server.tf_functions import rows_looked_up
        elif backend == "torch":
            from lockstep.keras.parameter_server.torch_functions import rows_looked_up
        else:
            raise ModelError(
                f"a scheduled function calls layer {self.path!r}, a ServerEmbedding, {NO_ROWS_ON_JAX}"
            )
        table.note_lookup(self._embeddings)
        shape = self.input_dim, self.output_dim
        rows = rows_looked_up(table.look_up_in_function, ids, stored_value(self._embeddings), shape)
        return keras.ops.cast(rows, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer."""
        return {**super().get_config(), "standbys": self.standbys}

    def save_own_variables(self, store: Any) -> None:
        """Save the rows in blocks, and the slots of the optimizer that the servers have."""
        if not self.built:
            return
        if self._table is None:
            values = keras.ops.convert_to_numpy(self._embeddings)
            for block, numbers in enumerate(_blocks(self.input_dim)):
                store[_key(VALUES, block)] = values[numbers]
            return
        store[_DIGEST] = keras.ops.convert_to_numpy(self.digest_variable)
        for slot in (VALUES, *self._table.slots()):
            for block, numbers in enumerate(_blocks(self.input_dim)):
                store[_key(slot, block)] = self._table.read(numbers, slot)

    def load_own_variables(self, store: Any) -> None:
        """Load the rows that `save_own_variables` has saved. Each server loads its own."""
        if not self.built:
            return
        show_refusals()
        blocks, saved = _blocks(self.input_dim), set(store.keys())
        shapes = [store[key].shape for k in range(len(blocks) + 1) if (key := _key(VALUES, k)) in saved]
        if shapes != [(len(numbers), self.output_dim) for numbers in blocks]:
            raise ModelError(
                f"the saved weights of layer {self.path!r} are not those of a ServerEmbedding with "
                f"{self.input_dim} rows of {self.output_dim} numbers"
            )
        if self._table is None:
            self._embeddings.assign(np.concatenate([store[_key(VALUES, k)] for k in range(len(blocks))]))
            return
        # It is exact from the next call on. Until then, it only has to differ from the earlier digest.
        self.digest_variable.assign(store[_DIGEST] if _DIGEST in saved else [0, 0, 0, self._table.loads + 1])
        slots = [VALUES]
        while _key(len(slots) - 1, 0) in saved:
            slots.append(len(slots) - 1)
        self._table.load(
            (slot, numbers, partial(_stored, store, _key(slot, block)))
            for slot in slots
            for block, numbers in enumerate(blocks)
        )

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ModelError."""
        raise ModelError("a ServerEmbedding cannot be quantized; train a keras.layers.Embedding")

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ModelError."""
        raise ModelError("a ServerEmbedding has no LoRA; train a keras.layers.Embedding")

    def _created(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """Return the initial values of the table. Keras may call this while it traces a function."""
        blocks = [self._drawn_block(first) for first in range(0, shape[0], _BLOCK)]
        return keras.ops.cast(keras.ops.concatenate(blocks), dtype or self.variable_dtype)

    def _drawn(self, start: int, stop: int) -> Array:
        """Return the initial values of a range of rows."""
        made = np.empty((stop - start, self.output_dim), np.dtype(self.variable_dtype))
        for first in range(start - start % _BLOCK, stop, _BLOCK):
            block = keras.ops.convert_to_numpy(self._drawn_block(first))
            begin, end = max(start, first), min(stop, first + len(block))
            made[begin - start : end - start] = block[begin - first : end - first]
        return made

    def _drawn_block(self, first: int) -> Any:
        """Return the initial values of the block that begins with a row."""
        initializer = self.embeddings_initializer
        if self._seed is not None:
            seed = seed_of("rows", self._seed, first) % 2**31
            initializer = type(initializer).from_config({**initializer.get_config(), "seed": seed})
        return initializer((min(_BLOCK, self.input_dim - first), self.output_dim), self.variable_dtype)


def server_layers(model: Any) -> list[Any]:
    """Return the layers of a model whose tables are on the parameter servers."""
    return [layer for layer in layers_of(model) if server_table(embedding_table(layer)) is not None]


def only_chief_reads(current_job: job.Job, model: Any) -> bool:
    """Whether scheduled functions may change a model's rows. Only the chief knows when none runs."""
    return bool(server_layers(model)) and tables_of_job(current_job).scheduling


def refuse_apart(current_job: job.Job, model: Any, action: str) -> None:
    """Raise ModelError if processes would separately read rows that functions may change.

    Args:
        current_job: the job of the process.
        model: the model.
        action: the action that would read rows, such as `evaluate`.
    """
    if only_chief_reads(current_job, model):
        raise ModelError(
            f"{action} of model {model.name!r}, which has a ServerEmbedding, while functions are scheduled: "
            "compile the model in `with strategy.scope():`, so that all processes make this call together"
        )


@contextmanager
def with_zero_rows(model: Any) -> Iterator[None]:
    """Within the block, lookups of a model in tables of servers return zeros, and have gradients."""
    with ExitStack() as stack:
        for layer in server_layers(model):
            stack.enter_context(replaced(layer, "call", partial(_first_row, layer)))
        yield


def meet_servers(current_job: job.Job, model: Any, label: str) -> None:
    """Connect to the servers that have tables of a model, and give its layers the digests of the tables.

    All processes do this at the beginning of a call; see `ServerTables.meet`.
    """
    layers = server_layers(model)
    tables = [table for layer in layers if (table := server_table(embedding_table(layer))) is not None]
    if tables:
        for layer, digest in zip(layers, tables_of_job(current_job).meet(tables, label), strict=True):
            layer.digest_variable.assign(digest.view(np.int32))


def _first_row(layer: Any, ids: Any) -> Any:
    rows = keras.ops.take(embedding_table(layer), keras.ops.zeros_like(ids, dtype="int32"), axis=0)
    return keras.ops.cast(rows, layer.compute_dtype)


def _refuse_gradient(path: str, *_: Any, **__: Any) -> NoReturn:
    raise ModelError(
        f"layer {path!r} is a ServerEmbedding, whose rows have gradients in fit and in scheduled functions "
        "only; use keras.layers.Embedding in your own loops"
    )


def _blocks(rows: int) -> list[Array]:
    """Return the numbers of the rows of each block."""
    return [np.arange(first, min(first + _BLOCK, rows)) for first in range(0, rows, _BLOCK)]


def _key(slot: int, block: int) -> str:
    """Return the name of a block of rows, or of one of their slots, in a saved layer."""
    return f"rows-{block}" if slot == VALUES else f"slot{slot}-{block}"


def _stored(store: Any, key: str) -> Array:
    return np.asarray(store[key])
