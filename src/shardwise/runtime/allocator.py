"""Host memory that a step frees stays with its process."""

from __future__ import annotations

import ctypes
import os

# The parameters of `mallopt`, of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_NEVER_TRIMMED = 2**31 - 1
"""`mallopt` takes an int: what is free at the end of the heap goes back beyond 2 GiB alone."""


def keep_freed_memory() -> bool:
    """From now on tensors on the host reuse the memory of those before; False where the allocator (any but
    glibc's) has no such setting.

    Without it every large tensor, and the end of the heap whenever much of it is free, goes back to the
    system, which clears each page of it before it gives it again: up to 6 % of a step, more or less by the
    order of allocations. What a process took at its peak stays with it until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER_TRIMMED))
    return all(mallopt(name, value) == 1 for name, value in settings)
