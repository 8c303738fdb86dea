"""How a worker enters views: the exchange of the first one, and of each later one."""

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.contract import Communicator, PeerWait, WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import (
    CheckpointError,
    DisagreementError,
    InternalError,
    LockstepError,
    NetworkError,
    PeerLostError,
    UnreachableError,
)
from lockstep.protocol.worker import (
    AbortExchange,
    AgentMessage,
    Endpoint,
    EnterView,
    Leave,
    NetworkEndpoint,
    Position,
    StateGiven,
    Welcome,
)
from lockstep.system.environment import WorkerIdentity
from lockstep.topology import View, place, place_on_hosts
from lockstep.transport.state_transport import StateTransport
from lockstep.worker.agent_client import AgentClient
from lockstep.worker.agent_peers import AgentPeers
from lockstep.worker.job import GRACE_FOR_AGENT
from lockstep.worker.peers import EnteredView
from lockstep.worker.script import summarize_own
from lockstep.worker.shared_states import SharedStates

if TYPE_CHECKING:
    from lockstep.worker.network_entrance import NetworkEntrance

_MOMENT = 3.0
"""Seconds in which the coordinator learns of a lost worker and begins the next view, also if a script has
raised and others may raise too. After that, a connection between hosts has broken."""

_REPORT_EVERY = 0.5
"""Seconds between two reports of a wait to the agent."""


def wait_policy(timeout: float) -> WaitPolicy:
    """Return how a worker waits if the agent ends waits after `timeout` seconds."""
    return WaitPolicy(timeout + GRACE_FOR_AGENT, _REPORT_EVERY)


def take_welcome(client: AgentClient) -> Welcome:
    """Wait for the first message of the agent, and return it.

    Raises:
        PeerLostError: the job is over.
    """
    message = _receive(client)
    if isinstance(message, AbortExchange):
        raise PeerLostError(message.reason)
    if not isinstance(message, Welcome):
        raise _unexpected(message)
    return message


