"""The command `capture` as users run it; an error names the line of code that cannot be captured, and the
remedy."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime import captured

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.graph import load_graph, parameter_count
from shardwise.runtime import capture

FILE = captured.__file__

WRONG = {
    "value": (
        "def build(batch=2):\n    class M(torch.nn.Module):\n        def forward(self, x):\n"
        "            return x.sum() if x.sum().item() > 0 else x.mean()\n"
        "    return M(), (torch.zeros(batch, 3),)\n",
        "line 8",
        "stops the capture",
    ),
    "operator": (
        "class M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.zeros(3))\n\n    def forward(self, x):\n"
        "        return (x * self.w).topk(2).values.sum()\n\n\n"
        "def build(batch=2):\n    return M(), (torch.zeros(batch, 3),)\n",
        "line 11",
        "aten.topk has no operator in graphs; found [2, 2], [2, 2]; allowed: weights over all",
    ),
    "no loss": (
        "def build(batch=2):\n    return torch.nn.Linear(3, 4), (torch.zeros(batch, 3),)\n",
        "forward",
        "does not return a loss; found results of shape [2, 4]",
    ),
    "no answer": (
        "def build():\n    return torch.zeros(3)\n",
        "build()",
        "does not return a module and its inputs; found Tensor",
    ),
    "no inputs": (
        "def build():\n    return torch.nn.Linear(3, 4), ()\n",
        None,
        "returns no input tensor with a dim",
    ),
    "an error": ("def build():\n    raise KeyError('tokens')\n", "line 6", "found KeyError: 'tokens'"),
    "an exit": ("def build():\n    import sys\n    sys.exit(0)\n", "line 7", "found SystemExit: 0"),
    "an error of its file": ("import no_such_module\n", "line 5", "found ModuleNotFoundError: No module"),
    "an error without a text": (
        "class E(Exception):\n    def __str__(self):\n        return [][0]\n\n\ndef build():\n    raise E\n",
        "line 11",
        "found E: no text: its __str__ raises IndexError",
    ),
    "an exception of the lowest kind": (
        "class E(BaseException):\n    pass\n\n\ndef build():\n    raise E('one\\ntwo')\n",
        "line 10",
        "found E: one two",
    ),
    "a mistake": ("def build(:\n", "line 5", "raises an error; found SyntaxError"),
    "another device": (
        "def build():\n    m = torch.nn.Linear(3, 4, device='cpu')\n    return m, (torch.zeros(2, 3),)\n",
        "build()",
        "not on the default device; found weight on cpu",
    ),
    "another name": ("def biuld():\n    pass\n", None, "has no function build (did you mean biuld?)"),
    "a length without default": ("def build(seq_len):\n    pass\n", "build(seq_len)", "has no default"),
    "a batch that decides": (
        "def build(batch=2):\n    layers = [torch.nn.Linear(3, 3) for _ in range(batch)]\n"
        "    return torch.nn.Sequential(*layers), (torch.zeros(batch, 3),)\n",
        None,
        "is a different network when the batch doubles",
    ),
    "a size of no product": (
        "class M(torch.nn.Module):\n    def __init__(self, n):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.zeros(n + 1))\n\n    def forward(self, x):\n"
        "        return self.w.sum() * x.sum()\n\n\n"
        "def build(batch=2):\n    return M(batch), (torch.zeros(batch, 3),)\n",
        "parameter w",
        "not a multiple of a power of the batch; found 3, and 5 when the batch doubles",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_failed_capture_names_the_line_and_the_remedy(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, where, message = WRONG[wrong]
    path, out = tmp_path / "mine.py", tmp_path / "graph.yaml"
    path.write_text("import torch\n\n\n\n" + code)
    with pytest.raises(ConfigError) as caught:
        capture(str(path), "build")
    assert caught.value.key == where
    assert message in str(caught.value) and caught.value.allowed
    assert main(["capture", f"{path}:build", "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0] == f"shardwise: running your code in {path}"
    assert len(error) == 2 and error[1].startswith(f"shardwise: error: {path}: ")
    assert not out.exists()


@pytest.mark.parametrize("where", ["build", "forward"])
def test_code_that_closes_its_streams_changes_nothing(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly seven lines of the interpreter about lost streams, and exit code 1."""
    closing = "print('shown'); sys.stdout.close(); sys.stderr.close()\n"
    path, out = tmp_path / "mine.py", tmp_path / "graph.yaml"
    path.write_text(
        "import sys\nimport torch\n\n\nclass M(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(4, 4)\n\n"
        f"    def forward(self, x):\n        {closing if where == 'forward' else ''}\n"
        "        return self.linear(x).square().mean()\n\n\n"
        f"def build():\n    {closing if where == 'build' else ''}\n    return M(), (torch.zeros(8, 4),)\n"
    )
    assert main(["capture", f"{path}:build", "--out", str(out)]) == 0
    ran = capsys.readouterr()
    first, *shown, last = ran.err.splitlines()
    assert first == f"shardwise: running your code in {path}" and last == f"wrote {out}"
    assert {*shown} == {"shown"} and "parameters" in ran.out


