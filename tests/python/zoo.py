# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, each with its own kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 96
WIDTH = 64


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def tokens(step: int, length: int = 12, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, length), generator=_random(step))


@dataclass(frozen=True)
class Specimen:
    """A model and its loss."""

    make: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, int], torch.Tensor]


def _language_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    batch = tokens(step)
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def language(model: str, config: str, **values: Any) -> Specimen:
    """A causal language model of transformers, by the names of its classes."""

    def make() -> torch.nn.Module:
        import transformers

        made = getattr(transformers, config)(
            **{"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
               **values})
        return getattr(transformers, model)(made).train()

    return Specimen(make, _language_loss)


LLAMA_LIKE = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
              "head_dim": 16}
NEOX_LIKE = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "max_position_embeddings": 64}

ZOO = {
    "gpt2": language("GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=4, n_head=4,
                     n_positions=64),
    "llama": language("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE),
}
