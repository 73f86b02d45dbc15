# SPDX-License-Identifier: Apache-2.0
"""A process of test_memory.py: makes a model that is larger than the memory it may use.

    limited.py HOW DIRECTORY

HOW is `config` (made from a configuration, trained a step and saved), `checkpoint` (loaded from what
was saved, and trained a step), `converted` (loaded as fp64, each parameter being taken slowly, so that
whoever reads ahead has to keep what he read) or `plain` (made without an engine, which must fail).
"""

import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pagoda
from pagoda.birth import birth_scope

ROOM = 96 << 20

CONFIG = LlamaConfig(vocab_size=512, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=8)


def own_bytes(kind: str) -> int:
    """Memory that is the process's own: VmData is what RLIMIT_DATA counts, RssAnon what is there."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(kind))
    return int(line.split()[1]) << 10


class Watch(threading.Thread):
    """The most memory that was there, as far as a look every two milliseconds sees it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = own_bytes("RssAnon")
        self.start()

    def run(self) -> None:
        while True:
            self.most = max(self.most, own_bytes("RssAnon"))
            time.sleep(0.002)


def slow_births() -> Any:
    def scope(handle: Any, adopt: Any, device: torch.device) -> Any:
        return birth_scope(handle, lambda *page: (time.sleep(0.02), adopt(*page)), device)

    return mock.patch("pagoda.engine.birth_scope", scope)


def main() -> None:
    how, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.ones(600, 600, requires_grad=True).mm(torch.ones(600, 600)).sum().backward()  # threads
    engine = pagoda.Engine(device="cpu", device_budget="24MiB", gradient_staging="8MiB",
                           host_budget="64MiB", nvme=[directory], parameters="nvme",
                           gradients="nvme", optimizer_state="nvme", fetch_threads=1, update_threads=1,
                           staging="1MiB", update_chunk="1MiB")
    # safetensors maps the files in a way that counts as the process's own memory, though nothing of
    # it is: there the watch must do.
    mapped = sum(file.stat().st_size for file in directory.glob("model/*.safetensors"))
    watch = Watch()
    limit = own_bytes("VmData") + ROOM + mapped
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    started = time.monotonic()
    if how == "plain":
        model = LlamaForCausalLM(CONFIG)
    elif how == "config":
        with engine.build():
            model = LlamaForCausalLM(CONFIG)
    elif how == "converted":
        with slow_births(), engine.build():
            model = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float64)
    else:
        with engine.build():
            model = LlamaForCausalLM.from_pretrained(directory / "model")
    parameters = sum(p.nbytes for p in model.parameters())
    built = time.monotonic()
    if how == "converted":
        print(json.dumps({"parameters": parameters, "room": ROOM, "most": watch.most - watch.first}))
        return
    engine.attach(model)
    batch = torch.arange(8).view(1, 8)
    loss = model(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    engine.finish()
    stepped = time.monotonic()
    if how == "config":
        engine.save_pretrained(directory / "model", max_shard_bytes=40 << 20)
    print(json.dumps({"parameters": parameters, "room": ROOM, "loss": loss.item(),
                      "most": watch.most - watch.first,
                      "build_s": built - started, "first_step_s": stepped - built}))


main()
