# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` through Pagoda, without a subclass."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainingArguments

from pagoda.accelerator_state import optimizers_of
from pagoda.engine import Engine
from pagoda.errors import UserError
from pagoda.optimizer import Optimizer

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

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
        """What the engine keeps is not in Trainer's checkpoints: neither is it written, nor read."""
        if state.global_step > 0:
            raise UserError(
                f"resume_from_checkpoint: the checkpoint of step {state.global_step} has no state of "
                "the engine's optimizer, whose checkpoints are not supported yet: load its weights with "
                "from_pretrained() and train from there, with fresh moments and a new schedule")
        _save_weights_only(args)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                     **kwargs: Any) -> None:
        """Pending updates are applied: whoever looks next need not wait."""
        self.engine.finish()


def _save_weights_only(args: TrainingArguments) -> None:
    """Trainer's checkpoints would ask the optimizer for its state, which is an error."""
    if args.save_only_model:
        return
    args.save_only_model = True
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
        _log.warning("save_only_model is set to True: checkpoints hold the weights, and training cannot "
                     "be resumed from them, because they do not hold the optimizer's state")


def _scale_losses() -> None:
    """Accelerate calls loss.backward(), which knows nothing of the engine's loss scale."""
    theirs = Accelerator.backward

    @functools.wraps(theirs)
    def backward(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> Any:
        optimizer = next(optimizers_of(self), None)
        if optimizer is None:
            return theirs(self, loss, **kwargs)
        with optimizer.scaled(loss) as scaled:
            return theirs(self, scaled, **kwargs)

    Accelerator.backward = backward


def _leave_state() -> None:
    """Accelerate moves an optimizer's state to the device by state_dict() and load_state_dict(): the
    engine's is where it belongs."""
    theirs = Accelerator.prepare_optimizer

    @functools.wraps(theirs)
    def prepare_optimizer(self: Accelerator, optimizer: torch.optim.Optimizer,
                          device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, Optimizer):
            device_placement = False
        return theirs(self, optimizer, device_placement)

    Accelerator.prepare_optimizer = prepare_optimizer


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
_leave_state()
_scale_losses()


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


def _optim_args(args: TrainingArguments, named: str, kind: str) -> dict[str, Any]:
    """What Trainer takes of them: for SGD all but the decay, which its groups have, else nothing."""
    out: dict[str, Any] = {}
    for mapping in (args.optim_args or "").replace(" ", "").split(","):
        if not mapping:
            continue
        key, _, value = mapping.partition("=")
        if kind == "sgd" and key in ("momentum", "dampening"):
            try:
                out[key] = float(value)
            except ValueError:
                raise UserError(f"optim_args: '{mapping}' is not allowed: expected a number") from None
        elif kind == "sgd" and key == "nesterov":
            out[key] = value.lower() in ("true", "1", "yes")  # as Trainer reads it
        elif kind != "sgd" or key != "weight_decay":
            raise UserError(f"optim_args: '{key}' is not supported with optim='{named}'" + (
                "; SGD has momentum, dampening and nesterov" if kind == "sgd" else ""))
    return out


def arguments(engine: Engine, model: torch.nn.Module, args: TrainingArguments, *,
              callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = ()) -> dict[str, Any]:
    """Attaches `model` and gives the keywords that make a Trainer train through `engine`:

        trainer = Trainer(model=model, args=args, train_dataset=data,
                          **pagoda.trainer.arguments(engine, model, args))
        trainer.train()

    Learning rate, decay, betas, `optim` and SGD's `optim_args` are taken from `args`; `max_grad_norm` becomes the
    engine's clip, and Trainer logs the norm as usual. `save_model` writes page by page. Optimizer
    state is not part of Trainer's checkpoints: `save_only_model` is set, and resuming from one is an
    error. Under torchrun the engine shards the model over the ranks: it is not wrapped. Callbacks of
    your own are given here, for Trainer takes the keyword once: `callbacks=[…]`.
    """
    for given, wanted in ((engine, Engine), (model, torch.nn.Module), (args, TrainingArguments)):
        if not isinstance(given, wanted):
            raise UserError("arguments() expects an engine, a model and TrainingArguments, got "
                            f"{type(given).__name__} instead of {wanted.__name__}")
    if isinstance(callbacks, (str, TrainerCallback)) or not isinstance(callbacks, Iterable):
        raise UserError("callbacks must be a list, as Trainer takes them, got "
                        f"{type(callbacks).__name__}")
    if engine._model is not None:
        raise UserError("a model is attached already, and arguments() attaches it itself: leave attach() "
                        "out, or release() the model first")
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        raise UserError("deepspeed= and fsdp= of the arguments would shard the model a second time: the "
                        "engine does it, with zero=")
    named = str(getattr(args.optim, "value", args.optim))
    kind = _OPTIMIZERS.get(named)
    if kind is None:
        raise UserError(f"optim='{named}' is not supported; use one of {', '.join(_OPTIMIZERS)}")
    if args.fp16:
        raise UserError("fp16=True scales the loss outside of the engine: call model.half() and create "
                        "the engine with loss_scale='dynamic', or use bf16")
    if args.resume_from_checkpoint:
        raise UserError("resume_from_checkpoint: checkpoints of the engine's optimizer are not supported "
                        "yet; load the weights with from_pretrained() and train from there")
    constants: dict[str, Any] = {}
    if kind in ("adamw", "lion"):
        constants["betas"] = (args.adam_beta1, args.adam_beta2)
    if kind == "adamw":
        constants["eps"] = args.adam_epsilon
    constants.update(_optim_args(args, named, kind))
    optimizer = engine.attach(model, optimizer=kind, lr=args.learning_rate,
                              groups=_groups(model, args.weight_decay),
                              clip=args.max_grad_norm or 0.0, **constants)
    _save_weights_only(args)
    engine.serve_framework()
    _attached.add(model)
    engine.on_release(lambda: _let_go(model))
    return {"optimizers": (optimizer, None),
            "callbacks": [PagodaCallback(engine, model), *callbacks]}
