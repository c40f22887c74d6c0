"""Memory of the exact method on GPT-2 medium's LoRA gradient."""

from gemproj import project

from .common import BACKENDS, DTYPES, LORA, Benchmark, labelled, load, problem
from .peaks import peak_memory, peak_on_device
from .timing import Call


class Memory(Benchmark):
    """The memory of a call in addition to G and g, in a process that has projected before."""

    params = (BACKENDS, DTYPES, [2, 19])
    param_names = ("backend", "dtype", "constraints t")

    def setup(self, backend, dtype, t):
        self.G, self.g, _ = problem(backend, dtype, t, LORA)

    @labelled("project: memory beside G and g", "bytes")
    def track_extra(self, backend, dtype, t):
        return extra(lambda: project(self.G, self.g), backend)

    @labelled("project(out=g): memory beside G and g", "bytes")
    def track_extra_in_place(self, backend, dtype, t):
        return extra(lambda: project(self.G, self.g, out=self.g), backend)


def extra(call, backend):
    """Return the rise of the used bytes during a call; skip the benchmark if nothing counts it."""
    on_device = backend in ("torch-cuda", "cupy")
    found = peak_on_device(call, load(backend)) if on_device else peak_memory(Call(call))
    if found is None:
        raise NotImplementedError("the peak of a process can be reset on Linux only")
    return found
