"""Small modules as users write them, with the functions that `capture` is called on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (8, 16):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(torch.flatten(self.features(images), 1)), labels)


def vgg(batch: int = 4) -> Built:
    return Vgg(), (torch.zeros(batch, 3, 16, 16), torch.zeros(batch, dtype=torch.long))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int = 1, *, shortcut: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = (
            nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )
            if shortcut
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        channels = 8
        self.stages = nn.ModuleList()
        for stage, count in enumerate(counts):
            width = 8 * 2**stage
            blocks = [Bottleneck(channels, width, 1 if stage == 0 else 2, shortcut=True)]
            channels = 4 * width
            blocks += [Bottleneck(channels, width) for _ in range(count - 1)]
            self.stages.append(nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def resnet(batch: int = 4) -> Built:
    return ResNet((3, 4)), (torch.zeros(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long))


class Words(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.cells = kind(24, 32, 2, batch_first=True)
        self.output = nn.Linear(32, 50)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        found, _ = self.cells(self.embedding(tokens))
        return F.cross_entropy(self.output(found).flatten(0, 1), labels.flatten())


def _tokens(batch: int, seq_len: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, seq_len, dtype=torch.long), torch.ones(batch, seq_len, dtype=torch.long)


def lstm(batch: int = 4, seq_len: int = 6) -> Built:
    return Words(nn.LSTM), _tokens(batch, seq_len)


def gru(batch: int = 4, seq_len: int = 6) -> Built:
    return Words(nn.GRU), _tokens(batch, seq_len)


class Transformer(nn.Module):
    """PyTorch's encoder and decoder; both embeddings and the output projection share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            3,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2
        )
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embedding(source))
        logits = self.head(self.decoder(self.embedding(target), memory))
        return F.cross_entropy(logits.transpose(1, 2), target)


def transformer(batch: int = 2, seq_len: int = 8) -> Built:
    return Transformer(), _tokens(batch, seq_len)


class Norm(nn.Module):
    """RMSNorm written out by hand in fp32, as in many model files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        normed: Tensor = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        scaled: Tensor = self.weight * normed.to(x.dtype)
        return scaled


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int, *, own_norm: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.input_norm = Norm(width) if own_norm else nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)
        self.post_norm = Norm(width) if own_norm else nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.input_norm(x)
        q = self.q_proj(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(normed).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(normed).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.post_norm(x)
        mlp: Tensor = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return x + mlp


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Llama(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, own_norm: bool = True
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, ffn, own_norm=own_norm) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.size = width // heads

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        # Angles are computed in the forward pass and read by every layer, as in many model files.
        places = torch.arange(tokens.shape[1], dtype=torch.float32)
        turns = 10000.0 ** (-torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        angles = torch.outer(places, turns).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


def llama(batch: int = 2, seq_len: int = 16) -> Built:
    return Llama(4, 64, 4, 2, 128, 100), _tokens(batch, seq_len)


def llama_8b_of_two_layers(batch: int = 2, seq_len: int = 128) -> Built:
    return Llama(2, 4096, 32, 8, 14336, 128256, own_norm=False), _tokens(batch, seq_len)


class Uneven(nn.Module):
    """Two equal layers, a different one, then two equal ones again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=at != 2) for at in range(5))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.last(x), labels)


def uneven() -> Built:
    return Uneven(), (torch.zeros(6, 16), torch.zeros(6, dtype=torch.long))


class Again(nn.Module):
    """The same layer three times: its parameters are shared, so this is no repetition of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return F.cross_entropy(self.last(x), labels)


def again() -> Built:
    return Again(), (torch.zeros(6, 16), torch.zeros(6, dtype=torch.long))


class Towers(nn.Module):
    """Further operators: an embedding bag, einsum, a softmax by hand, pooling over a dim, a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.mix = nn.Parameter(torch.randn(3, 8, 5))
        self.conv = nn.Conv1d(5, 6, 3, padding=1, groups=1)
        self.depth = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, items: Tensor, target: Tensor) -> Tensor:
        rows = self.table(items)
        heads = torch.einsum("bte,hef->bhtf", rows, self.mix)
        weights = torch.softmax(heads @ heads.transpose(-1, -2), dim=-1)
        mixed = (weights @ heads).mean(1).transpose(1, 2)
        found = self.norm(F.gelu(self.conv(mixed)))
        square = self.depth(found.unsqueeze(-1).expand(-1, -1, -1, 4))
        pooled = F.avg_pool2d(square, 2).amax((2, 3))
        one, two, three = pooled.chunk(3, dim=1)
        return F.mse_loss(torch.cat((one * 2, two - three), dim=1), target)


