# SPDX-License-Identifier: Apache-2.0
"""Functions and modules known to save tensors in odd ways: lazy bits, geometry, indices, masks."""

from __future__ import annotations

from typing import Any

import torch
from saved_case import case, complex_function, function, module, run
from saved_trial import Trial
from torch import nn
from torch.nn import functional as F


# Lazy bits.

complex_function("conjugate_product", lambda c: c @ c.mH, (6, 4))
complex_function("conjugate_saved", lambda c: c.conj() * c.conj().sin(), (6, 4))
complex_function("negative_saved", lambda c: c.conj().imag * c.conj().imag.exp(), (6, 4))
complex_function("both_bits", lambda c: torch._neg_view(c.conj()) * torch._neg_view(c), (6, 4))
complex_function("complex_solve", lambda a, b: torch.linalg.solve(a, b), (6, 6), (6, 3))
complex_function("complex_svd", lambda c: torch.linalg.svd(c)[1], (6, 4))
function("power_spectrum",
         lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x).conj()), (4, 32))
function("stft", lambda x: torch.stft(x, 16, window=torch.ones(16), return_complex=True), (2, 64))

# Geometry.

function("expanded", lambda x: (x.expand(64, 64) * x.sin().expand(64, 64)), (64, 1))
function("overlapping", lambda x: x.unfold(0, 8, 1).sin() * x.unfold(0, 8, 1), (32,))
function("strided", lambda x: (x * 1)[::2, 1::3].t().sin(), (16, 16))
function("empty", lambda x, y: (x * x.sin()).sum() + y, (0, 4), (3,))
function("empty_view", lambda x: (x * 1)[:0].exp().sum() + x.exp().sum(), (8, 8))
function("zero_dim", lambda x, y: x.exp() * y * y, (), (4,))
function("a_little_of_something_large", lambda x: (x * 1)[0].exp(), (64, 64))
function("several_views", lambda x: sum(p.sin() * p for p in (x * 1).split(8)), (64, 8))
function("dtype_view", lambda x: x * (x * 1).detach().view(torch.int32).float().tanh(), (8, 8))
function("channels_last", lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w),
         (2, 4, 8, 8), (4, 4, 3, 3))
function("bf16", lambda x, y: F.layer_norm(x @ y, (8,)), (4, 8), (8, 8), dtype=torch.bfloat16)
function("fp64", lambda x: x.logsumexp(0).softmax(-1), (8, 8), dtype=torch.float64)

# Functions that save indices, masks, results, or write in place.

function("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
         (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
function("attention_of_a_mask", lambda q, k, v: F.scaled_dot_product_attention(
    q, k, v, attn_mask=torch.ones(16, 16).tril().log(), dropout_p=0.2),
         (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
function("attention_of_one_tensor", lambda x: F.scaled_dot_product_attention(
    *x.view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)), (2, 16, 96))
function("attention_unsafe", lambda x: F.scaled_dot_product_attention(
    *(t.view(2, 16, 4, 8).transpose(1, 2) for t in (x * 1).unsafe_chunk(3, -1))), (2, 16, 96))
function("pooling", lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), (2, 3, 8, 8))
function("gathering", lambda x: x.gather(1, x.argsort(1)) * x.topk(4, 1).values.sum(), (8, 8))
function("indexing", lambda x: (x * 1).index_put_((torch.tensor([1, 2]),), x[3:5]).sin(), (8, 8))
function("slices_written", lambda x: _slices(x), (8, 8))
function("masking", lambda x: (x * 1).masked_fill_(x > 0, 0.3).exp_(), (8, 8))
function("products", lambda x: x.cumprod(0) + x.prod(1, keepdim=True), (4, 4))
function("einsum", lambda x, y: torch.einsum("bij,bjk->ik", x, y), (3, 4, 5), (3, 5, 6))
function("linear_algebra", lambda x: torch.linalg.eigh(x @ x.mT)[0] + torch.linalg.qr(x)[1][0],
         (5, 5))
function("dropouts", lambda x: F.dropout(x, 0.5) * F.dropout(x.sin(), 0.5, inplace=True), (8, 8))
function("ctc", lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2, 3]]),
                                     torch.tensor([12]), torch.tensor([3])), (12, 1, 6))
