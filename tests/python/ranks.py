# SPDX-License-Identifier: Apache-2.0
"""One rank of test_ranks.py, started by torchrun: trains models of the zoo and writes what they are
afterwards.

    torchrun --nproc-per-node 2 ranks.py DIRECTORY HOW NAME…

HOW is `env` (torch.distributed is not initialized), `group` (it is), `trainer`, or `thaw`, which has
stages in place of names.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import parity
import small_stack
import test_trainer
import thawing
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


def refusal_of(engine: pagoda.Engine) -> str:
    try:
        engine.step()
    except pagoda.UserError as error:
        return str(error)
    return "nothing"


def check_views_on_one_rank(zero: int) -> None:
    """A page of which one parameter is trained, and another thawed by rank 1 only: no trace of it in
    gradients or norms."""
    runs = []
    for alone in (False, True):
        engine = small_stack.engine(zero=zero, timeout=30, clip=0.01, device_budget="256KiB",
                                    gradient_staging="64KiB")
        model = thawing.Views()
        model.weights[1].requires_grad_(False)
        engine.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
        norms = []
        for step in range(3):
            odd = alone and step == 1
            if odd and engine.rank == 1:
                model.weights[1].requires_grad_(True)
            engine.backward(small_stack.loss_of(model, MICRO * step + engine.rank))
            if odd:
                assert "'weights.1' was thawed on some ranks only" in refusal_of(engine)
                model.weights[1].requires_grad_(False)
            norms.append(engine.step().norm)
        runs.append((norms, parity.values(model)))
        engine.finish()
        engine.close()
    assert runs[0][0] == runs[1][0]
    thawing.assert_same(runs[0][1], runs[1][1])


def train_thawing(zero: int, directory: Path) -> None:
    """In the last steps rank 1 thaws what rank 0 does not, and rank 0 has no room."""
    def attached(**config: object) -> tuple[pagoda.Engine, torch.nn.Module]:
        engine = small_stack.engine(zero=zero, timeout=30, **config)
        model = small_stack.stack()
        thawing.freeze(model, *thawing.FROZEN_ON_RANKS)
        engine.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
        return engine, model

    engine, model = attached()
    for step in range(thawing.STEPS_ON_RANKS):
        thawing.on_ranks(model, step)
        engine.backward(small_stack.loss_of(model, MICRO * step + engine.rank))
        engine.step()
    torch.save(parity.values(model), directory / f"zero{zero}.{engine.rank}.pt")

    before = parity.values(model)
    if engine.rank == 1:
        thawing.thaw(model, 2)
    engine.backward(small_stack.loss_of(model, engine.rank))
    said = refusal_of(engine)
    assert "'2.weight', '2.bias' were thawed on some ranks only ('2.weight' on rank 1, not on rank 0)" \
        in said, said
    assert all(p.grad is None for p in model.parameters())
    assert "on rank 1, not on rank 0" in refusal_of(engine)  # it still is
    thawing.freeze(model, 2)
    engine.step()  # with what the others have
    after = parity.values(model)
    assert [name for name in after if torch.equal(before[name], after[name])] == [
        "2.weight", "2.bias"]
    thawing.thaw(model, 2)
    engine.backward(small_stack.loss_of(model, engine.rank))
    engine.step()
    assert not torch.equal(parity.values(model)["2.weight"], after["2.weight"])
    rank = engine.rank
    engine.finish()
    engine.close()

    check_views_on_one_rank(zero)

    roomy, _ = attached()
    used = roomy.stats()["tiers"]["host"]["used"]
    roomy.close()
    engine, model = attached(**({"host_budget": used + 3 * small_stack.LAYER} if rank == 0 else {}))
    thawing.thaw(model, *thawing.FROZEN_ON_RANKS)
    engine.backward(small_stack.loss_of(model, engine.rank))
    said = refusal_of(engine)
    assert "were thawed and cannot be trained: " in said, said
    where = "" if rank == 0 else "rank 0: "
    assert f"cannot be trained: {where}gradients and optimizer states do not fit" in said, said
    engine.step()
    thawing.freeze(model, *thawing.FROZEN_ON_RANKS)
    engine.backward(small_stack.loss_of(model, engine.rank))
    assert engine.step().step == 2
    engine.close()


def main() -> None:
    directory, how, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if how == "thaw":
        for zero in names:
            train_thawing(int(zero), directory)
        return
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
