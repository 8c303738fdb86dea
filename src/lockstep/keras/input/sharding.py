"""The mapping of `tf.distribute`'s options for sharding a dataset by files or elements."""

from typing import Any

from lockstep.keras.input.streams import is_tensorflow
from lockstep.system.notes import note
from lockstep.worker.job import Job

_INSTEAD = (
    "every worker reads the dataset's batches, which are global, and each replica takes its rows of each"
)
_EXPLANATIONS = {
    "FILE": f"AutoShardPolicy.FILE: {_INSTEAD}; so the number and sizes of files do not matter",
    "OFF": (
        f"AutoShardPolicy.OFF: {_INSTEAD}; a dataset that gives each worker different examples belongs in "
        "strategy.distribute_datasets_from_function"
    ),
}


def explain_sharding(job: Job, dataset: Any) -> None:
    """Print a note, once and on the chief, on what Lockstep does with a dataset's auto-shard policy."""
    if not is_tensorflow(dataset):
        return
    policy = dataset.options().experimental_distribute.auto_shard_policy.name
    if policy in _EXPLANATIONS and policy not in _explained:
        _explained.add(policy)
        if job.is_chief:
            note(_EXPLANATIONS[policy])


_explained: set[str] = set()
