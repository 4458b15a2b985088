"""Export of a uniform plan to TorchTitan 0.3: a Python module with its `Trainer.Config`, and the schedule as
CSV where PyTorch has no schedule of this name.

A field that TorchTitan cannot say raises ConfigError with its name. So does a value that TorchTitan accepts
but cannot train.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from string import Template

from shardwise.launch import Program, start_lines
from shardwise.plans import Plan
from shardwise.schedule import SPLIT_NAMES, generate, legal_mask
from shardwise.strategy import PROFILES, SCHEDULES, Strategy, acting_options, layer_counts, target_of
from shardwise.targets.torchtitan_code import model_code, model_imports
from shardwise.targets.torchtitan_model import TORCHTITAN, TitanModel, titan_model
from shardwise.targets.writing import check_plan, head_lines, on_python_path, refusal

MODULE, CONFIG = "torchtitan_0_3", "plan"
"""The module that is written, and its function that gives the configuration."""

FILE, CSV = f"{MODULE}.py", "schedule.csv"

SINGLE, MULTI = "PipelineScheduleSingle", "PipelineScheduleMulti"

SCHEDULE_CLASSES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""Our schedules and the names of PyTorch's. The others go into `schedule.csv`."""


def schedule_class(plan: Plan) -> str | None:
    """PyTorch's schedule of the plan; None where it is in `schedule.csv`, as 1F1B is with fewer micro-batches
    than stages, which PyTorch's class refuses."""
    strategy = plan.best.strategy
    if strategy.schedule == "1f1b" and microbatches_of(plan) < strategy.pp:
        return None
    return SCHEDULE_CLASSES.get(strategy.schedule)


def torchtitan_files(plan: Plan) -> dict[str, str]:
    """The texts of the files, by name. Raises ConfigError, with the key of the plan file, for a value that
    cannot be exported."""
    model = titan_model(plan.model, seq_len=plan.job.seq_len)
    check_titan_strategy(plan, model)
    files = {FILE: _module(plan, model)}
    if schedule_class(plan) is None:
        files[CSV] = schedule_csv(plan.best.strategy, microbatches_of(plan))
    return files


def check_titan_strategy(plan: Plan, model: TitanModel) -> None:
    """Raise ConfigError for the first field of the strategy or the job that cannot be exported: the
    capability file excludes it, or TorchTitan does not accept it with the other fields."""
    strategy = plan.best.strategy
    target = check_plan(plan, TORCHTITAN)
    for field, allowed in (*_stage_refusals(plan, model), *_rank_refusals(strategy, model)):
        raise refusal(target, f"best.strategy.{field}", getattr(strategy, field), allowed)


Refused = tuple[str, str]
"""A field of the strategy, and the values that can be exported."""


def _stage_refusals(plan: Plan, model: TitanModel) -> Iterator[Refused]:
    """Refusals about stages, micro-batches and recomputation."""
    strategy = plan.best.strategy
    if plan.job.global_batch_size % (strategy.dp * strategy.micro_batch_size):
        yield "micro_batch_size", "a divisor of the batch of a replica"
        return
    code = SCHEDULES.index(strategy.schedule)
    if not legal_mask(code, strategy.pp, microbatches_of(plan), strategy.vpp):
        yield "schedule", "schedules that take these pp, vpp and micro-batches"
        return
    first, last = strategy.first_stage_layers, strategy.last_stage_layers
    counts = stage_parts(strategy, model.layers)
    if sum(counts) != model.layers or min(counts) < 0 or (counts[0], counts[-1]) != (first, last):
        yield "first_stage_layers", f"stages that together have the {model.layers} layers, once each"
    elif len(counts) > 2 and min(counts[1:-1]) < 1:
        yield "first_stage_layers", f"layers on every stage between the first, {first}, and the last, {last}"
    if (strategy.recompute == "full") != (strategy.recompute_layers > 0):
        yield "recompute_layers", "above 0 only with full recomputation"


def _rank_refusals(strategy: Strategy, model: TitanModel) -> Iterator[Refused]:
    """Refusals about groups of ranks."""
    ranks = strategy.optim_shard * strategy.tp
    if strategy.dp * strategy.cp % strategy.optim_shard:
        yield "optim_shard", f"a divisor of dp * cp, {strategy.dp * strategy.cp}"
    if model.experts is None:
        if strategy.ep * strategy.etp > 1:
            yield "ep", "1 without experts (and etp 1)"
    elif ranks % strategy.ep or model.experts.num_experts % strategy.ep:
        yield "ep", "a divisor of the experts, and of tp * the ranks that share parameters or gradients"
    if strategy.sequence_parallel and strategy.tp == 1:
        yield "sequence_parallel", "false with tp 1"


