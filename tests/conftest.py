"""One fixture for all array libraries, and randomised tests that repeat exactly."""

import importlib
import os

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # workers share the cores; threads on top would only wait for each other
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import gemproj

settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "explore", parent=settings.get_profile("default"), derandomize=False, max_examples=2000
)
settings.load_profile("default")


class Library:
    """An array library under test, with the conversions a test needs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module = importlib.import_module(name)

    def array(self, a, dtype="float64"):
        a = np.asarray(a)
        if self.name == "torch":
            return self.module.tensor(a, dtype=getattr(self.module, dtype))
        return self.module.asarray(a.astype(dtype))

    def numpy(self, a) -> np.ndarray:
        return a.to(self.module.float64).numpy() if self.name == "torch" else np.asarray(a).astype(np.float64)

    def project(self, G, g, **options) -> np.ndarray:
        """Project with this library; NumPy in and out."""
        return self.numpy(gemproj.project(self.array(G), self.array(g), **options))

    def __repr__(self) -> str:
        return self.name


@pytest.fixture(params=["numpy", "torch", "array_api_strict"], scope="session")
def xp(request) -> Library:
    pytest.importorskip(request.param)
    return Library(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20171208)
