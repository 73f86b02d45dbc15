# SPDX-License-Identifier: Apache-2.0
"""Operators and gradients that are not as most train to the bits of a plain loop, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from unusual_operators import SPARSE, WIDTH, WITH_KERNELS, Model, Use, assert_as_plain, assert_used_as_plain

import pagoda


@pytest.mark.parametrize("use", WITH_KERNELS.values(), ids=WITH_KERNELS.keys())
def test_a_composite_operator_with_a_kernel_of_its_own_finds_its_parameters(use: Use) -> None:
    assert_used_as_plain(use)


@pytest.mark.parametrize("use", SPARSE.values(), ids=SPARSE.keys())
def test_a_parameter_may_be_the_values_of_a_sparse_tensor(use: Use) -> None:
    assert_used_as_plain(use)


def test_a_composite_operator_that_reads_its_argument_itself_finds_it() -> None:
    model = Model(lambda weight, x: x * weight)
    expected = nn.functional.max_pool1d(model.weight.detach().reshape(1, 1, WIDTH), 2)
    with pagoda.Engine(device="cpu", device_budget="60KB", gradient_staging=20000) as engine:
        engine.attach(model)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
            assert torch.equal(nn.functional.max_pool1d(model.weight.reshape(1, 1, WIDTH), 2), expected)


def test_a_frozen_list_of_places_may_split_a_tensor() -> None:
    model = Model(lambda weight, x: x * weight)
    model.places = nn.Parameter(torch.tensor([3, 10]), requires_grad=False)
    with pagoda.Engine(device="cpu", device_budget="60KB", gradient_staging=20000) as engine:
        engine.attach(model)
        model(torch.ones(1, WIDTH))
        assert [part.numel() for part in torch.tensor_split(torch.arange(WIDTH), model.places)] == [3, 7, 54]


# Gradients whose bytes are not their values.


class Scalar(nn.Module):
    def __init__(self, size: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(size, 0.5))


def _negated(grad: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(grad)


def _zeros(grad: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(grad.shape)


def _conjugated(model: nn.Module) -> torch.Tensor:
    """Its gradient is minus one, and torch leaves it as a lazy negation of one."""
    loss: torch.Tensor = torch.complex(torch.tensor(1.0), model.weight).conj().mul(1 + 2j).imag
    return loss


def test_a_gradient_that_is_a_lazy_negation_has_its_sign() -> None:
    plain = Scalar()
    _conjugated(plain).backward()
    assert plain.weight.grad.is_neg()
    assert_as_plain(Scalar, _conjugated)


@pytest.mark.parametrize("change", [_negated, _zeros])
def test_a_hook_may_return_a_lazy_gradient(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        out = model.weight * 2
        out.register_hook(change)
        return out.sum()

    assert_as_plain(lambda: Scalar((8,)), loss)


def test_a_gradient_of_zeros_that_have_no_memory_is_zero() -> None:
    assert_as_plain(lambda: Scalar((8,)), lambda model: torch.sgn(model.weight).sum())


def test_lazy_gradients_of_parameters_that_share_a_storage() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.arange(8.0)
            self.one, self.other = nn.Parameter(both[:4]), nn.Parameter(both[4:])

    def loss(model: nn.Module) -> torch.Tensor:
        out = model.other * 2
        out.register_hook(_negated)
        return out.sum() + torch.sgn(model.one).sum()

    assert_as_plain(Halves, loss)


def test_a_lazy_negation_that_is_put_into_p_grad_has_its_sign() -> None:
    model = Scalar((4,))
    with pagoda.Engine(device="cpu", device_budget="64KiB") as engine:
        engine.attach(model, optimizer="sgd", lr=0.25)
        model.weight.grad = torch.full((4,), 1j).conj().imag
        engine.step()
        assert torch.equal(model.weight, torch.full((4,), 0.75))


def test_a_parameter_that_is_a_lazy_negation_is_read_and_not_trained() -> None:
    model = Scalar()
    model.weight = nn.Parameter(torch.tensor([1 + 1j, 2 + 2j]).conj().imag)
    model.other = nn.Parameter(torch.ones(1))
    with pagoda.Engine(device="cpu", device_budget="64KiB") as engine:
        with pytest.raises(pagoda.UserError, match="'weight' is a lazy negation.*resolve_neg"):
            engine.attach(model)
        model.weight.requires_grad_(False)
        engine.attach(model)
        assert model.weight.tolist() == [-1, -2]
