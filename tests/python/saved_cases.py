# SPDX-License-Identifier: Apache-2.0
"""Every kind of tensor that autograd can save, and modules and functions known to save them in odd
ways. Each is a program for saved_trial.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from saved_trial import Program, Trial
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Program] = {}

Forward = Callable[..., torch.Tensor]


def case(program: Program) -> Program:
    CASES[program.__name__] = program
    return program


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _run(trial: Trial, forward: Forward, *leaves: torch.Tensor) -> None:
    """Forward and backward; records the gradients of the leaves."""
    with trial.forward():
        loss = _real(forward(*leaves)).float().square().sum()
    trial.tick()
    loss.backward()
    trial.record(*(leaf.grad for leaf in leaves))


def function(name: str, forward: Forward, *shapes: tuple[int, ...],
             dtype: torch.dtype = torch.float32) -> None:
    """A case of one function of tensors."""

    def program(trial: Trial) -> None:
        _run(trial, forward, *(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes))

    CASES[name] = program


def complex_function(name: str, forward: Forward, *shapes: tuple[int, ...]) -> None:
    def program(trial: Trial) -> None:
        _run(trial, forward, *(torch.randn(shape, dtype=torch.complex64).requires_grad_()
                               for shape in shapes))

    CASES[name] = program


def module(name: str, make: Callable[[], nn.Module], forward: Callable[..., Any],
           *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """A case of a module whose parameters are no pages: what they are saved as stays."""

    def program(trial: Trial) -> None:
        made = make().to(dtype)
        inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        _run(trial, lambda *_: forward(made, *inputs), *inputs, *made.parameters())

    CASES[name] = program


# Aliases with version counters of their own.

@case
def issue_example(trial: Trial) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = (x * 1).unsafe_chunk(2)
        a = a.sigmoid_()
        trial.tick()
        return a * b.sigmoid_()

    _run(trial, forward, torch.randn(64, 4, requires_grad=True))


@case
def data_written_after_it_was_saved(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * 2
        z = y.sin()
        trial.tick()
        y.data.mul_(3)  # autograd reads what is there in backward
        del y
        trial.tick()
        loss = z.sum()
    loss.backward()
    trial.record(x.grad)


@case
def data_written_between_two_backwards(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * 2
        loss = y.sin().sum()
    trial.record(*torch.autograd.grad(loss, x, retain_graph=True))
    trial.tick()
    y.data.mul_(3)
    del y
    trial.tick()
    trial.record(*torch.autograd.grad(loss, x))


@case
def numpy_memory(trial: Trial) -> None:
    import numpy

    array = numpy.random.default_rng(0).standard_normal((8, 8)).astype(numpy.float32)
    w = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = torch.from_numpy(array) @ w
    trial.tick()
    array *= 2
    trial.tick()
    y.sum().backward()
    trial.record(w.grad)


@case
def shared_and_resized_storages(trial: Trial) -> None:
    w = torch.randn(8, 8, requires_grad=True)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with trial.forward():
        out = x @ w + y @ w
    x.share_memory_()
    y.untyped_storage().resize_(1024)
    trial.tick()
    del x, y
    trial.tick()
    out.sum().backward()
    trial.record(w.grad)


@case
def freed_and_filled_again(trial: Trial) -> None:
    """As FSDP does with gathered parameters: the bytes are gone between forward and backward."""
    x = torch.randn(8, 8, requires_grad=True)
    w = torch.randn(8, 8)
    values = w.clone()
    with trial.forward():
        y = (x @ w).sum()
    trial.tick()
    w.untyped_storage().resize_(0)
    trial.tick()
    w.untyped_storage().resize_(values.nbytes)
    with torch.autograd._unsafe_preserve_version_counter(w):
        w.copy_(values)
    del w
    trial.tick()
    y.backward()
    trial.record(x.grad)


@case
def a_storage_saved_in_two_forwards(trial: Trial) -> None:
    x = torch.randn(16, 16, requires_grad=True)
    with trial.forward():
        h = (x * 2).tanh()
        first = h.sin()
    trial.tick()
    with trial.forward():
        second = h.exp() * first
    del h, first
    trial.tick()
    second.sum().backward()
    trial.record(x.grad)


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
    _run(trial, lambda _: made(torch.tensor([[1, 5], [1, 2]])), made.weight)


@case
def autocast(trial: Trial) -> None:
    made = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(4, 8, requires_grad=True)

    def forward(*_: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = made(x)
            return out

    _run(trial, forward, x, *made.parameters())


# Tensors that are more, or less, than strided bytes.

class Saves(torch.autograd.Function):
    """Saves tensors and hands what it gets back to `seen`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.seen = seen
        ctx.count = len(tensors)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *tensors = ctx.saved_tensors
        ctx.seen.extend(tensors)
        return (gradient * x, None, *([None] * ctx.count))


