"""What every test runs under: checked shape annotations, fixed seeds, one thread, no display and no network.

pytest reads this file first, in each worker process too, so the import hook is there before anything imports the package.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; programs that the tests start inherit it
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

assert "eigendamage" not in sys.modules, "eigendamage was imported before its annotations could be checked"
install_import_hook("eigendamage", "beartype.beartype")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class TorchRandom:
    """Lets hypothesis seed torch for each example, so that a failure it reports happens again."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis holds it weakly
hypothesis.register_random(TORCH_RANDOM)

hypothesis.settings.register_profile("default", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True, database=None)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"), max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state, whatever ran before it in the same process."""
    torch.manual_seed(0)
    return 0
