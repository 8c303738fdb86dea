"""Datasets that TensorFlow divides into a shard for each replica: `AutoShardPolicy.FILE` and `DATA`.

Each replica has the shard that `tf.distribute` gives to one of R workers with one replica each. TensorFlow's
own graph rewriting makes it from a copy of the dataset.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.data.input_context import InputContext
from lockstep.keras.input.pipelines import Pipelines
from lockstep.keras.input.readings import Way, note_once
from lockstep.keras.input.streams import Stream, is_tensorflow
from lockstep.worker.job import Job

_FILE = "FILE"
_WAYS = {
    _FILE: Way("each worker reads the files of its replicas", "AutoShardPolicy.FILE"),
    "DATA": Way("each worker runs the whole dataset once for each of its replicas", "AutoShardPolicy.DATA"),
}
_CACHES = ("CacheDataset", "CacheDatasetV2")
_SAVES = ("SaveDataset", "SaveDatasetV2", "SnapshotDataset", "SnapshotDatasetV2")
_OWN_STATE = {"seed_generator": "DummySeedGenerator", "cache": "DummyMemoryCache"}
"""Arguments of operations that are state of a dataset, and the operations that create a new one."""
_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


def policy_of(dataset: Any) -> str:
    """Return the name of a `tf.data.Dataset`'s auto-shard policy, or an empty string for other datasets."""
    if not is_tensorflow(dataset):
        return ""
    return str(dataset.options().experimental_distribute.auto_shard_policy.name)


@dataclass(frozen=True)
class Shards:
    """A dataset that TensorFlow divides into one shard per replica.

    Attributes:
        way: how the workers read them.
        replicas: R.
    """

    way: Way
    replicas: int
    _dataset: Any
    _graph: Any

    def shard(self, context: InputContext) -> Any:
        """Return the `tf.data.Dataset` of a replica, with its own state; it is the same on any worker."""
        from lockstep.keras.input.tf_order import in_order
        from lockstep.keras.private.tensorflow import dataset_of, divided_batches, shard_of

        replica, replicas = context.input_pipeline_id, self.replicas
        copy = dataset_of(self._graph, self._dataset.element_spec)
        parts = divided_batches(copy, replicas, replica)
        # After `prefetch`, Python functions of the dataset would draw random numbers in no fixed order.
        parts = parts if _runs_python(self._graph) else parts.prefetch(1)
        return in_order(shard_of(parts, replicas, replica), self._dataset)


def shard_pipelines(
    job: Job, dataset: Any, seed: Callable[[], int], prepare: Callable[[Any], Any] | None = None
) -> Pipelines | None:
    """Return the shards of a dataset as the replicas' pipelines.

    Returns None if its auto-shard policy is neither FILE nor DATA, or if it cannot be divided into shards. In
    the second case, a note says why.

    Args:
        job: the job of the replicas.
        dataset: the dataset of global batches.
        seed: returns the seed of random numbers that Python functions of the dataset draw.
        prepare: applied to the dataset of each replica.

    Raises:
        DataError: the elements of the dataset cannot be split.
    """
    shards = shards_of(dataset, job.view.replicas)
    if isinstance(shards, str):
        note_once(
            job, f"{shards}; so the policy has no effect: each replica takes its rows of each global batch"
        )
    if not isinstance(shards, Shards):
        return None

    def dataset_fn(context: InputContext) -> Any:
        shard = shards.shard(context)
        return shard if prepare is None else prepare(shard)

    return Pipelines(job, dataset_fn, seed(), shards.way, compares=False)


def shards_of(dataset: Any, replicas: int) -> Shards | str | None:
    """Return the shards of a dataset of global batches, or the reason why it cannot be divided into shards.

    Returns None if its auto-shard policy is neither FILE nor DATA.

    Args:
        dataset: the dataset, of any kind.
        replicas: R.

    Raises:
        DataError: its elements cannot be split.
    """
    policy = policy_of(dataset)
    if policy not in _WAYS:
        return None
    import tensorflow as tf

    from lockstep.keras.private.tensorflow import graph_of

    Stream(dataset)
    try:
        graph = _with_own_state(graph_of(dataset))
        if _saves(graph):
            return (
                f"AutoShardPolicy.{policy} copies the dataset, and copies would share the files of its cache"
            )
        shards = Shards(_WAYS[policy], replicas, dataset, graph)
        first = shards.shard(InputContext(replicas, 0, replicas))
        files = _fewest_files(first, replicas) if policy == _FILE else replicas
    except tf.errors.NotFoundError:
        return f"AutoShardPolicy.{policy} finds no reader of files, such as tf.data.TFRecordDataset"
    except (tf.errors.OpError, ValueError) as error:
        return f"TensorFlow cannot apply AutoShardPolicy.{policy}: {str(error).splitlines()[0]}"
    if files < replicas:
        short = f"the dataset has {files} for {replicas} replicas"
        return f"AutoShardPolicy.FILE needs a file for each replica, and {short}"
    return shards


def _with_own_state(graph: Any) -> Any:
    """Return a graph whose datasets do not share shuffle orders or memory caches with others."""
    import tensorflow as tf

    from lockstep.keras.private.tensorflow import definition_of

    copy = tf.compat.v1.GraphDef.FromString(graph.SerializeToString())
    for number, node in enumerate(graph.node):
        definition = definition_of(node.op)
        for position, argument in enumerate(() if definition is None else definition.input_arg):
            if argument.name in _OWN_STATE:
                made = copy.node.add(name=f"own_state_{number}", op=_OWN_STATE[argument.name])
                copy.node[number].input[position] = made.name
    return copy


def _saves(graph: Any) -> bool:
    """Whether a dataset keeps elements in files on disk, which its copies would share."""
    import tensorflow as tf

    nodes = {node.name: node for node in graph.node}
    names = (nodes[node.input[1].partition(":")[0]] for node in graph.node if node.op in _CACHES)
    named = (name.op != "Const" or tf.make_ndarray(name.attr["value"].tensor).item() for name in names)
    return any(node.op in _SAVES for node in graph.node) or any(named)


def _runs_python(graph: Any) -> bool:
    """Whether a dataset runs Python functions."""
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    return any(node.op in _PYTHON for body in bodies for node in body)


def _fewest_files(shard: Any, enough: int) -> int:
    """Return the number of files of the reader with the fewest files in a dataset, counted up to `enough`."""
    import tensorflow as tf

    from lockstep.keras.private.tensorflow import dataset_of, graph_of

    graph = graph_of(shard)
    counts = []
    for node in graph.node:
        if node.op == "ShardDataset" and node.attr["require_non_empty"].b:
            files = tf.compat.v1.GraphDef.FromString(graph.SerializeToString())
            (result,) = (node for node in files.node if node.op == "_Retval")
            result.input[0] = node.input[0]
            kinds = zip(
                node.attr["output_shapes"].list.shape, node.attr["output_types"].list.type, strict=True
            )
            spec = tuple(tf.TensorSpec(tf.TensorShape(shape), kind) for shape, kind in kinds)
            counts.append(sum(1 for _ in dataset_of(files, spec).take(enough)))
    return min(counts)
