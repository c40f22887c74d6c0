"""Times of the three stages of a projection."""

from gemproj import Exact, combine, gram

from .common import BACKENDS, COLUMNS, CONSTRAINTS, LORA, Benchmark, labelled, problem


class Stages(Benchmark):
    """The exact method in float32; setup computes the input of each stage."""

    params = (BACKENDS, CONSTRAINTS, [COLUMNS[0], LORA])
    param_names = ("backend", "constraints t", "columns d")

    def setup(self, backend, t, d):
        # asv calls this before every call.
        if not hasattr(self, "G"):
            self.G, self.g, self.wait = problem(backend, "float32", t, d)
            self.K, self.b, _ = gram(self.G, self.g)
            self.method = Exact()
            self.multipliers = self.method(self.K, self.b)
        self.wait()

    @labelled("stage 1: gram(G, g) (float32)")
    def time_gram(self, backend, t, d):
        gram(self.G, self.g)
        self.wait()

    @labelled("stage 2: multipliers of (K, b) (float64)")
    def time_multipliers(self, backend, t, d):
        self.method(self.K, self.b)
        self.wait()

    @labelled("stage 3: combine(G, g, lam) (float32)")
    def time_combine(self, backend, t, d):
        combine(self.G, self.g, self.multipliers)
        self.wait()
