# SPDX-License-Identifier: Apache-2.0
"""Layers that use parameters in the ways that people really do: views, ties, parametrizations,
functions of their own, parameters of others."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from layers import Layer, Options, layer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune


@layer("views")
class Views(Layer):
    """One parameter, seen through a view."""

    HOWS = ("transpose", "slice", "expand", "chunk", "unbind", "flip", "diagonal", "narrow",
            "view", "index", "detached", "data", "standardized", "rounded", "item", "as_strided",
            "unfold")

    @staticmethod
    def draw(random: Random) -> Options:
        return {"how": random.choice(Views.HOWS)}

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(width + 1, width + 1) * 0.2)

    def matrix(self) -> torch.Tensor:
        w, n = self.weight, self.weight.shape[0] - 1
        match self.how:
            case "transpose":
                return w.t()[:n, 1:]
            case "slice":
                return w[::1][1:, :n]
            case "expand":
                return w[0, :n].expand(n, n)
            case "chunk":
                a, b = w[:n, :n].chunk(2, 0)
                return torch.cat([b, a])
            case "unbind":
                return torch.stack(w.unbind(0)[:n])[:, :n]
            case "flip":
                return w.flip(0)[:n, :n]
            case "diagonal":
                return torch.diag_embed(w.diagonal()[:n])
            case "narrow":
                return w.narrow(0, 1, n).narrow(1, 0, n)
            case "view":
                return w.view(-1)[:n * n].view(n, n)
            case "index":
                return w[torch.arange(n - 1, -1, -1)][:, :n]
            case "detached":
                return w[:n, :n] + w.detach()[1:, 1:]
            case "data":
                return w[:n, :n] / (1 + w.data.abs().max())
            case "standardized":
                return ((w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1))[:n, :n]
            case "rounded":  # straight through
                return (w + ((w * 8).round() / 8 - w).detach())[:n, :n]
            case "item":
                return w[:n, :n] if w[0, 0].item() > 0 else w.t()[:n, :n]
            case "as_strided":
                return w.as_strided((n, n), (n + 1, 1), 1)
            case _:
                return w.reshape(-1).unfold(0, n, n)[:n]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix()


@layer("borrower")
class Borrower(Layer):
    """Reads a parameter of another layer, which the model hands to it."""

    other: Any = None

    @staticmethod
    def draw(random: Random) -> Options:
        return {"of": random.randrange(100), "how": random.choice(["add", "scale", "detached"])}

    def __init__(self, width: int, of: int, how: str) -> None:
        super().__init__()
        self.of, self.how = of, how
        self.own = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theirs = [p for p in self.other().parameters() if p.is_floating_point() and p.numel() > 0]
        row = theirs[self.of % len(theirs)].reshape(-1)[:x.shape[-1]].to(x.dtype)
        if row.numel() < x.shape[-1]:
            row = row[:1].expand(x.shape[-1])
        if self.how == "detached":
            row = row.detach()
        return x * row + self.own if self.how == "scale" else x * self.own + row


@layer("twice")
class Twice(Layer):
    """One layer, used several times."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"times": random.choice([2, 3])}

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + torch.tanh(self.inner(x))
        return x


