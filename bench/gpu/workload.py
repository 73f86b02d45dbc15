# SPDX-License-Identifier: Apache-2.0
"""The model and the loop that every row of the table trains: Llama's shapes in bf16 with random
weights and tokens, SDPA, activation checkpointing, AdamW with fp32 masters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE = 2048
LR = 1e-5

SHAPES = {
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
}


@dataclass
class Timing:
    """Seconds of each step, and what the losses were."""

    seconds: list[float]
    losses: list[float]

    def steady(self, warm: int) -> float:
        """The median of the steps after the first ones."""
        rest = sorted(self.seconds[warm:])
        return rest[len(rest) // 2]


def make_model(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=8, intermediate_size=8192, vocab_size=128256,
                         tie_word_embeddings=True, max_position_embeddings=SEQUENCE,
                         **SHAPES[shape])
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def prepare(model: LlamaForCausalLM) -> None:
    model.gradient_checkpointing_enable()
    model.train()


def flops(model: LlamaForCausalLM, batch: int) -> float:
    """Of one step as the model needs them, without what checkpointing computes again."""
    config = model.config
    tokens = batch * SEQUENCE
    weights = sum(p.numel() for p in model.parameters())
    attention = (config.num_hidden_layers * config.num_attention_heads * config.head_dim
                 * SEQUENCE * 2)  # scores and values, causal: half of all
    return 6.0 * tokens * (weights + attention)


def run(model: LlamaForCausalLM, batch: int, steps: int,
        update: Callable[[torch.Tensor], None]) -> Timing:
    """`update` takes the loss and does the rest of the step. A step ends when its loss is known
    and the next may begin, as in any loop that logs."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    out = Timing([], [])
    torch.cuda.synchronize()
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, (batch, SEQUENCE), device="cuda",
                            generator=generator)
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        update(loss)
        out.losses.append(loss.item())
        out.seconds.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return out
