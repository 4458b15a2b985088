"""Atomic writes: whichever call fails and whenever the process dies, a reader finds the whole old file or the
whole new one.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.plans import remove_abandoned, write_file
from shardwise.plans.atomic_write import ABANDONED_S, SystemFiles, check_writable

OLD = b"old " * 1000
NEW = b"new " * 3000


class Killed(BaseException):
    """The process is killed: it does nothing afterwards."""


class FailingFiles(SystemFiles):
    """Counts the calls and fails call `fail_at`: with an error of the system, or as if the process were
    killed there.

    A write takes at most 5,000 bytes, so that the content needs several; a killed write leaves half of its
    bytes in the file.
    """

    def __init__(self, fail_at: int, *, is_kill: bool) -> None:
        self.fail_at = fail_at
        self.is_kill = is_kill
        self.calls: list[str] = []
        self.open: set[int] = set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.is_kill and len(self.calls) > self.fail_at:
            raise Killed
        if len(self.calls) == self.fail_at:
            raise Killed if self.is_kill else OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: str) -> int:
        self._call("create")
        descriptor = super().create(path)
        self.open.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: bytes) -> int:
        try:
            self._call("write")
        except Killed:
            if len(self.calls) == self.fail_at:
                super().write(descriptor, data[: len(data) // 2])
            raise
        return super().write(descriptor, data[:5000])

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        self._call("close")
        self.open.discard(descriptor)
        super().close(descriptor)

    def rename(self, source: str, target: str) -> None:
        self._call("rename")
        super().rename(source, target)

    def sync_folder(self, folder: str) -> None:
        self._call("sync_folder")
        super().sync_folder(folder)

    def remove(self, path: str) -> None:
        self._call("remove")
        super().remove(path)

    def close_open(self) -> None:
        """The system's cleanup when a process ends."""
        for descriptor in self.open:
            os.close(descriptor)


CALLS = ["create", "write", "write", "write", "sync", "close", "rename", "sync_folder"]
"""12,000 bytes at 5,000 a write are 3 writes."""


def test_the_protocol_is_create_write_sync_close_rename_sync_folder(tmp_path: Path) -> None:
    files = FailingFiles(0, is_kill=False)
    write_file(str(tmp_path / "plan.yaml"), NEW, files=files)
    assert files.calls == CALLS
    assert (tmp_path / "plan.yaml").read_bytes() == NEW


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("fail_at", range(1, len(CALLS) + 1))
def test_a_failing_call_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, fail_at: int, has_old: bool
) -> None:
    path = tmp_path / "plan.yaml"
    if has_old:
        path.write_bytes(OLD)
    files = FailingFiles(fail_at, is_kill=False)
    with pytest.raises(ConfigError, match=r"plan\.yaml: cannot be written: no space left on device"):
        write_file(str(path), NEW, files=files)
    files.close_open()
    assert files.calls[fail_at - 1] == CALLS[fail_at - 1]
    is_renamed = CALLS[fail_at - 1] == "sync_folder"
    expected = {"plan.yaml": NEW} if is_renamed else {"plan.yaml": OLD} if has_old else {}
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("kill_at", range(1, len(CALLS) + 1))
def test_a_process_killed_at_any_call_leaves_old_or_new_whole(
    tmp_path: Path, kill_at: int, has_old: bool
) -> None:
    path = tmp_path / "plan.yaml"
    if has_old:
        path.write_bytes(OLD)
    files = FailingFiles(kill_at, is_kill=True)
    with pytest.raises(Killed):
        write_file(str(path), NEW, files=files)
    files.close_open()
    is_renamed = kill_at > CALLS.index("rename") + 1
    if is_renamed:
        assert path.read_bytes() == NEW
    elif has_old:
        assert path.read_bytes() == OLD
    else:
        assert not path.exists()


def test_a_naive_writer_is_caught_by_the_same_kills(tmp_path: Path) -> None:
    """The mutant without the protocol (it writes in place) leaves a torn file after some kill, so the test
    above can fail.
    """
    torn = 0
    for kill_at in range(1, 6):
        path = tmp_path / "plan.yaml"
        path.write_bytes(OLD)
        files = FailingFiles(kill_at, is_kill=True)
        with pytest.raises(Killed):
            _write_in_place(files, str(path))
        files.close_open()
        torn += path.exists() and path.read_bytes() not in (OLD, NEW)
    assert torn > 0


def _write_in_place(files: FailingFiles, path: str) -> None:
    os.unlink(path)
    descriptor = files.create(path)
    unwritten = NEW
    while unwritten:
        unwritten = unwritten[files.write(descriptor, unwritten) :]
    files.close(descriptor)
    raise Killed


def _directory(path: Path) -> str:
    path.mkdir()
    return str(path)


def _pipe(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_directory, "found a directory"),
        (_pipe, "found not a regular file"),
        (lambda path: "/dev/null", "found not a regular file"),
        (lambda path: str(path / "plan.yaml"), "its folder does not exist"),
        (lambda path: f"{path}/", "found a directory"),
        (lambda path: "", "is not the name of a file"),
        (lambda path: "plan\0.yaml", "is not the name of a file"),
    ],
)
def test_an_impossible_path_is_refused_before_any_write(
    tmp_path: Path, make: Callable[[Path], str], message: str
) -> None:
    path = make(tmp_path / "target")
    before = sorted(tmp_path.rglob("*"))
    for attempt in (check_writable, lambda path: write_file(path, NEW)):
        with pytest.raises(ConfigError, match=message):
            attempt(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_symbolic_link_stays_and_its_target_changes(tmp_path: Path) -> None:
    target, link = tmp_path / "target.yaml", tmp_path / "link.yaml"
    target.write_bytes(OLD)
    link.symlink_to(target)
    write_file(str(link), NEW)
    assert link.is_symlink()
    assert target.read_bytes() == NEW


def test_a_new_file_has_ordinary_permissions_and_a_long_name_works(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 120 + ".yaml")
    write_file(str(path), NEW)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_name_too_long_for_the_system_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(str(tmp_path / ("x" * 300)), NEW)
    assert list(tmp_path.iterdir()) == []


def test_only_old_temporaries_of_killed_writers_are_removed(tmp_path: Path) -> None:
    old = ABANDONED_S + 60
    kept = [
        ".plan.yaml.0123456789ab.tmp",
        "plan.yaml.0123456789ab.tmp",
        ".plan.yaml.tmp",
        ".a.0123456789ag.tmp",
    ]
    for name in (*kept, ".frontier.json.abcdefabcdef.tmp"):
        path = tmp_path / name
        path.write_text("")
        if name != kept[0]:  # a writer may still be at work
            os.utime(path, (time.time() - old, time.time() - old))
    (tmp_path / ".link.0123456789ab.tmp").symlink_to(tmp_path / kept[1])
    remove_abandoned(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, ".link.0123456789ab.tmp"])
    remove_abandoned(str(tmp_path / "missing"))
