# SPDX-License-Identifier: Apache-2.0
"""One rank of test_ranks.py, started by torchrun: trains models of the zoo and writes what they are
afterwards.

    torchrun --nproc-per-node 2 ranks.py DIRECTORY HOW NAME…

HOW is `env` (torch.distributed is not initialized), `group` (it is) or `trainer`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import parity
import test_trainer
import torch
from torch import distributed
from zoo import ZOO

import pagoda

MICRO = 10  # batches of a step are far apart, so that no two ranks share one


def train(name: str, directory: Path) -> None:
    specimen = ZOO[name]
    engine = pagoda.Engine(**parity.config_below_a_third(specimen.make), zero=3, timeout=30)
    torch.manual_seed(0)
    with engine.build():
        model = specimen.make()
    engine.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    for step in range(parity.STEPS):
        torch.manual_seed(1000 * step + engine.rank)
        engine.backward(specimen.loss(model, MICRO * step + engine.rank))
        if distributed.is_initialized():  # the user's own collectives, in the middle of ours
            ones = torch.ones(3)
            distributed.all_reduce(ones)
            assert ones.sum() == 3 * engine.world_size
        engine.step()
    state = parity.values(model)
    torch.save(state, directory / f"{name}.{engine.rank}.pt")
    engine.save_pretrained(directory / name)
    assert (directory / name / "model.safetensors").exists()
    engine.close()


def train_by_trainer(name: str, directory: Path) -> None:
    args = test_trainer.arguments(directory, save_strategy="steps", save_steps=2)
    engine, model, trainer = test_trainer.paged_trainer(name, args)
    assert engine.world_size == distributed.get_world_size()
    trainer.train()
    assert trainer.model_wrapped is model
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(directory / name))
    torch.save(parity.values(model), directory / f"{name}.{engine.rank}.pt")
    engine.finish()
    distributed.barrier()
    engine.close()
    distributed.destroy_process_group()


def main() -> None:
    directory, how, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if how == "trainer":
        train_by_trainer(names[0], directory)
        return
    if how == "group":
        distributed.init_process_group("gloo")
    for name in names:
        train(name, directory)
    if how == "group":
        distributed.destroy_process_group()


main()
