"""One job a folder."""

import os
from pathlib import Path

from lockstep.checkpoint.durable import make_folder, reason
from lockstep.errors import CheckpointError
from lockstep.system.locks import try_lock
from lockstep.system.paths import RunPaths


class FolderLock:
    """The right to keep checkpoints in a folder, which one job has: the process of it that writes them.

    A process that has it has it until it ends or gives it up. The processes that it forks have no part in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take it, unless this process has it already; the folder exists then.

        Raises:
            CheckpointError: another job has it, or the folder cannot be written to.
        """
        if self._descriptor is not None:
            return
        try:
            make_folder(self._folder)
            descriptor = try_lock(RunPaths(self._folder).lock)
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints {self._folder} cannot be used: {reason(error)}; give another one"
            ) from None
        if descriptor is None:
            raise CheckpointError(
                f"another job saves checkpoints in {self._folder}; wait for it to end, or give another folder"
            )
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.leave)

    def leave(self) -> None:
        """Give it up, if this process has it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
