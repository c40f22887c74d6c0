"""Several processes do what one does with all the data; the checks are in the modules checks_*.py."""

import pytest

pytest.importorskip("torch")
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("torch without fully_shard", allow_module_level=True)

from processes import names, run_all


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what went wrong, by check; the processes start at the first question about so many of them."""
    results = {}

    def ask(name):
        world = int(name.rsplit("-")[-1])
        if name not in results:
            results.update(run_all(world, tmp_path_factory.mktemp(f"processes{world}")))
        return results[name]

    return ask


@pytest.mark.parametrize("name", sorted(names(), key=lambda name: name[-1]))
def test_on_processes(name, found):
    problems = [f"Process {rank}: {text}" for rank, text in enumerate(found(name)) if text]
    assert not problems, "\n".join(problems)
