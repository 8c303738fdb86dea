"""Distributed datasets in graphs of TensorFlow.

A graph never holds the values of replicas: it takes an element, the host stores it, and the graph continues
with its handle. All elements come from an iterator of `tf.data`: the user's, or one over the handles of
elements that the host reads. While a graph waits for it, the only thread for operations is free for the
reader.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any
from weakref import finalize

import tensorflow as tf

from lockstep.errors import DataError, LockstepError
from lockstep.keras.backends.tf_graphs import call_python
from lockstep.keras.input.distributed_dataset import DistributedDataset, DistributedIterator
from lockstep.keras.input.sources import GlobalBatchPass, GlobalBatchSource, Pass, Source, StreamBatches
from lockstep.keras.input.streams import Form, array_of
from lockstep.keras.nests import leaves_of, packed
from lockstep.keras.per_replica import Registry, Spec, ValueStore
from lockstep.keras.replica_run.runner import Runner
from lockstep.keras.tf_per_replica import symbolic
from lockstep.worker.script import keep_original

_END = -1
"""In place of a handle: the pass has ended."""

_PASSES_KEPT = 4
"""How many passes begun by graphs a dataset keeps alive, for nested loops."""


class TensorFlowDataset(DistributedDataset, tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A distributed dataset over which graphs can also iterate.

    Attributes:
        number: its number in graphs.
    """

    def __init__(self, runner: Runner, source: Source) -> None:
        super().__init__(runner, source)
        self._begun: deque[TensorFlowIterator] = deque(maxlen=_PASSES_KEPT)
        self._in_graphs: list[Any] = []
        self.number = _datasets.add(self)

    def __iter__(self) -> Any:
        return self.begin(self.source.begin()) if tf.executing_eagerly() else self._begin_in_graph()

    def begin(self, elements: Pass) -> "TensorFlowIterator":
        """Count a new pass; return its iterator."""
        self._passes += 1
        return TensorFlowIterator(self, elements, self._passes)

    @property
    def element_spec(self) -> Any:
        """The known specs of the elements: a nest of specs of `PerReplica`, as for `input_signature`."""
        return _signature(self.source.form(), self.store)

    @property
    def cardinality(self) -> Any:
        """The number of elements of a pass, like that of a `tf.data.Dataset`."""
        length = self.source.length
        if length is None or length == inf:
            return tf.constant(-2 if length is None else -1, tf.int64)
        return tf.constant(int(length), tf.int64)

    @property
    def in_tensors(self) -> Any:
        """The `tf.data.Dataset` whose elements are split, or None if they do not come from one."""
        return self.source.in_tensors if isinstance(self.source, GlobalBatchSource) else None

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the last state of a pass in which `reduce_func(state, element)` returns the next state."""
        if tf.executing_eagerly():
            state = initial_state
            for element in self:
                state = reduce_func(state, element)
            return state
        iterator = self._begin_in_graph()

        def body(handle: Any, state: Any) -> tuple[Any, Any]:
            state = reduce_func(state, iterator.element(handle))
            return iterator.handle_or_end(), state

        start = iterator.handle_or_end(), initial_state
        _, state = tf.while_loop(lambda handle, _: handle != _END, body, start, parallel_iterations=1)
        return state

    def _begin_in_graph(self) -> "GraphIterator":
        """Return a pass that begins when the graph is executed."""
        with tf.init_scope():
            form = self.source.form()
        if self.in_tensors is None:
            handles = dataset_of_handles(lambda: self.begin(self.source.begin()).handles(form.specs))
            self._in_graphs.append(handles)
            return GraphIterator(tf.zeros((), tf.int64), iter(handles), self.number, True)
        number = call_python(self._begin_in_python, [], tf.int64)
        number.set_shape(())
        return GraphIterator(number, iter(self.in_tensors), self.number, False)

    def _begin_in_python(self) -> int:
        assert isinstance(self.source, GlobalBatchSource)
        self._begun.append(self.begin(self.source.begin_in_graph()))
        return self._begun[-1].number


class TensorFlowIterator(DistributedIterator, tf.distribute.DistributedIterator):  # type: ignore[misc]
    """One pass over a dataset, which graphs can continue: as an argument, or by capturing it.

    Attributes:
        number: its number in graphs.
    """

    def __init__(self, dataset: TensorFlowDataset, elements: Pass, number: int) -> None:
        super().__init__(dataset, elements, number)
        self.number = _iterators.add(self)
        self._dataset_number = dataset.number
        self._symbols: list[GraphIterator] = []
        # Otherwise TensorFlow may call Python after the interpreter has ended.
        finalize(self, self._symbols.clear)

    def __next__(self) -> Any:
        return super().__next__() if tf.executing_eagerly() else self.in_graph().get_next()

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            tf.errors.OutOfRangeError: there is no further element.
        """
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "the distributed dataset has ended") from None

    def get_next_as_optional(self) -> Any:
        """Return the next element, or an empty optional at the end."""
        if tf.executing_eagerly():
            return super().get_next_as_optional()
        return self.in_graph().get_next_as_optional()

    @property
    def element_spec(self) -> Any:
        """The known specs of the elements: a nest of specs of `PerReplica`, as for `input_signature`."""
        return _signature(self._current.form(), self._dataset.store)

    def __tf_tracing_type__(self, context: Any) -> "IteratorType":
        return IteratorType(self.in_graph())

    def in_graph(self) -> "GraphIterator":
        """Return the iterator for graphs; if the form is otherwise unknown, read the first element ahead."""
        if not self._symbols:
            with tf.init_scope():
                self._symbols.append(self._made())
        return self._symbols[0]

    def _made(self) -> "GraphIterator":
        number, dataset = tf.constant(self.number, tf.int64), self._dataset_number
        if (batches := self._stream_batches()) is not None and batches.reader is not None:
            iterator = batches.reader.iterator
            if isinstance(iterator, tf.data.Iterator):
                return GraphIterator(number, iterator, dataset, False)
        specs = self._current.form().specs
        handles = iter(dataset_of_handles(lambda: self.handles(specs)))
        return GraphIterator(number, handles, dataset, True)

    def publish(self, leaves: Sequence[Any]) -> int:
        """Store an element that a graph has taken from `tf.data`; return its handle."""
        batches = self._stream_batches()
        assert batches is not None
        batch = batches.batch_of(packed(self._current.form().nest, [array_of(leaf) for leaf in leaves]))
        self._taken += 1
        return self._dataset.store.put(self._dataset.source.values(batch, self._taken))

    def _stream_batches(self) -> StreamBatches | None:
        """Return the batches of the pass if every worker reads all of them; otherwise None."""
        batches = self._current.batches if isinstance(self._current, GlobalBatchPass) else None
        return batches if isinstance(batches, StreamBatches) else None

    def handles(self, specs: Sequence[Spec]) -> Iterator[int]:
        """Read the remaining elements one by one as requested; yield their handles.

        Raises:
            DataError: an element does not match the `specs` for which a graph was traced.
        """
        try:
            while True:
                try:
                    values = self._next()
                except StopIteration:
                    return
                if values.specs != specs:
                    raise DataError(
                        f"an element of the dataset has leaves like {values.specs} where the first had "
                        f"{specs}; a graph needs elements of one structure: read them outside of it, or "
                        "from a tf.data.Dataset that declares them"
                    )
                yield self._dataset.store.put(values)
        except LockstepError as error:
            keep_original(error)
            raise


