# SPDX-License-Identifier: Apache-2.0
"""Scripts written for DeepSpeed: `pagoda.initialize` takes their configuration and returns
the same tuple as DeepSpeed's. What their keys do is said in deepspeed_config.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from pagoda.auto_values import are_training_arguments, of_arguments, of_model
from pagoda.deepspeed_config import Settings
from pagoda.engine import Engine
from pagoda.errors import UserError
from pagoda.schedules import make_schedule
from pagoda.stats import Stats
from pagoda.warning import warn


class DeepSpeedEngine:
    """What `initialize` returns first: the model, called as usual, with backward() and step()."""

    def __init__(self, engine: Engine, module: torch.nn.Module, micro: int, accumulation: int,
                 scheduler: Any, config: Any = None) -> None:
        self.engine = engine
        self.config = config
        self.module = module
        self.optimizer = engine.optimizer
        self.lr_scheduler = scheduler
        self.micro_steps = 0
        self.global_steps = 0
        self._micro = micro
        self._accumulation = accumulation
        self._norm: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the model's: parameters(), state_dict(), generate(), …"""
        if name == "module":
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            if hasattr(type(self.module), name):  # a property of the model's that failed
                raise
            raise AttributeError(f"neither DeepSpeedEngine nor {type(self.module).__name__} "
                                 f"has '{name}'") from None

    def __repr__(self) -> str:
        return (f"DeepSpeedEngine({type(self.module).__name__}, {self._micro} per micro-batch, "
                f"accumulation={self._accumulation}, {self.engine!r})")

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def global_rank(self) -> int:
        return self.engine.rank

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        return self.engine.world_size

    @property
    def dp_world_size(self) -> int:
        return self.engine.world_size

    @property
    def loss_scale(self) -> float:
        return self.engine.loss_scale

    @property
    def skipped_steps(self) -> int:
        return int(self.engine.stats()["skipped_steps"])

    def get_loss_scale(self) -> float:
        return self.engine.loss_scale

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return int(self.engine.config["zero"])

    def fp16_enabled(self) -> bool:
        return any(p.dtype == torch.float16 for p in self.module.parameters())

    def bfloat16_enabled(self) -> bool:
        return any(p.dtype == torch.bfloat16 for p in self.module.parameters())

    def gradient_clipping(self) -> float:
        return float(self.engine.config["clip"])

    def stats(self) -> Stats:
        """What the engine has done and what it holds."""
        return self.engine.stats()

    def no_sync(self) -> AbstractContextManager[None]:
        """Changes nothing: gradients are reduced as they come, in any micro-batch."""
        return nullcontext()

    def empty_partition_cache(self) -> None:
        """Does nothing: device_budget bounds what is resident."""

    def destroy(self) -> None:
        """Ends the engine, as Engine.close() does."""
        self.engine.close()

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro

    def train_batch_size(self) -> int:
        return self._micro * self._accumulation * self.engine.world_size

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, where something needed it."""
        return self._norm

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> torch.Tensor:
        """One micro-batch; the loss is divided by their number."""
        self.engine.backward(loss / self._accumulation if self._accumulation > 1 else loss,
                             retain_graph=retain_graph)
        return loss

    def zero_grad(self) -> None:
        """Drops the gradients accumulated since the last step."""
        self.engine.zero_grad()

    def step(self) -> None:
        """After every micro-batch: updates after the last of them."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        report = self.engine.step()
        self._norm = report.norm
        if report.skipped:
            return
        self.global_steps += 1
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def save_16bit_model(self, directory: str | Path, *_: Any) -> None:
        """The weights, as a Hugging Face directory."""
        self.engine.save_pretrained(directory)

    def save_pretrained(self, directory: str | Path, **keywords: Any) -> None:
        """The weights, as a Hugging Face directory."""
        self.engine.save_pretrained(directory, **keywords)

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise UserError("DeepSpeed checkpoints are not supported: "
                        "save_16bit_model(directory) writes the weights")

    load_checkpoint = save_checkpoint


def _config_of(args: Any) -> Any:
    """What --deepspeed_config says, or the `deepspeed` of TrainingArguments."""
    config = getattr(args, "deepspeed_config", None)
    return getattr(args, "deepspeed", None) if config is None and are_training_arguments(
        args) else config


def _ranks(group: distributed.ProcessGroup | None) -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(group)
    return int(os.environ.get("WORLD_SIZE", "1"))


