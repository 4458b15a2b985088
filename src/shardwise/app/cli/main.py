"""The command `shardwise`: runs one command, prints its answer on stdout, its errors as one line on stderr.

Exit codes: 0 answered, 1 anything unexpected, 2 usage or bad input, 3 infeasible, 4 a checker or a
measured step disagrees, 130 interrupted. Modules that cost time to import are imported by the command that
needs them.
"""

from __future__ import annotations

# Nothing else is imported out here: an interrupt while modules load must meet `main`, not leave a traceback.
import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.app.cli.output import Failure

DEBUG_VARIABLE = "SHARDWISE_DEBUG"
"""Environment variable; when set, unexpected errors keep their traceback."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What the system says where stdout takes no more; files that are read or written have their own errors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments); returns the exit code, never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
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

        return _fail(failure_of(error), is_json="--json" in arguments)


def _run(arguments: list[str]) -> int:
    from shardwise.app.cli.commands import command
    from shardwise.app.cli.output import Output, flush_stdout, write_output

    answer = command().main(args=arguments, prog_name="shardwise", standalone_mode=False)
    if isinstance(answer, Output):
        write_output(answer)
        return answer.code
    # `--help` and `--version` print by themselves and leave with a code, as an interrupt does.
    if answer == 130:
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
    """Whoever read stdout is gone: say nothing more, and keep the interpreter's last flush quiet too."""
    from shardwise.app.cli.output import silence

    silence(sys.stdout)
    return 1


def _stdout_unwritable(error: OSError) -> int:
    """Stdout is closed, or on a full disk: the answer is lost, and that is said."""
    from shardwise.app.cli.output import print_notes, silence

    silence(sys.stdout)
    print_notes(
        [f"shardwise: error: stdout: cannot be written; found {(error.strerror or str(error)).lower()}"]
    )
    return 1