def stage_parts(strategy: Strategy, layers: int) -> tuple[int, ...]:
    """Decoder layers of the stages, in model order."""
    ends = strategy.first_stage_layers, strategy.last_stage_layers
    return layer_counts(layers, strategy.pp * strategy.vpp, *ends)


def microbatches_of(plan: Plan) -> int:
    """Micro-batches of a replica in a step."""
    strategy = plan.best.strategy
    return plan.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)


def schedule_csv(strategy: Strategy, microbatches: int) -> str:
    """The schedule as PyTorch's pipelining reads it: one row of actions per pipeline rank."""
    table = generate(strategy.schedule, pp=strategy.pp, microbatches=microbatches, vpp=strategy.vpp)
    return "".join(",".join(map(str, row)) + "\n" for row in table.ranks)


def recomputes_all(strategy: Strategy, layers: int) -> bool:
    """Whether full recomputation is of all layers of every stage."""
    return strategy.recompute_layers >= max(stage_parts(strategy, layers))


_FIRST_LAYERS = '''
class FirstLayersAC(FullAC):
    """Full recomputation of the first layers of each model part."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: int = 0

    def apply(self, model: nn.Module) -> None:
        layers = model.get_submodule("layers")
        for name, block in list(layers.named_children())[: self.config.layers]:
            layers.register_module(name, self._wrap_block(block, base_fqn=f"layers.{name}"))

'''

_PARTS = """
def parts() -> list[list[str]]:
    \"\"\"The modules of each pipeline stage.\"\"\"
    starts = $starts
    ends = [*starts[1:], $layers]
    stages = [[f"layers.{index}" for index in range(*bounds)] for bounds in zip(starts, ends)]
    return [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "lm_head"]]

"""

_CONFIG = """
def plan() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_spec(),
        loss=CrossEntropyLoss.Config(global_vocab_size=$vocab),
        optimizer=$optimizer,
        training=TrainingConfig(
            local_batch_size=$local_batch,
            global_batch_size=$batch,
            seq_len=$seq_len,
            dtype="float32",
            mixed_precision_param="$dtype",
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
            # steps=100000,
        ),
        parallelism=ParallelismConfig(
$parallelism$pipeline            spmd_backend="partial_dtensor",
        ),
        activation_checkpoint=$recompute,
        compile=CompileConfig(enable=$compile$async),
        # The plan does not have these settings. The values are placeholders: set your own, and remove the #.
        # hf_assets_path="assets/hf/MODEL",
        # dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        # lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2000),
        # checkpoint=CheckpointManager.Config(enable=True, interval=500),
    )
"""

_PIPELINE = """\
            pipeline_parallel_schedule="$schedule",
            pipeline_parallel_schedule_csv=$csv,
            pipeline_parallel_microbatch_size=$microbatch,
            module_fqns_per_model_part=parts(),
"""


def _module(plan: Plan, model: TitanModel) -> str:
    """The text of the Python module."""
    strategy = plan.best.strategy
    head = [f"# {line}".rstrip() for line in head_lines(plan, target_of(TORCHTITAN))]
    start = [f"# {line}" for line in _start(plan)]
    is_partial = strategy.recompute == "full" and not recomputes_all(strategy, model.layers)
    classes = ("dataclass",) * is_partial + ("replace",) * has_narrow_moments(plan)
    texts = [
        "\n".join((*head, "#", *start, "", *_imports(model, strategy, classes), "", "")),
        model_code(model, plan.model.family, is_ring=strategy.cp > 1),
        _FIRST_LAYERS if is_partial else "",
        _parts(strategy, model.layers) if strategy.pp > 1 else "",
        _config(plan, model, is_partial),
    ]
    return "\n".join(filter(None, texts))


def _imports(model: TitanModel, strategy: Strategy, classes: Sequence[str]) -> Iterator[str]:
    if classes:
        yield f"from dataclasses import {', '.join(classes)}"
    yield "from functools import partial"
    yield "from pathlib import Path"
    yield ""
    yield "from torch import nn"
    yield "from torchtitan.components.loss import CrossEntropyLoss"
    yield "from torchtitan.components.optimizer import default_adamw"
    yield "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig"
    yield "from torchtitan.distributed.activation_checkpoint import FullAC"
    yield from model_imports(model, is_ring=strategy.cp > 1)
    yield "from torchtitan.trainer import Trainer"


def _parts(strategy: Strategy, layers: int) -> str:
    counts = stage_parts(strategy, layers)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return Template(_PARTS).substitute(starts=starts, layers=layers)


