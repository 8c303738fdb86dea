"""The contract of every communicator: collective calls between the workers of one view."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    # The agent opens exchanges but needs no NumPy, whose import would slow each launch.
    import numpy as np
    import numpy.typing as npt

Leaves = Sequence["npt.NDArray[Any]"]
"""The arrays of one partial or total, in an order that all members share."""

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class Span(NamedTuple):
    """The replicas `start <= r < stop`: a subtree of the reduce tree, or a worker's range."""

    start: int
    stop: int


@dataclass(frozen=True)
class PeerWait:
    """A member has been waiting for `seconds` in the call `what`; `workers` (ids) have not arrived."""

    what: str
    workers: tuple[int, ...]
    seconds: float


WaitObserver = Callable[[PeerWait], None]
"""Called on the waiting thread every few seconds while a member waits for others; must not block."""


@dataclass
class WaitPolicy:
    """How long a member waits for its peers; the creator of the policy may change it.

    Attributes:
        timeout: seconds after which the wait ends in `PeerStuckError`.
        report_every: seconds between two reports to the observer.
    """

    timeout: float
    report_every: float = 5.0


class Communicator(Protocol):
    """One member's access to the collective calls of one view.

    Every member calls the same methods in the same order. `what` names the call in messages ("step 12
    of fit 1") and is not compared. Every method except `abort` and `close` waits for the other members
    and raises

    * `DisagreementError` if the members call different methods or pass arguments that do not match;
      every member raises it, it names the workers, and further calls are possible;
    * `PeerLostError` if the view has been aborted (a worker ended, its script raised), with the reason;
    * `PeerStuckError` if the policy's timeout has passed; it names the workers that did not arrive (if
      several members time out, the later ones may raise `PeerLostError` with the same text).

    A member that leaves a call before it completes (a timeout, an interrupt) ends the view for all.
    """

    @property
    def notice(self) -> int:
        """A number that the creator of the view posts to its members; initially 0.

        It is the value that the first member read when it entered the last call, so between two calls it is
        the same on all members.
        """

    @property
    def waited(self) -> float:
        """Seconds that this member has waited for others, in all calls so far."""

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas along the plan's tree.

        Args:
            partials: the sum over each span. The spans are subtrees of the plan's tree and together contain
                exactly the replicas that this member owns. All members pass leaves of equal shapes and
                dtypes (float16, bfloat16, float32, float64 or integers; sizes of 0 are allowed).
            check: at most 64 bytes that must be equal on all members.
            what: names the call in messages.

        Returns:
            Read-only arrays with the sum over all replicas, valid until this member's next call of any
            method. The bits depend only on the partials and the tree: not on members, timing or transport.

        Raises:
            DisagreementError: `check`, shapes or dtypes differ.
            ModelError: a dtype cannot be summed.
            SharedMemoryError: the shared memory cannot be allocated; every member raises it.
        """

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        """Give every member the blobs of all members, in the order of the view's workers.

        If hosts complete the call in different views, the view of the host that completes it first counts.
        """

    def all_to_all(self, parts: Sequence[Sequence[Bytes]], *, what: str = "all_to_all") -> list[Bytes]:
        """Give each member the part that each member has for it.

        Args:
            parts: for each member, in the order of the view's workers, flat arrays of bytes; a part is their
                concatenation, and may be empty.
            what: names the call in messages.

        Returns:
            The part that each member had for this one, in memory of this member that starts at a multiple of
            64 bytes.

        Raises:
            SharedMemoryError: the shared memory cannot be allocated; every member raises it.
        """

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has called it."""

    def abort(self, reason: str) -> None:
        """End this view for all members: those that wait, or call later, raise `PeerLostError(reason)`.

        Safe to call from any thread, more than once (the first reason stays), and after `close`.
        """

    def close(self) -> None:
        """Release this member's resources; safe to call more than once.

        Arrays that `reduce` returned become invalid, this member's further calls raise `InternalError`,
        and members that wait for it raise `PeerLostError`.
        """