function("sampling", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
         (1, 2, 6, 6), (1, 4, 4, 2))
function("relu_chain", lambda x: F.relu_(F.relu_(x * 1) @ x.detach()), (8, 8))
function("silu_in_place", lambda x: F.silu(x * 1, inplace=True) * x, (8, 8))


def _slices(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[2:4] = x.sin()[2:4]
    y[:, 1] *= 2
    return y * y


# Recurrent modules.

def _first(made: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = made(*inputs)[0]
    return out


def _packed(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
    out: torch.Tensor = made(packed)[0].data
    return out


def _steps(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(3, 8, dtype=x.dtype)
    for at in range(x.shape[0]):
        h = made(x[at], h)
    return h


def _lstm_steps(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    state: Any = None
    for at in range(x.shape[0]):
        state = made(x[at], state)
    h, c = state
    out: torch.Tensor = h * c
    return out


SEQUENCE = (5, 3, 6)
for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    module(f"gru_{_name}", lambda: nn.GRU(6, 8, 2, dropout=0.1), _first, SEQUENCE, dtype=_dtype)
    module(f"lstm_{_name}", lambda: nn.LSTM(6, 8, 2), _first, SEQUENCE, dtype=_dtype)
    module(f"lstm_projected_{_name}", lambda: nn.LSTM(6, 8, proj_size=4), _first, SEQUENCE,
           dtype=_dtype)
    module(f"gru_packed_{_name}", lambda: nn.GRU(6, 8), _packed, SEQUENCE, dtype=_dtype)
    module(f"lstm_packed_{_name}", lambda: nn.LSTM(6, 8, bidirectional=True), _packed, SEQUENCE,
           dtype=_dtype)
    module(f"gru_both_ways_{_name}", lambda: nn.GRU(6, 8, bidirectional=True), _first, SEQUENCE,
           dtype=_dtype)
    module(f"gru_cell_{_name}", lambda: nn.GRUCell(6, 8), _steps, SEQUENCE, dtype=_dtype)
    module(f"lstm_cell_{_name}", lambda: nn.LSTMCell(6, 8), _lstm_steps, SEQUENCE, dtype=_dtype)
module("rnn", lambda: nn.RNN(6, 8, 2, nonlinearity="relu"), _first, SEQUENCE)
module("rnn_cell", lambda: nn.RNNCell(6, 8), _steps, SEQUENCE)


# Other modules.

def _call(made: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = made(*inputs)
    return out


module("batch_norms", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True),
                                            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval()),
       _call, (2, 3, 8, 8))
module("group_norm", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(), nn.InstanceNorm1d(4)),
       _call, (2, 4, 8))
module("transformer", lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.1), _call, (5, 2, 16))
module("many_heads", lambda: nn.MultiheadAttention(16, 4), lambda m, x: m(x, x, x)[0], (5, 2, 16))
module("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), _call, (4, 6))
module("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), _call,
       (4, 6))
module("transposed", lambda: nn.ConvTranspose2d(3, 4, 3), _call, (2, 3, 6, 6))
module("bilinear", lambda: nn.Bilinear(4, 5, 6), _call, (3, 4), (3, 5))
module("views_of_parameters", lambda: nn.Linear(8, 8),
       lambda m, x: x @ m.weight.t()[:, ::2] * m.weight.view(-1)[:4].exp() + m.weight[0, :4].sin(),
       (4, 8))


@case
def sparse_embedding(trial: Trial) -> None:
    made = nn.Embedding(16, 4, sparse=True)
    run(trial, lambda _: made(torch.tensor([[1, 5], [1, 2]])), made.weight)


@case
def autocast(trial: Trial) -> None:
    made = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(4, 8, requires_grad=True)

    def forward(*_: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = made(x)
            return out

    run(trial, forward, x, *made.parameters())
