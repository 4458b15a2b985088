"""The entry point of `shardwise`: runs one command, prints its answer to stdout and errors as one line to
stderr.

Exit codes: 0 success, 1 unexpected error, 2 usage or bad input, 3 infeasible, 4 failed check or deviating
measurement, 130 interrupted (143 by SIGTERM, 129 by SIGHUP). Commands import slow modules themselves.
"""

from __future__ import annotations

# No other imports at module level: `main` must handle an interrupt while modules load.
import errno
import os
import sys
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.app.cli.output import Failure

DEBUG_VARIABLE = "SHARDWISE_DEBUG"
"""Environment variable; when set, unexpected errors keep their traceback."""

OWN_TERMINAL = ("emulate", "train")
"""Commands that run programs of the user on the terminal, or show lines of their own."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a stdout that cannot be written. Other files have their own errors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the arguments of the process) and return the exit code.

    Raises only with SHARDWISE_DEBUG set.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from shardwise.interrupts import exit_code, signals_as_interrupts
    except KeyboardInterrupt:
        return _interrupted(is_json="--json" in arguments)
    with signals_as_interrupts():
        code = exit_code(_answered(arguments))
    # After an interrupt within exec() of a text, as the decorator of dataclasses calls it, the interpreter of
    # `python -m shardwise` ends itself by SIGINT, with another exit code. Making another class clears that.
    namedtuple("_Cleared", "")
    return code


def _answered(arguments: list[str]) -> int:
    """Run the command and return its exit code, errors and interrupts included."""
    try:
        return _run(arguments)
    except BrokenPipeError:
        return _stdout_closed()
    except KeyboardInterrupt:
        return _interrupted(is_json="--json" in arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return _stdout_unwritable(error)
        if os.environ.get(DEBUG_VARIABLE):
            raise
        from shardwise.app.cli.output import failure_of
        from shardwise.errors import ConfigError, Infeasible
        from shardwise.interrupts import was_interrupted

        if was_interrupted(error) and not isinstance(error, ConfigError | Infeasible):
            return _interrupted(is_json="--json" in arguments)
        return _fail(failure_of(error), is_json="--json" in arguments)


def _run(arguments: list[str]) -> int:
    from shardwise.app.cli.activity import active
    from shardwise.app.cli.commands import command
    from shardwise.app.cli.output import Output, flush_stdout, write_output
    from shardwise.errors import naming_options
    from shardwise.interrupts import INTERRUPTED

    what = f"shardwise {arguments[0]}" if arguments and arguments[0] not in OWN_TERMINAL else ""
    with naming_options(), active(what):
        answer = command().main(args=arguments, prog_name="shardwise", standalone_mode=False)
    if isinstance(answer, Output):
        write_output(answer)
        return answer.code
    # `--help` and `--version` print by themselves and return a code, as does an interrupt.
    if answer == INTERRUPTED:
        raise KeyboardInterrupt
    flush_stdout()
    return answer if isinstance(answer, int) else 0


def _fail(failure: Failure, *, is_json: bool) -> int:
    from shardwise.app.cli.output import Output, print_notes, silence, write_output

    if is_json:
        try:
            write_output(Output(document=failure.document()))
        except OSError:
            silence(sys.stdout)
    print_notes(failure.lines())
    return failure.code


def _interrupted(*, is_json: bool) -> int:
    from shardwise.app.cli.output import Failure

    message = "interrupted before there was an answer"
    return _fail(Failure(code=130, kind="interrupted", message=message), is_json=is_json)


def _stdout_closed() -> int:
    """The reader of stdout is gone: print nothing more, and prevent an error of the interpreter's last
    flush."""
    from shardwise.app.cli.output import silence

    silence(sys.stdout)
    return 1


def _stdout_unwritable(error: OSError) -> int:
    """Stdout is closed, or on a full disk: report that the answer is lost."""
    from shardwise.app.cli.output import print_notes, silence

    silence(sys.stdout)
    print_notes(
        [f"shardwise: error: stdout: cannot be written; found {(error.strerror or str(error)).lower()}"]
    )
    return 1