_datasets: Registry[TensorFlowDataset] = Registry(
    "the dataset that a graph reads no longer exists: keep a reference to it"
)
_iterators: Registry[TensorFlowIterator] = Registry(
    "the iterator that a graph reads no longer exists: keep a reference to it"
)


class GraphIterator(tf.experimental.ExtensionType, tf.distribute.DistributedIterator):  # type: ignore[misc]
    """A pass over a dataset in a graph that is being traced.

    Attributes:
        number: the number of the iterator on the host.
        tensors: the iterator of `tf.data` that yields the elements, or their handles.
        dataset: the number of the dataset.
        gives_handles: whether it yields handles.
    """

    number: tf.Tensor
    tensors: tf.data.Iterator
    dataset: int
    gives_handles: bool

    def __iter__(self) -> "GraphIterator":
        return self

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """Return the next element; at the end, the graph's execution raises OutOfRangeError."""
        return self.element(self._handle(self.tensors.get_next()))

    def get_next_as_optional(self) -> "GraphOptional":
        """Return the next element, or an empty optional at the end."""
        return GraphOptional(self, self.handle_or_end())

    @property
    def element_spec(self) -> Any:
        """The known specs of the elements: a nest of specs of `PerReplica`."""
        return _datasets.find(self.dataset).element_spec

    def handle_or_end(self) -> Any:
        """Return the handle of the next element, or _END."""
        optional = self.tensors.get_next_as_optional()
        return tf.cond(
            optional.has_value(),
            lambda: self._handle(optional.get_value()),
            lambda: tf.constant(_END, tf.int64),
        )

    def element(self, handle: Any) -> Any:
        """Return the element of a handle, with a `PerReplica` for each leaf."""
        dataset = _datasets.find(self.dataset)
        form = dataset.source.form()
        return packed(form.nest, symbolic(handle, dataset.store, form.specs))

    def _handle(self, element: Any) -> Any:
        if self.gives_handles:
            return element

        def publish(number: Any, *leaves: Any) -> int:
            return _iterators.find(int(number)).publish(leaves)

        handle = call_python(publish, [self.number, *leaves_of(element)], tf.int64)
        handle.set_shape(())
        return handle


