"""One run at a time in a checkpoint folder: a lock that ends with the process that holds it.

The lock is a lock of the operating system (flock) on `.shardwise-run`, so a run that was killed leaves none.
The file has the host, the process and the start of the run, for messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import ConfigError
from shardwise.inputs import printable

try:
    import fcntl
except ImportError:  # Windows has no flock, and no multi-process training of ours
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".shardwise-run"
"""Name of the lock's file in a checkpoint folder."""


@contextmanager
def only_run(folder: str | None) -> Iterator[None]:
    """Context manager that holds the lock of the checkpoint folder, if any; the folder must exist.

    Raises ConfigError where another run holds it. On filesystems without such locks nothing is held.
    """
    if folder is None or fcntl is None:
        yield
        return
    path = os.path.join(folder, LOCK_FILE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, folder)
        _write_owner(descriptor)
        yield
    finally:
        os.close(descriptor)


def check_no_run(folder: str) -> None:
    """ConfigError where a run holds the lock of the checkpoint folder. Writes nothing."""
    if fcntl is None:
        return
    try:
        descriptor = os.open(os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no run has ever started here, or the folder cannot be written to
        return
    try:
        _lock(descriptor, folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            "is in use by another run", file=printable(folder), key="--checkpoint", found=_owner(descriptor),
            allowed="another folder, or --resume once that run has ended",
        ) from None  # fmt: skip
    except OSError:  # a filesystem without locks
        return


def _write_owner(descriptor: int) -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    owner = {"host": socket.gethostname(), "process": os.getpid(), "started": started}
    with contextlib.suppress(OSError):  # the lock holds without it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(owner) + "\n").encode(), 0)


def _owner(descriptor: int) -> str:
    """The run that holds the lock, in words."""
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return printable(f"process {owner['process']} on {owner['host']}, since {owner['started']}")
    except (OSError, ValueError, KeyError, TypeError):
        return "a run"
