# SPDX-License-Identifier: Apache-2.0
"""Pagoda: virtual memory for model training.

Models far larger than the accelerator's memory train unmodified: their parameters, gradients and
optimizer state are pages that come when an operator needs them and go when it does not.

>>> import torch, pagoda
>>> engine = pagoda.Engine(device="cpu", device_budget="1MiB")
>>> with engine.build():  # parameters are pages from their birth
...     model = torch.nn.Linear(4, 2)
>>> optimizer = engine.attach(model, lr=1e-3)
>>> for batch in torch.ones(3, 8, 4):
...     engine.backward(model(batch).square().mean())
...     report = engine.step()
>>> report.step
3
"""

from types import ModuleType

from pagoda.deepspeed import initialize
from pagoda.engine import Engine, StepReport
from pagoda.errors import EngineError, Error, UserError
from pagoda.library import ConfigKey, config_keys, version
from pagoda.loss import chunked_cross_entropy
from pagoda.optimizer import Optimizer
from pagoda.pin import Pin
from pagoda.stats import Stats

__version__ = version()
__all__ = [
    "ConfigKey",
    "Engine",
    "EngineError",
    "Error",
    "Optimizer",
    "Pin",
    "Stats",
    "StepReport",
    "UserError",
    "__version__",
    "chunked_cross_entropy",
    "config_keys",
    "initialize",
]


def __getattr__(name: str) -> ModuleType:
    """pagoda.trainer is there when it is used: it imports transformers."""
    if name == "trainer":
        import importlib

        return importlib.import_module("pagoda.trainer")
    raise AttributeError(f"module 'pagoda' has no attribute '{name}'")