class GraphOptional(tf.experimental.ExtensionType):  # type: ignore[misc]
    """An element in a graph, or none.

    Attributes:
        iterator: the iterator that yields it.
        handle: the handle of the element, or _END.
    """

    iterator: GraphIterator
    handle: tf.Tensor

    def has_value(self) -> Any:
        """Whether there is an element, as a tensor."""
        return self.handle != _END

    def get_value(self) -> Any:
        """Return the element."""
        return self.iterator.element(self.handle)


class IteratorType(tf.types.experimental.TraceType):  # type: ignore[misc]
    """The trace type of an iterator: a graph for one iterator accepts any iterator of the same dataset."""

    def __init__(self, iterator: GraphIterator) -> None:
        self._spec = tf.type_spec_from_value(iterator)

    def is_subtype_of(self, other: Any) -> bool:
        """Whether both are the same type."""
        return bool(self == other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> "IteratorType | None":
        """Return this type if all are the same."""
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        """Return the placeholder of an iterator in a graph."""
        return self._spec.placeholder_value(placeholder_context)

    def to_tensors(self, value: Any) -> Any:
        """Return the tensors of an iterator."""
        return self._spec.to_tensors(value.in_graph())

    def from_tensors(self, tensors: Any) -> Any:
        """Return the iterator with these tensors."""
        return self._spec.from_tensors(tensors)

    def flatten(self) -> Any:
        """Return the specs of the tensors."""
        return self._spec.flatten()

    def cast(self, value: Any, cast_context: Any) -> Any:
        """Return the value."""
        return value

    def __hash__(self) -> int:
        return hash(self._spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IteratorType):
            return False
        equal: bool = self._spec == other._spec
        return equal


def dataset_of_handles(handles: Callable[[], Iterator[int]]) -> Any:
    """Return the `tf.data.Dataset` of the handles that `handles` yields, without reading ahead."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    signature = tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(handles, output_signature=signature).with_options(options)


def _signature(form: Form, store: ValueStore) -> Any:
    with tf.init_scope():
        leaves = symbolic(tf.zeros((), tf.int64), store, form.specs)
    return packed(form.nest, [tf.type_spec_from_value(leaf) for leaf in leaves])
