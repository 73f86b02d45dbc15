# SPDX-License-Identifier: Apache-2.0
"""Ordinary layers of random models: each maps (batch, time, width) to the same shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Options = dict[str, Any]


class Layer(nn.Module):
    """What a random model is made of. `draw` says what there is to choose."""

    KIND = ""
    DTYPES = ("float32", "bfloat16", "float16")

    @staticmethod
    def draw(random: Random) -> Options:
        return {}

    def together(self) -> Iterator[list[nn.Parameter]]:
        """Parameters that one operator may take at once."""
        for module in self.modules():
            yield list(module.parameters(recurse=False))

    def reset(self) -> None:
        """Initialises it again, as a user would."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


KINDS: dict[str, type[Layer]] = {}


def layer(kind: str, dtypes: tuple[str, ...] = Layer.DTYPES
          ) -> Callable[[type[Layer]], type[Layer]]:
    """Makes a class drawable under a name."""

    def register(cls: type[Layer]) -> type[Layer]:
        cls.KIND, cls.DTYPES = kind, dtypes
        KINDS[kind] = cls
        return cls

    return register


@layer("linear")
class Linear(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"bias": random.random() < 0.7, "grow": random.choice([1, 1, 2, 3])}

    def __init__(self, width: int, bias: bool, grow: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, grow * width, bias=bias)
        self.down = nn.Linear(grow * width, width, bias=bias) if grow > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


