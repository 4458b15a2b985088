"""The modules of `captured.py` without dropout, with data that they can be trained on."""

from __future__ import annotations

import torch
from tests.runtime import captured
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 3
"""Fewer than the classes or words of any of the modules."""


def _without_dropout(built: captured.Built) -> captured.Built:
    for module in built[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return built


def vgg(batch: int = 4) -> captured.Built:
    return _without_dropout(captured.vgg(batch))


def resnet(batch: int = 4) -> captured.Built:
    return captured.resnet(batch)


def lstm(batch: int = 4, seq_len: int = 6) -> captured.Built:
    return captured.lstm(batch, seq_len)


def gru(batch: int = 4, seq_len: int = 6) -> captured.Built:
    return captured.gru(batch, seq_len)


def transformer(batch: int = 4, seq_len: int = 8) -> captured.Built:
    return _without_dropout(captured.transformer(batch, seq_len))


def llama(batch: int = 2, seq_len: int = 16) -> captured.Built:
    return captured.llama(batch, seq_len)


def uneven() -> captured.Built:
    return captured.uneven()


def again() -> captured.Built:
    return captured.again()


def towers() -> captured.Built:
    return captured.towers()


def vision(batch: int = 4) -> captured.Built:
    return captured.vision(batch)


def digits(batch: int = 4) -> captured.Built:
    return _without_dropout(captured.digits(batch))


def numbers(batch: int = 4) -> captured.Built:
    return captured.numbers(batch)


def rows(batch: int = 4, seq_len: int = 6) -> captured.Built:
    return captured.rows(batch, seq_len)


def cells(batch: int = 4) -> captured.Built:
    return captured.cells(batch)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return functional.cross_entropy(self.head(x), labels)


def perceptron(batch: int = 8) -> captured.Built:
    return Perceptron(), (torch.zeros(batch, 12), torch.zeros(batch, dtype=torch.long))


class Readers(nn.Module):
    """Recurrent layers in a row with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(4))
        self.output = nn.Linear(16, 50)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return functional.cross_entropy(self.output(x).flatten(0, 1), labels.flatten())


def readers(batch: int = 4, seq_len: int = 6) -> captured.Built:
    long = torch.long
    return Readers(), (torch.zeros(batch, seq_len, dtype=long), torch.ones(batch, seq_len, dtype=long))


class Translator(nn.Module):
    """Encoder and decoder with separate tables; every decoder layer reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 32), nn.Embedding(40, 32)
        encoding = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        decoding = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoding, 3, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoding, 2)
        self.head = nn.Linear(32, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source(source))
        logits = self.head(self.decoder(self.target(target), memory))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def translator(batch: int = 4, seq_len: int = 6) -> captured.Built:
    long = torch.long
    return Translator(), (
        torch.zeros(batch, seq_len, dtype=long), torch.ones(batch, seq_len, dtype=long)
    )  # fmt: skip


class SkipTensors(nn.Module):
    """Source and target are embedded first, as in PyTorch's tutorial of `nn.Transformer`. Later decoder
    layers read a tensor that the first one computes (skip tensors)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 32), nn.Embedding(40, 32)
        encoding = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        decoding = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoding, 3, nn.LayerNorm(32), enable_nested_tensor=False)
        self.decoder = nn.ModuleList(nn.TransformerDecoder(decoding, 3).layers)
        self.bias, self.head = nn.Linear(32, 32), nn.Linear(32, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        before, x = self.source(source), self.target(target)
        memory = self.encoder(before)
        bias: Tensor | None = None
        for layer in self.decoder:
            bias = self.bias(x) if bias is None else bias
            x = layer(x, memory) + bias
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def skip_tensors(batch: int = 4, seq_len: int = 6) -> captured.Built:
    long = torch.long
    return SkipTensors(), (torch.zeros(batch, seq_len, dtype=long), torch.ones(batch, seq_len, dtype=long))


MODULES = {
    each.__name__: each
    for each in (
        vgg, resnet, lstm, gru, transformer, llama, uneven, again, towers, vision, digits, numbers, rows,
        cells, perceptron, readers, translator, skip_tensors,
    )
}  # fmt: skip


def module_of(name: str, seed: int) -> nn.Module:
    """The module in fp64 with the parameters of a seed."""
    torch.manual_seed(seed)
    return MODULES[name]()[0].double()


def data_of(name: str, step: int) -> tuple[Tensor, ...]:
    """The arguments of its forward pass in a step."""
    random = torch.Generator().manual_seed(100 + step)
    return tuple(
        torch.randn(like.shape, generator=random, dtype=torch.float64)
        if like.is_floating_point()
        else torch.randint(CLASSES, like.shape, generator=random)
        for like in MODULES[name]()[1]
    )
