# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, unmodified: three steps with less than a third of the parameters on the
device give the bits of a plain loop."""

from pathlib import Path

import pytest
import parity
from parity import IN_SMALL_PIECES, assert_parity
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_parity(name: str) -> None:
    specimen = ZOO[name]
    assert_parity(specimen.make, specimen.loss)


@pytest.mark.parametrize("name", ["gpt2", "llama_bf16", "qwen3_tied"])
def test_parity_in_small_pieces(name: str) -> None:
    """Embeddings are looked up where they lie, and states are updated in many chunks."""
    specimen = ZOO[name]
    assert_parity(specimen.make, specimen.loss, **IN_SMALL_PIECES)


@pytest.mark.parametrize("name", ["gpt2", "llama_bf16"])
def test_parity_from_disk(name: str, tmp_path: Path) -> None:
    specimen = ZOO[name]
    assert_parity(specimen.make, specimen.loss, parameters="nvme", gradients="nvme",
                  optimizer_state="nvme", nvme=[tmp_path], **IN_SMALL_PIECES)
    assert list(tmp_path.iterdir()) == []


def test_another_optimizer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    plain = parity.train_plainly(ZOO["gpt2"].make, ZOO["gpt2"].loss)
    monkeypatch.setattr(parity, "LR", 1.001e-3)
    with pytest.raises(AssertionError):
        parity.assert_equal(plain, parity.train_plainly(ZOO["gpt2"].make, ZOO["gpt2"].loss))
