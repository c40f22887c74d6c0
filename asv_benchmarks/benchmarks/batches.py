"""Many small problems in one call."""

from gemproj import project

from .common import BACKENDS, Benchmark, batch, find, labelled


class Batches(Benchmark):
    """A batch of random problems in float32, d = 64: 1,000 of them, or 100 for t = 64."""

    params = (["exact", "pgd", "fista", "agem", "quadprog"], BACKENDS, [2, 8, 64])
    param_names = ("method", "backend", "constraints t")
    repeat = (3, 20, 0.3)

    def setup(self, method, backend, t):
        self.method = find(method)
        n = 1_000 if t < 64 else 100
        self.G, self.g, self.wait = batch(backend, "float32", n, t, 64)
        self.wait()

    @labelled("project(batch), d = 64, float32")
    def time_project(self, method, backend, t):
        project(self.G, self.g, method=self.method)
        self.wait()
