# SPDX-License-Identifier: Apache-2.0
"""torch.nn.utils.clip_grad_* would find no gradients and clip nothing, without a word: the engine
has taken them. On attached parameters they are errors that name the way."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from pagoda.errors import UserError
from pagoda.vectors import copy_to_attached

_attached: weakref.WeakSet[object] = weakref.WeakSet()
_guarded = False


class Attachment:
    """The parameters of one engine, while it has their gradients.

    `norm`: for frameworks that clip by themselves, where the engine clips already: their call gets
    the norm, and nothing else happens.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.kept = list(parameters)  # an id means something while its object lives
        self.ids = {id(parameter) for parameter in self.kept}
        self.norm: Callable[[], float] | None = None
        _attached.add(self)
        _guard()
        copy_to_attached(lambda tensors: _attachment_of(tensors) is not None)


def _attachment_of(tensors: list[torch.Tensor]) -> Attachment | None:
    for attachment in _attached:
        assert isinstance(attachment, Attachment)
        if any(id(tensor) in attachment.ids for tensor in tensors):
            return attachment
    return None


def _guard() -> None:
    """Whatever name a script has imported them by: the wrapped function is exchanged inside."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapper = getattr(clip_grad, name)
        cell = next(cell for cell in wrapper.__closure__ or () if callable(cell.cell_contents))
        plain: Callable[..., Any] = cell.cell_contents

        def checked(parameters: Any, *args: Any, _name: str = name,
                    _plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
            single = isinstance(parameters, torch.Tensor)
            tensors = [parameters] if single else list(parameters)
            attachment = _attachment_of(tensors)
            if attachment is None:
                return _plain(tensors, *args, **kwargs)
            if attachment.norm is not None and _name == "clip_grad_norm_":
                return torch.tensor(attachment.norm())
            raise UserError(f"{_name}: the gradients of these parameters are the engine's; say "
                            "engine.attach(model, clip=…), and engine.grad_norm() for their norm")

        cell.cell_contents = functools.wraps(plain)(checked)
