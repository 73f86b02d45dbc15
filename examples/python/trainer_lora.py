# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with LoRA adapters of peft: the frozen base is paged, the adapters trained.

    python examples/python/trainer_lora.py --out adapters
"""

from __future__ import annotations

import argparse
import tempfile

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import pagoda
import pagoda.trainer


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that count upwards."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(32) + index) % 256
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", help="where to save the adapters")
    flags = parser.parse_args()

    engine = pagoda.Engine(device_budget="2MiB")
    with engine.build():
        base = AutoModelForCausalLM.from_config(LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=4))
        model = peft.get_peft_model(base, peft.LoraConfig(
            r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=folder, max_steps=flags.steps, learning_rate=1e-3,
                                 max_grad_norm=1.0, save_strategy="no", report_to=[],
                                 logging_steps=1, use_cpu=engine.device.type == "cpu")
        trainer = Trainer(model=model, args=args, train_dataset=Counting(),
                          **pagoda.trainer.arguments(engine, model, args))
        trainer.train()
    if flags.out:
        engine.save_pretrained(flags.out)
    print(engine.stats())


main()
