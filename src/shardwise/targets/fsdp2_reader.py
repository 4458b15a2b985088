"""Child process in which Accelerate reads its own configuration: `python -m shardwise.targets.fsdp2_reader`.

Each line of standard input is a request, `{"file": "the text of accelerate.yaml"}`. Each line of standard
output answers one request with these keys:

- `arguments`: the arguments of `accelerate launch` with the values of the file.
- `sizes`: the fields and the `total_size` of the `ParallelismConfig` that a script gets.
- `ring`: how context-parallel ranks send keys and values; null without them.
- `fsdp`: the fields of its `FullyShardedDataParallelPlugin`; `offloads`: whether that offloads parameters.
- `reduces`: the dtype in which gradients are reduced, unless the script passes a policy; null for that of the
  parameters.
- `ignored`: keys of the file that are no arguments.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.targets.child_loop import plain_items, serve

_SET_BY_LAUNCHER = ("ACCELERATE", "FSDP", "PARALLELISM")
"""First words of the environment variables by which the launcher passes a configuration to the script."""


def main() -> None:
    """Answer requests until the input ends."""
    serve(_import, _answer)


def _import() -> None:
    import accelerate.commands.launch  # noqa: F401 - is it there?


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, _same_environment():
        path = Path(folder, "accelerate.yaml")
        path.write_text(request["file"], "utf-8")
        return _read(str(path))


def _read(path: str) -> dict[str, Any]:
    """Accelerate's reading of a file: first by its launcher, then by the classes of a script."""
    import yaml
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import CPUOffloadPolicy

    # Port 0 is any free port: another program may use the default one.
    words = ["--config_file", path, "--main_process_port", "0", "train.py"]
    parser = launch_command_parser()
    known = vars(parser.parse_args(["train.py"]))
    arguments, _, _ = _validate_launch_command(parser.parse_args(words))
    sections = yaml.safe_load(Path(path).read_text("utf-8")).values()
    names = {key for section in sections if isinstance(section, dict) for key in section}
    passed = prepare_multi_gpu_env(arguments)
    os.environ.update({name: value for name, value in passed.items() if name.startswith(_SET_BY_LAUNCHER)})
    sizes, fsdp = ParallelismConfig(), FullyShardedDataParallelPlugin()
    if arguments.mixed_precision not in (None, "no"):
        fsdp.set_mixed_precision(arguments.mixed_precision)  # as AcceleratorState does
    policy = fsdp.mixed_precision_policy
    return {
        "arguments": dict(plain_items(vars(arguments))),
        "sizes": {**dict(plain_items(vars(sizes))), "total_size": sizes.total_size},
        "ring": sizes.cp_handler.cp_comm_strategy if sizes.cp_size > 1 else None,
        "fsdp": dict(plain_items(vars(fsdp))),
        "offloads": isinstance(fsdp.cpu_offload, CPUOffloadPolicy),
        "reduces": None if policy is None else str(policy.reduce_dtype),
        "ignored": sorted(names - set(known)),
    }


@contextmanager
def _same_environment() -> Iterator[None]:
    """Restore the environment afterwards, so that one file does not decide how the next is read."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
