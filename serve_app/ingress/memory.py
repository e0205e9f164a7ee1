"""Giving memory back to the system once a large tensor has passed.

gRPC receives a message as thousands of small buffers. The allocator keeps them when they are freed, in the arena of
whichever thread had received them, where the next large message cannot use them: a replica would grow by the size of a
tensor or two for every such thread.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from functools import lru_cache

TRIM_ABOVE_BYTES = 32 * 1024 * 1024
"""Tensors from this size on are worth the milliseconds that it takes."""


async def give_back(size_bytes: int) -> None:
    """Return free memory to the system, in a thread, if buffers of so many bytes have just been let go.

    Does nothing where the C library has no such call.

    Args:
        size_bytes: Of the tensors that were received.
    """
    if size_bytes >= TRIM_ABOVE_BYTES:
        trim = _malloc_trim()
        if trim is not None:
            await asyncio.to_thread(trim, 0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's call; ctypes lets other threads run meanwhile."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
