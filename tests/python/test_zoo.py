# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, unmodified: three steps with less than a third of the parameters on the
device give the bits of a plain loop."""

import pytest
from parity import assert_parity
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_parity(name: str) -> None:
    specimen = ZOO[name]
    assert_parity(specimen.make, specimen.loss)
