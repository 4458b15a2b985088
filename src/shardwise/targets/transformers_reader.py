"""Child process in which Transformers reads its own files: `python -m shardwise.targets.transformers_reader`.

Each line of standard input is a request, `{"config": "the text of distributed_config.py", "arguments": "the
text of trainer_args.json"}`. Each line of standard output answers one request with these keys:

- `sizes`: the fields of the `DistributedConfig`; `arguments`: those of the `TrainingArguments`.
- `sequence_length`, and `parameters` of the model that Transformers builds on the meta device.
- `sharded_layers`, `tensor_parallel_layers`, `expert_parallel_layers`: decoder layers in the plans that
  Transformers makes for the model and the sizes.
- `attention`, and `supports_attention`: whether the model has this implementation.
- `synchronizes_each_micro_batch`: whether gradients are reduced after each micro-batch.
"""

from __future__ import annotations

import json
import re
import runpy
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.targets.child_loop import plain_items, serve

_ATTENTION = re.compile(r"\blayers\.\d+\.self_attn\.q_proj$")
_LAYER = re.compile(r"\blayers\.\d+$")
_EXPERTS = re.compile(r"\blayers\.\d+\.mlp\.experts$")


def main() -> None:
    """Answer requests until the input ends."""
    serve(_import, _answer)


def _import() -> None:
    import accelerate  # noqa: F401 - the Trainer needs it
    import transformers.distributed  # noqa: F401 - is it there?


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    import transformers as package

    # Its annotations are not complete.
    transformers: Any = package
    # Without a GPU the Trainer takes no bf16 unless it may use the CPU.
    given = {**json.loads(request["arguments"]), "use_cpu": not torch.cuda.is_available()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "distributed_config.py")
        path.write_text(request["config"], "utf-8")
        module = runpy.run_path(str(path))
        (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_dict(
            {"output_dir": folder, **given}
        )
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**module["model_config"])
        model = transformers.AutoModelForCausalLM.from_config(config)
    of_tensors, of_experts, of_shards = model._resolve_parallel_plans(module["distributed_config"])
    accumulation = arguments.accelerator_config.gradient_accumulation_kwargs or {}
    return {
        "sizes": asdict(module["distributed_config"]),
        "arguments": dict(plain_items(vars(arguments))),
        "sequence_length": module["sequence_length"],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "attention": module["attn_implementation"],
        "supports_attention": _supports(model, module["attn_implementation"]),
        "sharded_layers": _matching(_LAYER, of_shards),
        "tensor_parallel_layers": _matching(_ATTENTION, of_tensors),
        "expert_parallel_layers": _matching(_EXPERTS, of_experts),
        "synchronizes_each_micro_batch": accumulation.get("sync_each_batch", False),
    }


def _supports(model: Any, attention: str) -> bool:
    """Whether the model has this implementation of attention; all have the eager one."""
    if attention == "eager":
        return True
    return bool(model._supports_sdpa if attention == "sdpa" else model._supports_flash_attn)


def _matching(pattern: re.Pattern[str], names: Iterable[str]) -> int:
    """How many of the names of modules are of this kind."""
    return sum(pattern.search(name) is not None for name in names)


if __name__ == "__main__":
    main()