class AgentMembership:
    """The `Membership` of a worker with an agent, which passes on the decisions of the coordinator.

    This worker waits for a decision as long as for a stuck worker: the coordinator may itself wait until
    enough workers have joined.

    Args:
        identity: the identity of this worker.
        welcome: the first message of the agent.
        client: the connection to the agent.
        policy: how this worker waits for others.
        states: how states travel between workers.

    Attributes:
        peers: the other processes, for a process that does not wait for them.
        state_pool: the memory for the state that the workers of the host divide; None if they do not.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        welcome: Welcome,
        client: AgentClient,
        policy: WaitPolicy,
        states: StateTransport,
    ) -> None:
        self._identity = identity
        self._welcome = welcome
        self._client = client
        self._policy = policy
        self._communicator: Communicator | None = None
        self._pool = SharedPool.attach(welcome.pool.take())
        self._buffers = Buffers(self._pool)
        shared = welcome.state_pool
        self.state_pool = None if shared is None else SharedPool.attach(shared.take())
        self._states = states
        if self.state_pool is not None and not self.over_hosts:
            self._states = SharedStates(states, self.state_pool)
        self.peers = AgentPeers(client, place(1, (identity.worker,)))

    @property
    def over_hosts(self) -> bool:
        """Whether the job has several hosts."""
        return self._welcome.credentials is not None

    def first_view(self) -> EnteredView:
        """Enter the view with which the job begins.

        Raises:
            PeerLostError: the job is over.
        """
        return self._enter_announced(_receive(self._client))

    def next_view(self, lost: LockstepError, *, expected: bool = False) -> EnteredView:
        """Wait for the view after the one that ended with `lost`, and enter it; see `Membership`.

        If this worker is no longer needed, its process ends here.

        Raises:
            PeerLostError: no view follows.
        """
        if self.over_hosts and not expected:
            answer = self._client.next_view(_MOMENT)
            if answer is not None:
                return self._enter_announced(answer)
            self._client.broken(self.peers.view.number, str(lost), fatal=False)
        return self._await_next(lost)

    def _await_next(self, lost: LockstepError) -> EnteredView:
        patience = self._policy.timeout
        answer = self._client.next_view(patience)
        if answer is None:
            raise PeerLostError(f"{lost}; the agent has not announced the next view within {patience:.0f} s")
        return self._enter_announced(answer)

    def end_differing(self, differs: DisagreementError, advice: str = "") -> NoReturn:
        """Report to the agent why this worker ends, and end the process; the others continue."""
        summary = summarize_own(differs)
        if advice:
            differs.add_note(advice)
            summary = f"{summary}; {advice}"
        text = "".join(traceback.format_exception(differs))
        reported = self._client.failed(1, summary, text, blames=False, prints=False)
        _end(1, "" if reported else text)

    def prepare(self, contents: Contents) -> None:
        """Prepare to hand over contents like these, so that it takes less time."""
        self._states.prepare(contents)

    def hand_over(self, contents: Contents, *, whole: bool, view: int | None = None) -> None:
        """Give the agent the state, or the position, for joining workers; see `Membership`."""
        number = self.peers.view.number if view is None else view
        try:
            state = self._states.publish(contents, prepared=whole)
        except CheckpointError as error:
            self._client.send_state(StateGiven(number, whole, failure=str(error)))
        else:
            self._client.send_state(StateGiven(number, whole, state=state))

    def refuse_joiners(self, why: str, view: int) -> None:
        """Tell the agent that no worker can join; see `Membership`."""
        self._client.send_state(StateGiven(view, whole=False, failure=why))

    def position(self) -> Contents:
        """Wait for the position, which the members send after a step, without a time limit.

        Raises:
            PeerLostError: the job is over.
        """
        self._client.request_to_join(whole=False)
        message = _receive(self._client)
        if isinstance(message, Position):
            return self._states.fetch(message.state)
        self._enter_announced(message)
        raise InternalError("the agent admitted a worker that had not asked to join")

    def join(self) -> tuple[Contents, EnteredView]:
        """Wait until this worker is admitted, after a step, without a time limit.

        Raises:
            PeerLostError: the job is over.
        """
        self._map_allocated()
        self._client.request_to_join(whole=True)
        message = _receive(self._client)
        admitted = self._enter_announced(message)
        if not isinstance(message, EnterView) or message.state is None:
            raise InternalError("the agent admitted a worker without the state")
        return self._states.fetch(message.state), admitted

    def join_later(self) -> tuple[Contents, tuple[int, ...]]:
        """Wait until this worker is admitted; leave the view to `next_view`; see `Membership`."""
        self._map_allocated()
        self._client.request_to_join(whole=True)
        message = _receive(self._client)
        if not isinstance(message, EnterView) or message.state is None:
            self._enter_announced(message)
            raise InternalError("the agent admitted a worker without the state")
        contents = self._states.fetch(message.state)
        self._client.put_back(message)
        if isinstance(message.endpoint, NetworkEndpoint):
            self._network_entrance().look_at(message.endpoint)
        return contents, tuple(worker for host in message.hosts for worker in host)

    def _map_allocated(self) -> None:
        """Map the memory that the others have allocated, while they do not yet wait for this worker."""
        self._pool.map_allocated()
        if self.state_pool is not None:
            self.state_pool.map_allocated()

    def _enter_announced(self, message: AgentMessage) -> EnteredView:
        match message:
            case EnterView(number, hosts, endpoint):
                return self._enter(place_on_hosts(self._welcome.settings.replicas, hosts, number), endpoint)
            case Leave():
                _end(0)
            case AbortExchange(reason):
                raise PeerLostError(reason)
        raise _unexpected(message)

    def _enter(self, view: View, endpoint: Endpoint) -> EnteredView:
        """Enter the exchange of `view`, or of a later one if that begins meanwhile."""
        if self._communicator is not None:
            self._communicator.close()
        if self.peers.segment is not None:
            self.peers.segment.close()
        self._states.forget()
        self.peers.view = view
        self.peers.segment = ControlSegment.attach(endpoint.control.take())
        if isinstance(endpoint, NetworkEndpoint):
            return self._enter_network(view, endpoint, self.peers.segment)
        rank = view.workers.index(self._identity.worker)
        plan = ReducePlan.of(view)
        self._communicator = SharedCommunicator(
            self.peers.segment, self._buffers, rank, plan, self._policy, self._observe
        )
        return view, self._communicator

    def _enter_network(self, view: View, endpoint: NetworkEndpoint, segment: ControlSegment) -> EnteredView:
        try:
            entered = self._network_entrance().enter(view, endpoint, segment, self._observe)
        except UnreachableError as error:
            self._client.broken(view.number, str(error), fatal=True)
            return self._await_next(error)
        except NetworkError as error:
            return self.next_view(error)
        if isinstance(entered, AgentMessage):
            return self._enter_announced(entered)
        self._communicator = entered
        return view, entered

    def _network_entrance(self) -> "NetworkEntrance":
        if self.peers.entrance is None:
            # Most jobs have one host, and do not need this module.
            from lockstep.worker.network_entrance import NetworkEntrance

            job, credentials = self._welcome.job, self._welcome.credentials
            assert credentials is not None
            self.peers.entrance = NetworkEntrance(
                self._identity, job, credentials, self._pool, self._client, self._policy
            )
        return self.peers.entrance

    def _observe(self, wait: PeerWait) -> None:
        self._client.waiting(wait.what, wait.workers, wait.seconds)


def _receive(client: AgentClient) -> AgentMessage:
    # The agent reports the end of the job. If the agent dies, this process dies too.
    message = client.receive(None)
    assert message is not None
    return message


def _unexpected(message: AgentMessage) -> InternalError:
    return InternalError(f"the agent sent {type(message).__name__} to a worker that waits for a view")


def _end(status: int, text: str = "") -> NoReturn:
    """Print `text` and end this process at once, as if it had been killed. No code of the script runs."""
    try:
        print(text, end="", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
