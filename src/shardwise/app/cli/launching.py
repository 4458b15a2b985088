"""The command `launch`: prints or runs the command or file that starts a plan with a launcher. For plans of
other training software it prints what starts that software with the files of `export`."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from shardwise import launch
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.launched import COMMAND_VARIABLE
from shardwise.app.cli.output import Output, print_notes
from shardwise.app.cli.request import choice
from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_bytes
from shardwise.launch import LAUNCHERS, PLAN_PATH, Launch
from shardwise.plans import Plan, check_output_path, plan_hash, read_plan, write_file
from shardwise.questions import files_for
from shardwise.targets import EXPORTERS, export_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of `launch`, with numbers in range. `files` is the folder of the files of `export`."""

    launcher: str
    target: str | None
    is_printed: bool
    head: str | None
    port: int
    host: int
    image: str | None
    files: str | None
    script: str | None


def launched(
    path: str, options: LaunchOptions, arguments: Sequence[str], *, is_adaptive: Callable[[], bool]
) -> Output:
    """Print the command that starts the plan file at `path`, or run it: then the launcher replaces this
    process. What starts other training software is always printed.

    `arguments` are options of `train`, which `is_adaptive` validates: it returns whether they have
    `--adaptive`. For other software they are arguments of its program. ConfigError where the launcher cannot
    start the plan, or `train` or the software would refuse it.
    """
    choice("--with", options.launcher, LAUNCHERS)
    if options.target is not None and export_of(options.target) is None:
        choice("--target", options.target, (launch.own_target().name, *EXPORTERS))
    plan = read_plan(path)
    target = export_of(options.target or plan.target or launch.own_target().name)
    if target is not None:
        return _text(_start_text(plan, target, path, options, arguments))
    for name, value in (("--files", options.files), ("--script", options.script)):
        if value is not None:
            raise ConfigError(
                f"is not an option for the target {launch.own_target().name}",
                key=name, found=printable(value),
                allowed=f"--target {' or '.join(EXPORTERS)}",
            )  # fmt: skip
    return _launched_own(plan, path, options, arguments, is_adaptive=is_adaptive())


def _start_text(plan: Plan, target: str, path: str, options: LaunchOptions, arguments: Sequence[str]) -> str:
    """What starts the software of `target` with `plan`."""
    exporter = EXPORTERS[target]
    if options.launcher == "ray":
        raise ConfigError(
            f"starts plans of the target {launch.own_target().name} only", key="--with ray", found=target,
            allowed="--with torchrun, slurm or k8s",
        )  # fmt: skip
    try:
        _, files = files_for(plan, target)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    if options.script is not None and exporter.script is None:
        raise ConfigError(
            f"is not an option for the target {target}", key="--script", found=printable(options.script)
        )
    is_pods = options.launcher == "k8s"
    if is_pods and options.files is not None:
        raise ConfigError(
            "is not an option for k8s", key="--files", found=printable(options.files),
            allowed="none: the manifest has the files",
        )  # fmt: skip
    folder = launch.FILES_FOLDER if is_pods else options.files or "."
    program = exporter.program(plan, folder, options.script or exporter.script or "")
    notes = [f"Starts a plan for {target}: {plan_hash(plan)}"]
    if not is_pods:
        notes.append(f"Needs the files of: shardwise export PLAN --to {target} --out FOLDER")
    if options.script is None and exporter.script is not None:
        notes.append(f"{exporter.script} {exporter.script_note}.")
    notes.append("Data, learning rate and number of steps are not part of a plan.")
    program = replace(program, words=(*program.words, *arguments), notes=tuple(notes))
    start = launch.launch_of(plan, program, head=options.head, port=options.port)
    if options.launcher == "torchrun":
        return launch.host_lines(start)
    if options.launcher == "slurm":
        return launch.slurm_script(start)
    if options.image is None:
        raise _no_image(f"a container image with {target}")
    return launch.jobset_manifest(start, files=files, image=options.image)


def _no_image(allowed: str) -> ConfigError:
    return ConfigError("is required for k8s", key="--image", allowed=allowed)


def _launched_own(
    plan: Plan, path: str, options: LaunchOptions, training: Sequence[str], *, is_adaptive: bool
) -> Output:
    """Print or start `train` with the plan file at `path`."""
    _check_runs(plan, is_adaptive=is_adaptive)
    launcher, host, image = options.launcher, options.host, options.image
    resume_command = _resume_command(path, options)
    plan_path = PLAN_PATH if launcher == "k8s" else path
    program = launch.own_program(("train", plan_path, *training))
    start = launch.launch_of(plan, program, head=options.head, port=options.port)
    if launcher == "torchrun":
        commands = launch.host_commands(start)
        if options.is_printed:
            return _text(launch.host_lines(start))
        if host >= len(commands):
            raise ConfigError(
                "is not a host of the plan",
                key="--host",
                found=str(host),
                allowed=f"0 to {len(commands) - 1}",
            )
        if host == 0 and start.hosts > 1:
            _check_free(options.port)
        return _exec_launcher(commands[host], resume_command=resume_command)
    if launcher == "k8s" and image is None:
        raise _no_image("a container image with shardwise[torch]")
    file_launcher = _FILE_LAUNCHERS[launcher]
    plan_text = read_bytes(path, max_bytes=_MAX_PLAN_BYTES).decode()
    text = file_launcher.text(start, plan_text, image or "")
    if options.is_printed:
        return _text(text)
    target = os.path.splitext(path)[0] + file_launcher.suffix
    check_output_path("--with", target, inputs=(path,))
    write_file(target, text.encode())
    print_notes([f"wrote {target}"])
    return _exec_launcher([*file_launcher.command, target], resume_command=resume_command)


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
    if not launch.own_target().knows_devices(plan.cluster.classes):
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
    lines = [((line, ""),) for line in text.removesuffix("\n").split("\n")]
    return Output(lines=lines, is_verbatim=True)


def _resume_command(path: str, options: LaunchOptions) -> str:
    """This command without the options of train, to resume the run."""
    words = ["shardwise", "launch", path, "--with", options.launcher, "--port", str(options.port)]
    if options.target is not None:
        words += ["--target", options.target]
    if options.launcher == "torchrun" and options.head is not None:
        words += ["--head", options.head, "--host", str(options.host)]
    if options.image is not None:
        words += ["--image", options.image]
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
