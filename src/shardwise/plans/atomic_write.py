"""Atomic writes: a reader sees the complete old file or the complete new one, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Sequence
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.inputs import printable


class Files(Protocol):
    """The filesystem calls of a write, one method each, so that a test can make any of them fail."""

    def create(self, path: str) -> int:
        """Creates `path`, which must not exist, and opens it for writing; returns the descriptor."""

    def write(self, descriptor: int, data: bytes) -> int:
        """Writes some of `data`; returns the number of bytes."""

    def sync(self, descriptor: int) -> None:
        """Waits until the written data is on the disk."""

    def close(self, descriptor: int) -> None:
        """Closes the descriptor."""

    def rename(self, source: str, target: str) -> None:
        """Replaces `target` by `source` atomically."""

    def sync_folder(self, folder: str) -> None:
        """Waits until the names in `folder` are on the disk."""

    def remove(self, path: str) -> None:
        """Removes the file `path`."""


class SystemFiles:
    """`Files` of the operating system."""

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, descriptor: int, data: bytes) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def sync_folder(self, folder: str) -> None:
        if not hasattr(os, "O_DIRECTORY"):  # Windows has no descriptor of a folder to sync
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some filesystems cannot sync a folder
                raise
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        os.unlink(path)


def check_writable(path: str) -> None:
    """Raises ConfigError, before any work is done, for a `path` that `write_file` cannot write.

    A path may be a regular file (also through a symbolic link), or a new name in an existing folder.
    """
    if not path or "\0" in path:
        raise ConfigError("is not the name of a file", found=repr(path), allowed="a path")
    folder, name = os.path.split(os.path.realpath(path))
    if not name or path.endswith(("/", os.sep)) or os.path.isdir(path):
        raise ConfigError(
            "cannot be written", file=printable(path), found="a directory", allowed="the name of a file"
        )
    if not os.path.isdir(folder):
        raise ConfigError("cannot be written: its folder does not exist", file=printable(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written: its folder does not allow it", file=printable(path))
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise ConfigError(
            "cannot be written",
            file=printable(path),
            found="not a regular file",
            allowed="the name of a file",
        )


def write_file(path: str, data: bytes, *, files: Files | None = None) -> None:
    """Writes `data` to `path`: temporary file in the same folder, sync, rename, sync of the folder.

    Raises ConfigError if the system refuses; then the old file, if any, is unchanged and no temporary file is
    left. If only the last sync fails, the new file is in place but may not survive a power loss.
    """
    check_writable(path)
    files = files if files is not None else SystemFiles()
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    # A random name, so that writers do not collide; truncated, so that it is not too long.
    temporary = os.path.join(folder, f".{name[:40]}.{os.urandom(6).hex()}.tmp")
    try:
        _write_and_rename(files, temporary, target, data)
        files.sync_folder(folder)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be written: {why}", file=printable(path)) from error


ABANDONED_S = 600.0
"""Age in seconds from which a temporary file belongs to a writer that ended before its rename."""

_TEMPORARY = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.tmp", re.DOTALL)


def remove_abandoned(folder: str) -> None:
    """Removes temporary files of `write_file` in `folder` whose writer was killed. Errors are ignored."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                        os.unlink(entry.path)


def _write_and_rename(files: Files, temporary: str, target: str, data: bytes) -> None:
    descriptor = files.create(temporary)
    try:
        try:
            unwritten = memoryview(data)
            while unwritten:
                unwritten = unwritten[files.write(descriptor, bytes(unwritten)) :]
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(temporary)
        raise


def check_output_path(option: str, path: str, *, inputs: Sequence[str]) -> None:
    """ConfigError where `path`, the value of `option`, cannot be written or is one of the `inputs`."""
    try:
        check_writable(path)
    except ConfigError as error:
        raise error.within(key=option) from None
    for given in inputs:
        # A model may be the folder of its config.json.
        for source in (given, os.path.join(given, "config.json")):
            if _is_same_file(path, source):
                raise ConfigError(
                    "is an input file, which would be overwritten",
                    file=printable(path),
                    key=option,
                    allowed="the name of another file",
                )


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # one of them does not exist
        return False
