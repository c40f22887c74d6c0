"""Every lower bound is one that `make test-lowest` can test."""

import lowest
import pytest


@pytest.mark.parametrize("other", ["numpy", "numpy>=2.0", "numpy~=1.26", "numpy==1.26", "numpy<3"])
def test_a_bound_that_would_not_be_tested_is_an_error(tmp_path, other):
    def project(*fast):
        (tmp_path / "pyproject.toml").write_text(
            f"""
            [project]
            name = "some"
            dependencies = ["numpy>=1.26"]
            [project.optional-dependencies]
            all = ["some[fast]", "numpy>=1.26"]
            docs = ["sphinx>=8"]
            fast = {list(fast)}
            """
        )
        return tmp_path

    assert lowest.lowest_versions(project("numba>=0.60")) == {"numba": "0.60", "numpy": "1.26"}
    with pytest.raises(ValueError, match=f"^'{other}' in pyproject.toml must be name>=version"):
        lowest.lowest_versions(project(other))
