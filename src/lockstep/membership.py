"""A worker's way from view to view: into the exchange of the first, and of each that follows."""

from lockstep.collectives.contract import Waiting, WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared import Arena, SharedCommunicator
from lockstep.config import WorkerConfig
from lockstep.control.client import Client
from lockstep.control.messages import Over
from lockstep.errors import PeerLostError
from lockstep.job import Place
from lockstep.topology import View, place

REPORT_EVERY = 0.5
"""Seconds between two reports of a wait to the agent."""

GRACE_FOR_AGENT = 60.0
"""Seconds that a wait goes on after the agent should have ended it, for the agent can show more."""

PATIENCE_FOR_VIEW = 60.0
"""Seconds in which the agent has to say what follows a view that is over."""


class Membership:
    """Enters this worker into the views that the agent decides."""

    def __init__(self, config: WorkerConfig, client: Client) -> None:
        self._config = config
        self._client = client
        self._arena: Arena | None = None

    def enter(self, view: View, descriptor: int) -> SharedCommunicator:
        """Take part in the exchange of `view`, whose memory `descriptor` is; takes it over."""
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena.attach(descriptor)
        policy = WaitPolicy(report_every=REPORT_EVERY, timeout=self._config.timeout + GRACE_FOR_AGENT)
        position = view.workers.index(self._config.worker)
        return SharedCommunicator(self._arena, position, ReducePlan.of(view), policy, self._observe)

    def next_place(self, lost: PeerLostError) -> Place:
        """Wait for the view that follows the one that ended with `lost`, and enter it.

        Raises:
            PeerLostError: none follows.
        """
        answer = self._client.next_view(PATIENCE_FOR_VIEW)
        if answer is None:
            raise PeerLostError(f"{lost}; the agent has not said in {PATIENCE_FOR_VIEW:.0f} s what follows")
        if isinstance(answer, Over):
            raise PeerLostError(answer.reason)
        message, descriptor = answer
        view = place(self._config.replicas, message.workers, message.number)
        return view, self.enter(view, descriptor)

    def _observe(self, waiting: Waiting) -> None:
        self._client.waiting(waiting.what, waiting.workers, waiting.seconds)
