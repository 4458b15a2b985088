"""Compilation of the loops of the Pareto search: numba is required, and functions are compiled once.

Compiled functions are cached next to their modules, or in the user's cache folder. `require_numba` is for
entry points, `numba_compiled` for functions, and `reporting_compilation` reports that a search compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from shardwise.errors import ConfigError
from shardwise.inputs import install_text

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILING = "compiling the search of operator graphs, once after an installation (about 20 s)"
"""Shown while functions are compiled."""


def require_numba() -> None:
    """Raises ConfigError if numba cannot be imported."""
    try:
        import numba  # noqa: F401 - a missing numba is reported clearly
    except ImportError as error:
        raise ConfigError(
            "cannot be imported, and frontiers of operator graphs need it", key="numba",
            found=str(error), allowed=install_text("graph"),
        ) from error  # fmt: skip


def numba_compiled(function: Function) -> Function:
    """Compile with numba, cached for later processes where a folder can be written to."""
    return _compiled(function)


def numba_inlined(function: Function) -> Function:
    """Compile as part of its callers alone. numba compiles and optimises every function again in each caller,
    and in theirs, so a function with one caller is compiled once less."""
    return _compiled(function, inline="always")


def _compiled(function: Function, **others: Any) -> Function:
    import numba

    _discard_own_stale_caches()
    _optimise_own_less()
    options = {"error_model": "numpy", "fastmath": {"nnan", "nsz"}, **others}  # no value here is NaN
    options["no_cfunc_wrapper"] = True
    found: Any
    try:
        found = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to
        found = numba.njit(**options)(function)
    else:
        _ignore_damage(found._cache)
    return cast(Function, found)


def _ignore_damage(files: Any) -> None:
    """Make damaged files of a function's cache count as missing: it is compiled again and they are replaced.
    numba raises whatever reading them raises."""
    load, save = files.load_overload, files.save_overload

    def load_or_compile(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # noqa: BLE001 - pickle raises errors of any kind
            with suppress(OSError):
                files.flush()
            return None

    def save_if_possible(*arguments: Any) -> None:
        with suppress(Exception):
            save(*arguments)

    files.load_overload, files.save_overload = load_or_compile, save_if_possible


@cache
def _discard_own_stale_caches() -> None:
    discard_stale_caches(Path(__file__).parent)


@cache
def _optimise_own_less() -> None:
    """Compile functions of this package at LLVM's level 1, of others as before. It takes a fifth less time
    than level 3, and the loops are as fast."""
    from numba.core import event

    config: Any = import_module("numba.core.config")
    listen: Any = event.register

    class Level(event.Listener):
        before: list[Any] = []  # noqa: RUF012 - of the only one

        def on_start(self, event: Any) -> None:
            self.before.append(config.OPT)
            if event.data["dispatcher"].py_func.__module__.startswith(__package__):
                config.OPT = type(config.OPT)(1)

        def on_end(self, event: Any) -> None:
            config.OPT = self.before.pop()

    listen("numba:compile", Level())


def discard_stale_caches(folder: Path) -> None:
    """Remove compiled functions in `folder` that are older than one of its modules. numba checks a function
    only against its own file, not against the functions and types it uses."""
    newest_s = max((path.stat().st_mtime for path in folder.glob("*.py")), default=0.0)
    for pattern in ("*.nbi", "*.nbc"):
        for path in folder.glob(f"__pycache__/{pattern}"):
            with suppress(OSError):  # another process was faster, or the folder is read-only
                if path.stat().st_mtime < newest_s:
                    path.unlink()


@contextmanager
def reporting_compilation(report: Callable[[str], None] | None) -> Iterator[None]:
    """Calls `report` with one line when a function is first compiled, not loaded from a cache."""
    if report is None:
        yield
    else:
        yield from _reporting(report)


def _reporting(report: Callable[[str], None]) -> Iterator[None]:
    from numba.core import event

    class Reporter(event.Listener):
        is_reported = False

        def on_start(self, event: Any) -> None:
            if not self.is_reported:
                report(COMPILING)
            self.is_reported = True

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Reporter()):
        yield