def _saved(trial: Trial, *tensors: torch.Tensor) -> list[Any]:
    """The tensors as a function's backward gets them."""
    seen: list[Any] = []
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = Saves.apply(x, seen, *tensors)
    trial.tick()
    y.sum().backward()
    trial.record(x.grad)
    assert len(seen) == len(tensors)
    for before, after in zip(tensors, seen, strict=True):
        assert after.dtype == before.dtype and after.layout == before.layout
        assert after.device == before.device
        assert after.is_conj() == before.is_conj() and after.is_neg() == before.is_neg()
        assert after.requires_grad == before.requires_grad
    return seen


@case
def geometry_of_what_is_saved(trial: Trial) -> None:
    base = torch.randn(64, 96)
    c = torch.randn(8, 8, dtype=torch.complex64)
    tensors = [base[:, 32:64].t(), base[::2], torch.randn(64, 1).expand(64, 64), base[3:3],
               torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last), torch.randn(()),
               base.unfold(0, 4, 2), c.conj(), c.mH, c.conj().imag, torch._neg_view(base),
               torch.zeros(3, dtype=torch.bool), torch.arange(9)[::2], base.as_strided((4, 5), (1, 2))]
    for before, after in zip(tensors, _saved(trial, *tensors), strict=True):
        assert before.shape == after.shape and before.stride() == after.stride()
        assert before.storage_offset() == after.storage_offset()
        trial.record(after)


@case
def sparse_layouts(trial: Trial) -> None:
    dense = torch.randn(8, 8).relu()
    tensors = [dense.to_sparse(), dense.to_sparse().coalesce(), dense.to_sparse_csr(),
               dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    trial.record(*_saved(trial, *tensors))


@case
def sparse_products(trial: Trial) -> None:
    s = torch.randn(8, 8).relu().to_sparse().requires_grad_()
    x = torch.randn(8, 4, requires_grad=True)
    _run(trial, lambda s, x: torch.sparse.mm(s, x.sin()), s, x)


@case
def sparse_written_in_place(trial: Trial) -> None:
    s = torch.randn(8, 8).relu().to_sparse()
    x = torch.randn(8, 4, requires_grad=True)
    with trial.forward():
        y = torch.sparse.mm(s, x)
    s.mul_(2)
    trial.attempt(lambda: y.sum().backward())
    trial.record(x.grad)


@case
def mkldnn(trial: Trial) -> None:
    (after,) = _saved(trial, torch.randn(8, 8).to_mkldnn())
    trial.record(after.to_dense())


@case
def quantized(trial: Trial) -> None:
    q = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 3, torch.qint8)
    (after,) = _saved(trial, q)
    assert after.q_scale() == 0.1 and after.q_zero_point() == 3
    trial.record(after.dequantize())


@case
def meta(trial: Trial) -> None:
    (after,) = _saved(trial, torch.randn(8, 8, device="meta"))
    assert after.is_meta and after.shape == (8, 8)


