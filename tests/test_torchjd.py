"""The projector in TorchJD's aggregators: the optimality conditions, at any scale and with dependent rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import arbitrary

from gemproj import project

pytest.importorskip("torchjd", reason="needs the extra torchjd")
report = pytest.importorskip("asv_benchmarks.reports.torchjd")

from torchjd.aggregation import DualProj, UPGrad  # noqa: E402
from torchjd.autojac import backward, jac_to_grad  # noqa: E402
from torchjd.linalg import QuadprogProjector  # noqa: E402

from gemproj.integrations.torchjd import ConeProjector  # noqa: E402

PROJECTOR = ConeProjector()
draw, residual = report.draw, report.residual


def test_residual_is_small_for_the_projection_only():
    J, U = draw("random", 5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    W = PROJECTOR(U, J @ J.T)
    assert residual(J, U, W) < 1e-14
    assert residual(1e-3 * J, 1e5 * U, 1e5 * W) < 1e-14
    for wrong in (U, W + 0.1, W - 0.1, -W):  # violated, not complementary, negative multipliers
        assert residual(J, U, wrong) > 0.01


@given(arbitrary(), st.sampled_from([1e-12, 1e-6, 1.0, 1e6, 1e12]), st.integers(0, 1000))
def test_optimality_conditions_at_every_scale(problem, scale, seed):
    J = torch.from_numpy(scale * problem[0])
    U = torch.from_numpy(np.random.default_rng(seed).standard_normal((3, len(J))))
    W = PROJECTOR(U, J @ J.T)
    assert (W >= U).all()
    assert residual(J, U, W) < 1e-9


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("family", report.FAMILIES)
@pytest.mark.parametrize("m", [4, 16, 40])
def test_float32_with_dependent_rows(family, m, scale):
    for seed in range(2):
        J, U = scale * draw(family, m, seed), torch.eye(m)
        W = PROJECTOR(U, J @ J.T)
        assert (W >= U).all()
        assert residual(J, U, W) < 1e-4


@pytest.mark.parametrize("family", ["random", "rank m/4"])
@pytest.mark.parametrize("m", [6, 12])
def test_batches_are_many_vectors(family, m):
    J = draw(family, m, dtype=torch.float64)
    U = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, m)))
    W = PROJECTOR(U, J @ J.T)
    each = torch.stack([PROJECTOR(u, J @ J.T) for u in U.reshape(6, m)]).reshape(U.shape)
    torch.testing.assert_close(W @ J, each @ J, rtol=0, atol=1e-9 * float(J.norm()))
    assert PROJECTOR(U[0, :0], J @ J.T).shape == (0, m)
    assert PROJECTOR(torch.zeros(0), torch.zeros(0, 0)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_keeps_dtype_and_device(dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    J = draw("random", 5, dtype=dtype).to(device)
    G = (J @ J.T).requires_grad_()
    W = PROJECTOR(torch.eye(5, dtype=dtype, device=device), G)
    assert (W.dtype, W.device, W.requires_grad) == (dtype, G.device, False)
    assert residual(J.cpu(), torch.eye(5), W.cpu()) < 8 * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("error")
def test_squares_that_float16_cannot_hold_are_told():
    J = 1e-4 * draw("random", 5, dtype=torch.float16)
    with pytest.warns(UserWarning, match="Use bfloat16 or float32, or scale the losses"):
        PROJECTOR(torch.eye(5).half(), J @ J.T)
    for better in (J.bfloat16(), J.float(), 1e4 * J):
        PROJECTOR(torch.eye(5).to(better.dtype), better @ better.T)


def test_what_is_not_finite_or_does_not_fit_is_an_error():
    J = draw("random", 4)
    J[2, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite: row 2"):
        PROJECTOR(torch.eye(4), J @ J.T)
    for U, G in ((torch.eye(3), torch.eye(4)), (torch.eye(4), J), (torch.tensor(1.0), torch.eye(4))):
        with pytest.raises(ValueError, match=r"G must have shape \(m, m\)"):
            PROJECTOR(U, G)


def aggregate(aggregator, scale, **options):
    """Train once on three losses that contradict each other; return the Jacobian, the gradient, the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    y, x = model(torch.randn(8, 4, dtype=torch.float64)), torch.tensor([1.0, -1.0, 0.2])
    losses = [scale * ((y - target) ** 2).mean() for target in x.tolist()]
    backward(losses)
    J = torch.cat([p.jac.reshape(3, -1) for p in model.parameters()], dim=1)
    weights = jac_to_grad(model.parameters(), aggregator, **options)
    return J, torch.cat([p.grad.reshape(-1) for p in model.parameters()]), weights


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("by_parameter", [False, True])
def test_in_the_aggregators_of_a_training_step(scale, by_parameter):
    options = {"optimize_gramian_computation": by_parameter}
    for make, expected in (
        (UPGrad, lambda J: project(J, J).mean(0)),
        (DualProj, lambda J: project(J, J.mean(0))),
    ):
        J, x, weights = aggregate(make(projector=ConeProjector()), scale, **options)
        assert (J @ J.T).min() < 0  # objectives conflict
        assert weights.shape == (3,)
        torch.testing.assert_close(x, expected(J), rtol=0, atol=1e-9 * float(J.norm()))
        assert ((J @ x) > -1e-9 * J.norm() ** 2).all()
        if scale == 1.0:
            theirs = aggregate(make(projector=QuadprogProjector(reg_eps=1e-9)), scale, **options)[1]
            torch.testing.assert_close(x, theirs, rtol=0, atol=1e-4 * float(J.norm()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_half_precision_tells_apart_are_no_copies(dtype):
    G = torch.tensor([[1.0, -0.875], [-0.875, 1.0]], dtype=dtype)
    W = ConeProjector()(torch.tensor([-2.4, -1.6], dtype=dtype), G)  # the origin
    assert float((G.double() @ W.double()).min()) > -0.05
