"""A fixed number of mutated inputs through each reader; and faults that the judgement must find."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from tests.fuzz.readers import Reader, readers
from tests.fuzz.runner import Counts, judged, run

import shardwise as sw
from shardwise.errors import MAX_PART, ConfigError, Infeasible
from shardwise.plans import read_plan
from shardwise.plans.documents import document_hash

INPUTS = {"checked plan": 15, "rehashed plan": 60, "plan": 60, "graph": 60}
"""Mutated inputs of a slow reader; 300 for others."""

READERS = readers()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_mutated_inputs_are_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    counts = Counts()
    runs = run(READERS[name], tmp_path, Random(f"20 {name}"), counts)
    faults = [fault for fault in islice(runs, INPUTS.get(name, 300)) if fault is not None]
    assert faults == []
    assert counts.refused and (counts.read or name == "plan")  # its hash refuses every change


def reading(read: Callable[[str], object]) -> Reader:
    return Reader("planted", "", lambda: ('{"a": 1, "b": [2, 3]}',), read)


def key_error(text: str) -> object:
    try:
        return json.loads(text)["a"]
    except json.JSONDecodeError as error:
        raise ConfigError("is not JSON") from error


def warning(text: str) -> None:
    warnings.warn(text, SyntaxWarning, stacklevel=1)


def two_lines(text: str) -> None:
    error = ConfigError("x")
    error.message = f"found\n{text}"
    raise error


@pytest.mark.parametrize("read", [key_error, warning, two_lines])
def test_a_planted_fault_is_found(tmp_path: Path, read: Callable[[str], object]) -> None:
    planted = reading(read)
    if read is key_error:
        runs = run(planted, tmp_path, Random(1), Counts())
        assert any(fault and "KeyError: 'a'" in fault.reason for fault in islice(runs, 200))
    assert judged(reading(lambda text: text), "{}", tmp_path) == ("", "")
    assert judged(planted, "{}", tmp_path)[0]


def test_a_change_that_check_accepts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = READERS["checked plan"]
    document = json.loads(reader.seeds()[0])
    document["best"]["tokens_per_s_per_device"] *= 1.01
    text = json.dumps(document)
    assert judged(reader, text, tmp_path) == ("", "")
    monkeypatch.setattr(sw, "check", lambda plan, proof_budget: _agreeing(plan))
    assert "tokens_per_s_per_device" in judged(reader, text, tmp_path)[0]


def test_fewer_runners_up_are_the_answer_to_another_top(tmp_path: Path) -> None:
    """`check` accepts a plan without them, as `plan --top 0` writes it, and refuses another order."""
    document = json.loads(READERS["checked plan"].seeds()[0])
    fewer = document | {"runners_up": document["runners_up"][:1]}
    assert judged(READERS["checked plan"], json.dumps(fewer), tmp_path) == ("", "")
    plan = _written(document | {"runners_up": document["runners_up"][::-1]}, tmp_path)
    assert not sw.check(plan, proof_budget=5).ok


def _written(document: dict[str, object], folder: Path) -> sw.Plan:
    path = folder / "plan.json"
    path.write_text(json.dumps(document | {"hash": document_hash(document)}))
    return read_plan(path)


def _agreeing(plan: sw.Plan) -> object:
    from types import SimpleNamespace

    return SimpleNamespace(ok=True, verdict=SimpleNamespace(not_judged=(), not_re_derived=()))


# Faults that the mutations found


@pytest.mark.parametrize("sign", ["\n", "\t", "\u2028", "\x85", "\x1b", "\ud800"])
def test_whatever_an_error_quotes_it_has_one_line(sign: str) -> None:
    """Formerly errors of `review` quoted values of files as they were."""
    text = f"a{sign}b"
    error = ConfigError(text, file=text, key=text, found=text, allowed=text)
    escaped = f"a{ascii(sign)[1:-1]}b"
    assert str(error) == f"{escaped}: {escaped}: {escaped}; found {escaped}; allowed: {escaped}"
    assert str(error.within(file="other", key="k")).isprintable()
    assert Infeasible(text, relaxations=[text]).relaxations == (escaped,)


def test_an_error_is_not_as_long_as_its_input() -> None:
    with pytest.raises(ConfigError) as caught:
        sw.evaluate("gpt2", cluster="1x1xcpu", seq_len=8, global_batch_size=1, strategy={"x" * 10**5: 1})
    assert len(str(caught.value)) < 3 * MAX_PART


def test_a_plan_with_a_value_out_of_range_is_refused_by_check(tmp_path: Path) -> None:
    """Formerly `check` of a plan in memory raised an exception of the checker."""
    document = json.loads(READERS["plan"].seeds()[0])
    document["runners_up"][0]["step_time_s"] = 0
    document["hash"] = document_hash(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"runners_up\[0\]\.step_time_s: is out of range"):
        sw.check(read_plan(path))