def _config(plan: Plan, model: TitanModel, is_partial: bool) -> str:
    strategy, job = plan.best.strategy, plan.job
    is_piped = strategy.pp > 1
    recompute = "FullAC.Config()" if strategy.recompute == "full" else "None"
    if is_partial:
        recompute = f"FirstLayersAC.Config(layers={strategy.recompute_layers})"
    return Template(_CONFIG).substitute(
        vocab=model.vocab_size,
        local_batch=_local_batch(plan),
        batch=job.global_batch_size,
        seq_len=job.seq_len,
        dtype=DTYPES[job.dtype],
        parallelism="".join(
            f"            {name}={json.dumps(value) if isinstance(value, str) else value},\n"
            for name, value in degrees(strategy).items()
        ),
        pipeline=_pipeline(plan) if is_piped else "",
        recompute=recompute,
        compile=is_compiled(plan),
        **{"async": ", enable_async_tensor_parallel=True" if is_async(plan) else ""},
        optimizer=f'replace({_ADAMW}, implementation="{NARROW}")' if has_narrow_moments(plan) else _ADAMW,
    )


def degrees(strategy: Strategy) -> dict[str, object]:
    """The values of TorchTitan's `ParallelismConfig` that are not about stages."""
    return {
        "data_parallel_replicate_degree": strategy.dp * strategy.cp // max(strategy.optim_shard, strategy.cp),
        "data_parallel_shard_degree": max(strategy.optim_shard // strategy.cp, 1),
        "fsdp_reshard_after_forward": "always" if strategy.param_shard > 1 else "never",
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.sequence_parallel,
        "context_parallel_degree": strategy.cp,
        "expert_parallel_degree": strategy.ep,
        "pipeline_parallel_degree": strategy.pp,
    }


def _local_batch(plan: Plan) -> int:
    """Sequences of a pass: without a pipeline, gradients of micro-batches accumulate over several passes."""
    strategy = plan.best.strategy
    if strategy.pp > 1:
        return plan.job.global_batch_size // strategy.dp
    return strategy.micro_batch_size


def titan_settings(plan: Plan) -> dict[str, str]:
    """The keys of the plan's strategy with their values, also where it cannot be exported."""
    strategy = plan.best.strategy
    values: dict[str, object] = {f"parallelism.{name}": value for name, value in degrees(strategy).items()}
    if strategy.pp > 1:
        schedule = schedule_class(plan) or f"a CSV of {strategy.schedule}"
        counts = stage_parts(strategy, plan.model.layers)
        values |= {
            "parallelism.pipeline_parallel_schedule": schedule,
            "parallelism.pipeline_parallel_microbatch_size": strategy.micro_batch_size,
            "parallelism.module_fqns_per_model_part": f"parts of {', '.join(map(str, counts))} layers",
        }
    values["training.local_batch_size"] = _local_batch(plan)
    is_partial = strategy.recompute == "full" and not recomputes_all(strategy, plan.model.layers)
    layers = f" of {strategy.recompute_layers} layers" if is_partial else ""
    values["activation_checkpoint"] = strategy.recompute + layers
    values["compile.enable"] = is_compiled(plan)
    values["compile.enable_async_tensor_parallel"] = is_async(plan)
    return {name: f"= {value}" for name, value in values.items()}


DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Our dtypes and TorchTitan's names."""


def is_compiled(plan: Plan) -> bool:
    """Whether the prediction assumes compiled layers. Compiled layers cannot split their backward pass."""
    profile = plan.job.profile
    is_eager = profile.pointwise_passes >= PROFILES["fsdp2-eager"].pointwise_passes
    return profile.loss == "compiled" and not is_eager and plan.best.strategy.schedule not in SPLIT_NAMES


def is_async(plan: Plan) -> bool:
    """Whether tensor-parallel collectives overlap with matmuls."""
    return acting_options(TORCHTITAN, plan.job.profile, plan.best.strategy).get("tp_comm_overlap") == "on"


def has_narrow_moments(plan: Plan) -> bool:
    """Whether the moments of the optimizer have 16 bits."""
    return plan.job.profile.options.get("moment_dtype") == "bf16"


_ADAMW = "default_adamw(lr=3e-4)"

NARROW = "fused_opt_states_bf16"
"""The implementation of AdamW whose moments have 16 bits."""


def _pipeline(plan: Plan) -> str:
    name = schedule_class(plan)
    return Template(_PIPELINE).substitute(
        schedule=name or SINGLE,
        csv='""' if name else f'str(Path(__file__).with_name("{CSV}"))',
        microbatch=plan.best.strategy.micro_batch_size,
    )


_WORDS = ("-m", "--", "torchtitan.train", "--module", MODULE, "--config", CONFIG)


def program(plan: Plan, folder: str, script: str) -> Program:
    """How TorchTitan starts with the module in `folder`; `script` is ignored. ConfigError where Python cannot
    search the folder."""
    return Program(words=_WORDS, setup=(on_python_path(folder),))


def _start(plan: Plan) -> Iterator[str]:
    yield "With this file's folder on PYTHONPATH:"
    yield from start_lines(plan, Program(words=_WORDS))
