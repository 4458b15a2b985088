"""How a run that has ended goes on: the command that does it."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from shardwise.app.cli.launched import COMMAND_VARIABLE, TORCHRUN_VARIABLE
from shardwise.app.cli.training_run import TrainArguments, TrainingRun
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.runtime import RankLost, TrainOptions


def lost(error: RankLost, run: TrainingRun, options: TrainOptions) -> list[str]:
    """What to say where a rank is lost."""
    lines = [f"shardwise: error: {error} {run.progress()}; the other ranks were ended"]
    lines += resume_lines(run, options)
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def interrupted(run: TrainingRun, options: TrainOptions) -> list[str]:
    """What to say where the user, or who started this process, ends it."""
    return [f"shardwise: error: interrupted {run.progress()}", *resume_lines(run, options)]


def resume_lines(run: TrainingRun, options: TrainOptions) -> list[str]:
    """The command that goes on with `run`, and from where; nothing where it saves nothing, or what it has
    saved cannot be gone on from."""
    from shardwise.runtime import restart_options

    if options.checkpoint is None:
        return []
    try:
        is_saved = restart_options(options, run.plan).resumed is not None
    except ConfigError as error:
        return [f"  it cannot go on: {error}"]
    where = "the last checkpoint" if is_saved else "the beginning"
    launcher = os.environ.get(COMMAND_VARIABLE)
    words = resume_arguments(run.arguments, options, is_saved=is_saved)
    if launcher:
        return [f"  to go on from {where}: {launcher} -- {shlex.join(words)}"]
    if TORCHRUN_VARIABLE in os.environ:
        where += ", under the same launcher"
    return [f"  to go on from {where}: {shlex.join(['shardwise', 'train', run.arguments.path, *words])}"]


def resume_arguments(arguments: TrainArguments, options: TrainOptions, *, is_saved: bool) -> list[str]:
    """The options of `train` that go on with a run, from its last checkpoint where there `is_saved` one."""
    words = ["--data", arguments.data, "--steps", str(arguments.steps), "--lr", repr(arguments.lr)]
    words += ["--checkpoint-every", str(arguments.checkpoint_every), "--restarts", str(arguments.restarts)]
    given = {"--checkpoint": arguments.checkpoint, "--log": arguments.log, "--trace": arguments.trace,
             "--export": arguments.export}  # fmt: skip
    if not is_saved:
        words += ["--seed", str(options.seed)]
        given["--weights"] = arguments.weights
    for option, text in given.items():
        if text is not None:
            words += [option, text]
    if arguments.adaptive:
        words.append("--adaptive")
    if is_saved:
        words.append("--resume")
    return words
