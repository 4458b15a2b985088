"""Bans, size limits and ratchets over the whole package; each rule catches a module that breaks it."""

from __future__ import annotations

import pytest
from tests.architecture.bans import ban_violations, sizes, skip_marks
from tests.architecture.column_rules import column_violations, equation_violations
from tests.architecture.sources import module_of, package_modules, test_modules

MODULES = package_modules()

LONGER: dict[str, int] = {"shardwise.sim.engine:simulate": 84}
"""Modules and functions that may exceed the limit, with their length: shrink this list, never grow it."""

SKIP_MARKS = 7
"""Skipped and expected-to-fail tests: one for each oracle that needs torch or transformers, one for Ray, one
for the browser, one where the package cannot be built because pip finds no hatchling, and no other."""

ONE_VALUE = {"shardwise.cost.stages:_stages"}
"""Functions in cost/ that read a column as a number, since all rows of their tables have the same value."""


@pytest.mark.slow
def test_no_module_has_a_banned_statement() -> None:
    assert [problem for module in MODULES for problem in ban_violations(module)] == []


@pytest.mark.slow
def test_no_module_or_function_grows_beyond_its_limit() -> None:
    long = {name: lines for module in MODULES for name, lines, limit in sizes(module) if lines > limit}
    assert {name: lines for name, lines in long.items() if lines > LONGER.get(name, 0)} == {}
    assert set(LONGER) <= set(long), "an exception that is no longer needed"


@pytest.mark.slow
def test_tests_are_not_skipped_away() -> None:
    marks = {module.name: skip_marks(module) for module in test_modules() if skip_marks(module)}
    assert sum(marks.values()) <= SKIP_MARKS, marks


def test_equations_do_not_branch() -> None:
    equations = [module for module in MODULES if module.package == "equations"]
    assert [problem for module in equations for problem in equation_violations(module)] == []
    assert len(equations) > 3


def test_costs_do_not_decide_on_columns() -> None:
    costs = [module for module in MODULES if module.package == "cost"]
    decisions = {decision for module in costs for decision in column_violations(module)}
    functions = {decision: ":".join(decision.split(":")[:2]) for decision in decisions}
    assert [decision for decision in decisions if functions[decision] not in ONE_VALUE] == []
    assert set(functions.values()) >= ONE_VALUE, "an exception that is no longer needed"
    assert len(costs) > 3


BANNED = {
    "eval": "x = eval('1')",
    "exec": "exec('x = 1')",
    "compile": "compile('1', 'x', 'eval')",
    "pickle": "def f():\n    import pickle",
    "pickle part": "from pickle import loads",
    "subprocess": "import subprocess",
    "os.system": "import os\nos.system('ls')",
    "shell": "run('ls', shell=True)",
    "shell by variable": "run('ls', shell=flag)",
    "yaml.load": "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
    "np.load": "import numpy as np\nnp.load('x.npy')",
    "bare except": "try:\n    pass\nexcept:\n    pass",
    "swallowed": "try:\n    pass\nexcept BaseException:\n    pass",
    "print": "print('x')",
    "assert": "def f(x):\n    assert x > 0",
    "global": "def f():\n    global x\n    x = 1",
    "private import": "from torch.distributed._tensor import DTensor",
    "private name": "from torch.utils import _pytree",
    "private module": "import torch._dynamo",
    "private operator": "x = torch.ops.c10d._allgather_base_.default",
    "private below distributed": "from torch import distributed\nx = distributed.distributed_c10d._world",
}


@pytest.mark.parametrize("mutant", BANNED)
def test_a_banned_statement_is_caught(mutant: str) -> None:
    assert ban_violations(module_of("shardwise.cost.twin", BANNED[mutant]))


@pytest.mark.parametrize(
    "source",
    [
        "re.compile('x')",
        "run(['ls'], shell=False)",
        "yaml.parse(text)",
        "try:\n    pass\nexcept BaseException:\n    clean()\n    raise",
        "np.maximum(a, b)",
    ],
)
def test_allowed_statements_are_not_caught(source: str) -> None:
    assert ban_violations(module_of("shardwise.cost.twin", source)) == []


