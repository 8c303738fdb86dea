"""The names that scripts find in `tf.distribute`, with and without `--tf-distribute`."""

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import attrgetter
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NoReturn

from lockstep.errors import ConfigError
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patch_registry import PATCHES

_BY_THE_SAME_NAME = (
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReplicaContext",
    "Server",
    "Strategy",
    "cluster_resolver.ClusterResolver",
    "cluster_resolver.KubernetesClusterResolver",
    "cluster_resolver.KubernetesExecutableLocation",
    "cluster_resolver.SimpleClusterResolver",
    "cluster_resolver.SlurmClusterResolver",
    "cluster_resolver.TFConfigClusterResolver",
    "cluster_resolver.UnionResolver",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
)
REPLACED = {name: f"lockstep:{name}" for name in _BY_THE_SAME_NAME} | {
    "coordinator.ClusterCoordinator": "lockstep:ClusterCoordinator",
    "coordinator.PerWorkerValue": "lockstep:PerWorkerValues",
    "coordinator.RemoteValue": "lockstep:RemoteValue",
    "experimental.CollectiveCommunication": "lockstep:CommunicationImplementation",
    "experimental.CollectiveHints": "lockstep:CommunicationOptions",
    "experimental.CommunicationImplementation": "lockstep:CommunicationImplementation",
    "experimental.CommunicationOptions": "lockstep:CommunicationOptions",
    "experimental.MultiWorkerMirroredStrategy": "lockstep.strategy.experimental:MultiWorkerMirroredStrategy",
    "experimental.ParameterServerStrategy": "lockstep:ParameterServerStrategy",
    "experimental.coordinator.ClusterCoordinator": "lockstep:ClusterCoordinator",
    "experimental.coordinator.PerWorkerValues": "lockstep:PerWorkerValues",
    "experimental.coordinator.RemoteValue": "lockstep:RemoteValue",
    "experimental.partitioners.FixedShardsPartitioner": "lockstep:FixedShardsPartitioner",
    "experimental.partitioners.MaxSizePartitioner": "lockstep:MaxSizePartitioner",
    "experimental.partitioners.MinSizePartitioner": "lockstep:MinSizePartitioner",
}
"""Lockstep's replacements by their name under `tf.distribute`."""

_TPUS = "TPUs are not supported; MultiWorkerMirroredStrategy trains on CPUs and GPUs"
REFUSED = {
    "TPUStrategy": _TPUS,
    "experimental.CentralStorageStrategy": (
        "each worker has its own copy of the variables; MirroredStrategy trains on the devices of one machine"
    ),
    "experimental.TPUStrategy": _TPUS,
    "experimental_set_strategy": "write `with strategy.scope():`",
}
"""TensorFlow's names with which a script would train outside of the job, and the reason or the replacement.

All other names under `tf.distribute` stay TensorFlow's.
"""

_STRATEGIES = tuple(name for name in REPLACED | REFUSED if name.endswith("Strategy") and name != "Strategy")
"""The names that create one of TensorFlow's strategies."""


def is_library(code_globals: Mapping[str, Any]) -> bool:
    """Whether code, given its global variables, belongs to a library that reads what Lockstep replaces."""
    return str(code_globals.get("__name__")).partition(".")[0] in ("keras", "lockstep", "tensorflow")


def replace_names() -> None:
    """Replace names in `tf.distribute` with Lockstep's, now or when the script has imported TensorFlow.

    The modules of TensorFlow and Keras still find TensorFlow's own names there, with one replica: Keras
    divides its loss by the number of replicas it finds, and Lockstep does that itself. `tf.compat` stays
    unchanged.
    """
    when_imported({"tensorflow": _replace_in})


def refuse_strategies(replicas: int) -> None:
    """Reject TensorFlow's own strategies when a script creates one, now or after it imports TensorFlow.

    With one, each worker would train a separate model, or wait for others at addresses where nothing listens.
    The default strategy and access to the names still work.

    Args:
        replicas: the replicas of the job, for the message.
    """
    when_imported({"tensorflow": partial(_refuse_in, replicas)})


def _refuse_in(replicas: int, tensorflow: ModuleType) -> None:
    # If a class has several names, the first one counts.
    for name in reversed(_STRATEGIES):
        PATCHES.put(__name__, attrgetter(name)(tensorflow.distribute), "__init__", _refusal(replicas, name))


def _refusal(replicas: int, name: str) -> Callable[..., NoReturn]:
    replacement = REPLACED.get(name, "").replace(":", ".")
    remedy = (
        f"run it with `lockstep run --tf-distribute`, or use {replacement} instead"
        if replacement
        else REFUSED[name]
    )

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"tf.distribute.{name} is TensorFlow's own and does not know about this job: each worker would "
            f"train by itself, not as a part of the {replicas} replicas; {remedy}"
        )

    return refuse


def _replace_in(tensorflow: ModuleType) -> None:
    # This loads no other module of Lockstep: Keras may be importing TensorFlow, and is then incomplete.
    distribute = DistributeModule(tensorflow.distribute, "")
    PATCHES.put(__name__, tensorflow, "distribute", distribute)
    # `from tensorflow.distribute import ...` looks here.
    PATCHES.put(__name__, sys.modules, "tensorflow.distribute", distribute)
    for module in ("experimental", "cluster_resolver", "coordinator"):
        PATCHES.put(__name__, sys.modules, f"tensorflow.distribute.{module}", getattr(distribute, module))


class DistributeModule(ModuleType):
    """`tf.distribute`, or a module in it, with Lockstep's names for the script and libraries it calls.

    The result of a lookup depends on the module whose code makes it: Keras looks up functions when it calls
    them, in the same place and by the same names as scripts, and nothing else distinguishes the two.
    """

    def __init__(self, theirs: ModuleType, prefix: str) -> None:
        """Replace `theirs`, whose names follow `prefix` in `REPLACED`."""
        super().__init__(theirs.__name__)
        vars(self).update({name: value for name, value in vars(theirs).items() if name.startswith("__")})
        self._theirs = theirs
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        """Return the value of `name` for the module whose code looks it up."""
        theirs = getattr(self._theirs, name)
        full = self._prefix + name
        if isinstance(theirs, ModuleType) and any(ours.startswith(f"{full}.") for ours in REPLACED | REFUSED):
            module = vars(self)[name] = DistributeModule(theirs, f"{full}.")
            return module
        if is_library(sys._getframe(1).f_globals):
            return theirs
        if full in REFUSED:
            return _refused(theirs, full)
        return resolve_name(REPLACED[full]) if full in REPLACED else theirs

    def __dir__(self) -> list[str]:
        return dir(self._theirs)


@cache
def _refused(theirs: Any, name: str) -> Any:
    """Return a substitute for a name that is not supported: it can be looked up, but not called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"tf.distribute.{name} is not supported by `lockstep run --tf-distribute`: {REFUSED[name]}"
        )

    if not isinstance(theirs, type):
        return refuse
    # Programs use these classes in isinstance checks.
    return type(theirs)(theirs.__name__, (theirs,), {"__new__": refuse})