@layer("norm")
class Norm(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"of": random.choice(["layer", "rms", "group", "batch", "instance"])}

    def __init__(self, width: int, of: str) -> None:
        super().__init__()
        self.of = of
        self.norm = {"layer": lambda: nn.LayerNorm(width), "rms": lambda: nn.RMSNorm(width),
                     "group": lambda: nn.GroupNorm(2, width),
                     "batch": lambda: nn.BatchNorm1d(width),
                     "instance": lambda: nn.InstanceNorm1d(width, affine=True)}[of]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of in ("layer", "rms"):
            return self.norm(x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@layer("convolution", ("float32", "bfloat16"))
class Convolution(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"dims": random.choice([1, 1, 2]), "depthwise": random.random() < 0.3,
                "channels_last": random.random() < 0.3}

    def __init__(self, width: int, dims: int, depthwise: bool, channels_last: bool) -> None:
        super().__init__()
        self.dims = dims
        groups = width if depthwise and dims == 1 else 1
        self.conv: nn.Module
        if dims == 1:
            self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        else:
            self.conv = nn.Conv2d(1, 4, 3, padding=1)
            if channels_last:
                self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dims == 1:
            return self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.conv(x.unsqueeze(1)).mean(1)


@layer("attention", ("float32", "bfloat16"))
class Attention(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"how": random.choice(["fused", "eager", "module"]), "heads": 2,
                "causal": random.random() < 0.5}

    def __init__(self, width: int, how: str, heads: int, causal: bool) -> None:
        super().__init__()
        self.how, self.heads, self.causal = how, heads, causal
        if how == "module":
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        else:
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width, bias=False)

    def together(self) -> Iterator[list[nn.Parameter]]:
        if self.how == "module":  # one operator in evaluation
            yield list(self.parameters())
        yield from super().together()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "module":
            return self.attention(x, x, x, need_weights=False)[0]
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(x).chunk(3, -1))
        if self.how == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
            if self.causal:
                mask = torch.ones(time, time, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(mask, float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


@layer("transformer", ("float32",))
class Transformer(Layer):
    """torch's own layer, which is one operator in evaluation."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"norm_first": random.random() < 0.5, "dropout": random.choice([0.0, 0.1])}

    def __init__(self, width: int, norm_first: bool, dropout: float) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True,
                                                norm_first=norm_first)

    def together(self) -> Iterator[list[nn.Parameter]]:
        yield list(self.parameters())

    def reset(self) -> None:
        self.inner.linear1.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@layer("recurrent", ("float32",))
class Recurrent(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        kind = random.choice(["gru", "lstm", "rnn", "projected", "cell"])
        return {"of": kind, "layers": random.choice([1, 1, 2]),
                "both_ways": kind in ("gru", "lstm") and random.random() < 0.3}

    def __init__(self, width: int, of: str, layers: int, both_ways: bool) -> None:
        super().__init__()
        self.of = of
        hidden = width // 2 if both_ways else width
        self.inner: nn.Module
        if of == "cell":
            self.inner = nn.GRUCell(width, width)
        elif of == "projected":
            self.inner = nn.LSTM(width, width + 8, layers, batch_first=True, proj_size=width)
        else:
            made = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[of]
            self.inner = made(width, hidden, layers, batch_first=True, bidirectional=both_ways)

    def together(self) -> Iterator[list[nn.Parameter]]:
        yield list(self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of != "cell":
            return self.inner(x)[0]
        state = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            state = self.inner(x[:, t], state)
            out.append(state)
        return torch.stack(out, 1)


@layer("experts")
class Experts(Layer):
    """Which experts run depends on the data."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"count": random.choice([2, 3, 4]), "stacked": random.random() < 0.3}

    def __init__(self, width: int, count: int, stacked: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.stacked = stacked
        if stacked:
            self.weights = nn.Parameter(torch.randn(count, width, width) * 0.1)
        else:
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gates = self.router(flat).float().softmax(-1)
        weight, chosen = gates.max(-1)
        out = torch.zeros_like(flat)
        for number in range(gates.shape[1]):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            part = flat[rows]
            part = part @ self.weights[number] if self.stacked else self.experts[number](part)
            out = out.index_add(0, rows, (part * weight[rows, None]).to(out.dtype))
        return out.view_as(x)


@layer("embedding")
class Embedding(Layer):
    """A table beside the main path, looked up by what the data says."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"rows": random.choice([7, 40, 150]), "how": random.choice(
            ["plain", "padding", "bag", "max_norm", "index", "gather", "tied"])}

    def __init__(self, width: int, rows: int, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "bag":
            self.table: nn.Module = nn.EmbeddingBag(rows, width, mode="mean")
        else:
            self.table = nn.Embedding(rows, width, padding_idx=0 if how == "padding" else None,
                                      max_norm=1.5 if how == "max_norm" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.table.weight
        assert isinstance(weight, torch.Tensor)
        rows = weight.shape[0]
        ids = (x.detach().float().sum(-1) * 3).abs().long() % rows
        if self.how == "index":
            return x + weight[ids]
        if self.how == "gather":
            flat = ids.reshape(-1, 1).expand(-1, weight.shape[1])
            return x + weight.gather(0, flat).view_as(x)
        if self.how == "bag":
            return x + self.table(ids).unsqueeze(1)
        if self.how == "tied":
            scores = (x + self.table(ids)) @ weight.t()
            return scores.softmax(-1) @ weight
        return x + self.table(ids)


@layer("gated")
class Gated(Layer):
    """Elementwise things: PReLU, dropout, in-place activations."""

    @staticmethod
    def draw(random: Random) -> Options:
        return {"dropout": random.choice([0.0, 0.2]), "in_place": random.random() < 0.5}

    def __init__(self, width: int, dropout: float, in_place: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.slope = nn.PReLU(width)
        self.dropout = nn.Dropout(dropout)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.slope(x.transpose(1, 2)).transpose(1, 2)
        if self.in_place:
            y = (y * 1).mul_(self.scale).add_(self.scale).relu_()
        else:
            y = torch.sigmoid(y * self.scale) * self.scale
        return self.dropout(y)


@layer("bilinear", ("float32",))
class Bilinear(Layer):
    @staticmethod
    def draw(random: Random) -> Options:
        return {"rank": random.choice([2, 4])}

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, rank, bias=False)
        self.bilinear = nn.Bilinear(rank, rank, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.into(x)
        return self.bilinear(small.float(), small.flip(1).float())
