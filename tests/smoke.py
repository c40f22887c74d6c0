"""One small problem for each extra, with nothing else installed but pytest: ``python tests/smoke.py EXTRA``.

It imports the gemproj that is installed, not that of the checkout.
"""

import importlib
import os
import sys
import tempfile
import time
from pathlib import Path


def core():
    import numpy as np

    start = time.perf_counter()
    import gemproj

    seconds = time.perf_counter() - start
    x = gemproj.project(np.array([[1.0, 0.0]]), np.array([-3.0, 1.0]))
    assert x.tolist() == [0.0, 1.0]
    assert "torch" not in sys.modules
    print(f"import of gemproj after numpy: {1000 * seconds:.0f} ms")


def fast():
    import numpy as np

    from gemproj import _problem, backends, project

    G, g = np.eye(2, 3), np.array([-1.0, 2.0, 3.0])
    assert backends.select(_problem.check_problem(G, g)).name == "numba"
    assert project(G, g).tolist() == [0.0, 2.0, 3.0]


def qp():
    import numpy as np

    from gemproj import project

    rng = np.random.default_rng(0)
    G, g = rng.standard_normal((5, 9)), rng.standard_normal(9)
    for method in ("quadprog", "osqp"):
        assert np.allclose(project(G, g, method=method), project(G, g), atol=1e-5), method


def torchjd():
    import torch

    from gemproj.integrations.torchjd import ConeProjector

    J = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    U = torch.eye(2)
    W = ConeProjector()(U, J @ J.T)
    assert (W >= U).all()
    assert (W @ J @ J.T >= -1e-6).all()


def learn(train, keep, keeper, **options):
    """Learn two tasks that contradict each other, and check that the promise about the first one was kept."""
    from frameworks import batches

    for k in range(2):
        train(batches(k, **options))
        keep(batches(k, **options))
    first, *_ = keeper.report().values()
    assert first.would_break, keeper.report()
    assert keeper.last.worst_cosine > -1e-4, keeper.last  # what rounding float32 parameters leaves


def in_loop_of(name):
    """Return a function that learns in the loop of a framework, of which tests/frameworks.py has a driver."""

    def run():
        import frameworks

        with tempfile.TemporaryDirectory() as folder:
            driver = getattr(frameworks, name)(Path(folder), on="both")
            learn(driver.train, driver.keep, driver.keeper)

    return run


torch, accelerate, transformers = map(in_loop_of, ["Plain", "Accelerate", "Transformers"])
lightning, avalanche = map(in_loop_of, ["Lightning", "Avalanche"])


def deepspeed():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from frameworks import Net, adamw
    from torch import float32

    from gemproj.integrations.deepspeed import Keeper
    from gemproj.torch import Promise

    # DeepSpeed would compile an operator of its own for processes of one machine.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    model = Net("bf16")  # which is in float32
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    keeper = Keeper(engine, Promise(examples=None))

    def train(data):
        for batch in data:
            engine.backward(engine(**batch).loss)
            engine.step()

    learn(train, keeper.keep, keeper, dtype=float32)


if __name__ == "__main__":
    # The names of this folder's files must not hide packages.
    sys.path.append(sys.path.pop(0))
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]}: right", flush=True)
    os._exit(0)  # threads of DeepSpeed would abort a process that ends in the usual way
