# SPDX-License-Identifier: Apache-2.0
"""A language model, larger than what it is given: two lines more than a plain loop.

    python examples/python/train.py --model ./llama-8b --device-budget 6GiB --nvme /mnt/nvme0
    torchrun --nproc-per-node 2 examples/python/train.py

Without --model a small random one is made, so that the example runs anywhere.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import pagoda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face directory; its configuration is used")
    parser.add_argument("--device-budget", default="2MiB")
    parser.add_argument("--nvme", nargs="*", default=[], help="directories for what does not fit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", help="where to save the model")
    flags = parser.parse_args()

    config = AutoConfig.from_pretrained(flags.model) if flags.model else LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4)
    engine = pagoda.Engine(device_budget=flags.device_budget, nvme=flags.nvme)
    with engine.build():
        model = AutoModelForCausalLM.from_config(config)
    engine.attach(model, lr=1e-3, weight_decay=0.1, clip=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, flags.steps)

    text = torch.arange(2 * 32, device=engine.device).view(2, 32) % config.vocab_size
    for step in range(flags.steps):
        loss = model(input_ids=text, labels=text).loss
        engine.backward(loss)
        report = engine.step()
        schedule.step()
        print(f"step {step + 1}  loss {loss.item():.4f}  norm {report.norm:.3f}")
    if flags.out:
        engine.save_pretrained(flags.out)
    print(engine.stats())


main()
