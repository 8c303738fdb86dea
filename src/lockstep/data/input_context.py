"""The argument of a function that creates the input of one replica."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InputContext:
    """Describes the pipeline that a function must create, with the names of `tf.distribute`.

    Attributes:
        num_input_pipelines: the number of pipelines, one per replica.
        input_pipeline_id: the index of this pipeline, from 0.
        num_replicas_in_sync: R, the number of replicas.

    Example:
        >>> import lockstep
        >>> context = lockstep.InputContext(2, input_pipeline_id=1, num_replicas_in_sync=2)
        >>> context.get_per_replica_batch_size(64)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples per replica in each global batch.

        Raises:
            ValueError: the batch cannot be divided evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"a global batch of {global_batch_size} examples cannot be divided evenly over "
                f"{self.num_replicas_in_sync} replicas; choose a multiple of {self.num_replicas_in_sync}"
            )
        return size
