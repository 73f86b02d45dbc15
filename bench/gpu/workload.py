# SPDX-License-Identifier: Apache-2.0
"""The model and the loop that every row of the table trains: Llama's shapes in bf16 with random
weights, SDPA, activation checkpointing, AdamW with fp32 masters; random tokens, or text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQUENCE = 2048
LR = 1e-5

_LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "head_dim": 128, "intermediate_size": 14336, "tie_word_embeddings": False},
    "3B": {**_LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
           "head_dim": 128, "intermediate_size": 8192, "tie_word_embeddings": True},
    "1B": {**_LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
           "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True},
}

SHRUNK = 4096  # what shrink() divides parameters by


def shrink() -> None:
    """For tests: every shape with a 4096th of its parameters."""
    global SEQUENCE
    if SEQUENCE == 32:
        return
    SEQUENCE = 32
    for shape in SHAPES.values():
        for key in ("hidden_size", "head_dim", "intermediate_size"):
            shape[key] //= 32
        shape["vocab_size"] //= 128
        shape["num_hidden_layers"] //= 4


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
    config = LlamaConfig(max_position_embeddings=SEQUENCE, **SHAPES[shape])
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
    if not config.tie_word_embeddings:
        weights -= model.model.embed_tokens.weight.numel()  # looked up, not multiplied
    attention = (config.num_hidden_layers * config.num_attention_heads * config.head_dim
                 * SEQUENCE * 2)  # scores and values, causal: half of all
    return 6.0 * tokens * (weights + attention)


def random_tokens(model: LlamaForCausalLM, batch: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    while True:
        yield torch.randint(0, model.config.vocab_size, (batch, SEQUENCE), device=DEVICE,
                            generator=generator)


def text_tokens(batch: int) -> Iterator[torch.Tensor]:
    """English that every Python has, its own reference, from the beginning and over again. A token
    is a byte, for a tokenizer would have to be fetched."""
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    at = 0
    while True:
        if at + batch * SEQUENCE > text.numel():
            at = 0
        yield text[at:at + batch * SEQUENCE].view(batch, SEQUENCE).to(DEVICE, torch.int64)
        at += batch * SEQUENCE


def loss_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def wait() -> None:
    """Until the device has done what was launched."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def run(tokens: Iterator[torch.Tensor], steps: int,
        step: Callable[[torch.Tensor], torch.Tensor],
        between: Callable[[int], None] = lambda done: None) -> Timing:
    """`step` takes a batch and gives its loss. A step ends when its loss is known and the next may
    begin, as in any loop that logs. `between` is told how many are done, and is in no step's time."""
    out = Timing([], [])
    wait()
    for _ in range(steps):
        batch = next(tokens)
        began = time.perf_counter()
        loss = step(batch)
        out.losses.append(loss.item())
        out.seconds.append(time.perf_counter() - began)
        print(f"step {len(out.losses)} of {steps}: {out.seconds[-1]:.2f} s, loss {out.losses[-1]:.4f}",
              file=sys.stderr, flush=True)
        between(len(out.losses))
    wait()
    return out
