# SPDX-License-Identifier: Apache-2.0
"""The engine: what a training script sees of Pagoda."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import distributed

from pagoda.activations import kept_off_the_device
from pagoda.birth import birth_scope
from pagoda.clipping import Attachment
from pagoda.errors import UserError, translated
from pagoda.export import save
from pagoda.library import Handle, make_engine
from pagoda.optimizer import KINDS, Optimizer, constants_of, group_defaults
from pagoda.pin import Pin
from pagoda.stats import Stats
from pagoda.untrained import UntrainedWatch


class StepReport(NamedTuple):
    """What `Engine.step` did."""

    step: int
    """Steps taken so far, skipped ones left out."""
    skipped: bool
    """Gradients were not finite: only the loss scale changed."""
    norm: float | None
    """Of all gradients before clipping, where something needed it."""
    loss_scale: float
    """Of the next step."""


def _plain(value: object) -> object:
    """A keyword's value as JSON has it."""
    if isinstance(value, (torch.device, Path)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _check_modules(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UserError(f"module '{name}' gives sparse gradients: build it with sparse=False")


class Engine:
    """Trains models whose states may be larger than the device, the host, or both.

    Keywords are the fields of `Config` (`pagoda.config_keys()` lists them, docs/config.md explains
    them): `device_budget="6GiB"`, `host_budget`, `nvme=["/mnt/nvme0"]`, `zero=3`, … Sizes are
    numbers or texts. `device` is CUDA where there is one, else the CPU.

    The ranks are those of `group`, by default of torch.distributed's default group or, where that
    has not been initialized, of torchrun's environment. The engine makes groups of its own beside
    them, over Gloo; gradients go over `gradient_group` where one is given, which has the same ranks
    and belongs to the engine alone: `torch.distributed.new_group(backend="nccl")`. With several
    ranks attach(), step(), join(), grad(), grad_norm(), release() and save_pretrained() are
    collectives.

    An engine ends with close(), with its `with` block, or when it is dropped. Parameters that were
    not released by then throw when they are used.

    >>> import torch, pagoda
    >>> with pagoda.Engine(device="cpu", device_budget="1MiB") as engine:
    ...     model = torch.nn.Linear(2, 2)
    ...     _ = engine.attach(model, optimizer="sgd", lr=0.1)
    ...     engine.backward(model(torch.ones(1, 2)).sum())
    ...     _ = engine.step()
    ...     engine.release(model)
    """

    def __init__(self, *, group: distributed.ProcessGroup | None = None,
                 gradient_group: distributed.ProcessGroup | None = None, **config: Any) -> None:
        if group is None and distributed.is_available() and distributed.is_initialized():
            group = distributed.group.WORLD
        text = json.dumps({key: _plain(value) for key, value in config.items()})
        if gradient_group is not None and group is None:
            raise UserError("gradient_group needs torch.distributed to be initialized, or group=")
        self._handle: Handle = make_engine(
            text, None if group is None else group.boxed(),
            None if gradient_group is None else gradient_group.boxed(), group is None)
        # Not a destructor: it may not run while Python's lock is held.
        self._end = weakref.finalize(self, self._handle.close)
        self._model: torch.nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._attachment: Attachment | None = None
        self._untrained: UntrainedWatch | None = None
        self._on_release: list[Callable[[], Any]] = []
        with translated():
            self._device = torch.device(self._handle.device())

    def close(self) -> None:
        """Ends the engine: its threads, files and memory go."""
        self._attachment = None
        self._end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # What there is.

    @property
    def device(self) -> torch.device:
        """Where operators run and parameters are while they do."""
        return self._device

    @property
    def rank(self) -> int:
        with translated():
            return self._handle.rank()

    @property
    def world_size(self) -> int:
        with translated():
            return self._handle.world_size()

    @property
    def config(self) -> dict[str, Any]:
        """Every keyword with its value."""
        with translated():
            values: dict[str, Any] = json.loads(self._handle.config())
        return values

    @property
    def optimizer(self) -> Optimizer:
        """A torch optimizer, for schedulers and for code that wants one."""
        if self._optimizer is None:
            raise UserError("no model is attached: call attach() first")
        return self._optimizer

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward() is multiplied by."""
        with translated():
            return self._handle.loss_scale()

    def stats(self) -> Stats:
        """What the engine has done and what it holds."""
        with translated():
            return Stats(dict(self._handle.stats()), self._handle.stats_table())

    # Models.

    def build(self) -> AbstractContextManager[None]:
        """Around code that makes a model, or loads one: its parameters are pages from their birth,
        so that it may be larger than any memory.

        >>> import torch, pagoda
        >>> engine = pagoda.Engine(device="cpu", device_budget="128KiB")
        >>> with engine.build():  # 400 KiB of parameters
        ...     model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))
        >>> engine.stats()["pages"]["device_bytes_peak"] <= 128 * 1024
        True
        """
        handle = self._handle

        def adopt(parameter: torch.Tensor, name: str) -> None:
            with translated():
                handle.adopt(parameter, name)

        return birth_scope(handle, adopt, self._device)

    def attach(self, model: torch.nn.Module, *, optimizer: str = "adamw",
               groups: Iterable[dict[str, Any]] | None = None, clip: float | None = None,
               lr: float | None = None, betas: tuple[float, float] | None = None,
               eps: float | None = None, weight_decay: float | None = None,
               momentum: float | None = None, dampening: float | None = None,
               nesterov: bool | None = None) -> Optimizer:
        """Trains all parameters of `model`; those that do not require a gradient take no memory for
        gradients and optimizer state, and train from the step after they are thawed
        (`requires_grad_(True)`).

        `optimizer` is "adamw" (with torch.optim.AdamW's defaults), "adam", "sgd" or "lion".
        `groups` are those of torch.optim: dicts with "params" and what differs from the keywords,
        "optimizer" included; parameters in none of them are not trained. `clip` is the largest norm
        of all gradients together.
        """
        _check_modules(model)
        said = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        named = dict(model.named_parameters())
        if groups is None:
            trains = any(p.requires_grad for p in named.values())
            groups = [{"params": list(named.values()) if trains else []}]
        resolved = [self._resolve(group, optimizer, said) for group in groups]
        number_of = {id(parameter): number for number, group in enumerate(resolved)
                     for parameter in group["params"]}
        known = {id(parameter) for parameter in named.values()}
        if any(key not in known for key in number_of):
            raise UserError("a group holds a tensor that is no parameter of the model")
        facade = Optimizer(self._handle, resolved, self._take_step, self.zero_grad)
        with translated():
            if clip is not None:
                self._handle.set_clip(float(clip))
            self._handle.attach(
                list(named), list(named.values()),
                [number_of.get(id(parameter), -1) for parameter in named.values()],
                [group["optimizer"] for group in facade.param_groups],
                [constants_of(group) for group in facade.param_groups])
        self._model = model
        self._optimizer = facade
        given = [p for group in resolved for p in group["params"]]
        self._attachment = Attachment(given)
        self._untrained = UntrainedWatch(model, given)
        return facade

    @staticmethod
    def _resolve(group: dict[str, Any], optimizer: str, said: dict[str, Any]) -> dict[str, Any]:
        kind = group.get("optimizer", optimizer)
        if kind not in KINDS:
            raise UserError(f"there is no optimizer '{kind}': it is {', '.join(KINDS)}")
        defaults = group_defaults(kind)
        out = {"optimizer": kind, **defaults}
        given = {name: value for name, value in said.items() if value is not None}
        for name, value in {**given, **group}.items():
            # What the keywords say is for the groups whose optimizer has such a thing.
            if name not in defaults and name not in ("params", "optimizer", "name") and (
                    name in group or kind == optimizer):
                raise UserError(f"optimizer '{kind}' has no '{name}': it has {', '.join(defaults)}")
            if name in defaults or name in ("params", "name"):
                out[name] = value
        params = out.get("params", [])
        out["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        if not out["params"]:
            raise UserError("there is nothing to train: no parameter requires a gradient, or a "
                            "group has none")
        return out

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Parameters become plain tensors again, up to date, if they fit into memory."""
        model = self._model if model is None else model
        if model is None:
            raise UserError("no model is attached")
        with translated():
            self._handle.release(list(model.parameters()))
        self._model, self._optimizer, self._attachment = None, None, None
        self._untrained = None
        while self._on_release:
            self._on_release.pop()()

    def save_pretrained(self, directory: str | Path, model: torch.nn.Module | None = None, *,
                        max_shard_bytes: int = 5_000_000_000) -> None:
        """Writes the model (the attached one) as a Hugging Face directory: safetensors files and
        its configuration; of a peft model, its adapters. One page is in memory at a time, and files
        of before are replaced when all new ones are there. Rank 0 writes.
        """
        model = self._model if model is None else model
        if model is None:
            raise UserError("no model is attached: name the one to save")
        if self.rank == 0:
            self._save(directory, model, max_shard_bytes)
        else:
            self.finish()
        with translated():
            self._handle.barrier()

    def _save(self, directory: str | Path, model: torch.nn.Module,
              max_shard_bytes: int = 5_000_000_000) -> None:
        """By this rank alone: what others keep is asked of them."""
        self.finish()
        save(model, Path(directory), max_shard_bytes)

    # Training.

    def backward(self, loss: torch.Tensor, last: bool | None = None) -> None:
        """One micro-batch. `last`: no other comes before step(), so that updates may begin; by
        default the `accumulation`-th since the last step is."""
        if self._optimizer is not None:
            self._optimizer.send()
        with translated():
            self._handle.backward(loss, last)

    def step(self) -> StepReport:
        """Fixes what the updates need and returns; they run while the next forward does."""
        facade = self.optimizer
        facade.step()  # through the facade, for schedulers count its calls
        assert facade.report is not None
        return facade.report

    def _take_step(self) -> StepReport:
        self.optimizer.send()
        if self._untrained is not None:
            self._untrained.look()
        with translated():
            step, skipped, norm, loss_scale = self._handle.step()
        return StepReport(step, skipped, norm if norm >= 0 else None, loss_scale)

    def join(self) -> None:
        """This rank has no more data: takes part in the others' steps until all have joined."""
        with translated():
            self._handle.join()

    def finish(self) -> None:
        """Returns when every update has been made."""
        with translated():
            self._handle.finish()

    # Gradients.

    def grad(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient accumulated so far, as fp32 on the host.

        >>> import torch, pagoda
        >>> engine = pagoda.Engine(device="cpu", device_budget="1MiB", clip=1.0)
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = engine.attach(model)
        >>> engine.backward(model(torch.ones(1, 2)).sum())
        >>> engine.grad(model.weight)
        tensor([[1., 1.]])
        >>> model.weight.grad is None
        True
        """
        with translated():
            return self._handle.grad(parameter)

    def grad_norm(self) -> float:
        """The norm of all gradients accumulated so far."""
        with translated():
            return self._handle.grad_norm()

    def serve_framework(self) -> None:
        """For frameworks that clip and save by themselves, until release(): clip_grad_norm_ tells
        them the norm, and the engine's own `clip` is what clips; the model's save_pretrained is
        the engine's, on the ranks that call it."""
        model, handle = self._model, self._handle
        if model is None or self._attachment is None:
            raise UserError("no model is attached: call attach() first")
        self._attachment.norm = handle.grad_norm

        me = weakref.ref(self)  # the model must not keep the engine

        def save_pretrained(save_directory: str | Path, *_: Any, **__: Any) -> None:
            engine = me()
            if engine is None:
                raise UserError("the model's engine is gone, and its parameters with it")
            engine._save(save_directory, model)

        vars(model)["save_pretrained"] = save_pretrained
        self.on_release(lambda: vars(model).pop("save_pretrained", None))

    def on_release(self, call: Callable[[], Any]) -> None:
        """For frameworks: what is to be undone when the model is released."""
        self._on_release.append(call)

    def zero_grad(self) -> None:
        """Drops the gradients accumulated since the last step."""
        with translated():
            self._handle.zero_grad()

    # Activations.

    def activations(self, place: str = "host", *, least: int | str = "16KiB",
                    in_flight: int | str = "64MiB") -> AbstractContextManager[Any]:
        """Around a forward: what autograd saves for backward goes to "host" or "nvme" in the
        background, within the engine's budgets, and is back before backward needs it, bit for bit.
        Storages below `least` stay; `in_flight` bounds the bytes that wait to leave, and those that
        are back early. What fits into no budget stays where it is; pages are never copied.

        >>> import torch, pagoda
        >>> engine = pagoda.Engine(device="cpu", device_budget="1MiB")
        >>> x = torch.ones(64, 64, requires_grad=True)
        >>> with engine.activations("host"):
        ...     y = (x * 2).exp().sum()
        >>> engine.stats()["tiers"]["host"]["holders"]["activations"]["used"]
        16384
        >>> y.backward()
        >>> bool((x.grad == 2 * (x.detach() * 2).exp()).all())
        True
        """
        buffers = [] if self._model is None else list(self._model.buffers())  # there anyway
        with translated():
            handle = self._handle.activations(place, str(least), str(in_flight), buffers)
        return kept_off_the_device(handle)

    # Raw pointers.

    def pin(self, what: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> Pin:
        """Keeps parameters on the device for code that reads raw pointers: numpy(), a compiled
        region, a kernel of one's own. They must fit into the device's budget together."""
        if isinstance(what, torch.nn.Module):
            tensors: list[torch.Tensor] = list(what.parameters())
        else:
            tensors = [what] if isinstance(what, torch.Tensor) else list(what)
        with translated():
            return Pin(self._handle.pin(tensors))
