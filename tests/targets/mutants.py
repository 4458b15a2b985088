"""Mutated flags, as a wrong export would write them: each has one flag changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Flags = tuple[tuple[str, ...], ...]

OTHER_WORDS = {
    "--cp-comm-type": "a2a+p2p",
    "--normalization": "LayerNorm",
    "--optimizer": "sgd",
    "--data-parallel-sharding-strategy": "no_shard",
    "--outer-dp-sharding-strategy": "no_shard",
    "--megatron-fsdp-main-grads-dtype": "auto",
    "--megatron-fsdp-grad-comm-dtype": "auto",
    "--ckpt-format": "torch_dist",
    "--position-embedding-type": "none",
    "--recompute-method": "uniform",
    "--recompute-granularity": "selective",
    "--recompute-modules": "core_attn",
    "--attention-backend": "flash",
}
"""Another value for flags with named values (BACK's value, if the flag already has this one)."""

BACK = {"LayerNorm": "RMSNorm", "sgd": "adam", "none": "rope", "flash": "unfused",
        "selective": "full", "core_attn": "layernorm"}  # fmt: skip
"""The replacement for each value of OTHER_WORDS that has one."""


def mutants(flags: Flags) -> Iterator[tuple[str, Flags]]:
    """The name of each flag, with all flags of which this one is changed: a degree doubled or another number
    increased by one, a named value replaced, a switch left out."""
    for place, (name, *values) in enumerate(flags):
        for changed in _changed(name, values):
            yield name, (*flags[:place], *changed, *flags[place + 1 :])


def _changed(name: str, values: Sequence[str]) -> Iterator[Flags]:
    if not values:
        yield ()
    elif all(_is_number(value) for value in values):
        # Twice a degree may be legal where one more is not.
        is_degree = name.endswith(("-parallel-size", "-instances", "-batch-size", "-per-pipeline-rank"))
        numbers = [float(value) * 2 if is_degree else float(value) + 1 for value in values]
        yield ((name, *(_text(number, value) for number, value in zip(numbers, values, strict=True))),)
    elif name == "--pipeline-model-parallel-layout":
        yield ((name, _moved(values[0])),)
    elif name in OTHER_WORDS:
        word = OTHER_WORDS[name]
        yield ((name, BACK[word] if values[0] == word else word),)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdecimal()


def _text(number: float, like: str) -> str:
    return str(int(number)) if like.isdecimal() else repr(number)


def _moved(layout: str) -> str:
    """The layout with one layer moved across the last stage border."""
    head, border, tail = layout.rpartition("|")
    return f"{head}t{border}{tail.replace('t', '', 1)}" if "t" in tail else f"{head[:-1]}{border}t{tail}"
