"""Several processes do what one does with all the data; the checks are in the modules checks_*.py."""

import pytest

if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("torch without fully_shard", allow_module_level=True)

from processes import MODULES, names, run_all


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what went wrong, by check."""
    return run_all(tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", [name for world in MODULES for name in names(world)])
def test_on_processes(name, found):
    problems = [f"Process {rank}: {text}" for rank, text in enumerate(found[name]) if text]
    assert not problems, "\n".join(problems)
