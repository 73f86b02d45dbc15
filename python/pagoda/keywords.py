# SPDX-License-Identifier: Apache-2.0
"""The keywords of Engine() and attach(). One that belongs elsewhere, or has another name in other
libraries, is an error that says where it goes."""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pagoda.errors import UserError
from pagoda.library import config_keys

KINDS = ("adamw", "adam", "sgd", "lion")
CONSTANTS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
_OF_ATTACH = (*CONSTANTS, "groups")

# What others call it.
_ENGINE_NAMES = {
    "stage": "zero", "zero_stage": "zero", "budget": "device_budget", "memory": "device_budget",
    "device_memory": "device_budget", "gpu_budget": "device_budget", "gpu_memory": "device_budget",
    "max_memory": "device_budget", "host_memory": "host_budget", "cpu_budget": "host_budget",
    "max_grad_norm": "clip", "max_norm": "clip", "gradient_clipping": "clip", "grad_clip": "clip",
    "gradient_accumulation_steps": "accumulation", "grad_accumulation": "accumulation",
    "nvme_path": "nvme", "offload_folder": "nvme"}
# What others have, and what it is here.
_ENGINE_ANSWERS = {
    "offload_param": "say parameters='host' or 'nvme'",
    "offload_params": "say parameters='host' or 'nvme'",
    "offload_optimizer": "say optimizer_state='host' or 'nvme'",
    "offload": "say parameters=, gradients= and optimizer_state='host' or 'nvme'; by default ('auto') "
               "each is placed where device_budget and host_budget have room for it",
    "cpu_offload": "say parameters=, gradients= and optimizer_state='host'",
    "mixed_precision": "the model's own dtype decides: model.bfloat16(), or model.half() with "
                       "loss_scale='dynamic'; masters are fp32",
    "bf16": "call model.bfloat16() before attach(); masters are fp32",
    "fp16": "call model.half() before attach() and say loss_scale='dynamic'; masters are fp32",
    "dtype": "the model's own dtype decides; masters are fp32",
    "config": "pass the keys as keywords, Engine(**json.load(file)); pagoda.initialize(config=…) takes a "
              "DeepSpeed configuration",
    "activations": "use `with engine.activations('host'):` around the forward",
    "model": "pass it to engine.attach(model)",
}
_ATTACH_NAMES = {"learning_rate": "lr", "max_grad_norm": "clip", "max_norm": "clip",
                 "gradient_clipping": "clip", "grad_clip": "clip", "epsilon": "eps",
                 "decay": "weight_decay", "beta": "betas", "params": "groups",
                 "param_groups": "groups"}
# Arguments of torch.optim, with the values that change nothing.
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "amsgrad": (False,), "maximize": (False,), "capturable": (False,), "differentiable": (False,),
    "foreach": (None, False), "fused": (None, False), "decoupled_weight_decay": ()}


@functools.cache
def _takes() -> dict[str, str]:
    """What each of Engine()'s keywords takes."""
    return {key.name: key.takes for key in config_keys()}


