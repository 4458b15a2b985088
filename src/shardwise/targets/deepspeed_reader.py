"""Child process in which DeepSpeed reads its own file: `python -m shardwise.targets.deepspeed_reader`.

Each line of standard input is a request, `{"file": "the text of deepspeed.json", "world_size": 8}`. Each line
of standard output answers one request with these keys:

- `config`: the attributes of the `DeepSpeedConfig`; `zero`: the fields of its `zero_config`.
- `bf16`, `fp16`: whether they are enabled; `tensor_parallel`: the size of AutoTP, 0 without it.
- `ignored`: keys that DeepSpeed did not look up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from shardwise.targets.child_loop import line_of, plain_items, serve


def main() -> None:
    """Answer requests until the input ends."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # else it wants a GPU
    serve(_import, _answer)


def _import() -> None:
    import deepspeed.runtime.config  # noqa: F401 - is it there?


class KeyRecorder(dict[str, Any]):
    """A mapping that knows which of its keys were looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[object] = set()

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime import config

    # Without a process group DeepSpeed assumes one rank, whatever the file says.
    config.dist = SimpleNamespace(
        get_rank=lambda *_: 0, get_world_size=lambda *_, **__: int(request["world_size"])
    )
    given = json.loads(request["file"])
    types = KeyRecorder(given.get("data_types", {}))
    top = KeyRecorder({**given, "data_types": types} if "data_types" in given else given)
    try:
        read = config.DeepSpeedConfig(top)
    except config.DeepSpeedConfigError as error:
        return {"error": line_of(error)}
    # The copy that DeepSpeed reads shares `names` with `top`.
    ignored = [name for name in given if name not in top.names]
    return {
        "config": dict(plain_items({name: vars(read)[name] for name in vars(read) if name[0] != "_"})),
        "zero": json.loads(read.zero_config.model_dump_json()),
        "bf16": read.bfloat16_config.enabled,
        "fp16": read.float16_config.enabled,
        "tensor_parallel": read.tensor_parallel_config.autotp_size,
        "ignored": ignored + [f"data_types.{name}" for name in types if name not in types.names],
    }


if __name__ == "__main__":
    main()
