# SPDX-License-Identifier: Apache-2.0
"""save_pretrained() that fails leaves what was there, and the engine goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import run_scenarios, shown
from safetensors.torch import load_file
from small_net import engine, net, raises, trains

import pagoda
from pagoda import export


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_disk_without_room_for_it_is_told_before_the_first_byte(tmp_path: Path) -> None:
    paged, model = engine(), net()
    paged.attach(model)
    paged.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    trains(paged, model)
    usage = mock.Mock(free=1000)
    with mock.patch.object(export.shutil, "disk_usage", return_value=usage):
        raises(lambda: paged.save_pretrained(tmp_path),
               rf"need 3,264 bytes in '{tmp_path}', where 1,000 are free")
        raises(lambda: paged.save_pretrained(tmp_path / "new"), "where 1,000 are free")
    assert files(tmp_path) == ["model.safetensors"]  # and no empty directory
    assert (tmp_path / "model.safetensors").read_bytes() == before
    trains(paged, model)
    paged.save_pretrained(tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_no_files(tmp_path: Path, error: BaseException) -> None:
    paged, model = engine(), net()
    paged.attach(model)
    calls = 0
    plain = export._write_tensor

    def write(file: Any, tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error
        plain(file, tensor)

    wanted = pagoda.UserError if isinstance(error, OSError) else KeyboardInterrupt
    with mock.patch.object(export, "_write_tensor", write), pytest.raises(wanted) as told:
        paged.save_pretrained(tmp_path, max_shard_bytes=1100)
    if wanted is pagoda.UserError:
        assert str(tmp_path) in str(told.value) and "No space left" in str(told.value)
        assert isinstance(told.value.__cause__, OSError)
    assert files(tmp_path) == []
    trains(paged, model)
    paged.save_pretrained(tmp_path)
    assert files(tmp_path) == ["model.safetensors"]


def test_directories_that_cannot_be(tmp_path: Path) -> None:
    paged, model = engine(), net()
    paged.attach(model)
    before = sorted(os.listdir())
    raises(lambda: paged.save_pretrained(""), "name is empty")
    raises(lambda: paged.save_pretrained(b"out"), "path")
    (tmp_path / "file").write_text("")
    raises(lambda: paged.save_pretrained(tmp_path / "file" / "out"), "cannot be created: Not a directory")
    raises(lambda: paged.save_pretrained(tmp_path / "file"), "cannot be created: File exists")
    assert sorted(os.listdir()) == before
    trains(paged, model)


def test_adapters_that_were_merged_are_saved_as_the_whole_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    paged = engine(device_budget="1MiB")
    paged.attach(model)
    tokens = torch.arange(8)[None]
    paged.backward(model(input_ids=tokens, labels=tokens).loss)
    paged.step()
    paged.save_pretrained(tmp_path / "adapters")
    assert "adapter_model.safetensors" in files(tmp_path / "adapters")
    merged = model.merge_and_unload()
    with torch.no_grad():
        wanted = merged(input_ids=tokens).logits
    paged.save_pretrained(tmp_path / "whole")
    paged.save_pretrained(tmp_path / "named", merged)
    for name in ("whole", "named"):
        assert "adapter_config.json" not in files(tmp_path / name)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=tokens).logits, wanted)


RANKS = ["bad_argument_of_one_rank", "other_folders_on_other_ranks"]


@pytest.mark.parametrize("name", RANKS)
def test_arguments_of_ranks(name: str, tmp_path: Path) -> None:
    ended = run_scenarios([name], tmp_path)[name]
    assert [one.code for one in ended] == [0, 0], shown(ended)
    assert load_file(tmp_path / "out" / "model.safetensors")