def towers() -> Built:
    return Towers(), (torch.zeros(4, 10, dtype=torch.long), torch.zeros(4, 4))


class Vision(nn.Module):
    """A vision transformer: patches, a repeated class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.positions = nn.Parameter(torch.zeros(1, 17, 32))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, 0])
        return F.cross_entropy(logits, labels), logits


def vision(batch: int = 4) -> Built:
    return Vision(), (torch.zeros(batch, 3, 16, 16), torch.zeros(batch, dtype=torch.long))


class Digits(nn.Module):
    """One-channel images; squeeze and excitation on single rows; log softmax with its likelihood loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding="same")
        self.squeeze = nn.Conv2d(8, 2, 1)
        self.excite = nn.Conv2d(2, 8, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.first(images))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = F.normalize(F.max_pool2d(x, 2).mean((2, 3)), dim=-1)
        return F.nll_loss(F.log_softmax(self.head(x), dim=-1), labels)


def digits(batch: int = 4) -> Built:
    return Digits(), (torch.zeros(batch, 1, 8, 8), torch.zeros(batch, dtype=torch.long))


class Numbers(nn.Module):
    """Functions of a tensor and a number, some of them linear; one number depends on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.head = nn.Linear(6, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = 2 - (self.first(x) * 3 + 1.5) / 4
        y = torch.add(y, 2, alpha=0.5).sub(7).masked_fill(x[:, :6] > 0, 0.25)
        y = torch.where(x[:, 2:] > 0, y, 3.0) ** 3 / x.shape[0]
        y = torch.div(y, 0.5, rounding_mode="floor") + y.masked_fill(x[:, :6] > 1, float("-inf")).exp()
        return F.mse_loss(self.head(y), target)


def numbers(batch: int = 4) -> Built:
    return Numbers(), (torch.zeros(batch, 8), torch.zeros(batch, 8))


class Rows(nn.Module):
    """Parameters that are read in parts: a table longer than the sequence, every other row, a single row,
    columns with a gap, and three thirds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.zeros(1, 24, 8))
        self.scales = nn.Parameter(torch.ones(5, 8))
        self.stacked = nn.Parameter(torch.ones(12, 8))
        self.columns = nn.Parameter(torch.ones(8, 16))
        self.thirds = nn.Parameter(torch.ones(24, 8))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        x = x * self.scales[3] + self.scales[1:2]
        x = F.linear(x, self.stacked[0:8]) + F.linear(x, self.stacked[4:12:1]) * self.scales[-1]
        x = x @ self.columns[:, 2:10] + F.linear(x, self.thirds[::3])
        one, two, three = self.thirds.chunk(3)
        x = F.linear(x, one) * F.linear(x, two) + F.linear(x, three)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def rows(batch: int = 4, seq_len: int = 6) -> Built:
    module = Rows()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module, _tokens(batch, seq_len)


class Cells(nn.Module):
    """A recurrent state passed from cell to cell: zeros first, then computed states, once with its two
    tensors swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.reader = nn.LSTMCell(12, 8)
        self.writer = nn.LSTMCell(12, 8, bias=False)
        self.gated = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        state = None
        for step in range(tokens.shape[1]):
            state = self.reader(x[:, step], state)
        assert state is not None
        hidden, cell = self.writer(x[:, 0], state)
        hidden, cell = self.writer(x[:, 1], (cell, hidden))
        hidden = self.gated(cell, self.gated(hidden))
        return F.cross_entropy(self.head(hidden), labels[:, 0])


def cells(batch: int = 4) -> Built:
    return Cells(), _tokens(batch, 3)
