"""Code that a graph would not represent, or would train otherwise than the module does, is refused with its
line; other code is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.graph import parameter_count
from shardwise.runtime import capture
from shardwise.runtime.graph_capture.checks import ADVICE
from shardwise.runtime.graphs.modules import captured

HEAD = """import torch
import torch.nn.functional as F
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.lstm, self.gru = nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)
        self.conv, self.frozen = nn.Conv2d(2, 2, 3), nn.Linear(16, 16).requires_grad_(False)
        self.w = nn.Parameter(torch.zeros(8, 16))
        self.table = nn.Parameter(torch.zeros(16), requires_grad=False)
    def forward(self, x):
"""
FIRST_LINE = 1 + HEAD.count("\n")
"""Line number of the first statement of a forward pass."""


def _file(tmp_path: Path, forward: str, build: str = "torch.zeros(batch, 4, 16)") -> str:
    path = tmp_path / "mine.py"
    body = "".join(f"        {line.strip()}\n" for line in forward.split(";"))
    path.write_text(f"{HEAD}{body}def build(batch: int = 8):\n    return M(), ({build},)\n")
    return str(path)


REFUSED = {
    "a state of other layers": (
        "y, s = self.lstm(x); z, _ = self.lstm(y, s); return z.mean()", 1, "has an initial state",
    ),
    "a state of a parameter": (
        "s = self.a(x[:, :1]).transpose(0, 1); return self.gru(x, s)[0].mean()", 1, "has an initial state",
    ),
    "a state of data": (
        "return self.gru(x, x[:, :1].transpose(0, 1).contiguous())[0].mean()", 0, "has an initial state",
    ),
    "a state of zeros written to": (
        "s = torch.zeros(1, x.shape[0], 16); s[0, 0] = 1.0; return self.gru(x, s)[0].mean()", 2,
        "has an initial state",
    ),
    "a part changed": ("h = self.a(x); h[..., :8].add_(self.b(x)); return h.mean()", 1, "changes in place"),
    "a part assigned": ("h = self.a(x); h[..., :8] = self.b(x); return h.mean()", 1, "changes in place"),
    "a view changed": (
        "h = self.a(x); h.view(-1).add_(self.c(x).view(-1)); return h.mean()", 1, "changes in place",
    ),
    "a view read later": (
        "h = self.a(x); v = h.view(-1); h.add_(self.c(x)); return v.mean()", 2, "changes in place",
    ),
    "data filled": (
        "h = torch.zeros(x.shape); h[0] = 1.0; h[..., :8] = self.b(x); return (h * self.a(x)).mean()", 2,
        "changes in place",
    ),
    "a parameter": ("return (F.linear(x, self.frozen.weight) + self.a(x)).mean()", 0, "is frozen"),
    "a table": ("return (self.a(x) * self.table).mean()", 0, "reads table, which is frozen"),
    "detached": ("return self.c(self.a(x).detach()).mean()", 0, "aten.detach stops the gradient"),
    "a detached branch": ("h = self.a(x); return (h * h.detach()).mean()", 1, "aten.detach stops"),
    "no gradient": ("with torch.no_grad(): h = self.a(x); return self.c(h).mean()", 0, "no_grad covers"),
    "autocast": (
        "with torch.autocast('cpu', dtype=torch.bfloat16): h = self.a(x); return self.c(h.float()).mean()", 0,
        "torch.autocast covers",
    ),
    "a mask": ("h = self.a(x); return h[x > 0].mean()", 1, "aten.index.Tensor makes a tensor whose size"),
    "filters": (
        "f = self.a(x)[0, :3, :3].expand(2, 2, 3, 3); return F.conv2d(x.view(-1, 2, 4, 8), f).mean()", 1,
        "computes its filters",
    ),
    "an exit": ("import sys; sys.exit(3)", 1, "found SystemExit: 3"),
}  # fmt: skip
"""By name: a forward pass, the number of the reported statement, and part of the message."""


@pytest.mark.parametrize("wrong", REFUSED)
def test_code_that_capture_would_lose_is_refused_with_its_line(wrong: str, tmp_path: Path) -> None:
    forward, line, message = REFUSED[wrong]
    with pytest.raises(ConfigError) as caught:
        capture(_file(tmp_path, forward), "build")
    assert message in str(caught.value) and caught.value.allowed
    assert caught.value.key == f"line {FIRST_LINE + line}"


TAKEN = {
    "changes in place": ("h = self.a(x); h.add_(self.c(x)); h.relu_(); h *= 2; return h.mean()", 2 * 272),
    "a change of a view alone": ("h = self.a(x).view(-1, 8); h.add_(1.0); return h.mean()", 272),
    "data changed": ("m = torch.zeros(16); m[3:] = 1.0; return (self.a(x) * m).mean()", 272),
    "a state of zeros": ("s = torch.zeros(1, x.shape[0], 16); return self.gru(x, s)[0].mean()", 1632),
    "results in addition to the loss": ("h = self.a(x); return h.mean(), h.detach(), self.c(h)", 272),
    "every other row": ("return (F.linear(x, self.w[0::2]) + F.linear(x, self.w[1::2])).mean()", 128),
    "a part and the whole": ("return (F.linear(x, self.w)[..., :4] + F.linear(x, self.w[2:6])).mean()", 128),
    "a part alone": ("return F.linear(x, self.w[:4]).mean()", 128),
    "a row by its number": ("return (self.a(x) * self.w[-2]).mean()", 272 + 128),
    "a part of a parameter seen with a dim of 1": (
        "w = self.w.unsqueeze(0); "
        "return sum(F.linear(x[..., :4], w[..., n : n + 4][0]).mean() for n in (0, 4, 8, 12))",
        128,
    ),
    "data under no_grad": ("with torch.no_grad(): s = x * 2\n        return self.a(s).mean()", 272),
}  # fmt: skip


@pytest.mark.parametrize("right", TAKEN)
def test_code_that_capture_can_represent_is_captured_in_full(right: str, tmp_path: Path) -> None:
    forward, parameters = TAKEN[right]
    assert parameter_count(capture(_file(tmp_path, forward), "build")) == parameters


INSTEAD = {
    "roll": "return torch.cat((h[..., -1:], h[..., :-1]), -1).mean()",
    "pad": "return torch.cat((torch.zeros(8, 4, 2), h), -1).mean()",
    "repeat": "return h.unsqueeze(1).expand(-1, 3, -1, -1).reshape(-1, 12, 16).mean()",
    "cumsum": "return (torch.ones(4, 4).tril() @ h).mean()",
    "gt": "return torch.where(x > 0, h, h.relu()).mean()",
    "conv_transpose2d": "return self.b(h).view(8, 2, 2, 2, 2, 4).transpose(2, 3).reshape(8, 4, 4, 4).mean()",
    "upsample_nearest2d": "return h.view(8, 4, 1, 16, 1).expand(-1, -1, 2, -1, 2).reshape(8, 8, 32).mean()",
    "copy": "return torch.cat((self.b(x), h[..., 8:]), -1).mean()",
}
"""By PyTorch's operator: the code that the error about it advises."""


