# SPDX-License-Identifier: Apache-2.0
"""The engine: what a training script sees of Pagoda."""

from __future__ import annotations

import inspect
import json
import math
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed

from pagoda.activations import ActivationHooks
from pagoda.arguments import boxed, check_model, described, directory_of, module_of, tensor_of
from pagoda.attachment import Attachment
from pagoda.birth import birth_scope
from pagoda.calls import Calls
from pagoda.copies import copy_pages
from pagoda.endings import Ending, is_failure, listen_for_interrupts, text_of, watch
from pagoda.errors import EngineError, UserError, sendable, translated
from pagoda.export import save, shard_bytes
from pagoda.groups import resolve_groups
from pagoda.keywords import as_json, require_attach_keywords, require_engine_keywords
from pagoda.library import Handle, config_keys, make_engine
from pagoda.optimizer import Optimizer, constants_of, number
from pagoda.pin import Pin
from pagoda.profiling import profile_without_pointers, require_no_pointer_profiler
from pagoda.regions import watch_regions
from pagoda.sharing import guard_sharing
from pagoda.stats import Stats, byte_size
from pagoda.untrained import UntrainedWatch
from pagoda.warning import warn


class StepReport(NamedTuple):
    """What `Engine.step` did."""

    step: int
    """Steps taken so far, skipped ones left out."""
    skipped: bool
    """Gradients were not finite: only the loss scale changed."""
    norm: float | None
    """Of all gradients before clipping; None where nothing needed it (clip=inf always does)."""
    loss_scale: float
    """Of the next step."""


