# SPDX-License-Identifier: Apache-2.0
"""Writes a model as a Hugging Face directory, one page at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from pagoda.errors import UserError

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_PART = 8 << 20  # bytes of a tensor that are copied at a time
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

# Gives the tensors that one entry of a state dict becomes in the file.
Convert = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


class Entry(NamedTuple):
    """A tensor of a file: what it is called, and which entry of the state dict it comes from."""

    name: str
    source: str
    dtype: str
    shape: list[int]
    size: int


def _without_aliases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with every tensor once: of tied ones, the name that a loader expects."""
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    seen: set[tuple[Any, ...]] = set()
    out: dict[str, torch.Tensor] = {}
    for name in sorted(state, key=lambda name: name in tied):
        tensor = state[name]
        if name in ignored or not isinstance(tensor, torch.Tensor):
            continue
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape),
               tuple(tensor.stride()))
        if key not in seen or tensor.numel() == 0:
            seen.add(key)
            out[name] = tensor
    return {name: out[name] for name in state if name in out}


def _as_they_are(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _original_names(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> Convert:
    """transformers keeps some weights otherwise than their checkpoints do (the experts of a layer in
    one tensor): gives back what the checkpoint has, where it can be done one parameter at a time."""
    if "transformers" not in sys.modules:  # then it is no model of it, and 20 MiB stay free
        return _as_they_are
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _as_they_are
    if not isinstance(model, PreTrainedModel):
        return _as_they_are

    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(model, {name: tensor}))

    def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in tensors.items()}

    try:
        whole = shapes(revert_weight_conversion(
            model, {name: _on_meta(tensor) for name, tensor in state.items()}))
        alone: dict[str, torch.Size] = {}
        for name, tensor in state.items():
            alone.update(shapes(convert(name, _on_meta(tensor))))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError):
        return _as_they_are
    return convert if whole == alone else _as_they_are


def _shards(state: dict[str, torch.Tensor], convert: Convert,
            largest: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    filled = 0
    for source, tensor in state.items():
        if tensor.is_meta:
            raise UserError(f"'{source}' is on the meta device and has no values to save")
        entries = []
        for name, part in convert(source, _on_meta(tensor)).items():
            if part.dtype not in _DTYPES:
                raise UserError(f"'{name}' is {part.dtype}, which safetensors does not support")
            entries.append(Entry(name, source, _DTYPES[part.dtype], list(part.shape),
                                 part.numel() * part.element_size()))
        size = sum(entry.size for entry in entries)
        if shard and filled + size > largest:
            yield shard
            shard, filled = [], 0
        shard += entries
        filled += size
    yield shard


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    # Copies by operators: each brings the page in, if it is not there, and lets it go again. A part
    # at a time: what is written needs no memory of the tensor's size.
    if tensor.numel() == 0:
        return
    if not tensor.is_contiguous():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    flat = tensor.view(-1)
    elements = max(1, _PART // tensor.element_size())
    part = torch.empty(min(elements, flat.numel()), dtype=tensor.dtype, device="cpu")
    for begin in range(0, flat.numel(), elements):
        count = min(elements, flat.numel() - begin)
        part[:count].copy_(flat[begin:begin + count])
        file.write(part[:count].view(torch.uint8).numpy().data)


def _write_shard(path: Path, shard: list[Entry], state: dict[str, torch.Tensor],
                 convert: Convert) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in shard:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape,
                              "data_offsets": [at, at + entry.size]}
        at += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        parts: dict[str, torch.Tensor] = {}
        source = None
        for entry in shard:
            if entry.source != source:
                source = entry.source
                parts = convert(source, state[source])
            _write_tensor(file, parts[entry.name])
        file.flush()
        os.fsync(file.fileno())


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", re.IGNORECASE)


def shard_bytes(name: str, size: object) -> int:
    """The largest file, as Hugging Face's max_shard_size says it: "5GB", "200MiB" or bytes."""
    if isinstance(size, str) and (found := _SIZE.fullmatch(size.strip())):
        unit = (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
        size = int(float(found[1]) * unit)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError(f"{name} = {size!r} is not allowed: expected a size such as '5GB', or an integer "
                        "number of bytes ≥ 1")
    return size


def _require_space(directory: Path, needed: int) -> None:
    """Before the first byte is written. Files of before are replaced at the end: both need space."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(f"the weights need {needed:,} bytes in '{directory}', where {free:,} are free: free "
                        "some space, or name another directory")


def _write_weights(model: torch.nn.Module, directory: Path, largest: int) -> None:
    with torch.no_grad():
        state = _without_aliases(model)
        convert = _original_names(model, state)
        shards = list(_shards(state, convert, largest))
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                     for i in range(len(shards))]
        needed = sum(entry.size for shard in shards for entry in shard)
        try:
            _require_space(directory, needed)
            for name, shard in zip(names, shards, strict=True):
                _write_shard(directory / f".{name}.part", shard, state, convert)
        except BaseException as error:
            for name in names:
                (directory / f".{name}.part").unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"the weights need {needed:,} bytes in '{directory}', where "
                    f"{shutil.disk_usage(directory).free:,} are free ({error.strerror}): the "
                    "previous files are unchanged") from error
            raise
    for old in directory.iterdir():
        if _SHARD.fullmatch(old.name):
            old.unlink()
    for name in names:
        (directory / f".{name}.part").replace(directory / name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(e.size for shard in shards for e in shard)},
                 "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True)
                                for entry in shard}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _has_adapters(model: torch.nn.Module) -> bool:
    """Whether a peft model has any: not after merge_and_unload() or unload()."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return True
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return True
    return hasattr(model, "prompt_encoder") or not hasattr(model, "merge_and_unload")


def _write_adapters(model: torch.nn.Module, directory: Path) -> None:
    """peft's own format: what is trained is small, and is copied."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        state = {name: tensor.clone() if name in trained else tensor
                 for name, tensor in model.state_dict().items()}
    # Of the class: the model itself may have ours (Engine.serve_framework).
    type(model).save_pretrained(model, directory, state_dict=state)  # type: ignore[attr-defined]


def save(model: torch.nn.Module, directory: Path, largest: int) -> None:
    """The model's weights, and its configuration where it has one. A directory that was made for
    what then could not be written does not stay."""
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the directory '{directory}' cannot be created: {error.strerror}") from error
    try:
        _write(model, directory, largest)
    except BaseException:
        if made:
            with suppress(OSError):  # something is in it
                directory.rmdir()
        raise


def _write(model: torch.nn.Module, directory: Path, largest: int) -> None:
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        if _has_adapters(model):
            _write_adapters(model, directory)
            return
        base = getattr(model, "get_base_model", None)  # they were merged into it
        model = model if base is None else base()
    _write_weights(model, directory, largest)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        dtype = getattr(model, "dtype", None)
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", bool)():
        generation.save_pretrained(directory)
