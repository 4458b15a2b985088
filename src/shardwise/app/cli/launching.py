"""The command `launch`: prints or runs the command or file that starts a plan with a launcher."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from shardwise import launch
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.launched import COMMAND_VARIABLE
from shardwise.app.cli.output import Output, print_notes
from shardwise.app.cli.request import choice
from shardwise.errors import ConfigError
from shardwise.inputs import read_bytes
from shardwise.launch import LAUNCHERS, PLAN_PATH, Launch
from shardwise.plans import Plan, check_output_path, read_plan, write_file

_MAX_PLAN_BYTES = 8 * 2**20
"""Largest plan file, bytes."""


@dataclass(frozen=True, slots=True)
class _FileLauncher:
    """A launcher that takes a file: the text of the file, the suffix of its name, and the command that
    submits it."""

    text: Callable[[Launch, str, str], str]
    suffix: str
    command: tuple[str, ...]


_FILE_LAUNCHERS: Mapping[str, _FileLauncher] = {
    "slurm": _FileLauncher(lambda start, *_: launch.slurm_script(start), ".sbatch", ("sbatch",)),
    "ray": _FileLauncher(
        lambda start, *_: launch.ray_script(start),
        ".ray.py",
        ("ray", "job", "submit", "--working-dir", ".", "--", "python"),
    ),
    "k8s": _FileLauncher(
        lambda start, plan_text, image: launch.kubernetes_manifest(start, plan_text=plan_text, image=image),
        ".k8s.yaml",
        ("kubectl", "apply", "-f"),
    ),
}


def launched(
    path: str,
    *,
    launcher: str,
    is_printed: bool,
    head: str | None,
    port: int,
    host: int,
    image: str | None,
    training: Sequence[str],
    is_adaptive: bool,
) -> Output:
    """Print the command that starts the plan file at `path`, or run it: then the launcher replaces this
    process.

    `training` are options of `train`, already validated; `is_adaptive` is whether they have `--adaptive`.
    ConfigError where the launcher cannot start the plan, or `train` would refuse it.
    """
    choice("--with", launcher, LAUNCHERS)
    plan = read_plan(path)
    _check_runs(plan, is_adaptive=is_adaptive)
    plan_path = PLAN_PATH if launcher == "k8s" else path
    start = launch.launch_of(plan, ("train", plan_path, *training), head=head, port=port)
    if launcher == "torchrun":
        commands = launch.torchrun_commands(start)
        if is_printed:
            return _text("".join(f"{shlex.join(command)}\n" for command in commands))
        if host >= len(commands):
            raise ConfigError(
                "is not a host of the plan",
                key="--host",
                found=str(host),
                allowed=f"0 to {len(commands) - 1}",
            )
        if host == 0 and start.hosts > 1:
            _check_free(port)
        return _exec_launcher(
            commands[host], resume_command=_resume_command(path, launcher, head=head, port=port, host=host)
        )
    if launcher == "k8s" and image is None:
        raise ConfigError(
            "is required for k8s", key="--image", allowed="a container image with shardwise[torch]"
        )
    file_launcher = _FILE_LAUNCHERS[launcher]
    plan_text = read_bytes(path, max_bytes=_MAX_PLAN_BYTES).decode()
    text = file_launcher.text(start, plan_text, image or "")
    if is_printed:
        return _text(text)
    target = os.path.splitext(path)[0] + file_launcher.suffix
    check_output_path("--with", target, inputs=(path,))
    write_file(target, text.encode())
    print_notes([f"wrote {target}"])
    return _exec_launcher(
        [*file_launcher.command, target],
        resume_command=_resume_command(path, launcher, head=None, port=port, host=0, image=image),
    )


def _check_runs(plan: Plan, *, is_adaptive: bool) -> None:
    """ConfigError where `train` would refuse the plan or `--adaptive`. Needs no PyTorch, except to check the
    operators of a graph."""
    launch.check_runnable(plan)
    if plan.best.has_operators and find_spec("torch") is not None:
        from shardwise.runtime import check_computable

        check_computable(plan.graph)
    if not is_adaptive:
        return
    plan.require_kind("uniform", key="--adaptive")
    if not launch.TARGET.knows_devices(plan.cluster.classes):
        raise ConfigError(
            "is not supported on accelerators", key="--adaptive", found=", ".join(plan.cluster.classes),
            allowed="train without it",
        )  # fmt: skip
    advisor_for(plan)


def _check_free(port: int) -> None:
    """ConfigError where another program listens on `port` of this host, the port of the rendezvous."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"cannot be opened: {os.strerror(error.errno or 0).lower()}", key="--port", found=str(port),
            allowed="a free port of the first host",
        ) from None  # fmt: skip


def _text(text: str) -> Output:
    return Output(lines=[((line, ""),) for line in text.splitlines()])


def _resume_command(
    path: str, launcher: str, *, head: str | None, port: int, host: int, image: str | None = None
) -> str:
    """This command without the options of train, to resume the run."""
    words = ["shardwise", "launch", path, "--with", launcher, "--port", str(port)]
    if head is not None:
        words += ["--head", head, "--host", str(host)]
    if image is not None:
        words += ["--image", image]
    return shlex.join(words)


def _exec_launcher(command: Sequence[str], *, resume_command: str) -> Output:
    """Replace this process by the launcher, which then gets the user's signals and sets the exit code. Its
    processes find `resume_command` in COMMAND_VARIABLE."""
    print_notes([shlex.join(command)])
    try:
        os.execvpe(command[0], list(command), {**os.environ, COMMAND_VARIABLE: resume_command})
    except FileNotFoundError:
        raise ConfigError(
            "is not installed", key=command[0], allowed="--print, and run the command where it is installed"
        ) from None
