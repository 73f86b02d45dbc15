# SPDX-License-Identifier: Apache-2.0
"""Gradients that nobody uses: those of parameters that came to a model after attach(), or that are in
no group. torch.optim says nothing of them; we do, once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import (register_module_module_registration_hook,
                                     register_module_parameter_registration_hook)

from pagoda.warning import warn

_watches: weakref.WeakSet[UntrainedWatch] = weakref.WeakSet()
_hooked = False
_MOST_NAMES = 5


def _registered(*_: Any) -> None:
    """Somewhere a module got a parameter or a module."""
    for watch in _watches:
        watch.changed = True


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        register_module_parameter_registration_hook(_registered)
        register_module_module_registration_hook(_registered)


class UntrainedWatch:
    """Looks at the parameters of an attached model that its optimizer was not given.

    `changed`: the model may have others than when it was last looked through.
    """

    def __init__(self, model: torch.nn.Module, given: Iterable[torch.Tensor]) -> None:
        self._model = weakref.ref(model)
        self._known = {id(parameter): weakref.ref(parameter) for parameter in given}
        self._watched: dict[str, weakref.ref[torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            if id(parameter) in self._known:
                continue
            self._known[id(parameter)] = self._watched[name] = weakref.ref(parameter)
        self.changed = False
        _watches.add(self)
        _hook()

    def _look_through(self) -> None:
        model = self._model()
        if model is None or not self.changed:
            return
        self.changed = False
        for name, parameter in model.named_parameters():
            known = self._known.get(id(parameter))
            if known is None or known() is not parameter:  # an id may come again
                self._known[id(parameter)] = self._watched[name] = weakref.ref(parameter)

    def look(self) -> None:
        """Before a step: warns of gradients that it will not use."""
        self._look_through()
        unused = [name for name, reference in self._watched.items()
                  if (parameter := reference()) is not None and parameter.grad is not None]
        if not unused:
            return
        names = ", ".join(f"'{name}'" for name in unused[:_MOST_NAMES])
        if len(unused) > _MOST_NAMES:
            names += f" and {len(unused) - _MOST_NAMES} others"
        warn(f"the engine does not train {names}: added after attach(), or in none of its groups. "
             "Their gradients accumulate in .grad. Freeze them with requires_grad_(False), or release() "
             "the model and attach() it again to train them")
        for name in unused:
            del self._watched[name]
