"""The Python code of an exported model: TorchTitan's configurations of its parts, with exact sizes."""

from __future__ import annotations

from collections.abc import Iterator
from string import Template

from shardwise.targets.torchtitan_model import TitanModel

CHECKPOINTS = ("llama", "mistral", "qwen3", "qwen3_moe")
"""Families whose Hugging Face checkpoints the module converts."""

NAMES = {
    "llama3": {
        "model": "Llama3Model", "block": "Llama3TransformerBlock", "parallelize": "parallelize_llama",
        "adapter": "Llama3StateDictAdapter", "rope": "ComplexRoPE",
    },
    "qwen3": {
        "model": "Qwen3Model", "block": "Qwen3TransformerBlock", "parallelize": "parallelize_qwen3",
        "adapter": "Qwen3StateDictAdapter", "rope": "CosSinRoPE",
    },
}  # fmt: skip
"""Names in each module of TorchTitan; its rotary embeddings pair neighbours (complex) or halves (cosine and
sine)."""

_RING = """\
# Keys and values go round the ring of context-parallel ranks during attention. (TorchTitan's FlexAttention
# gathers them before it, and keeps them.) Attention is causal over the whole sequence, across documents.
set_rotate_method("alltoall")

"""

_PARTS = """\
WEIGHT = {"weight": partial(nn.init.normal_, std=$std), "bias": nn.init.zeros_}


def norm(size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=$eps, param_init={"weight": nn.init.ones_})


def layer(index: int) -> $block.Config:
    attention = make_gqa_config(
        dim=$dim,
        n_heads=$heads,
        n_kv_heads=$kv_heads,
        head_dim=$head_dim,
        wqkv_param_init=WEIGHT,
        wo_param_init=WEIGHT,
        inner_attention=$attention,
        fuse_qkv=True,
        rope=$rope.Config(dim=$head_dim, max_seq_len=$positions, theta=$theta$scaling),
        qk_norm=$qk_norm,
    )
    attention.qkv_linear.wqkv.bias = $qkv_bias
    block = $block.Config(attention_norm=norm($dim), ffn_norm=norm($dim), attention=attention)
$mlps
    return block


def model() -> $model.Config:
    return $model.Config(
        dim=$dim,
        vocab_size=$vocab,
        enable_weight_tying=$tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=$vocab,
            embedding_dim=$dim,
            param_init=$embedding_init,
        ),
        norm=norm($dim),
        lm_head=Linear.Config(in_features=$dim, out_features=$vocab, param_init=WEIGHT),
        layers=[layer(index) for index in range($layers)],
    )


def model_spec() -> ModelSpec:
    return ModelSpec(
        name="$module",
        flavor="$family",
        model=model(),
        parallelize_fn=$parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=$hook,
        state_dict_adapter=$checkpoints,
    )
"""

_SCALING = (
    ', scaling="llama", scaling_factor=$factor, low_freq_factor=$low, high_freq_factor=$high,'
    " original_max_position_embeddings=$original"
)

_DENSE = """\
block.feed_forward = make_ffn_config(
    dim=$dim, hidden_dim=$ffn, w1_param_init=WEIGHT, w2w3_param_init=WEIGHT
)
"""

_EXPERTS = """\
block.moe = make_moe_config(
    num_experts=$experts,
    router=make_router_config(
        dim=$dim, num_experts=$experts, gate_param_init=WEIGHT, top_k=$top_k,
        score_func="softmax", route_norm=$route_norm,
    ),
    routed_experts=make_routed_experts_config(
        dim=$dim, hidden_dim=$expert_ffn, num_experts=$experts, top_k=$top_k,
        param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), WEIGHT["weight"]),
        comm_backend="standard",
    ),
)
"""


def model_imports(model: TitanModel, *, is_ring: bool) -> Iterator[str]:
    """The imports that the code of `model_code` needs."""
    names, module = NAMES[model.module], f"torchtitan.models.{model.module}"
    helpers = ["make_gqa_config"]
    if is_ring:
        yield "from torch.distributed.tensor.experimental._attention import set_rotate_method"
        yield "from torchtitan.models.common.attention import ScaledDotProductAttention"
    else:
        helpers.append("get_attention_config")
    if model.ffn_hidden_dim is not None:
        helpers.append("make_ffn_config")
    if model.experts is not None:
        helpers += ["make_moe_config", "make_routed_experts_config", "make_router_config"]
        yield "from torchtitan.components.optimizer import register_moe_load_balancing_hook"
    if model.enable_weight_tying:
        yield "from torchtitan.models.common.param_init import skip_param_init"
    yield "from torchtitan.distributed.pipeline_parallel import pipeline_llm"
    yield f"from torchtitan.models.common import {names['rope']}, Embedding, Linear, RMSNorm"
    yield f"from torchtitan.models.common.config_utils import {', '.join(sorted(helpers))}"
    yield f"from {module}.model import {names['model']}, {names['block']}"
    yield f"from {module}.parallelize import {names['parallelize']}"
    yield f"from {module}.state_dict_adapter import {names['adapter']}"
    yield "from torchtitan.protocols.model_spec import ModelSpec"


def model_code(model: TitanModel, family: str, *, is_ring: bool) -> str:
    """The code of the function `model_spec`, which gives TorchTitan's specification of the model. The weight
    of a tied embedding is that of the output. With `is_ring`, attention is that of a ring of ranks."""
    names, experts = NAMES[model.module], model.experts
    parts = Template(_PARTS).substitute(
        names,
        attention="ScaledDotProductAttention.Config()" if is_ring else 'get_attention_config("flex")',
        std=repr(model.init_std),
        eps=repr(model.norm_eps),
        dim=model.dim,
        heads=model.n_heads,
        kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        positions=model.max_seq_len,
        theta=repr(model.theta),
        scaling=_scaling(model),
        qk_norm=f"norm({model.head_dim})" if model.qk_norm else "None",
        qkv_bias=model.qkv_bias,
        mlps=_mlps(model),
        vocab=model.vocab_size,
        tied=model.enable_weight_tying,
        embedding_init='{"weight": skip_param_init}' if model.enable_weight_tying else "WEIGHT",
        layers=model.layers,
        module=model.module,
        family=family,
        hook="None" if experts is None else "register_moe_load_balancing_hook",
        checkpoints=names["adapter"] if family in CHECKPOINTS else "None",
    )
    return _RING + parts if is_ring else parts


def _scaling(model: TitanModel) -> str:
    if model.scaling is None:
        return ""
    factor, low, high, original = map(repr, model.scaling)
    return Template(_SCALING).substitute(factor=factor, low=low, high=high, original=original)


def _mlps(model: TitanModel) -> str:
    """The code that sets the dense MLP or the experts of a layer."""
    experts = model.experts
    dense = Template(_DENSE).substitute(dim=model.dim, ffn=model.ffn_hidden_dim)
    if experts is None:
        return _indented(dense, 1)
    routed = Template(_EXPERTS).substitute(
        dim=model.dim,
        experts=experts.num_experts,
        top_k=experts.top_k,
        expert_ffn=experts.hidden_dim,
        route_norm=experts.route_norm,
    )
    if model.ffn_hidden_dim is None:
        return _indented(routed, 1)
    without = [index for index, has_experts in enumerate(experts.pattern) if not has_experts]
    choice = f"    if index in {without}:\n{_indented(dense, 2)}\n    else:\n"
    return choice + _indented(routed, 2)


def _indented(code: str, levels: int) -> str:
    margin = "    " * levels
    return "\n".join(margin + line for line in code.splitlines())