@case
def named(trial: Trial) -> None:
    before = torch.randn(8, 8, names=("N", "C"))
    (after,) = _saved(trial, before)
    assert after.names == ("N", "C")
    trial.record(after.rename(None))
    seen: list[Any] = []
    with trial.forward():
        y = Saves.apply(torch.randn(8, 8, requires_grad=True), seen, before)
    before.mul_(2)
    trial.attempt(lambda: y.sum().backward())


@case
def zero_tensor(trial: Trial) -> None:
    (after,) = _saved(trial, torch._efficientzerotensor(8, 8))
    assert after._is_zerotensor()
    trial.record(after + 0)


@case
def nested(trial: Trial) -> None:
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    with trial.forward():
        y = (F.gelu(x @ w) * x.sin()).values()
    trial.tick()
    y.sum().backward()
    assert x.grad is not None
    trial.record(x.grad.values(), w.grad)


@case
def nested_strided(trial: Trial) -> None:
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.strided)
    w = torch.randn(4, 4, requires_grad=True)
    with trial.forward():
        y = torch.nested.to_padded_tensor(F.linear(x, w), 0.0).sin()
    trial.tick()
    y.sum().backward()
    trial.record(w.grad)


class Doubled(torch.Tensor):
    """A subclass with a dispatch of its own: two tensors of the same sizes."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, a.shape, dtype=a.dtype, requires_grad=a.requires_grad)
        made.a, made.b = a, b
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def each(pick: Callable[[Doubled], torch.Tensor]) -> Any:
            take = lambda t: pick(t) if isinstance(t, Doubled) else t  # noqa: E731
            return func(*tree_map(take, args), **tree_map(take, kwargs or {}))

        left, right = each(lambda t: t.a), each(lambda t: t.b)
        if isinstance(left, torch.Tensor):
            return Doubled(left, right)
        return left


class Labelled(torch.Tensor):
    """A subclass with plain bytes."""


@case
def subclasses(trial: Trial) -> None:
    x = Doubled(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
    with trial.forward():
        y = (x.sin() * x.exp()).tanh()
    trial.tick()
    y.sum().backward()
    assert isinstance(x.grad, Doubled)
    trial.record(x.grad.a, x.grad.b)


@case
def subclasses_of_plain_bytes(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    _run(trial, lambda x: ((x * 1).as_subclass(Labelled).sin()  # type: ignore[arg-type]
                           * x.exp()).as_subclass(torch.Tensor), x)


class Counts(TorchDispatchMode):
    """Sees operators, as profilers and fake modes do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@case
