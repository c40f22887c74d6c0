"""Every lower bound is one that `make test-lowest` can test."""

import pytest

from asv_benchmarks.reports import lowest


@pytest.mark.parametrize("other", ["numpy", "numpy>=2.0", "numpy~=1.26", "numpy==1.26", "numpy<3"])
def test_a_bound_that_would_not_be_tested_is_an_error(tmp_path, monkeypatch, other):
    project = tmp_path / "pyproject.toml"
    monkeypatch.setattr(lowest, "PYPROJECT", project)
    lines = [
        "[project]",
        'name = "some"',
        'dependencies = ["numpy>=1.26"]',
        "[project.optional-dependencies]",
    ]
    project.write_text("\n".join([*lines, 'fast = ["numba>=0.60"]', 'all = ["some[fast]", "numpy>=1.26"]']))
    assert lowest.lowest_versions() == {"numba": "0.60", "numpy": "1.26"}
    assert lowest.lowest_versions(without=["fast"]) == {"numpy": "1.26"}
    project.write_text("\n".join([*lines, f'fast = ["{other}"]']))
    with pytest.raises(ValueError, match=f"^'{other}' in pyproject.toml must be name>=version"):
        lowest.lowest_versions()