@layer("einsum", ("float32", "bfloat16"))
class Einsum(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"heads": random.choice([2, 3])}

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(heads, width, width // 2) * 0.2)
        self.down = nn.Parameter(torch.randn(heads, width // 2, width) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bthk,hkw->btw", torch.einsum("btw,hwk->bthk", x, self.up), self.down)


@layer("parametrized", ("float32",))
class Parametrized(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"how": random.choice(["weight_norm", "spectral_norm", "symmetric", "pruned",
                                      "old_weight_norm", "orthogonal"])}

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        made: nn.Module = nn.Linear(width, width)
        if how == "weight_norm":
            made = parametrizations.weight_norm(made)
        elif how == "spectral_norm":
            made = parametrizations.spectral_norm(made)
        elif how == "orthogonal":
            made = parametrizations.orthogonal(made, orthogonal_map="cayley")
        elif how == "old_weight_norm":
            made = nn.utils.weight_norm(made)
        elif how == "pruned":
            made = prune.random_unstructured(made, "weight", 0.3)
        else:
            parametrize.register_parametrization(made, "weight", Symmetric())
        self.inner = made

    def together(self) -> Iterator[list[nn.Parameter]]:
        yield list(self.parameters())

    def reset(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@layer("shapes")
class Shapes(Layer):
    """Parameters of no elements, of one, without dimensions, and views of one storage."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"how": random.choice(["one_storage", "offset", "strided", "gap", "small"])}

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.empty = nn.Parameter(torch.zeros(0, width))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        base = torch.randn(2 * width * width + 6) * 0.2
        if how == "one_storage":
            self.a = nn.Parameter(base[:width * width].view(width, width))
            self.b = nn.Parameter(base[width * width:2 * width * width].view(width, width).t())
        elif how == "offset":
            self.a = nn.Parameter(base[5:5 + width * width].view(width, width))
        elif how == "strided":
            self.a = nn.Parameter(base[:width * width].view(width, width).t())
        elif how == "gap":
            both = base[:2 * width * width].view(width, 2 * width)
            self.a = nn.Parameter(both[:, :width])
            self.b = nn.Parameter(both[:, width:])
        else:
            self.a = nn.Parameter(torch.randn(width, 1) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([x.reshape(-1, x.shape[-1]), self.empty])
        y = flat.view_as(x) * self.scalar + self.one
        if self.how == "small":
            return y * (x @ self.a)
        y = x @ self.a + y
        return y @ self.b if hasattr(self, "b") else y


class Saving(torch.autograd.Function):
    """A linear map written by hand, which saves its weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        flat = x.reshape(-1, x.shape[-1]).to(weight.dtype)
        return (grad @ weight.t()).to(x.dtype), flat.t() @ grad.reshape(-1, grad.shape[-1])


@layer("composed", ("float32", "bfloat16"))
class Composed(Layer):
    """A weight that is made of several parameters."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"how": random.choice(["lora", "cat", "stack", "sum", "function", "dropped"])}

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(width, width) * 0.2)
        if how == "lora":
            self.weight.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(width, 2) * 0.2)
            self.b = nn.Parameter(torch.zeros(2, width))
        elif how in ("cat", "stack", "sum"):
            self.more = nn.ParameterList(nn.Parameter(torch.randn(width, width) * 0.2)
                                         for _ in range(2))

    def together(self) -> Iterator[list[nn.Parameter]]:
        yield list(self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, n = self.weight, self.weight.shape[0]
        if self.how == "lora":
            return x @ w + (x @ self.a) @ self.b
        if self.how == "cat":
            return x @ torch.cat([w[:, :n // 2], self.more[0][:, n // 2:]], 1) @ self.more[1]
        if self.how == "stack":
            return x @ torch.stack([w, *self.more]).mean(0)
        if self.how == "sum":
            return x @ (w + self.more[0] * self.more[1])
        if self.how == "function":
            return Saving.apply(x, w)
        return x @ F.dropout(w, 0.2, self.training)


@layer("transformed", ("float32",))
class Transformed(Layer):
    """torch.func over a parameter, and what Fourier leaves conjugated."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"how": random.choice(["vmap", "functional", "fourier", "conjugate", "jvp"])}

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.weights = nn.Parameter(torch.randn(2, width, width) * 0.2)
        self.inner = nn.Linear(width, width)

    def together(self) -> Iterator[list[nn.Parameter]]:
        yield list(self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "vmap":
            return torch.func.vmap(lambda w: x @ w)(self.weights).mean(0) + self.inner(x)
        if self.how == "functional":
            named = {"weight": self.weights[0], "bias": self.inner.bias}
            return torch.func.functional_call(self.inner, named, (x,)) @ self.weights[1]
        if self.how == "fourier":
            spectrum = torch.fft.rfft(self.weights[0], dim=-1)
            back = torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[-1], dim=-1)
            return self.inner(x) @ back
        if self.how == "conjugate":
            c = torch.complex(self.weights[0], self.weights[1])
            return x @ (c @ c.mH).real + self.inner(x)
        out, tangent = torch.func.jvp(lambda v: torch.tanh(v @ self.weights[0]), (x,), (x,))
        return out + tangent + self.inner(x)


@layer("frozen")
class Frozen(Layer):
    """Parameters that are not trained, of types that cannot be."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"type": random.choice(["same", "float64", "int8", "bool"])}

    def __init__(self, width: int, type: str) -> None:
        super().__init__()
        base = torch.randn(width, width) * 0.3
        kept = {"same": lambda: base, "float64": lambda: base.double(),
                "int8": lambda: (base * 40).round().to(torch.int8),
                "bool": lambda: base > 0}[type]()
        self.base = nn.Parameter(kept, requires_grad=False)
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x @ (self.base.to(x.dtype) * self.scale)
