# SPDX-License-Identifier: Apache-2.0
"""The fused kernel is the AdamW people know: after 100 steps it agrees with torch.optim.AdamW to
1e-6 in norm. (Elementwise even torch's own variants differ by up to 1e-2, so norms are compared.)"""

from pathlib import Path

import pytest
import torch

STEPS = 100
COUNT = 100_003  # no multiple of any vector's length


@pytest.fixture(scope="session", autouse=True)
def library(build: Path) -> None:
    torch.ops.load_library(str(build / "lib" / "libpagoda.so"))


def gradients(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    # Sizes spread over six decades, as real gradients are.
    scale = torch.logspace(-5, 1, COUNT)
    return torch.randn(COUNT, generator=generator) * scale


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_agrees_with_torch(decoupled: bool, weight_decay: float, fused: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(COUNT)
    reference = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([reference], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay,
                     fused=fused)
    master, m, v = start.clone(), torch.zeros(COUNT), torch.zeros(COUNT)
    for step in range(1, STEPS + 1):
        grad = gradients(step)
        reference.grad = grad.clone()
        optimizer.step()
        # The gradient arrives scaled, as under a loss scale, and is unscaled inside.
        torch.ops.pagoda.adam_step_(master, grad * 1024, m, v, step=step, lr=1e-3, beta1=0.9,
                                    beta2=0.95, eps=1e-8, weight_decay=weight_decay,
                                    decoupled=decoupled, grad_scale=1 / 1024)
    state = optimizer.state[reference]
    assert relative_difference(master, reference.detach()) <= 1e-6
    assert relative_difference(master - start, reference.detach() - start) <= 1e-5
    assert relative_difference(m, state["exp_avg"]) <= 1e-6
    assert relative_difference(v, state["exp_avg_sq"]) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameter_is_the_rounded_master(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    master = torch.randn(COUNT)
    param = torch.empty(COUNT, dtype=dtype)
    m, v = torch.zeros(COUNT), torch.zeros(COUNT)
    torch.ops.pagoda.adam_step_(master, torch.randn(COUNT).to(dtype), m, v, param, step=1)
    assert torch.equal(param, master.to(dtype))


def test_wrong_tensors_are_refused() -> None:
    good = [torch.zeros(8) for _ in range(4)]
    with pytest.raises(RuntimeError, match="momentum must have as many elements"):
        torch.ops.pagoda.adam_step_(good[0], good[1], torch.zeros(7), good[3], step=1)
    with pytest.raises(RuntimeError, match="master must be float32"):
        torch.ops.pagoda.adam_step_(good[0].bfloat16(), *good[1:], step=1)
    with pytest.raises(RuntimeError, match="grad must be contiguous"):
        torch.ops.pagoda.adam_step_(good[0], torch.zeros(16)[::2], *good[2:], step=1)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        torch.ops.pagoda.adam_step_(good[0], good[1].double(), *good[2:], step=1)
    with pytest.raises(RuntimeError, match="counted from 1"):
        torch.ops.pagoda.adam_step_(*good, step=0)
