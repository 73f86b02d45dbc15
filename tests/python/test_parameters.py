# SPDX-License-Identifier: Apache-2.0
"""Which parameters can be pages, and which can be trained; what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_net import WIDTH, engine, loss_of, net, raises, trains

import pagoda

# Models that cannot be attached.


def test_a_model_whose_engine_is_gone() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    paged._handle.fail("a test")
    with pytest.warns(RuntimeWarning, match="a test"):  # or it would have its weights back
        paged.close()
    other = engine()
    raises(lambda: other.attach(model), r"'0\.weight'.*went with its engine")
    raises(lambda: other.pin(model), "engine")
    raises(lambda: other.grad(model[0].weight), "attach")
    other.attach(net())


def test_a_model_on_meta(tmp_path: Path) -> None:
    paged = engine()
    with torch.device("meta"):
        model = net()
    raises(lambda: paged.attach(model), r"'0\.weight' and 5 others are on the meta device.*build")
    partly = net()
    with torch.device("meta"):
        partly[1] = torch.nn.Linear(WIDTH, WIDTH)
    raises(lambda: paged.attach(partly), r"'1\.weight' and 1 other .*to_empty")
    raises(lambda: paged.pin(partly), "engine")
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    paged.attach(model)
    trains(paged, model)
    with pytest.raises(pagoda.UserError, match="meta"):
        paged.save_pretrained(tmp_path, partly)


# Parameters that cannot be pages, or cannot be trained.


class Wrapper(torch.Tensor):
    """A subclass that has its bytes elsewhere, as torchao's and DTensor have."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        out.inner = inner
        return out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(func)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(WIDTH))


ODD: dict[str, tuple[Callable[[], torch.Tensor], bool, str]] = {  # and whether it is trained
    "float64": (lambda: torch.ones(4, dtype=torch.float64), True, "float64; only fp32, bf16 and fp16"),
    "float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), True, "float8_e4m3fn"),
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), True, "complex: train its real view"),
    "sparse": (lambda: torch.ones(4, 4).to_sparse(), True, "sparse, quantized or packed"),
    "csr": (lambda: torch.ones(4, 4).to_sparse_csr(), True, "sparse, quantized or packed"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), False,
                  "sparse, quantized or packed"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), True,
               "subclass|bytes"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)],
                                                  layout=torch.jagged), True, "NestedTensor"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), True, "'odd' is a Wrapper"),
    "frozen wrapper": (lambda: Wrapper(torch.ones(4)), False, "'odd' is a Wrapper"),
    "expanded": (lambda: torch.ones(1).expand(4), True, r"share one place in memory \(expand"),
    "inference": (inference, True, "inference mode"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), True, "not initialized yet"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*CSR.*", "ignore:.*quantize.*")
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_parameter_is_refused_before_anything_is_a_page(kind: str) -> None:
    make, trained, match = ODD[kind]
    paged, model = engine(), net()
    odd = make()
    model.register_parameter("odd", odd if isinstance(odd, torch.nn.Parameter)
                             else torch.nn.Parameter(odd, requires_grad=trained))
    raises(lambda: paged.attach(model), match)
    model.register_parameter("odd", None)
    for parameter in model.parameters():
        parameter.detach().numpy()
    paged.attach(model)
    trains(paged, model)


EVEN: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "frozen float64": (lambda: torch.ones(4, dtype=torch.float64), False),
    "frozen int8": (lambda: torch.ones(4, dtype=torch.int8), False),
    "frozen bool": (lambda: torch.ones(4, dtype=torch.bool), False),
    "frozen float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), False),
    "frozen expanded": (lambda: torch.ones(1).expand(4), False),
    "empty": (lambda: torch.empty(0, 3), True),
    "a number": (lambda: torch.tensor(2.0), True),
    "bf16": (lambda: torch.ones(4, dtype=torch.bfloat16), True),
    "a slice": (lambda: torch.ones(8)[2:6], True),
    "transposed": (lambda: torch.ones(4, 2).t(), True),
    "a subclass that is all Python": (lambda: torch.ones(4).as_subclass(Named), True),
}


class Named(torch.Tensor):
    """As torch.nn.Buffer and bitsandbytes' are: other methods, the same bytes."""


@pytest.mark.parametrize("kind", EVEN)
def test_an_uncommon_parameter_is_trained_or_paged(kind: str) -> None:
    make, trained = EVEN[kind]
    paged, model = engine(), net()
    odd = torch.nn.Parameter(make(), requires_grad=trained)
    model.register_parameter("odd", odd)
    expected = odd.detach().clone()
    paged.attach(model, optimizer="sgd", lr=0.5)
    for step in range(2):
        loss = loss_of(model, step)
        paged.backward(loss + odd.float().sum() if trained else loss)
        paged.step()
    if trained:
        expected -= 1
    paged.release(model)
    assert torch.equal(odd.detach(), expected)


def test_an_odd_parameter_is_refused_while_building() -> None:
    paged = engine()
    with pytest.raises(pagoda.UserError, match=r"'Sequential\.odd' is a tensor subclass"), \
            paged.build():
        model = net()
        model.register_parameter("odd", torch.nn.Parameter(Wrapper(torch.ones(4))))
    with paged.build():
        model = net()
        model.append(torch.nn.LazyLinear(WIDTH))
        with torch.device("meta"):
            model.append(torch.nn.Linear(WIDTH, WIDTH))
    model[4] = model[4].to_empty(device="cpu")
    raises(lambda: paged.attach(model), "one forward pass")
    model(torch.ones(1, WIDTH))
    paged.attach(model)
    trains(paged, model)


def test_a_model_of_another_engine_is_refused_before_anything_is_a_page() -> None:
    first, second = engine(), engine()
    taken, free = net(), net()
    first.attach(taken)
    mixed = torch.nn.Sequential(free, taken)
    raises(lambda: second.attach(mixed), r"'1\.0\.weight' belongs to another engine")
    free[0].weight.detach().numpy()
    raises(lambda: second.pin(taken), "not a parameter of this engine")
    raises(lambda: second.release(taken), "no parameter of this model")
    trains(first, taken)
    first.release(taken)
    second.attach(mixed)
    trains(second, mixed)


class Rotated(torch.nn.Module):
    """A frozen complex parameter: the rotations of a rotary embedding, say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        angles = torch.linspace(0, 3, WIDTH // 2)
        self.rotations = torch.nn.Parameter(torch.polar(torch.ones_like(angles), angles),
                                            requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotations).flatten(-2)


def test_a_frozen_complex_parameter_is_a_page_like_others() -> None:
    torch.manual_seed(0)
    plain = Rotated()
    optimizer = torch.optim.SGD(plain.layer.parameters(), lr=0.1)
    torch.manual_seed(0)
    paged, model = engine(), Rotated()
    paged.attach(model, optimizer="sgd", lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(plain, step).backward()
        optimizer.step()
        paged.backward(loss_of(model, step))
        paged.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    model.rotations.requires_grad_(True)
    paged.backward(loss_of(model))
    raises(paged.step, "'rotations'.*complex: train its real view")
    model.rotations.requires_grad_(False)
    paged.step()  # without it
    paged.release(model)
    assert torch.equal(model.rotations, plain.rotations)
