# SPDX-License-Identifier: Apache-2.0
"""What "auto" stands for in a DeepSpeed configuration that was written for Hugging Face's Trainer:
values of its TrainingArguments, and of the model."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import torch


def are_training_arguments(args: Any) -> bool:
    """Whether `args` are transformers' and not those of a script's own parser."""
    return hasattr(args, "per_device_train_batch_size") and hasattr(args, "get_warmup_steps")


def _training_steps(args: Any, data: Any, ranks: int) -> int | None:
    """As Trainer counts them; None where the length of the data is not known."""
    if args.max_steps > 0:
        return int(args.max_steps)
    if not isinstance(data, Sized):
        return None
    batch = ranks * args.per_device_train_batch_size
    whole, rest = divmod(len(data), batch)
    batches = whole + int(rest > 0 and not args.dataloader_drop_last)
    steps_per_epoch: int = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return math.ceil(float(args.num_train_epochs) * steps_per_epoch)


def of_arguments(args: Any, data: Any, ranks: int) -> dict[str, Any]:
    """What TrainingArguments say, by the keys of the configuration."""
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    out = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * ranks,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": bool(args.fp16 or args.fp16_full_eval),
        "bf16.enabled": bool(args.bf16 or args.bf16_full_eval),
    }
    total = _training_steps(args, data, ranks)
    if total is not None:
        out["scheduler.params.total_num_steps"] = total
    # A share of all steps needs their number; a number of steps does not.
    if total is not None or args.get_warmup_steps(10_000) == args.get_warmup_steps(20_000):
        out["scheduler.params.warmup_num_steps"] = max(1, args.get_warmup_steps(total or 10_000))
    return out


def _hidden_size(model: torch.nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        size = getattr(place, "hidden_size", None)
        sizes = getattr(place, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if sizes:
            return int(max(sizes))
    return None


def of_model(model: Any) -> dict[str, Any]:
    """What a model says that exists already."""
    if not isinstance(model, torch.nn.Module):
        return {}
    out: dict[str, Any] = {}
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) == 1 or torch.float16 not in dtypes:  # else it is not clear what is meant
        out["fp16.enabled"] = dtypes == {torch.float16}
        out["bf16.enabled"] = dtypes == {torch.bfloat16}
    if (hidden := _hidden_size(model)) is not None:
        out["zero_optimization.reduce_bucket_size"] = hidden * hidden
    return out
