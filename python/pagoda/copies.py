# SPDX-License-Identifier: Apache-2.0
"""copy.deepcopy(model.state_dict()) copies storages by their pointers, which those of pages do not give
away. They are copied by an operator instead, which brings them in."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

_replaced = False


def copy_pages() -> None:
    """From now on: the code of torch.Tensor.__deepcopy__ is exchanged."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    theirs: Any = torch.Tensor.__deepcopy__
    plain = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__)

    def deepcopy(tensor: torch.Tensor, memo: dict[Any, Any]) -> Any:
        if type(tensor) is torch.Tensor and id(tensor) not in memo and _is_page(tensor):
            storage = tensor.untyped_storage()
            copied = memo.setdefault("torch", {})  # where torch looks for what has been copied
            if storage._cdata not in copied:
                elements = storage.nbytes() // tensor.element_size()
                whole = tensor.detach().as_strided((elements,), (1,), 0)
                copied[storage._cdata] = whole.clone().untyped_storage()
        return plain(tensor, memo)

    def through(self, memo):  # type: ignore[no-untyped-def]
        return _pagoda_deepcopy(self, memo)  # type: ignore[name-defined] # noqa: F821

    theirs.__globals__["_pagoda_deepcopy"] = deepcopy
    theirs.__code__ = through.__code__


def _is_page(tensor: torch.Tensor) -> bool:
    """It may be: its pointer is refused."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False
