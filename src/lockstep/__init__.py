"""Train a single-process Keras program on any number of workers, with the same result to the last bit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep import callbacks, cluster_resolver
    from lockstep import ray as ray
    from lockstep.cluster.spec import ClusterSpec
    from lockstep.data.input_context import InputContext
    from lockstep.keras.input.distributed_dataset import DistributedDataset, DistributedIterator
    from lockstep.keras.input.show_input import show_input
    from lockstep.keras.model_digest import digest
    from lockstep.keras.parameter_server.per_worker import PerWorkerValues
    from lockstep.keras.parameter_server.remote_values import RemoteValue
    from lockstep.keras.parameter_server.server_embedding import ServerEmbedding
    from lockstep.keras.per_replica import DistributedValues
    from lockstep.keras.sidecar_evaluator import SidecarEvaluator
    from lockstep.keras.state.loading import load_checkpoint
    from lockstep.notebook.launch import launch
    from lockstep.parameter_server.partitioners import (
        FixedShardsPartitioner,
        MaxSizePartitioner,
        MinSizePartitioner,
    )
    from lockstep.protocol.local_steps import LocalSteps
    from lockstep.strategy.cluster_coordinator import ClusterCoordinator
    from lockstep.strategy.context import (
        ReplicaContext,
        gather,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from lockstep.strategy.default import OneDeviceStrategy
    from lockstep.strategy.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
    from lockstep.strategy.options import CommunicationImplementation, CommunicationOptions, ReduceOp
    from lockstep.strategy.parameter_server import ParameterServerStrategy, Server
    from lockstep.strategy.strategy import Strategy
    from lockstep.worker.job import is_chief

__all__ = [
    "ClusterCoordinator",
    "ClusterSpec",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "FixedShardsPartitioner",
    "InputContext",
    "LocalSteps",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerWorkerValues",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "Server",
    "ServerEmbedding",
    "SidecarEvaluator",
    "Strategy",
    "__version__",
    "callbacks",
    "cluster_resolver",
    "digest",
    "gather",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_chief",
    "launch",
    "load_checkpoint",
    "show_input",
]

_HOMES = {
    "ClusterCoordinator": "lockstep.strategy.cluster_coordinator",
    "ClusterSpec": "lockstep.cluster.spec",
    "CommunicationImplementation": "lockstep.strategy.options",
    "CommunicationOptions": "lockstep.strategy.options",
    "DistributedDataset": "lockstep.keras.input.distributed_dataset",
    "DistributedIterator": "lockstep.keras.input.distributed_dataset",
    "DistributedValues": "lockstep.keras.per_replica",
    "FixedShardsPartitioner": "lockstep.parameter_server.partitioners",
    "InputContext": "lockstep.data.input_context",
    "LocalSteps": "lockstep.protocol.local_steps",
    "MaxSizePartitioner": "lockstep.parameter_server.partitioners",
    "MinSizePartitioner": "lockstep.parameter_server.partitioners",
    "MirroredStrategy": "lockstep.strategy.mirrored",
    "MultiWorkerMirroredStrategy": "lockstep.strategy.mirrored",
    "OneDeviceStrategy": "lockstep.strategy.default",
    "ParameterServerStrategy": "lockstep.strategy.parameter_server",
    "PerWorkerValues": "lockstep.keras.parameter_server.per_worker",
    "ReduceOp": "lockstep.strategy.options",
    "RemoteValue": "lockstep.keras.parameter_server.remote_values",
    "ReplicaContext": "lockstep.strategy.context",
    "Server": "lockstep.strategy.parameter_server",
    "ServerEmbedding": "lockstep.keras.parameter_server.server_embedding",
    "SidecarEvaluator": "lockstep.keras.sidecar_evaluator",
    "Strategy": "lockstep.strategy.strategy",
    "digest": "lockstep.keras.model_digest",
    "gather": "lockstep.strategy.context",
    "get_replica_context": "lockstep.strategy.context",
    "get_strategy": "lockstep.strategy.context",
    "has_strategy": "lockstep.strategy.context",
    "in_cross_replica_context": "lockstep.strategy.context",
    "is_chief": "lockstep.worker.job",
    "launch": "lockstep.notebook.launch",
    "load_checkpoint": "lockstep.keras.state.loading",
    "show_input": "lockstep.keras.input.show_input",
}
# `ray` is not in `__all__`, because `from lockstep import *` must not replace the `ray` of a program.
_MODULES = ("callbacks", "cluster_resolver", "ray")


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `import lockstep` loads neither Keras nor a backend."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"lockstep.{name}")
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