def dispatch_modes(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward(), Counts():
        y = (x.sin() * x.exp()).unsafe_chunk(2)
        z = y[0].tanh_() * y[1].sigmoid_()
        del y
    trial.tick()
    with Counts():
        z.sum().backward()
    trial.record(x.grad)


@case
def vectorized(trial: Trial) -> None:
    _run(trial, torch.vmap(lambda v: v.sin() * v.exp().sum()), torch.randn(8, 8, requires_grad=True))


@case
def forward_mode(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x * 1, torch.ones(8, 8))
        tangent = torch.autograd.forward_ad.unpack_dual(dual.sin() * dual).tangent
        trial.record(tangent)
        assert tangent is not None
        loss = tangent.sum()
    loss.backward()
    trial.record(x.grad)


# Around autograd.

@case
def outputs_and_intermediates(trial: Trial) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            out, between = x.exp(), x * 2
            ctx.save_for_backward(x, out, between, between[1:])
            return out, between

        @staticmethod
        def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
            x, out, between, part = ctx.saved_tensors
            return first * out + second * between + x * part.sum()

    def forward(x: torch.Tensor) -> torch.Tensor:
        out, between = Exp.apply(x)
        return out * between

    _run(trial, forward, torch.randn(8, 8, requires_grad=True))


@case
def double_backward(trial: Trial) -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = (F.layer_norm(x @ w, (8,)).tanh() * x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        loss = g.square().sum() + y
    trial.tick()
    loss.backward()
    trial.record(x.grad, w.grad)


@case
def double_backward_outside(trial: Trial) -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = ((x @ w).tanh() * x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    trial.tick()
    g.square().sum().backward()
    trial.record(x.grad, w.grad)


@case
def backward_thrice(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * 2
        for _ in range(4):
            y = y.sin() * y
    loss = y.sum()
    del y
    for last in (False, False, True):
        trial.tick()
        loss.backward(retain_graph=not last)
        trial.record(x.grad)
    trial.attempt(loss.backward)


@case
def parts_of_a_graph(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = (x * 2).tanh()
        z = (y * y.exp()).sin()
    trial.record(*torch.autograd.grad(z.sum(), y, retain_graph=True))
    trial.tick()
    trial.record(*torch.autograd.grad(y.sum(), x, retain_graph=True))
    trial.tick()
    trial.record(*torch.autograd.grad(z.sum(), x))


@case
def checkpoints(trial: Trial) -> None:
    made = nn.ModuleList(nn.GRUCell(8, 8) for _ in range(4))
    x = torch.randn(3, 8, requires_grad=True)

    def forward(*_: torch.Tensor) -> torch.Tensor:
        h = x
        for number, cell in enumerate(made):
            h = checkpoint(cell, h, h.sin(), use_reentrant=number % 2 == 0).tanh_()
        return h

    _run(trial, forward, x, *made.parameters())


@case
def forward_within_backward(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def again(gradient: torch.Tensor) -> torch.Tensor:
        with trial.forward(), torch.enable_grad():
            z = gradient.detach().requires_grad_()
            w = (z.sin() * z.exp()).sum()
        w.backward()
        assert z.grad is not None
        return gradient * z.grad.clamp(-1, 1)

    with trial.forward():
        y = x.tanh()
        y.register_hook(again)
        z = (y * y.sin()).sum()
    z.backward()
    trial.record(x.grad)


@case
def hooks_inside_and_outside(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t * 1), trial.forward():
        y = x.sin() * x.exp()
        with saved_tensors_hooks(lambda t: t.detach().double(), lambda t: t.float()):
            y = y.tanh() * y
        y = y.sigmoid() * y
    trial.tick()
    y.sum().backward()
    trial.record(x.grad)


@case
def other_threads(trial: Trial) -> None:
    """Forward on two threads, backward on a third."""
    x = torch.randn(16, 16, requires_grad=True)
    out: list[torch.Tensor | None] = [None, None]

    def forward(at: int) -> None:
        with trial.forward():
            a, b = (x * (at + 1)).unsafe_chunk(2)
            out[at] = a.sigmoid_() * b.tanh_() * x[:8].exp()

    threads = [threading.Thread(target=forward, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = (out[0] * out[1]).sum()  # type: ignore[operator]
    out.clear()
    trial.tick()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    trial.record(x.grad)


@case
def writes_that_autograd_catches(trial: Trial) -> None:
    """Of what is offloaded and of what stays, inputs and results, before and after a flush."""
    for size in (1, 64):
        for write in (lambda y, z: y.add_(1), lambda y, z: z.add_(1), lambda y, z: y.detach().zero_(),
                      lambda y, z: y[:1].mul_(2), lambda y, z: None):
            x = torch.randn(size, 8, requires_grad=True)
            with trial.forward():
                y = x * 2
                z = y.sin().exp()
            trial.tick()
            with torch.no_grad():
                write(y, z)
            del y
            trial.tick()
            trial.attempt(lambda z=z: z.sum().backward())  # type: ignore[misc]
            trial.record(x.grad)
    w = torch.randn(8, 8, requires_grad=True)  # a leaf, by its optimizer
    with trial.forward():
        y = torch.randn(8, 8, requires_grad=True) @ w
    with torch.no_grad():
        w.mul_(2)
    trial.attempt(lambda: y.sum().backward())
    trial.record(w.grad)


@case
def a_parameter_given_other_data(trial: Trial) -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * w
    w.data = torch.ones(8, 8)  # autograd saved the leaf itself
    y.sum().backward()
    trial.record(x.grad, w.grad)
