"""Small Hugging Face models, with the functions that `capture` is called on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

Built = tuple[nn.Module, tuple[Tensor, ...]]


class WithLoss(nn.Module):
    """A model whose forward pass returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


def _tokens(batch: int, seq_len: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, seq_len, dtype=torch.long), torch.ones(batch, seq_len, dtype=torch.long)


def llama(batch: int = 2, seq_len: int = 16) -> Built:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, use_cache=False,
    )  # fmt: skip
    return WithLoss(LlamaForCausalLM(config)), _tokens(batch, seq_len)


def gpt2(batch: int = 2, seq_len: int = 16) -> Built:
    config = GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=100, n_positions=64, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return WithLoss(GPT2LMHeadModel(config)), _tokens(batch, seq_len)


def bert(batch: int = 2, seq_len: int = 16) -> Built:
    config = BertConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100,
        max_position_embeddings=64,
    )  # fmt: skip
    return WithLoss(BertForMaskedLM(config)), _tokens(batch, seq_len)
