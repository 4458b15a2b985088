"""Facts of the recipes of megatron-bridge: model, devices, batch, degrees and options.

`read_wheel` extracts them (`recipes_wheel` reads the syntax trees), `read_facts` reads the stored copy
`recipes_facts.json`, and `write_facts` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.recipes_wheel import Opaque, Settings, UnreadableRecipe, WheelReader

from shardwise.targets.imports.megatron_lm_text import layout_counts

STORED = Path(__file__).with_name("recipes_facts.json")
SOURCE = "megatron-bridge 0.6.2, the wheel on PyPI: megatron/bridge/recipes and megatron/bridge/perf_recipes"

DTYPES = {"tensorwise": "fp8-current", "delayed": "fp8", "blockwise": "fp8-block", "mxfp8": "mxfp8"}
"""Values of `fp8_recipe` and our dtypes."""

TASKS = ("pretrain", "sft", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe states. Degrees as in Megatron-LM.

    `family` is its folder in the wheel; `model` an id of the Hugging Face Hub, or the class that builds it
    with its layers and width. `vocab` is the vocabulary of a mock tokenizer that replaces the model's,
    padded as Megatron-LM does, `mtp_layers` the layers of multi-token prediction (None: as the model has
    them). `devices` is 0 where the name has none. `layers` are decoder layers of each stage, in model
    order, where the recipe gives them; else `ends_count_as_layers` says that the embedding and the loss
    take the place of a layer, and `first_rank_layers`, `last_rank_layers` (0: not given) are those of a
    pipeline rank. `sharding` is `none`, `optimizer` (the distributed optimizer, or one that gives each rank
    some layers) or `fsdp` (Megatron-FSDP), over the data-parallel ranks divided by `optimizer_instances`;
    with `shards_states_outside` optimizer states are sharded over all of them. `recompute_layers` is 0
    where all layers are recomputed. `offload` has `optimizer` and the modules whose activations are
    offloaded, `offloaded_layers` the number of layers whose activations are. With `low_precision_weights`
    weights are stored and gathered in the format of the products, without a 16-bit copy. `aliases` are
    recipes with the same facts."""

    name: str
    family: str
    kind: str
    task: str
    model: str
    vocab: int | None
    mtp_layers: int | None
    devices: int
    device: str
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    dtype: str
    optimizer: str
    tp: int
    pp: int
    vpp: int
    cp: int
    cp_kind: str
    ep: int
    etp: int
    sequence_parallel: bool
    layers: tuple[int, ...]
    ends_count_as_layers: bool
    first_rank_layers: int
    last_rank_layers: int
    sharding: str
    optimizer_instances: int
    shards_states_outside: bool
    recompute: str
    recompute_modules: tuple[str, ...]
    recompute_layers: int
    offload: tuple[str, ...]
    offloaded_layers: int
    low_precision_weights: bool
    grad_reduce_dtype: str
    master_dtype: str
    moment_dtype: str
    overlap_grad_reduce: bool
    tp_comm_overlap: bool
    ep_overlap: bool
    dispatcher: str
    cuda_graphs: str
    capacity_factor: float
    is_balanced: bool
    aliases: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel ranks; rounded down where the degrees do not divide the devices."""
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def faults(self) -> tuple[str, ...]:
        """What does not add up in the recipe itself."""
        if not self.devices:
            return ("its name has no number of devices",)
        product = self.tp * self.pp * self.cp
        if self.devices % product:
            return (f"tp * pp * cp = {product} does not divide {self.devices} devices",)
        found = []
        if self.global_batch_size % (self.dp * self.micro_batch_size):
            found.append(
                f"{self.global_batch_size} sequences do not divide over dp {self.dp} with micro-batches of "
                f"{self.micro_batch_size}"
            )
        experts = self.etp * self.ep * self.pp
        if self.ep > 1 and self.devices % experts:
            found.append(f"etp * ep * pp = {experts} does not divide {self.devices} devices")
        return tuple(found)


def read_wheel(wheel: Path) -> tuple[list[Recipe], list[tuple[str, str]]]:
    """The recipes of a wheel that give tp and pp, equal ones once, and the names of those that cannot be
    read, each with the reason."""
    reader = WheelReader(wheel)
    found: dict[Recipe, list[str]] = {}
    unread = []
    for module, name in reader.recipes():
        try:
            recipe = facts_of(name, module, reader.configuration(module, name), reader)
        except UnreadableRecipe as error:
            unread.append((name, str(error)))
            continue
        if recipe is not None:
            found.setdefault(replace(recipe, name=""), []).append(name)
    return [
        replace(recipe, name=names[0], aliases=tuple(names[1:])) for recipe, names in found.items()
    ], unread


def facts_of(name: str, module: str, cfg: Settings, reader: WheelReader) -> Recipe | None:
    """The facts of one configuration; None for one without tp and pp. Raises UnreadableRecipe where a
    degree is no number."""
    read = _Facts(name, cfg, _precision(cfg, reader))
    tp, pp = (read.value(f"model.{axis}_model_parallel_size") for axis in ("tensor", "pipeline"))
    if tp is None or pp is None:
        return None
    _, _, folder, family, *_ = module.split(".")
    return read.recipe(family=family, kind="performance" if folder == "perf_recipes" else "canonical")


def _precision(cfg: Settings, reader: WheelReader) -> Settings:
    """The precision of a configuration; a name stands for a function of the wheel."""
    found = cfg.get("mixed_precision")
    if isinstance(found, str):
        found = reader.configuration("megatron.bridge.training.mixed_precision", found.replace("-", "_"))
    return found if isinstance(found, Settings) else Settings("MixedPrecisionConfig", {"bf16": True})


@dataclass(frozen=True, slots=True)
class _Facts:
    """Reads the facts of one configuration; `precision` is that of `mixed_precision`."""

    name: str
    cfg: Settings
    precision: Settings

    def recipe(self, *, family: str, kind: str) -> Recipe:
        devices, device = self._devices()
        tp, pp = (
            self.count("model.tensor_model_parallel_size"),
            self.count("model.pipeline_model_parallel_size"),
        )
        cp = self.count("model.context_parallel_size")
        sharding, instances = self._sharding()
        layers = self._layers() if pp > 1 else ()
        recompute, modules, recomputed = self._recompute()
        aware = self.value("optimizer.use_precision_aware_optimizer") is True
        sequence_parallel = tp > 1 and self.value("model.sequence_parallel") is True
        return Recipe(
            name=self.name,
            family=family,
            kind=kind,
            task=next((task for task in TASKS if task in self.name.split("_")), "other"),
            model=self._model(),
            vocab=self._vocabulary(tp),
            mtp_layers=self.value("model.mtp_num_layers"),
            devices=devices,
            device=device,
            seq_len=self.count("model.seq_length", self.count("dataset.seq_length", 0)),
            global_batch_size=self.count("train.global_batch_size"),
            micro_batch_size=self.count("train.micro_batch_size"),
            dtype=self._dtype(),
            optimizer=self.value("optimizer.optimizer") or "adam",
            tp=tp,
            pp=pp,
            vpp=self.count("model.virtual_pipeline_model_parallel_size", len(layers) // pp or 1)
            if pp > 1
            else 1,
            cp=cp,
            cp_kind="all_to_all" if cp > 1 and self.value("model.cp_comm_type") == "a2a" else "ring",
            ep=self.count("model.expert_model_parallel_size"),
            etp=self.count("model.expert_tensor_parallel_size", tp),
            sequence_parallel=sequence_parallel,
            layers=layers,
            ends_count_as_layers=pp > 1 and self._ends_count(),
            first_rank_layers=self.count("model.num_layers_in_first_pipeline_stage", 0) if pp > 1 else 0,
            last_rank_layers=self.count("model.num_layers_in_last_pipeline_stage", 0) if pp > 1 else 0,
            sharding=sharding,
            optimizer_instances=instances,
            shards_states_outside=self.value("ddp.outer_dp_sharding_strategy") == "optim",
            recompute=recompute,
            recompute_modules=modules,
            recompute_layers=recomputed,
            offload=self._offload(),
            offloaded_layers=self._offloaded_layers(),
            low_precision_weights=any(
                self.precision.get(f"{kind}_param_gather") is True and bool(self.precision.get(kind))
                for kind in ("fp8", "fp4")
            ),
            grad_reduce_dtype="fp32" if self.precision.get("grad_reduce_in_fp32", True) else "bf16",
            master_dtype=self._stored("main_params_dtype") if aware else "fp32",
            moment_dtype=self._stored("exp_avg_dtype") if aware else "fp32",
            overlap_grad_reduce=self._overlaps(),
            tp_comm_overlap=sequence_parallel and self.value("comm_overlap.tp_comm_overlap") is True,
            ep_overlap=self.value("comm_overlap.overlap_moe_expert_parallel_comm") is True,
            dispatcher=self._dispatcher(),
            cuda_graphs=self._graphs(),
            is_balanced=self.value("model.moe_router_force_load_balancing") is True,
            capacity_factor=float(self.value("model.moe_expert_capacity_factor") or 0.0),
        )

    def value(self, path: str) -> Any:
        """The value at a path; None where it is not set, or not known."""
        found = self.cfg.get(path)
        return None if isinstance(found, Opaque) else found

    def count(self, path: str, default: int = 1) -> int:
        found = self.cfg.get(path)
        if isinstance(found, Opaque | Settings | str):
            raise UnreadableRecipe(f"{path} is {getattr(found, 'text', found)}")
        return default if found is None else int(found)

    def _devices(self) -> tuple[int, str]:
        match = re.search(r"_(\d+)gpu_([a-z]+\d+)_", self.name)
        return (0, "") if match is None else (int(match.group(1)), match.group(2))

    def _model(self) -> str:
        source = self.value("model.hugging_face")
        if isinstance(source, Settings):
            return str(source.get("architectures", ["?"])[0])
        if source is not None:
            return str(source)
        kind = self.cfg.get("model").kind
        sizes = [self.value(f"model.{name}") for name in ("num_layers", "hidden_size")]
        return f"{kind} {sizes[0]}x{sizes[1]}"

    def _vocabulary(self, tp: int) -> int | None:
        own = self.value("tokenizer.use_tokenizer_vocab_size") is True
        size = self.value("tokenizer.vocab_size")
        if not own or not isinstance(size, int) or self.value("tokenizer.tokenizer_type") != "NullTokenizer":
            return None
        multiple = tp * self.count("model.make_vocab_size_divisible_by", 128)
        return -(-size // multiple) * multiple

    def _dtype(self) -> str:
        if self.precision.get("fp4"):
            return "nvfp4"
        if self.precision.get("fp8"):
            return DTYPES[self.precision.get("fp8_recipe")]
        return "fp16" if self.precision.get("fp16") else "bf16"

    def _layers(self) -> tuple[int, ...]:
        """Decoder layers of every stage, from a layout or from the layers of the first and the last."""
        layout = self.value("model.pipeline_model_parallel_layout")
        if isinstance(layout, str) and layout:
            return layout_counts(layout, "layout")
        if isinstance(layout, list):
            return tuple(stage.count("decoder") for stage in layout)
        return ()

    def _ends_count(self) -> bool:
        """Whether the embedding and the loss count as a layer each when layers are divided over stages."""
        found = {
            self.value(f"model.account_for_{end}_in_pipeline_split") is True for end in ("embedding", "loss")
        }
        if len(found) > 1:
            raise UnreadableRecipe("only one of the embedding and the loss counts as a layer")
        return found.pop()

    def _sharding(self) -> tuple[str, int]:
        instances = self.count("ddp.num_distributed_optimizer_instances")
        if self.value("ddp.use_megatron_fsdp") is True or self.value("dist.use_megatron_fsdp") is True:
            return "fsdp", instances
        by_layer = str(self.value("optimizer.optimizer")).startswith("dist_")
        is_sharded = by_layer or self.value("ddp.use_distributed_optimizer") is True
        return ("optimizer" if is_sharded else "none"), instances

    def _recompute(self) -> tuple[str, tuple[str, ...], int]:
        """Granularity, modules of a selective one, and layers of a full one (0: all)."""
        granularity = self.value("model.recompute_granularity")
        if granularity == "full":
            whole = self.value("model.recompute_method") != "block"
            return "full", (), 0 if whole else self.count("model.recompute_num_layers", 0)
        if granularity != "selective":
            return "none", (), 0
        modules = self.value("model.recompute_modules")
        named = tuple(sorted(modules)) if modules is not None else ("core_attn",)
        return ("selective" if named else "none"), named, 0

    def _offload(self) -> tuple[str, ...]:
        found = []
        if self.value("optimizer.optimizer_cpu_offload") is True:
            found.append("optimizer")
        if self.value("model.fine_grained_activation_offloading") is True:
            found += sorted(self.value("model.offload_modules") or ())
        return tuple(found)

    def _offloaded_layers(self) -> int:
        if self.value("model.cpu_offloading") is not True:
            return 0
        return self.count("model.cpu_offloading_num_layers", 0)

    def _stored(self, name: str) -> str:
        found = self.cfg.get(f"optimizer.{name}")
        text = found.text.rsplit(".", 1)[-1] if isinstance(found, Opaque) else "float32"
        return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "fp8"}[text]

    def _overlaps(self) -> bool:
        """Whether gradients are reduced during the backward pass: the overlap settings replace those of the
        data-parallel configuration, and turn it on where they do not say."""
        if self.value("comm_overlap") is not None:
            return self.value("comm_overlap.overlap_grad_reduce") is not False
        return self.value("ddp.overlap_grad_reduce") is True

    def _dispatcher(self) -> str:
        kind = self.value("model.moe_token_dispatcher_type")
        return str(self.value("model.moe_flex_dispatcher_backend") if kind == "flex" else kind or "")

    def _graphs(self) -> str:
        kind = self.value("model.cuda_graph_impl")
        return "" if kind in (None, "none") else str(kind)


def write_facts(recipes: Iterable[Recipe], unread: Iterable[tuple[str, str]], path: Path = STORED) -> None:
    """Stores the facts as JSON, one recipe a line, without the values that are the most common."""
    lines = [json.dumps(_record(recipe)) for recipe in recipes]
    text = (
        "{\n"
        f'"source": {json.dumps(SOURCE)},\n'
        f'"unread": {json.dumps([list(each) for each in unread])},\n'
        '"recipes": [\n' + ",\n".join(lines) + "\n]\n}\n"
    )
    path.write_text(text, "utf-8")


def read_facts(path: Path = STORED) -> tuple[list[Recipe], list[tuple[str, str]]]:
    """The stored facts: recipes, and those that could not be read with the reason."""
    data = json.loads(path.read_text("utf-8"))
    return [_recipe(record) for record in data["recipes"]], [
        (name, reason) for name, reason in data["unread"]
    ]


COMMON: Mapping[str, Any] = {
    "kind": "performance", "task": "pretrain", "vocab": None, "mtp_layers": None, "optimizer": "adam",
    "vpp": 1, "cp": 1, "cp_kind": "ring", "ep": 1, "sequence_parallel": False, "layers": (),
    "ends_count_as_layers": False, "first_rank_layers": 0, "last_rank_layers": 0, "sharding": "optimizer",
    "optimizer_instances": 1, "shards_states_outside": False, "recompute": "none", "recompute_modules": (),
    "recompute_layers": 0, "offload": (), "offloaded_layers": 0,
    "low_precision_weights": False, "grad_reduce_dtype": "bf16",
    "master_dtype": "fp32", "moment_dtype": "fp32", "overlap_grad_reduce": True, "tp_comm_overlap": False,
    "ep_overlap": False, "dispatcher": "alltoall", "cuda_graphs": "", "capacity_factor": 0.0,
    "is_balanced": False,
    "aliases": (),
}  # fmt: skip
"""Values that the stored facts leave out."""


def _record(recipe: Recipe) -> dict[str, Any]:
    return {
        name: value for name, value in asdict(recipe).items() if name not in COMMON or COMMON[name] != value
    }


def _recipe(record: Mapping[str, Any]) -> Recipe:
    values = {**COMMON, **record}
    listed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Recipe(**listed)