@pytest.mark.parametrize("call", ["all_gather_object(every, x)", "broadcast_object_list(found)"])
@pytest.mark.parametrize("package", ["runtime", "measure", "app"])
def test_a_collective_of_pickled_objects_is_caught(call: str, package: str) -> None:
    for source in (f"distributed.{call}", f"from torch.distributed import *\n{call}"):
        assert ban_violations(module_of(f"shardwise.{package}.twin", source))


def test_one_module_may_use_private_names() -> None:
    source = "x = torch.ops.c10d._allgather_base_.default"
    assert ban_violations(module_of("shardwise.runtime.private", source)) == []
    assert ban_violations(module_of("shardwise.runtime.twin", source))
    assert ban_violations(module_of("shardwise.runtime.twin", "x = torch.__version__")) == []


def test_app_may_print() -> None:
    assert ban_violations(module_of("shardwise.app.cli.twin", "print('x')")) == []


BRANCHING = {
    "if": "def f(n):\n    if n > 1:\n        return n\n    return 0",
    "conditional": "def f(n):\n    return n if n > 1 else 0",
    "and": "def f(n, m):\n    return n and m",
    "not": "def f(n):\n    return not n",
    "chain": "def f(n):\n    return 1 < n < 3",
    "max": "def f(n):\n    return max(n, 1)",
    "int": "def f(n):\n    return int(n)",
    "round": "def f(n):\n    return round(n)",
    "math": "def f(n):\n    return math.log2(n)",
    "filter": "def f(sizes):\n    return [n for n in sizes if n > 1]",
    "while": "def f(n):\n    while n > 1:\n        n = n / 2\n    return n",
    "assert": "def f(n):\n    assert n > 0\n    return n",
}


@pytest.mark.parametrize("mutant", BRANCHING)
def test_an_equation_that_branches_is_caught(mutant: str) -> None:
    assert equation_violations(module_of("shardwise.equations.twin", BRANCHING[mutant]))


DECIDING = {
    "if": "def f(table: Any):\n    if table.tp > 1:\n        return 1\n    return 0",
    "conditional": "def f(table: Any):\n    return 1 if table.tp > 1 else 0",
    "derived": "def f(table: Any):\n    a = table.tp * 2\n    b = a + 1\n    return 1 if b > 1 else 0",
    "tuple": "def f(table: Any):\n    a, b = table.tp, 1\n    return 1 if a > 1 else 0",
    "and": "def f(a: Quantity, b: Quantity):\n    return (a > 1) and (b > 1)",
    "not": "def f(a: NDArray[np.int64]):\n    return not a",
    "chain": "def f(a: Any):\n    return 0 < a < 3",
    "max": "def f(sizes: Sizes):\n    return max(sizes[0], 1)",
    "int": "def f(k: Any):\n    return int(k)",
    "math": "def f(k: Any):\n    return math.ceil(k)",
    "while": "def f(k: Any):\n    while k > 1:\n        k = k / 2",
}


@pytest.mark.parametrize("mutant", DECIDING)
def test_a_cost_that_decides_on_a_column_is_caught(mutant: str) -> None:
    assert column_violations(module_of("shardwise.cost.twin", DECIDING[mutant]))


@pytest.mark.parametrize(
    "source",
    [
        "def f(problem: Problem, table: Any):\n    return table.tp if problem.is_tied else 0 * table.tp",
        "def f(record: Any):\n    return record[0] if isinstance(record, np.ndarray) else record",
        "def f(k: Any | None):\n    return 0.0 if k is None else k",
        "def f(sizes: Sizes):\n    return 1 if len(sizes) > 1 else 0",
        "def f(k: Any):\n    return 1 if k.ndim > 1 else 0",
        "def f(k: float):\n    return max(k, 1.0)",
    ],
)
def test_a_decision_on_form_or_scalars_is_not_caught(source: str) -> None:
    assert column_violations(module_of("shardwise.cost.twin", source)) == []


def test_sizes_and_skips_are_measured() -> None:
    source = "import pytest\n\n\n@pytest.mark.skip\ndef f():\n" + "    x = 1\n" * 90
    module = module_of("shardwise.cost.twin", source)
    assert ("shardwise.cost.twin:f", 91, 80) in set(sizes(module))
    assert ("shardwise.cost.twin", 95, 900) in set(sizes(module))
    assert skip_marks(module) == 1
