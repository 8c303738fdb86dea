"""Asks the cluster's control store (GCS) for nodes, a job's newest coordinator, and its exit status."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray.exceptions import AuthenticationError, RpcError
from ray.experimental.internal_kv import (
    _internal_kv_get,
    _internal_kv_put,
    internal_kv_get_gcs_client,
)

from lockstep.errors import UnfitError

NAMESPACE = "lockstep"
_TIMEOUT = 5.0
_RETRY = 0.5
_ALIVE = 0

Result = TypeVar("Result")


class ControlStore:
    """The control store, and the entries of a job there, which outlive each actor.

    All methods wait while the store is out of reach, and raise UnfitError if it has lost its data.

    Args:
        job: its name.
        run: an id of the process of the coordinator's actor.
    """

    def __init__(self, job: str, run: str) -> None:
        self._newest, self._end = f"lockstep/{job}".encode(), f"lockstep/{job}/status".encode()
        self._run = run.encode()

    def nodes(self) -> dict[str, dict[str, float]]:
        """Return the resources of each live node, by Ray's name for them."""
        client: Any = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        # ray.nodes() aborts the process if the store has lost its data.
        infos = _patiently(lambda: client.get_all_node_info(timeout=_TIMEOUT))
        living = [node for node in infos.values() if node.state == _ALIVE]
        return {node.node_id.hex(): dict(node.resources_total) for node in living}

    def draining(self) -> frozenset[str]:
        """Return the nodes that Ray has announced to remove soon, as before a preemption."""
        client: Any = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        return frozenset(_patiently(lambda: client.get_draining_nodes(timeout=_TIMEOUT)))

    def take(self) -> bool:
        """Make this process the newest; return whether there was one before."""
        again = self._get(self._newest) is not None
        self._put(self._newest, self._run)
        return again

    def is_newest(self) -> bool:
        """Whether no other process has become the newest."""
        return self._get(self._newest) == self._run

    def record_end(self, status: int) -> None:
        """Note that the job has ended with this exit status; the first note counts."""
        self._put(self._end, str(status).encode(), overwrite=False)

    def status(self) -> int | None:
        """Return the exit status of the job, or None if it has not ended."""
        text = self._get(self._end)
        return None if text is None else int(text)

    def _get(self, key: bytes) -> bytes | None:
        return _patiently(lambda: _internal_kv_get(key, namespace=NAMESPACE))

    def _put(self, key: bytes, value: bytes, overwrite: bool = True) -> None:
        _patiently(lambda: _internal_kv_put(key, value, overwrite, namespace=NAMESPACE))


def _patiently(call: Callable[[], Result]) -> Result:
    while True:
        try:
            return call()
        except AuthenticationError:
            raise UnfitError(
                "the cluster's control store (GCS) has restarted without its data, so the job ends; with "
                "external storage, it continues: start the head node with RAY_REDIS_ADDRESS"
            ) from None
        except RpcError:
            time.sleep(_RETRY)
