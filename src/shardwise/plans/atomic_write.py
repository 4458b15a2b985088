"""Writing a file so that a reader meets the old one or the new one, whole, whatever happens between."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.inputs import printable


class Files(Protocol):
    """The filesystem calls that writing needs, one method each, so that a test can fail any of them."""

    def create(self, path: str) -> int:
        """Create `path`, which must not exist, and open it for writing; returns the descriptor."""

    def write(self, descriptor: int, data: bytes) -> int:
        """Write some of `data`; returns how many bytes."""

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the disk."""

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""

    def rename(self, source: str, target: str) -> None:
        """Put `source` in the place of `target`, in one step."""

    def sync_folder(self, folder: str) -> None:
        """Wait until the names in `folder` are on the disk."""

    def remove(self, path: str) -> None:
        """Remove the file `path`."""


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
    """Refuse, with a ConfigError and before any work is done, a `path` that `write_file` could not write.

    Allowed are a regular file (also behind a symbolic link) and a new name in a folder that exists.
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
    """Put `data` at `path`: temporary file beside it, write, sync, rename, sync the folder.

    Raises ConfigError where the system refuses; then the old file, if any, is as it was and no temporary file
    is left. (Should only the last sync fail, the new file is in place, but may not survive a power loss.)
    """
    check_writable(path)
    files = files if files is not None else SystemFiles()
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    # A short, random name of its own: two writers never meet, and a long name does not become too long.
    temporary = os.path.join(folder, f".{name[:40]}.{os.urandom(6).hex()}.tmp")
    try:
        _write_and_rename(files, temporary, target, data)
        files.sync_folder(folder)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be written: {why}", file=printable(path)) from error


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
