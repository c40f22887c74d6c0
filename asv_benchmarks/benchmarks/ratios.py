"""Times over the memory floor and over A-GEM, taken in turn in one process: valid on other machines."""

from gemproj import project

from .common import COLUMNS, LORA, Benchmark, labelled, problem
from .peers import agem_published, floor
from .timing import Call, in_turn


class Ratios(Benchmark):
    """The shortest run of a method over the shortest run of what it is compared with; float32."""

    params = (["exact", "pgd", "fista", "agem"], [1, 2, 9, 49], [COLUMNS[0], LORA])
    param_names = ("method", "constraints t", "columns d")

    def setup(self, method, t, d):
        self.G, self.g, _ = problem("torch", "float32", t, d)
        self.out = 1.0 * self.g

    def ratio(self, method, other):
        this = Call(lambda: project(self.G, self.g, method=method, out=self.out))
        times = in_turn({"this": this, "other": Call(other)}, 0.1)
        return float(f"{min(times['this']) / min(times['other']):.3g}")  # further digits are noise

    @labelled("project / memory floor (torch)", "times as long as the memory floor")
    def track_to_memory_floor(self, method, t, d):
        return self.ratio(method, lambda: floor(self.G, self.g, self.out))

    @labelled("project / A-GEM as published (torch)", "times as long as A-GEM on a given gradient")
    def track_to_agem_published(self, method, t, d):
        return self.ratio(method, lambda: agem_published(self.G[0], self.g))


class Blocks(Benchmark):
    """300 blocks, as of a model with as many parameters, over one array; two rows of float32."""

    params = (["numpy", "torch"], [256, 4096])
    param_names = ("library", "columns of a block")

    def setup(self, library, n):
        G, g, _ = problem(library, "float32", 2, 300 * n)
        self.whole = G, g
        self.blocks = (
            [1.0 * G[:, k : k + n] for k in range(0, 300 * n, n)],
            [1.0 * g[k : k + n] for k in range(0, 300 * n, n)],
        )

    @labelled("project, 300 blocks / one array", "times as long as one array")
    def track_to_one_array(self, library, n):
        calls = {"blocks": Call(lambda: project(*self.blocks)), "one": Call(lambda: project(*self.whole))}
        times = in_turn(calls, 0.1)
        return float(f"{min(times['blocks']) / min(times['one']):.3g}")