def _is_algorithm(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in KINDS
    return isinstance(value, torch.optim.Optimizer) or (
        isinstance(value, type) and issubclass(value, torch.optim.Optimizer))


def require_engine_keywords(positional: tuple[object, ...], keywords: dict[str, Any]) -> None:
    """Before Engine() asks the library, which knows its own names only."""
    if positional:
        raise UserError(f"Engine({positional[0]!r}): Engine() takes keyword arguments only, such as "
                        "device_budget='6GiB'")
    takes = _takes()
    for name, value in keywords.items():
        if name == "optimizer" and _is_algorithm(value):
            shown = repr(value) if isinstance(value, str) else "…"
            raise UserError(f"optimizer={shown} belongs in attach(model, optimizer='adamw'); where its "
                            f"states are placed is optimizer_state= ({takes['optimizer_state']})")
        if name in takes or name == "optimizer":  # as optimizer_state was called, which the library tells
            continue
        if name in _OF_ATTACH:
            raise UserError(f"Engine() has no '{name}': it belongs in attach(model, {name}=…)")
        if name in _ENGINE_NAMES:
            raise UserError(f"Engine() has no '{name}': say {_ENGINE_NAMES[name]}={value!r}")
        if name in _ENGINE_ANSWERS:
            raise UserError(f"Engine() has no '{name}': {_ENGINE_ANSWERS[name]}")


def require_attach_keywords(positional: tuple[object, ...], keywords: dict[str, Any]) -> None:
    """Of attach(): all that it does not know."""
    if positional:
        given = positional[0]
        if isinstance(given, (torch.optim.Optimizer, str)) or _is_algorithm(given):
            named = given if isinstance(given, str) else "adamw"
            raise UserError("attach() takes one positional argument, the model: pass the optimizer's name "
                            f"and constants as keywords, attach(model, optimizer='{named}', lr=…); an "
                            "optimizer of torch.optim cannot be paged")
        raise UserError("attach() takes one positional argument, the model; pass " + (
            f"lr={given!r} as a keyword" if isinstance(given, float) else
            "everything else by keyword, such as lr=0.001"))
    for name, value in keywords.items():
        if name in _ATTACH_NAMES:
            raise UserError(f"attach() has no '{name}': say {_ATTACH_NAMES[name]}=…")
        if name in _NOT_SUPPORTED:
            if value in _NOT_SUPPORTED[name]:  # as it is here
                continue
            raise UserError(f"attach() has no '{name}': it is not supported, leave it out")
        if name in _takes():
            raise UserError(f"attach() has no '{name}': it belongs in Engine({name}={value!r})")
        if name in _ENGINE_NAMES:
            raise UserError(f"attach() has no '{name}': it belongs in "
                            f"Engine({_ENGINE_NAMES[name]}={value!r})")
        known = [*CONSTANTS, "optimizer", "groups", "clip"]
        near = difflib.get_close_matches(name, known, 1)
        raise UserError(f"attach() has no '{name}'; " + (
            f"did you mean '{near[0]}'?" if near else f"it has {', '.join(known)}"))


def no_such_optimizer(kind: object) -> UserError:
    """What is wrong with `optimizer=kind`."""
    names = ", ".join(f"'{name}'" for name in KINDS)
    if not isinstance(kind, str):
        what = (f"a {kind.__module__.partition('.')[0]}.optim.{type(kind).__name__} object"
                if isinstance(kind, torch.optim.Optimizer) else
                f"the class {kind.__name__}" if isinstance(kind, type) else type(kind).__name__)
        return UserError(f"optimizer= takes a name ({names}), not {what}: "
                         "pass its lr, betas, … to attach()")
    near = difflib.get_close_matches(kind.lower(), KINDS, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"use one of {names}"
    return UserError(f"there is no optimizer '{kind}'; {hint}")


def kind_of(optimizer: object) -> str:
    """The optimizer of that name, in any case; UserError where there is none."""
    kind = optimizer.lower() if isinstance(optimizer, str) else optimizer
    if kind not in KINDS:
        raise no_such_optimizer(optimizer)
    return str(kind)


def no_such_constant(kind: str, name: str, constants: Iterable[str]) -> UserError:
    """What is wrong with `name` in a group of the optimizer `kind`."""
    has = list(constants)
    near = difflib.get_close_matches(name, [*has, "params"], 1)
    return UserError(f"optimizer '{kind}' has no '{name}'; " + (
        f"did you mean '{near[0]}'?" if near else f"it has {', '.join(has)}"))


def _plain(name: str, value: object) -> object:
    """A keyword's value as JSON has it."""
    if isinstance(value, (torch.device, Path)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    takes = _takes().get(name, "")
    if isinstance(value, float) and value.is_integer() and takes.startswith("a byte size"):
        return int(value)  # 6e9
    if isinstance(value, float) and value == math.inf and takes.endswith("or inf"):
        return "inf"
    return value


def as_json(config: dict[str, Any]) -> str:
    """The configuration as the library takes it, which says what is wrong with a value. JSON has
    neither NaN nor infinity nor Python's objects."""
    texts = []
    for key, value in config.items():
        try:
            plain = json.dumps(_plain(key, value), allow_nan=False)
            json.dumps(_plain(key, value), ensure_ascii=False).encode()  # surrogates are no Unicode
            texts.append(f"{json.dumps(key)}: {plain}")
        except (TypeError, ValueError) as error:
            reason = "it is not valid Unicode; " if isinstance(error, UnicodeError) else ""
            if key in _takes():
                raise UserError(f"{key} = {value!r} is not allowed: {reason}expected "
                                f"{_takes()[key]}") from None
            texts.append(f"{json.dumps(key)}: 0")  # the library names the nearest
    return f"{{{', '.join(texts)}}}"
