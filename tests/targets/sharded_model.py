"""A child process in which Transformers shards its model: `python -m tests.targets.sharded_model`.

Each line of the standard input is a request, `{"config": "the text of distributed_config.py", "world_size":
8}`. Each line of the standard output is its answer: `{"parameters": N}`, the elements of all parameters that
the first rank holds, or `{"error": "one line"}`. The process group is a fake one and tensors are on the meta
device, so that nothing is computed or sent; meshes, plans and shards are those of Transformers and PyTorch.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.targets.child_loop import serve


def main() -> None:
    serve(_import, _answer)


def _import() -> None:
    import transformers.distributed  # noqa: F401 - is it there?


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    import transformers as package
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers.initialization import no_tie_weights

    transformers: Any = package
    world_size = int(request["world_size"])
    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "distributed_config.py")
        path.write_text(request["config"], "utf-8")
        module = runpy.run_path(str(path))
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        config = transformers.AutoConfig.for_model(**module["model_config"])
        # As in `from_pretrained`, which ties embeddings after it has sharded them.
        with torch.device("meta"), no_tie_weights():
            model = transformers.AutoModelForCausalLM.from_config(config)
        own, _, meshes = model.prepare_distribute_model(module["distributed_config"])
        model = model.maybe_distribute_model(model, own, meshes)
        model.tie_weights(recompute_mapping=False)
        held = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.parameters()]
        return {"parameters": sum(weight.numel() for weight in held)}
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