class Engine:
    """Trains models whose states may be larger than the device, the host, or both.

    Keywords are the fields of `Config` (`pagoda.config_keys()` lists them, docs/config.md explains
    them): `device_budget="6GiB"`, `host_budget`, `nvme=["/mnt/nvme0"]`, `zero=3`, … Sizes are
    numbers or strings. `device` is CUDA where there is one, else the CPU.

    The ranks are those of `group`, by default of torch.distributed's default group or, where that
    has not been initialized, of torchrun's environment. The engine makes groups of its own beside
    them, over Gloo; gradients go over `gradient_group` where one is given, which has the same ranks
    and belongs to the engine alone: `torch.distributed.new_group(backend="nccl")`. With several
    ranks attach(), step(), join(), zero_grad(), grad(), grad_norm(), release() and
    save_pretrained() are collectives: every rank calls them in the same order, and ranks that are
    in different calls get an error that names both sides.

    An engine ends with close(), with its `with` block, or when it is dropped. Parameters that were
    not released by then become plain tensors if they fit into memory; if not, a warning names them.
    A rank that ends with an exception tells the others, which raise it.

    >>> import torch, pagoda
    >>> with pagoda.Engine(device="cpu", device_budget="1MiB") as engine:
    ...     model = torch.nn.Linear(2, 2)
    ...     _ = engine.attach(model, optimizer="sgd", lr=0.1)
    ...     engine.backward(model(torch.ones(1, 2)).sum())
    ...     _ = engine.step()
    ...     engine.release(model)
    """

    def __init__(self, *positional: Any, group: distributed.ProcessGroup | None = None,
                 gradient_group: distributed.ProcessGroup | None = None, **config: Any) -> None:
        require_engine_keywords(positional, config)
        require_no_pointer_profiler()
        if group is None and distributed.is_available() and distributed.is_initialized():
            group = distributed.group.WORLD
        text = as_json(config)
        theirs = boxed("group", group), boxed("gradient_group", gradient_group)
        if gradient_group is not None and group is None:
            raise UserError("gradient_group needs torch.distributed to be initialized, or group=")
        if (group.size() if group is not None else os.environ.get("WORLD_SIZE", "1")) not in (1, "1"):
            listen_for_interrupts()  # before it waits for them to connect
        self._handle: Handle = make_engine(text, *theirs, group is None)
        # Not a destructor: it may not run while Python's lock is held.
        self._ending = Ending(self._handle)
        self._end = weakref.finalize(self, self._ending.end)
        self._calls = Calls(self._handle)
        self._told = watch(self._handle)  # after finalize: at exit what is told comes first
        self._handle.taken()
        self._model: torch.nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._attachment: Attachment | None = None
        self._untrained: UntrainedWatch | None = None
        # Micro-batches of the attached model's first step; None: it is made, or its length is meant.
        self._first_step: int | None = None
        self._told_no_gradient = False
        with translated():
            self._device = torch.device(self._handle.device())
            self._several = self._handle.world_size() > 1
        self._budget = int(self.stats()["tiers"]["device"]["budget"])  # for repr(), in a fork as well
        copy_pages()
        watch_regions()
        guard_sharing()
        profile_without_pointers(self)
        config = self.config
        self._clip = float(config["clip"])  # where attach() says nothing of it
        self._accumulation = int(config["accumulation"])

    def close(self) -> None:
        """Ends the engine: stops its threads and frees its files and memory.

        Parameters that were not released become plain tensors, as release() makes them, if they fit
        into memory. If not, a RuntimeWarning names them, and they throw when they are used; so do
        those of an engine that has failed. There is no warning if the model was saved since the last
        step, or when the interpreter exits.

        A call of another thread ends first: a backward pass at its next gradient, with a UserError,
        and any other call with its result. If it takes longer than `timeout`, the engine fails. Calls
        that come later raise UserError.
        """
        with translated():
            self._handle.require_may_close()
        optimizer = self._optimizer
        self._told.closing = True  # first: a thread that finds no model below finds the engine closed
        self._ending.end()
        self._end.detach()  # after it: a Ctrl-C on the way leaves the rest to a second close()
        if optimizer is not None:
            optimizer.retire("the engine has been closed")
        self._forget_model()

    def __enter__(self) -> Engine:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is not None and is_failure(error) and self._several:
            self._told.fail(error)  # or the others would wait for this rank
        self.close()

    def _forget_model(self) -> None:
        if self._optimizer is not None:
            self._optimizer.retire("the model of this optimizer was released: "
                                   "attach() returns a new one")
        self._model, self._optimizer, self._attachment = None, None, None
        self._untrained = None
        self._ending.undo()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError("an engine cannot be copied or pickled: it belongs to this process")

    def __repr__(self) -> str:
        if not self.is_open:
            return "Engine(closed)"
        attachment = self._attachment
        model = "no model attached" if attachment is None else f"{len(attachment.kept)} parameters"
        return (f"Engine(device='{self._device}', device_budget={byte_size(self._budget)}, "
                f"rank {self.rank} of {self.world_size}, {model})")

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
        if values["clip"] == "inf":  # JSON has no such number
            values["clip"] = math.inf
        return values

    @property
    def optimizer(self) -> Optimizer:
        """A torch optimizer, for schedulers and for code that wants one."""
        optimizer = self._optimizer  # before the look at the engine, for another thread may close it
        self._require_open()
        if optimizer is None:
            raise UserError("no model is attached: call attach() first")
        return optimizer

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
        """Around code that makes a model, or loads one: parameters are created as pages, so that it may
        be larger than any memory.

        >>> import torch, pagoda
        >>> engine = pagoda.Engine(device="cpu", device_budget="128KiB")
        >>> with engine.build():  # 400 KiB of parameters
        ...     model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))
        >>> engine.stats()["pages"]["device_bytes_peak"] <= 128 * 1024
        True
        """
        self._require_open()
        handle = self._handle

        def adopt(parameter: torch.Tensor, name: str) -> None:
            with translated():
                handle.adopt(parameter, sendable(name))

        return birth_scope(handle, adopt, self._device)

    def attach(self, model: torch.nn.Module, *positional: Any, optimizer: str = "adamw",
               groups: Iterable[dict[str, Any]] | None = None, clip: float | None = None,
               lr: float | None = None, betas: tuple[float, float] | None = None,
               eps: float | None = None, weight_decay: float | None = None,
               momentum: float | None = None, dampening: float | None = None,
               nesterov: bool | None = None, **unknown: Any) -> Optimizer:
        """Trains all parameters of `model`; those that do not require a gradient take no memory for
        gradients and optimizer state, and train from the step after they are thawed
        (`requires_grad_(True)`).

        `optimizer` is "adamw" (with torch.optim.AdamW's defaults), "adam", "sgd" or "lion".
        `groups` are those of torch.optim: dicts with "params" and what differs from the keywords,
        "optimizer" included; parameters in none of them are not trained. `clip` is the largest norm
        of all gradients together; `clip=math.inf` computes the norm at every step and never clips.
        """
        with translated():
            self._handle.config()  # it has not been closed
        if self._model is not None and not self._is_attached():
            self._forget_model()  # a Ctrl-C came between the two
        if self._model is not None:
            raise UserError("a model is attached already: release() it first")
        said = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        with self._refusing(lambda why: self._handle.attach([], [], [], [], [], [], [], 0, why),
                            "attach"):
            require_attach_keywords(positional, unknown)
            check_model(module_of(model, "attach()"))
            named = dict(model.named_parameters())
            buffers = dict(model.named_buffers())
            resolved = resolve_groups(named, groups, optimizer, said)
            number_of = {id(parameter): number for number, group in enumerate(resolved)
                         for parameter in group["params"]}
            facade = Optimizer(self, self._handle, resolved)
            constants = [constants_of(group) for group in facade.param_groups]
            largest = self._clip if clip is None else number("clip", clip)
        given = [p for group in resolved for p in group["params"]]
        try:
            # First, so that a Ctrl-C as the library's call returns finds the same there and here.
            self._model = model
            self._optimizer = facade
            self._attachment = Attachment(self, given, largest)
            self._untrained = UntrainedWatch(model, given)
            self._first_step = 0
            with translated():
                self._handle.attach(
                    [sendable(name) for name in named], list(named.values()),
                    [number_of.get(id(parameter), -1) for parameter in named.values()],
                    [group["optimizer"] for group in facade.param_groups], constants,
                    [sendable(name) for name in buffers], list(buffers.values()), largest, "")
        except BaseException:
            if not self._is_attached():
                self._forget_model()
                with suppress(RuntimeError):  # the engine has failed
                    self._handle.set_clip(self._clip)
            raise
        return facade

    @contextmanager
    def _refusing(self, refuse: Callable[[str], None], call: str) -> Iterator[None]:
        """Around what a collective call makes of its arguments: what is wrong with those of this rank
        is raised on all, which `refuse` tells in the call itself."""
        try:
            yield
        except Exception as error:
            if self._several:
                with suppress(UserError), translated():
                    refuse(f"{call}(): {text_of(error)}")
            raise

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Parameters become plain tensors again, up to date, if they fit into memory."""
        self._require_open()
        with self._refusing(lambda why: self._handle.release([], why), "release"):
            model = self._model if model is None else module_of(model, "release()")
            if model is None:
                raise UserError("no model is attached")
            tensors: list[torch.Tensor] = list(model.parameters())
            if model is self._model and self._attachment is not None:
                tensors += self._attachment.kept  # also what the model has replaced since
        try:
            with translated():
                self._handle.release(list({id(tensor): tensor for tensor in tensors}.values()), "")
        finally:  # a Ctrl-C may come as the library's call returns
            if not self._is_attached():
                self._forget_model()

    def _is_attached(self) -> bool:
        """Whether the library has a model; an engine that has failed keeps its own."""
        try:
            return self._handle.attached()
        except RuntimeError:
            return True

    def save_pretrained(self, directory: str | Path, model: torch.nn.Module | None = None, *,
                        max_shard_size: int | str = "5GB", max_shard_bytes: int | None = None) -> None:
        """Writes the model (the attached one) as a Hugging Face directory: safetensors files of at most
        `max_shard_size` and its configuration; of a peft model, its adapters. One page is in memory
        at a time, and previous files are replaced when all new ones are complete. Rank 0 writes; if
        it cannot, all ranks raise, and may go on.
        """
        with self._calls.together("save_pretrained", "the directory of save_pretrained()", directory):
            # What is wrong with the arguments of one rank is an error on all.
            chosen = self._model if model is None else module_of(model, "save_pretrained()")
            if chosen is None:
                raise UserError("no model is attached: pass the one to save")
            path = directory_of(directory)
            largest = (shard_bytes("max_shard_size", max_shard_size) if max_shard_bytes is None else
                       shard_bytes("max_shard_bytes", max_shard_bytes))  # its name of before
            if self.rank == 0:
                self._save(path, chosen, largest)
            else:
                self.finish()
        if chosen is self._model:
            self._ending.saved()

    def _save(self, directory: str | Path, model: torch.nn.Module,
              max_shard_bytes: int = 5_000_000_000) -> None:
        """By this rank alone: what others keep is asked of them."""
        self.finish()
        save(model, directory_of(directory), max_shard_bytes)

    # Training.

    def backward(self, loss: torch.Tensor, last: bool | None = None, *,
                 retain_graph: bool = False) -> None:
        """One micro-batch. `last`: no other comes before step(), so that updates may start; by
        default the `accumulation`-th since the last step is. `retain_graph`: as torch's."""
        self._told.thread = threading.get_ident()
        self.optimizer.send()
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"backward() expects a tensor, got {described(loss)}")
        if loss.numel() != 1:
            raise UserError(f"backward() expects a scalar loss, such as mean() or sum() returns, got one of "
                            f"shape {list(loss.shape)}")
        if not loss.requires_grad:
            raise UserError("the loss does not require a gradient: it depends on no parameter that does, "
                            "or was computed without autograd (torch.no_grad, detach, inference mode)")
        if last is not None and not isinstance(last, bool):
            raise UserError(f"backward(last={last!r}) expects True, False or None")
        with translated():
            self._handle.backward(loss, last, bool(retain_graph))
        self._check_gradients()
        if self._first_step is not None:
            self._first_step = None if last else self._first_step + 1

    def step(self) -> StepReport:
        """Starts the optimizer step and returns; updates run during the next forward."""
        facade = self.optimizer
        facade.step()  # through the facade, for schedulers count its calls
        assert facade.report is not None
        return facade.report

    def _take_step(self) -> StepReport:
        self.optimizer.send()
        untrained = self._untrained
        if untrained is not None:
            untrained.look()
        self._check_first_step()
        with translated():
            step, skipped, norm, loss_scale = self._handle.step()
        return StepReport(step, skipped, None if norm < 0 else norm, loss_scale)

    def _check_gradients(self) -> None:
        """A loss that reaches no attached parameter trains nothing: another engine's, or of a model that
        was copied or replaced after attach()."""
        if self._told_no_gradient or self.has_gradients():
            return
        self._told_no_gradient = True
        warn("backward() produced no gradient for any attached parameter: the loss does not depend "
             "on the model of this engine (was it copied or replaced after attach(), or "
             "is it another engine's?)")

    def _check_first_step(self) -> None:
        """A short last accumulation of an epoch is meant; a short first one is a loop that calls step()
        after every backward(), as DeepSpeed's do."""
        count = self._first_step
        if not count:  # loss.backward() is not counted
            return
        self._first_step = None
        if count < self._accumulation:
            warn(f"step() was called after {count} backward(), with accumulation={self._accumulation}: "
                 f"every step() updates the parameters. Call it after {self._accumulation} micro-batches, "
                 "or pass backward(loss, last=True) if fewer are intended")

    def join(self) -> None:
        """This rank has no more data: takes part in the others' steps until all have joined."""
        self._require_attached()
        with translated():
            self._handle.join()

    def finish(self) -> None:
        """Waits until all pending updates are applied."""
        with translated():
            self._handle.finish()

    # Gradients.

    def grad(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient accumulated so far, as fp32 on the host and without the loss scale; zeros where
        none has come.

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
        self._require_attached()
        with translated():
            return self._handle.grad(tensor_of(parameter, "grad()"))

    def grad_norm(self) -> float:
        """The norm of all gradients accumulated so far. After the last backward() of a step, read
        `step().norm` instead, which `clip=math.inf` computes at every step."""
        self._require_attached()
        with translated():
            return self._handle.grad_norm()

    def serve_framework(self) -> None:
        """For frameworks that clip and save by themselves, until release(): clip_grad_norm_ tells
        them the norm, and the engine's own `clip` is what clips; the model's save_pretrained is
        the engine's, on the ranks that call it."""
        self._require_open()
        model = self._model
        if model is None or self._attachment is None:
            raise UserError("no model is attached: call attach() first")
        self._attachment.serves = True

        me, attached = weakref.ref(self), weakref.ref(model)  # the model must not keep the engine

        def save_pretrained(self: torch.nn.Module, save_directory: str | Path, *args: Any,
                            **kwargs: Any) -> None:
            if self is not attached():  # a copy of the model
                type(self).save_pretrained(self, save_directory, *args, **kwargs)  # type: ignore
                return
            engine = me()
            if engine is None:  # it has given the weights back, or they throw
                type(self).save_pretrained(self, save_directory, *args, **kwargs)  # type: ignore
                return
            with engine._calls.working("save_pretrained"):
                engine._save(save_directory, self)

        # A method, so that a copy of the model has one of the copy.
        vars(model)["save_pretrained"] = types.MethodType(save_pretrained, model)
        self.on_release(lambda: vars(model).pop("save_pretrained", None))

    def on_release(self, call: Callable[[], Any]) -> None:
        """For frameworks: what is to be undone when the model is released or the engine ends. `call`
        must not refer to the engine, which would never end by itself."""
        self._ending.on_release.append(call)

    def zero_grad(self) -> None:
        """Drops the gradients accumulated since the last step, and what p.grad has been set to."""
        self._require_attached()
        with translated():
            self._handle.zero_grad()
        if self._first_step is not None:
            self._first_step = 0

    def has_gradients(self) -> bool:
        """Whether gradients have come on this rank since the last step."""
        with translated():
            return self._handle.has_gradients()

    @property
    def is_open(self) -> bool:
        """Until close()."""
        return self._end.alive and not self._told.closing

    def _require_open(self) -> None:
        if not self.is_open:
            raise UserError("the engine has been closed")

    def _require_attached(self) -> None:
        with translated():
            self._handle.rank()  # it has not been closed
        _ = self.optimizer

    # Activations.

    def activations(self, place: str = "host", *, least: int | str = "16KiB",
                    in_flight: int | str = "64MiB") -> AbstractContextManager[Any]:
        """Around a forward: what autograd saves for backward goes to "host" or "nvme" in the
        background, within the engine's budgets, and is back before backward needs it. Gradients and
        errors are those of plain autograd, bit for bit. A storage leaves when nothing else refers
        to it. Those below `least` stay; `in_flight` bounds the bytes that wait to leave, and those
        that are back early. What is no plain strided tensor, or fits into no budget, stays where it
        is; pages are never copied.

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
        with translated():
            handle = self._handle.activations(str(place), str(least), str(in_flight))
        return ActivationHooks(handle)

    # Raw pointers.

    def pin(self, what: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor], *,
            write: bool = False) -> Pin:
        """Keeps parameters on the device for code that uses raw pointers: numpy(), a compiled
        region, a kernel of one's own. They must fit into the device's budget together. What a
        step() changes is there when it returns. Writes through numpy are found; a kernel that
        writes to a parameter on a GPU needs `write=True`."""
        if isinstance(what, torch.nn.Module):
            tensors: list[torch.Tensor] = list(what.parameters())
        else:
            single = isinstance(what, (torch.Tensor, str)) or not isinstance(what, Iterable)
            tensors = [tensor_of(item, "pin()", "a module, a tensor or an iterable of tensors")
                       for item in ([what] if single else what)]
        with translated():
            return Pin(self._handle.pin(tensors, write))


def _show_keywords() -> None:
    """help(Engine) and help(Engine.attach) show the keywords that are accepted."""
    made = inspect.signature(Engine.__init__).parameters
    keys = [inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for key in config_keys()]
    cls: Any = Engine
    cls.__signature__ = inspect.Signature([*keys, made["group"], made["gradient_group"]])
    attach: Any = Engine.attach
    signature = inspect.signature(attach)
    attach.__signature__ = signature.replace(parameters=[
        parameter for name, parameter in signature.parameters.items()
        if name not in ("positional", "unknown")])


_show_keywords()
