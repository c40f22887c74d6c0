"""The whole projection: time, and how exact the result is."""

from gemproj import project, solve_dual

from .common import (
    BACKENDS,
    COLUMNS,
    CONSTRAINTS,
    DTYPES,
    LORA,
    METHODS,
    Benchmark,
    find,
    kkt_residual,
    labelled,
    problem,
)

RESIDUAL = "largest violation of a condition, free of scale"


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


class Accuracy(Benchmark):
    """Every method, on arrays of torch on the CPU: the residual of x as it was returned."""

    params = (METHODS, ["float32", "float64"], [2, 9, 49], COLUMNS[:2])
    param_names = ("method", "dtype", "constraints t", "columns d")

    def setup(self, method, dtype, t, d):
        self.method = find(method)
        self.G, self.g, _ = problem("torch", dtype, t, d)

    @labelled("KKT residual, by method (torch)", RESIDUAL)
    def track_kkt_residual(self, method, dtype, t, d):
        sol = solve_dual(self.G, self.g, method=self.method)
        return kkt_residual(self.G, self.g, project(self.G, self.g, method=self.method), sol.multipliers)


class Backends(Benchmark):
    """The exact method, on every library, device and dtype."""

    params = (BACKENDS, DTYPES, [2, 9], COLUMNS)
    param_names = ("backend", "dtype", "constraints t", "columns d")

    def setup(self, backend, dtype, t, d):
        self.G, self.g, self.wait = problem(backend, dtype, t, d)
        self.wait()

    @labelled("project, by backend and dtype (exact)")
    def time_project(self, backend, dtype, t, d):
        project(self.G, self.g)
        self.wait()

    @labelled("KKT residual, by backend and dtype (exact)", RESIDUAL)
    def track_kkt_residual(self, backend, dtype, t, d):
        sol = solve_dual(self.G, self.g)
        return kkt_residual(self.G, self.g, project(self.G, self.g), sol.multipliers)


class Layouts(Benchmark):
    """The exact method in float32, on G stored by rows or by columns."""

    params = (["rows", "columns"], BACKENDS, [2, 9, 49], COLUMNS[1:])
    param_names = ("layout", "backend", "constraints t", "columns d")

    def setup(self, layout, backend, t, d):
        self.G, self.g, self.wait = problem(backend, "float32", t, d, layout)
        self.out = 1.0 * self.g
        self.wait()

    @labelled("project(out=), by layout of G (exact, float32)")
    def time_project(self, layout, backend, t, d):
        project(self.G, self.g, out=self.out)
        self.wait()


class InPlace(Benchmark):
    """The exact method, overwriting g."""

    params = (BACKENDS, CONSTRAINTS, [COLUMNS[0], LORA])
    param_names = ("backend", "constraints t", "columns d")

    def setup(self, backend, t, d):
        self.G, g, self.wait = problem(backend, "float32", t, d)
        # Runs before every call: what is projected already would cost less to project.
        if not hasattr(self, "out"):
            self.out = 1.0 * g
        self.out[...] = g
        self.wait()

    @labelled("project(out=g) (exact, float32)")
    def time_project(self, backend, t, d):
        project(self.G, self.out, out=self.out)
        self.wait()
