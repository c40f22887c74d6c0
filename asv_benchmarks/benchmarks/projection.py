"""Time of the whole projection."""

from gemproj import project

from .common import BACKENDS, COLUMNS, CONSTRAINTS, DTYPES, LORA, METHODS, Benchmark, find, labelled, problem


class Methods(Benchmark):
    """Every method, on float32 arrays of torch on the CPU."""

    params = (METHODS, CONSTRAINTS, [COLUMNS[0], LORA])
    param_names = ("method", "constraints t", "columns d")

    def setup(self, method, t, d):
        self.method = find(method)
        self.G, self.g, _ = problem("torch", "float32", t, d)

    @labelled("project, by method (torch, float32)")
    def time_project(self, method, t, d):
        project(self.G, self.g, method=self.method)


class Backends(Benchmark):
    """The exact method, for each library, device and dtype, with G stored by rows or by columns."""

    params = (["rows", "columns"], BACKENDS, DTYPES, [2, 9], COLUMNS)
    param_names = ("layout", "backend", "dtype", "constraints t", "columns d")

    def setup(self, layout, backend, dtype, t, d):
        self.G, self.g, self.wait = problem(backend, dtype, t, d, layout)
        self.wait()

    @labelled("project, by layout of G, backend and dtype (exact)")
    def time_project(self, layout, backend, dtype, t, d):
        project(self.G, self.g)
        self.wait()
