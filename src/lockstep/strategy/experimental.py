"""The strategy of `tf.distribute.experimental`, which has a different signature."""

from typing import Any

from lockstep.strategy import mirrored
from lockstep.strategy.options import CommunicationImplementation, CommunicationOptions


class MultiWorkerMirroredStrategy(mirrored.MultiWorkerMirroredStrategy):
    """`lockstep.MultiWorkerMirroredStrategy` with the argument `communication`."""

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: Any = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))
