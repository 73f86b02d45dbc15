# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` through Pagoda, without a subclass."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from transformers import TrainerCallback

from pagoda.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from pagoda.engine import Engine

# What TrainingArguments.optim may be, and which of ours that is.
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd",
               "lion_32bit": "lion", "paged_lion_32bit": "lion", "paged_adamw_32bit": "adamw"}
_log = logging.getLogger("pagoda")
_attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class PagodaCallback(TrainerCallback):
    """Made by `arguments`: what a Trainer must be told while it trains through an engine."""

    def __init__(self, engine: Engine, model: torch.nn.Module) -> None:
        self.engine = engine
        self.model = model

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                       **kwargs: Any) -> None:
        """Resuming: what the engine keeps is not in Trainer's checkpoints."""
        if state.global_step > 0:
            _log.warning("training is resumed at step %d with moments that start from zero",
                         state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                     **kwargs: Any) -> None:
        """What is still owed is made: whoever looks next need not wait."""
        self.engine.finish()


def _leave_attached_models() -> None:
    """With several ranks Accelerate wraps what it trains in DistributedDataParallel, which keeps
    whole gradients and waits for those that an engine has taken: a model that an engine trains is
    prepared as one that is only evaluated."""
    theirs = Accelerator.prepare_model

    @functools.wraps(theirs)
    def prepare_model(self: Accelerator, model: torch.nn.Module,
                      device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> Any:
        if model in _attached:
            device_placement, evaluation_mode = False, True
        return theirs(self, model, device_placement, evaluation_mode)

    Accelerator.prepare_model = prepare_model


_leave_attached_models()


def _let_go(model: torch.nn.Module) -> None:
    """A plain model again, which another Trainer may wrap."""
    _attached.discard(model)
    vars(model).pop("_is_accelerate_prepared", None)


def _groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """As Trainer has them: neither biases nor norms decay. What is frozen is in them, too: it trains
    once a callback thaws it."""
    from transformers.trainer_pt_utils import get_parameter_names

    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    names = get_parameter_names(  # type: ignore[no-untyped-call]
        model, [torch.nn.LayerNorm], forbidden)
    decaying = set(names)
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay},
                                    {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[0 if name in decaying else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def arguments(engine: Engine, model: torch.nn.Module, args: TrainingArguments) -> dict[str, Any]:
    """Attaches `model` and gives the keywords that make a Trainer train through `engine`:

        trainer = Trainer(model=model, args=args, train_dataset=data,
                          **pagoda.trainer.arguments(engine, model, args))
        trainer.train()

    Learning rate, decay, betas and `optim` are taken from `args`; `max_grad_norm` becomes the
    engine's clip, and Trainer logs the norm as ever. `save_model` writes page by page. Optimizer
    state is not part of Trainer's checkpoints. Under torchrun the engine shares the work out: the
    model is not wrapped.
    """
    named = str(getattr(args.optim, "value", args.optim))
    kind = _OPTIMIZERS.get(named)
    if kind is None:
        raise UserError(f"optim='{named}' is none of {', '.join(_OPTIMIZERS)}")
    if args.fp16:
        raise UserError("fp16=True scales the loss outside of the engine: make the model fp16 and "
                        "the engine with loss_scale='dynamic', or use bf16")
    constants: dict[str, Any] = {}
    if kind in ("adamw", "lion"):
        constants["betas"] = (args.adam_beta1, args.adam_beta2)
    if kind == "adamw":
        constants["eps"] = args.adam_epsilon
    optimizer = engine.attach(model, optimizer=kind, lr=args.learning_rate,
                              groups=_groups(model, args.weight_decay),
                              clip=args.max_grad_norm or 0.0, **constants)
    engine.serve_framework()
    _attached.add(model)
    engine.on_release(lambda: _let_go(model))
    return {"optimizers": (optimizer, None), "callbacks": [PagodaCallback(engine, model)]}