@pytest.mark.parametrize("name", INSTEAD)
def test_the_code_that_an_error_advises_is_captured(name: str, tmp_path: Path) -> None:
    assert name in ADVICE
    body = (
        INSTEAD[name].replace("8,", "x.shape[0],", 1) if "torch.zeros(8" in INSTEAD[name] else INSTEAD[name]
    )
    body = body.replace("view(8, ", "view(-1, ").replace("reshape(8, ", "reshape(-1, ")
    assert parameter_count(capture(_file(tmp_path, f"h = self.a(x); {body}"), "build")) >= 272


TABLE = """import torch
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.table = nn.Linear(4, 4), nn.Parameter(torch.zeros(1, 64, 4))
    def forward(self, x):
        return (self.own(x) + self.table[:, : x.shape[1]]).mean()
def build(batch: int = 2, seq_len: int = SIZE):
    return M(), (torch.zeros(batch, seq_len, 4),)
"""


def test_a_table_longer_than_the_sequence_is_stored_whole(tmp_path: Path) -> None:
    # Two files: Python may reuse bytecode for a file that is rewritten within a second.
    short, long = tmp_path / "short.py", tmp_path / "long.py"
    short.write_text(TABLE.replace("SIZE", "16"))
    graph = capture(str(short), "build")
    assert parameter_count(graph) == 20 + 64 * 4
    long.write_text(TABLE.replace("SIZE", "40"))
    with pytest.raises(ConfigError) as caught:
        capture(str(long), "build")
    assert caught.value.key == "line 8"
    assert "when the seq_len doubles, to 80" in str(caught.value)
    assert "tables that suffice" in str(caught.value)


class Masked(nn.Module):
    """Writes a mask in place."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4)
        mask[2:] = 1.0
        return (self.own(x) * mask).mean()


class Plain(Masked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.own(x) * x[0]).mean()


def test_training_refuses_a_frozen_module_and_a_mask_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"import torch\nfrom {__name__} import Masked, Plain\n"
        "def masked(batch: int = 8):\n    return Masked(), (torch.zeros(batch, 4),)\n"
        "def plain(batch: int = 8):\n    return Plain(), (torch.zeros(batch, 4),)\n"
    )
    x = (torch.zeros(8, 4),)
    with pytest.raises(ConfigError, match="changes in place"):
        captured(Masked(), x, capture(str(path), "masked"))
    graph = capture(str(path), "plain")
    assert captured(Plain(), x, graph).values
    frozen = Plain()
    frozen.own.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"own.bias, which is frozen"):
        captured(frozen, x, graph)