def _groups(parameters: Any) -> list[dict[str, Any]] | None:
    """Tensors or groups of them; None: all of the model's."""
    if parameters is None:
        return None
    if isinstance(parameters, (dict, torch.Tensor)) or not isinstance(parameters, Iterable):
        parameters = [parameters]
    listed = list(parameters)
    if any(isinstance(item, dict) for item in listed):
        return listed
    return [{"params": listed}]


def _loader(data: Any, micro: int, engine: Engine, collate: Any, drop_last: bool) -> Any:
    if data is None:
        return None
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

    sampler = (DistributedSampler(data, engine.world_size, engine.rank)
               if engine.world_size > 1 else RandomSampler(data))
    return DataLoader(data, batch_size=micro, sampler=sampler, collate_fn=collate,
                      drop_last=drop_last)


def initialize(args: Any = None, model: torch.nn.Module | Callable[[], torch.nn.Module] | None = None,
               optimizer: Any = None, model_parameters: Any = None, training_data: Any = None,
               lr_scheduler: Any = None, collate_fn: Any = None,
               config: dict[str, Any] | str | Path | None = None, config_params: Any = None,
               mpu: Any = None, dist_init_required: bool | None = None, **engine_keywords: Any,
               ) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """DeepSpeed's initialize(): the engine, its optimizer, the loader and the scheduler.

    `model` may also be a function that makes it: then its parameters are created as pages. `args` may
    be transformers' TrainingArguments: what the configuration calls "auto" is taken from them, or
    from the model, and what neither knows is an error. `config_params` is another name of `config`.
    torch.distributed is used as it is, or torchrun's environment, whatever `dist_init_required` says.
    Further keywords are `Engine`'s, and come before what the configuration says:
    `device_budget="6GiB"`.

    >>> import torch, pagoda
    >>> engine, optimizer, _, scheduler = pagoda.initialize(
    ...     model=torch.nn.Linear(2, 2), device="cpu", device_budget="1MiB",
    ...     config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
    ...             "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    >>> engine.backward(engine(torch.ones(1, 2)).sum()).shape
    torch.Size([])
    >>> engine.step()
    >>> engine.global_steps
    1
    """
    if config is None:
        config = config_params if config_params is not None else _config_of(args)
    if model is None or config is None:
        raise UserError("initialize() needs a model and a config")
    if mpu is not None:
        raise UserError("mpu: model parallelism is not supported; the engine shards the model over the "
                        "ranks (zero_optimization.stage)")
    if not callable(model):  # as modules are, too
        raise UserError("model must be a torch.nn.Module or a function that makes one, got "
                        f"{type(model).__name__}")
    if optimizer is not None:
        raise UserError("an optimizer object cannot be paged: name it in the config's optimizer section")
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise UserError(f"a {type(lr_scheduler).__name__} object drives another optimizer: pass a function "
                        "that makes it, lr_scheduler=lambda optimizer: …")
    settings = Settings(config)
    ranks = _ranks(engine_keywords.get("group"))
    settings.resolve(of_arguments(args, training_data, ranks) if are_training_arguments(args) else {},
                     of_model(model))
    micro, accumulation = settings.batches(ranks)
    keywords = settings.engine_keywords(engine_keywords.get("nvme"))
    chosen = settings.optimizer_keywords()
    if settings.ignored:
        warn("DeepSpeed keys without effect here, and defaults used:\n" + "\n".join(
            f"  {path}: {instead}" for path, instead in settings.ignored.items()))
    engine = Engine(**{**keywords, "accumulation": accumulation, **engine_keywords})
    if not isinstance(model, torch.nn.Module):
        with engine.build():
            model = model()
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"the function that makes the model returned a {type(model).__name__}")
    if settings.get("fp16.enabled"):
        model.half()
    if settings.get("bf16.enabled"):
        model.bfloat16()
    try:
        facade = engine.attach(model, groups=_groups(model_parameters), **chosen)
        schedule = lr_scheduler(facade) if lr_scheduler is not None else make_schedule(
            facade, settings.get("scheduler.type"), settings.section("scheduler.params"))
        wrapped = DeepSpeedEngine(engine, model, micro, accumulation, schedule, config)
        loader = _loader(training_data, micro, engine, collate_fn,
                         bool(settings.get("dataloader_drop_last",
                                           getattr(args, "dataloader_drop_last", False))))
    except BaseException:
        with suppress(RuntimeError):  # nobody has the engine: the model shall not go with it
            engine.release(model)
        engine.close()
        raise
    return wrapped, facade, loader, schedule
