# SPDX-License-Identifier: Apache-2.0
"""A program's trainer that is an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from model import UsersOwn
from session import Call
from torch import nn

import pagoda


def is_refusal(error: BaseException) -> bool:
    """An error of the engine's that blames the caller; operators wrap its text."""
    return isinstance(error, (pagoda.UserError, RuntimeError)) and not isinstance(
        error, pagoda.EngineError)


class Paged:
    """One rank."""

    paged = True

    def __init__(self, config: dict[str, Any], build: bool) -> None:
        self.engine = pagoda.Engine(**config)
        self.build = build
        self.refused: dict[int, bool] = {}
        self.model: nn.Module

    def attempt(self, number: int, action: Callable[[], Any], may_refuse: bool) -> bool:
        try:
            action()
        except UsersOwn:
            raise
        except Exception as error:
            if not may_refuse or not is_refusal(error):
                raise
            self.refused[number] = True
            return False
        return True

    def was_refused(self, number: int) -> bool:
        return self.refused.get(number, False)

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    def make(self, build: Callable[[], nn.Module]) -> nn.Module:
        if not self.build:
            return build()
        with self.engine.build():
            return build()

    def backward(self, loss: torch.Tensor, how: str, last: bool | None, retain: bool) -> None:
        if how == "plain":
            loss.backward(retain_graph=retain)
        elif retain:
            # engine.backward() frees the graph: what is to be kept goes through torch's own.
            loss.backward(retain_graph=True)
        else:
            self.engine.backward(loss, last)

    def put_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        named = dict(self.model.named_parameters())
        for name, gradient in gradients.items():
            named[name].grad = gradient

    @contextlib.contextmanager
    def pin(self, what: Any) -> Generator[None]:
        with self.engine.pin(what):
            yield

    def activations(self, place: str, least: int) -> Any:
        return self.engine.activations(place, least=least)

    def answer(self, call: Call) -> Any:
        """What ranks do together."""
        engine = self.engine
        match call.what:
            case "attach":
                self.model = call.model
                groups = call.groups
                if len(groups) == 1 and not call.name:
                    said = {key: value for key, value in groups[0].items() if key != "params"}
                    engine.attach(call.model, **said)
                else:
                    engine.attach(call.model, groups=groups)
            case "step":
                if call.name == "optimizer":
                    engine.optimizer.step()
                elif call.name == "closure":
                    engine.optimizer.step(lambda: 0.0)
                else:
                    engine.step()
                report = engine.optimizer.report
                assert report is not None
                return report.step, report.skipped, report.norm, report.loss_scale
            case "zero_grad":
                {"engine": engine, "optimizer": engine.optimizer,
                 "model": call.model}[call.name].zero_grad()
            case "grad":
                return engine.grad(call.model)
            case "grad_norm":
                return engine.grad_norm()
            case "release":
                engine.release(call.model)
            case "join":
                engine.join()
            case "save":
                engine.save_pretrained(call.name, call.model)
            case "barrier":
                pass
            case _:
                raise AssertionError(call.what)
        return None

    def close(self) -> None:
        self.engine.close()