@pytest.mark.parametrize("where", ["import", "build", "forward"])
@pytest.mark.parametrize("ending", ["os._exit(7)", "os.abort()"])
def test_code_that_ends_the_process_is_refused_in_one_line(
    where: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly the command ended with the exit code of the user's code, without a word. A child that the code
    forks ends as ever."""
    own = {name: ending if name == where else "pass" for name in ("import", "build", "forward")}
    path, out = tmp_path / "mine.py", tmp_path / "graph.yaml"
    path.write_text(
        f"import os\nimport torch\n\n{own['import']}\n\n"
        "child = os.fork()\nif child == 0:\n    os._exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n\n\n"
        "class M(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(4, 4)\n\n"
        f"    def forward(self, x):\n        {own['forward']}\n"
        "        return self.linear(x).square().mean()\n\n\n"
        f"def build():\n    {own['build']}\n    return M(), (torch.zeros(8, 4),)\n"
    )
    lines = path.read_text().split("\n")
    line = next(number for number, text in enumerate(lines, start=1) if text.strip() == ending)
    assert main(["capture", f"{path}:build", "--out", str(out)]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"shardwise: running your code in {path}"
    assert last.startswith(f"shardwise: error: {path}: line {line}: ") and f"EndsProcess: {ending}" in last
    assert not out.exists() and os._exit.__name__ == "_exit" and os.abort.__name__ == "abort"


def test_the_command_writes_a_graph_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vgg.json"
    assert main(["capture", f"{FILE}:vgg", "--out", str(out), "--batch", "6"]) == 0
    ran = capsys.readouterr()
    assert ran.err.splitlines() == [f"shardwise: running your code in {FILE}", f"wrote {out}"]
    graph = load_graph(str(out))
    assert graph == capture(FILE, "vgg", batch=6)
    assert f"vgg: {parameter_count(graph):,} parameters" in ran.out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.py", "is not FILE.py:function"),
        (":build", "is not FILE.py:function"),
        ("mine.py:a b", "is not FILE.py:function"),
        ("no-such.py:build", "no-such.py: is not a file"),
    ],
)
def test_a_wrong_target_is_refused(
    target: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", target, "--out", str(tmp_path / "g.yaml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["graph.txt", "graph", "graph.yaml.bak"])
def test_a_file_that_could_not_be_read_again_is_refused_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", f"{FILE}:vgg", "--out", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardwise: error: --out: is not the name of a graph file; found ")
    assert line.endswith("; allowed: a name that ends in .yaml, .yml, .json")
    assert not list(tmp_path.iterdir())


def test_without_pytorch_the_command_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from shardwise.app.cli.main import main\n"
        f"sys.exit(main(['capture', {FILE + ':vgg'!r}, '--out', {str(tmp_path / 'g.yaml')!r}]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("shardwise: error: torch: is not installed")
    assert "pip install 'shardwise[torch]'" in ran.stderr


def test_pytorch_logs_of_a_failure_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n\n\ndef build(batch=2):\n    return torch.nn.Linear(3, 3), (torch.zeros(batch, 4),)\n"
    )
    reported: list[logging.LogRecord] = []

    class RecordHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.append(record)

    handler = RecordHandler()
    logger = logging.getLogger("torch")
    logger.addHandler(handler)
    try:
        with pytest.raises(ConfigError, match="stops the capture"):
            capture(str(path), "build")
        assert reported == []
        logger.warning("later")
        assert len(reported) == 1
    finally:
        logger.removeHandler(handler)
