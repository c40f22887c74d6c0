"""One fixture for all array libraries, and randomised tests that repeat exactly."""

import ctypes
import gc
import importlib
import os
from contextlib import nullcontext, suppress

# Workers share the cores; threads on top would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # read at import; nothing here may wait for a hub that cannot be reached
try:
    ctypes.CDLL("libcuda.so.1")
    HAS_DRIVER = True
except OSError:
    HAS_DRIVER = False
    os.environ["TRITON_INTERPRET"] = "1"  # read at import, too: without a GPU, kernels are interpreted

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import gemproj
from gemproj.backends.numba import installed

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


# What takes longest comes first: a worker that began it last would leave the others without work.
LONGEST = ["distributed", "pages", "compiled", "compile", "triton", "frameworks", "transformers", "trl"]


def pytest_configure(config):
    config.option.loadscopereorder = False  # of pytest-xdist: by how many tests a file has


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def pytest_collection_finish():
    """Take what has been imported by now out of all later collections, which take half a second each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


class Library:
    """An array library under test, on the CPU or a device, with the conversions a test needs."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.name, _, device = title.partition("-")
        self.device = "cuda" if device == "cuda" else "cpu"
        self.on_cpu = title in ON_CPU
        self.module = importlib.import_module(self.name)

    def array(self, a, dtype="float64"):
        a = np.asarray(a)
        if self.name == "torch":
            return self.module.tensor(a, dtype=getattr(self.module, dtype), device=self.device)
        there = {"device": self.module.Device("device1")} if self.title == UNSEEN else {}
        return self.module.asarray(a.astype(dtype), **there)

    def numpy(self, a) -> np.ndarray:
        if self.name == "torch":
            return a.to("cpu", self.module.float64).numpy()
        if self.title == UNSEEN:
            a = a.to_device(self.module.Device("CPU_DEVICE"))
        return np.asarray(a.get() if self.name == "cupy" else a).astype(np.float64)

    def project(self, G, g, **options) -> np.ndarray:
        """Project with this library; NumPy in and out."""
        return self.numpy(gemproj.project(self.array(G), self.array(g), **options))

    def __repr__(self) -> str:
        return self.title


ON_CPU = ["numpy", "torch", "array_api_strict"]
# Arrays of this device refuse to become NumPy's: only what a device is not read for can run.
UNSEEN = "array_api_strict-device1"


def on_devices() -> list[str]:
    """Return the libraries that have an NVIDIA device; without one, torch with the CPU taken for a device."""
    found, none = [], ["torch-as_device"]
    if not HAS_DRIVER:  # no need to import torch
        return none
    for title, name in (("torch-cuda", "torch"), ("cupy", "cupy")):
        with suppress(ImportError):
            if importlib.import_module(name).cuda.is_available():
                found.append(title)
    return found or none


ON_DEVICES = on_devices()


@pytest.fixture(params=[*ON_CPU, *ON_DEVICES])
def xp(request):
    """Return a library, on the CPU or on a device."""
    yield from library(request.param)


@pytest.fixture(params=[*ON_DEVICES, UNSEEN])
def device(request):
    """Return a library on a device, where no value is looked at."""
    yield from library(request.param)


def library(title):
    pytest.importorskip(title.partition("-")[0])
    with pytest.importorskip("devices").make_device() if title == "torch-as_device" else nullcontext():
        found = Library(title)
        if title == UNSEEN:
            try:
                found.numpy(found.array(0.0))
            except TypeError as error:
                pytest.skip(f"array_api_strict moves no array between devices with this NumPy: {error}")
        yield found


@pytest.fixture(params=ON_CPU, scope="session")
def host(request) -> Library:
    """Return a library where values are looked at, and wrong ones are errors."""
    pytest.importorskip(request.param)
    return Library(request.param)


@pytest.fixture
def one_thread():
    """Have torch use one thread, and afterwards as many as before, whatever the test has set."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def any_size_in_threads(monkeypatch):
    """Have compiled loops share out problems of any size among threads, not only large ones."""
    if installed():
        monkeypatch.setattr("gemproj.backends.numba.threads._WORTH_THREADS", 0)


@pytest.fixture
def fresh_state():
    """Forget what Accelerate keeps for a process, before and after; yield a function that does it in between."""
    from frameworks import forget_accelerate

    forget_accelerate()
    yield forget_accelerate
    forget_accelerate()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20171208)
