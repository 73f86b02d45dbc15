# SPDX-License-Identifier: Apache-2.0
"""The keywords of Engine() and attach(). One that belongs elsewhere, or has another name in other
libraries, is an error that says where it goes."""

from __future__ import annotations

import difflib
import functools
import json
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
_ATTACH_NAMES = {"learning_rate": "lr", "max_grad_norm": "clip", "max_norm": "clip",
                 "gradient_clipping": "clip", "grad_clip": "clip", "epsilon": "eps",
                 "decay": "weight_decay", "beta": "betas", "params": "groups",
                 "param_groups": "groups"}
_NOT_SUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused",
                  "decoupled_weight_decay")


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
        raise UserError(f"Engine({positional[0]!r}): it takes keywords only, such as "
                        "device_budget='6GiB'")
    takes = _takes()
    for name, value in keywords.items():
        if name == "optimizer" and _is_algorithm(value):
            raise UserError(f"optimizer={value!r} belongs in attach(model, optimizer='adamw'): the "
                            f"engine's keyword of that name says where its states lie ({takes[name]})")
        if name in takes:
            continue
        if name in _OF_ATTACH:
            raise UserError(f"Engine() has no '{name}': it belongs in attach(model, {name}=…)")
        if name in _ENGINE_NAMES:
            raise UserError(f"Engine() has no '{name}': say {_ENGINE_NAMES[name]}={value!r}")


def require_attach_keywords(positional: tuple[object, ...], keywords: dict[str, Any]) -> None:
    """Of attach(): all that it does not know."""
    if positional:
        given = positional[0]
        if isinstance(given, (torch.optim.Optimizer, str)) or _is_algorithm(given):
            named = given if isinstance(given, str) else "adamw"
            raise UserError("attach() takes the model, and keywords: name the optimizer and its "
                            f"constants, attach(model, optimizer='{named}', lr=…); one of torch.optim "
                            "cannot be paged")
        raise UserError(f"attach() takes the model, and keywords, and not a {type(given).__name__} "
                        "beside it")
    for name, value in keywords.items():
        if name in _ATTACH_NAMES:
            raise UserError(f"attach() has no '{name}': say {_ATTACH_NAMES[name]}=…")
        if name in _NOT_SUPPORTED:
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
    if not isinstance(kind, str) and _is_algorithm(kind):
        return UserError(f"there is no optimizer '{kind}': it is named by a text, one of "
                         f"{', '.join(KINDS)}; one of torch.optim cannot be paged")
    near = difflib.get_close_matches(kind.lower(), KINDS, 1) if isinstance(kind, str) else []
    hint = f"; did you mean '{near[0]}'?" if near else f": it is {', '.join(KINDS)}"
    return UserError(f"there is no optimizer '{kind}'{hint}")


def _plain(name: str, value: object) -> object:
    """A keyword's value as JSON has it."""
    if isinstance(value, (torch.device, Path)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    takes = _takes().get(name, "")
    if isinstance(value, float) and value.is_integer() and takes.startswith("a byte size"):
        return int(value)  # 6e9
    return value


def as_json(config: dict[str, Any]) -> str:
    """The configuration as the library takes it, which says what is wrong with a value. JSON has
    neither NaN nor infinity nor Python's objects."""
    texts = []
    for key, value in config.items():
        try:
            plain = json.dumps(_plain(key, value), allow_nan=False)
            texts.append(f"{json.dumps(key)}: {plain}")
        except (TypeError, ValueError):
            if key in _takes():
                raise UserError(f"{key} = {value!r} is not allowed: it takes {_takes()[key]}") from None
            texts.append(f"{json.dumps(key)}: 0")  # the library names the nearest
    return f"{{{', '.join(texts)}}}"
