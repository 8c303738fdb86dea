"""Modules of PyTorch in trials, which leave them as they were."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from lockstep.keras.private.torch import normalizes
from lockstep.worker.patch_registry import replaced


@contextmanager
def constant_modules(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block, BatchNorm uses its averages, also in training; afterwards nothing has changed.

    Args:
        modules: with all inner ones.
    """
    modes = [(one, one.training) for one in modules]
    buffers = [
        (one, name, buffer, buffer.clone())
        for one in modules
        for name, buffer in one.named_buffers(recurse=False)
    ]
    with ExitStack() as stack:
        for one in modules:
            if normalizes(one):
                one.training = False
                stack.enter_context(replaced(one, "train", lambda mode=True, one=one: one))
        try:
            yield
        finally:
            for one, name, buffer, copy in buffers:
                setattr(one, name, buffer)
                with torch.no_grad():
                    buffer.copy_(copy)
            for one, mode in modes:
                one.training = mode
