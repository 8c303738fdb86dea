"""Modules of PyTorch in trials, which leave them as they were."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from lockstep.keras.private.torch import normalizes
from lockstep.worker.patch_registry import replaced


@contextmanager
def constant_modules(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block, BatchNorm uses its averages, even in training. Afterwards, nothing has changed.

    Args:
        modules: the modules, with all inner ones.
    """
    modes = [(module, module.training) for module in modules]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with ExitStack() as stack:
        for module in modules:
            if normalizes(module):
                module.training = False
                stack.enter_context(replaced(module, "train", lambda mode=True, module=module: module))
        try:
            yield
        finally:
            for module, name, buffer, copy in buffers:
                setattr(module, name, buffer)
                with torch.no_grad():
                    buffer.copy_(copy)
            for module, mode in modes:
                module.training = mode
