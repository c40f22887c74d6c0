"""The example keeps X at the bound that it was given, and writes its table, its figure and its numbers."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich", reason="needs the extra examples")
pytest.importorskip("matplotlib", reason="needs the extra examples")


from examples import keep_a_skill

# The matrices are small, and threads would wait for those of other tests.
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_languages_share_half_of_their_rules():
    x, y = keep_a_skill.rules(0)
    same = (x == y).all(-1).float().mean()
    assert 0.35 < same < 0.65
    text = keep_a_skill.write(x, 0, 20, seed=1)
    assert text.shape == (20, keep_a_skill.LENGTH)
    assert (text[:, 0] == keep_a_skill.WORDS).all()
    group = text[:, 1:-2] % keep_a_skill.GROUPS
    assert (x[group, text[:, 2:-1]] == text[:, 3:, None]).any(-1).all()


def test_keep_a_skill(tmp_path, capsys, monkeypatch):
    chosen = ("plain", "replay of KL, weight 3", "KL held, bound 0.1")
    methods = [method for method in keep_a_skill.METHODS if str(method) in chosen]
    assert len(methods) == len(chosen)
    monkeypatch.setattr(keep_a_skill, "METHODS", methods)
    figure, out = tmp_path / "figure.png", tmp_path / "numbers.json"
    keep_a_skill.main(["--steps", "40", "--figure", str(figure), "--out", str(out)])

    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(name in printed for name in chosen)
    assert all(f"seed 0: {name} ..." in printed for name in chosen)  # as it goes
    rows = json.loads(out.read_text())["rows"]
    before, plain, replay, held = rows
    assert [row["method"] for row in rows] == ["before", *chosen]
    assert before["kl"] < 1e-5
    assert plain["y"] < before["y"] - 1
    assert plain["x"] > before["x"] + 0.5
    for row in (replay, held):
        assert row["x"] < plain["x"] - 0.3
        assert row["y"] < before["y"] - 0.8
    assert held["kl"] < 0.1 + 0.03
