"""What scripts find under `tf.distribute`, with `lockstep run --tf-distribute` and without."""

import sys
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NoReturn

from lockstep.errors import ConfigError
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patching import PATCHES

_BY_THE_SAME_NAME = (
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReplicaContext",
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
SERVED = {name: f"lockstep:{name}" for name in _BY_THE_SAME_NAME} | {
    "experimental.CollectiveCommunication": "lockstep:CommunicationImplementation",
    "experimental.CollectiveHints": "lockstep:CommunicationOptions",
    "experimental.CommunicationImplementation": "lockstep:CommunicationImplementation",
    "experimental.CommunicationOptions": "lockstep:CommunicationOptions",
    "experimental.MultiWorkerMirroredStrategy": "lockstep.strategy.experimental:MultiWorkerMirroredStrategy",
}
"""What stands for which name under `tf.distribute`."""

_SERVERS = (
    "parameter servers apply updates in their order of arrival, so no two runs are equal; "
    "MultiWorkerMirroredStrategy trains on any number of workers, and replaces those that are lost"
)
_TPUS = "TPUs are not supported; MultiWorkerMirroredStrategy trains on CPUs and GPUs"
NOT_SERVED = {
    "ParameterServerStrategy": _SERVERS,
    "TPUStrategy": _TPUS,
    "coordinator.ClusterCoordinator": _SERVERS,
    "experimental.CentralStorageStrategy": (
        "each worker has its own copy of the variables; MirroredStrategy trains on the devices of one machine"
    ),
    "experimental.ParameterServerStrategy": _SERVERS,
    "experimental.TPUStrategy": _TPUS,
    "experimental.coordinator.ClusterCoordinator": _SERVERS,
    "experimental_set_strategy": "write `with strategy.scope():`",
}
"""What a script must not take from TensorFlow by mistake: it would train beside the job. And why.

All other names under `tf.distribute` stay TensorFlow's.
"""

_STRATEGIES = tuple(name for name in SERVED | NOT_SERVED if name.endswith("Strategy") and name != "Strategy")
"""What makes a strategy of TensorFlow's."""

_THEIR_OWN = ("keras", "lockstep", "tensorflow")


def serve() -> None:
    """Put Lockstep's names into `tf.distribute`: now, or once the script has imported TensorFlow.

    The modules of TensorFlow and Keras go on finding TensorFlow's own there, with one replica: Keras divides
    its loss by the number of replicas it finds, and Lockstep does that itself. `tf.compat` is left alone.
    """
    when_imported({"tensorflow": _serve_in})


def refuse_theirs(replicas: int) -> None:
    """Refuse TensorFlow's own strategies where a script makes one: now, or once it has imported TensorFlow.

    Each worker would train a model of its own with it, or wait for others at addresses where nobody listens.
    Its default strategy, and whoever only asks for names, are left alone.

    Args:
        replicas: of the job, for the message.
    """
    when_imported({"tensorflow": partial(_refuse_in, replicas)})


def _refuse_in(replicas: int, tensorflow: ModuleType) -> None:
    # Of the names of one class the first counts.
    for name in reversed(_STRATEGIES):
        PATCHES.put(__name__, attrgetter(name)(tensorflow.distribute), "__init__", _refusal(replicas, name))


def _refusal(replicas: int, name: str) -> Callable[..., NoReturn]:
    own = SERVED.get(name, "").replace(":", ".")
    remedy = f"run it with `lockstep run --tf-distribute`, or write {own} for it" if own else NOT_SERVED[name]

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"tf.distribute.{name} is TensorFlow's own and does not know about this job: each worker would "
            f"train on its own instead of as a part of the {replicas} replicas; {remedy}"
        )

    return refuse


def _serve_in(tensorflow: ModuleType) -> None:
    # Loads nothing of Lockstep's yet: Keras may be what imports TensorFlow, and is not ready then.
    served = Served(tensorflow.distribute, "")
    PATCHES.put(__name__, tensorflow, "distribute", served)
    # `from tensorflow.distribute import ...` asks here.
    PATCHES.put(__name__, sys.modules, "tensorflow.distribute", served)
    for module in ("experimental", "cluster_resolver", "coordinator"):
        PATCHES.put(__name__, sys.modules, f"tensorflow.distribute.{module}", getattr(served, module))


class Served(ModuleType):
    """`tf.distribute`, or a module in it, with Lockstep's names for the script and the libraries it calls.

    Whose a name is depends on the module whose code asks for it: Keras looks a function up when it calls it,
    in the same place and by the same name as scripts do, and nothing else tells them apart.
    """

    def __init__(self, theirs: ModuleType, prefix: str) -> None:
        """Stand in for `theirs`, whose names follow `prefix` in `SERVED`."""
        super().__init__(theirs.__name__)
        vars(self).update({name: value for name, value in vars(theirs).items() if name.startswith("__")})
        self._theirs = theirs
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        """Return what `name` is for the module whose code asks."""
        theirs = getattr(self._theirs, name)
        full = self._prefix + name
        if isinstance(theirs, ModuleType) and any(
            ours.startswith(f"{full}.") for ours in SERVED | NOT_SERVED
        ):
            module = vars(self)[name] = Served(theirs, f"{full}.")
            return module
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        if asks.partition(".")[0] in _THEIR_OWN:
            return theirs
        if full in NOT_SERVED:
            return _refused(theirs, full)
        return resolve_name(SERVED[full]) if full in SERVED else theirs

    def __dir__(self) -> list[str]:
        return dir(self._theirs)


@cache
def _refused(theirs: Any, name: str) -> Any:
    """Return what stands for a name that is not served: it can be asked for, but not be called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"tf.distribute.{name} is not supported by `lockstep run --tf-distribute`: {NOT_SERVED[name]}"
        )

    if not isinstance(theirs, type):
        return refuse
    # Programs ask whether a strategy is of such a class.
    return type(theirs)(theirs.__name__, (theirs,), {"__new__": refuse})
