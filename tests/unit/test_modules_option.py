"""Modules to recompute as an option of the software (`--set`) and as a field of the strategy are one."""

from __future__ import annotations

import pytest

from shardwise import ConfigError
from shardwise.questions import arguments


@pytest.mark.parametrize(
    "options", ["recompute_modules=mlp+core_attn, ep_overlap=on", {"recompute_modules": "core_attn+mlp"}]
)
def test_the_option_is_the_field(options: object) -> None:
    found = arguments.fields_and_modules("--fix", "tp=2", options)
    assert found == {"tp": 2, "recompute_modules": "core_attn+mlp"}
    assert "recompute_modules" not in arguments.options_of_software("--set", options)


def test_the_same_twice_is_no_contradiction() -> None:
    both = arguments.fields_and_modules("--fix", "recompute_modules=mlp", "recompute_modules=mlp")
    assert both == {"recompute_modules": "mlp"}
    with pytest.raises(ConfigError, match="contradicts --fix"):
        arguments.fields_and_modules("--fix", "recompute_modules=mlp", "recompute_modules=layernorm")


@pytest.mark.parametrize(
    "options", ["recompute_modules=mlp+nothing", "recompute_modules", {"recompute_modules": 3}, 7]
)
def test_what_is_no_set_of_modules_is_refused(options: object) -> None:
    with pytest.raises(ConfigError, match="--set"):
        arguments.fields_and_modules("--fix", None, options)
