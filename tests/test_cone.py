"""The page docs/_static/cone.html, its mathematics against `project`; and the pictures of docs/hero.py."""

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from problems import assert_close, kkt

from gemproj import GEM2017, PGD, project

PAGE = Path(__file__).parents[1] / "docs/_static/cone.html"


@pytest.fixture(scope="module")
def run():
    """Return a function that evaluates an expression with the page's mathematics and drawing, in V8."""
    py_mini_racer = pytest.importorskip("py_mini_racer", reason="needs mini-racer, a JavaScript engine")
    with py_mini_racer.MiniRacer() as engine:
        script = re.search(r"<script>(.*?)</script>", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
        assert "document" not in script  # nor anything else of a browser
        engine.eval(script)
        yield lambda expression: json.loads(engine.eval(f"JSON.stringify({expression})"))


def draw(seed):
    """Return a state of the page: two or three rows, some dependent or zero, with a random choice of options."""
    rng = np.random.default_rng(seed)
    t = int(rng.integers(2, 4))
    G = rng.uniform(-1.2, 1.2, (t, 2)).round(2)
    turned = 0.01 * np.array([-G[0, 1], G[0, 0]]).round() + G[0]
    G[-1] = rng.choice([G[-1], 2 * G[0], -G[0], turned, -turned, 0 * G[0]]).round(2)
    equality, h = np.zeros(3, bool), np.zeros(3)
    equality[rng.integers(t)] = rng.random() < 0.25
    if rng.random() < 0.4:
        slack = np.where(equality[:t], 0.0, rng.choice([0.0, 0.5], t))
        h[:t] = G @ rng.uniform(-1, 1, 2) - slack
        if rng.random() < 0.4:  # which often contradicts an opposite row or an equality
            h[:t] = rng.uniform(-1, 1, t)
    return {
        "g": rng.uniform(-2, 2, 2).round(2).tolist(),
        "rows": G.tolist(),
        "h": np.clip(h, -2.4, 2.4).round(2).tolist(),
        "equality": equality.tolist(),
        "margin": float(rng.choice([0.0, 0.0, 0.25, 0.5])),
        "metric": float(rng.choice([1.0, 1.0, 0.05, 8.0])),
        "scale": float(rng.choice([1.0, 0.1, 0.01, 0.001])),
        "steps": int(rng.integers(0, 12)),
    }


CASES = [draw(seed) for seed in range(200)]


def arguments(case):
    """Return G, g, the options of `project`, h and the rows that are equalities, of a state."""
    G, g = np.array(case["rows"]), np.array(case["g"])
    h, equality = np.array(case["h"])[: len(G)], np.array(case["equality"])[: len(G)]
    options = {"margin": case["margin"], "metric": np.array([case["metric"], 1.0])}
    if h.any():
        options["h"] = case["scale"] ** 2 * h
    return G, g, options, h, equality


def test_geometry_is_what_project_computes(run):
    infeasible = 0
    for case in CASES:
        shape = run(f"geometry({json.dumps(case)})")
        G, g, options, h, equality = arguments(case)
        scale, memory_strength = case["scale"], case["margin"]
        size = np.linalg.norm(g) + np.abs(h).max() + memory_strength * np.abs(G).sum()

        def computed(method, options=options, G=G, g=g, scale=scale):
            return project(scale * G, scale * g, method=method, **options) / scale

        if shape["exact"] is None:
            infeasible += 1
            with pytest.raises(ValueError, match="infeasible"):
                computed("exact", options | {"equality": equality})
        else:
            x = computed("exact", options | {"equality": equality})
            assert_close(shape["exact"]["x"], x, atol=1e-11 * size * max(1, case["metric"]))
            # Multipliers are not unique for dependent rows: their optimality conditions, not their values.
            root, lower = np.sqrt(options["metric"]), np.where(equality, -np.inf, memory_strength)
            lam = np.array(shape["exact"]["multipliers"])
            assert kkt(G / root, g * root, h, lower, np.inf, lam) < 1e-8
            assert_close(shape["exact"]["slack"], G @ shape["exact"]["x"] - h, atol=1e-12)
        assert (shape["agem"] is None) == equality.any()
        assert (shape["recipe"] is None) == (equality.any() or h.any())
        same = options | {"equality": equality}
        steps = [computed(PGD(steps=k), same) for k in range(1, case["steps"] + 1)]
        answers = list(zip(shape["steps"][1:], steps, strict=True))
        if shape["agem"]:
            answers.append((shape["agem"], computed("agem")))
        if shape["recipe"]:
            recipe = computed(GEM2017(memory_strength), {"metric": options["metric"]})
            answers.append((shape["recipe"], recipe))
        for answer, x in answers:
            # The mean of nearly opposite rows is short: the answer of A-GEM is long, and loses digits.
            assert_close(answer["x"], x, atol=1e-11 * size + 1e-10 * np.abs(x).max())
            n = np.linalg.norm(G, axis=1)
            s = (G @ x - h) / np.where(n > 0, n, np.inf)
            off = np.where(equality, np.abs(s), np.maximum(0.0, -s))
            said = set(answer["violated"])
            assert set(np.flatnonzero(off > 1e-6)) <= said <= set(np.flatnonzero(off > 1e-12))
    assert infeasible > 5


def test_region_holds_the_points_that_satisfy_all_rows(run, rng):
    points = rng.uniform(-2.4, 2.4, (100, 2))
    for case in CASES:
        G, _, _, h, equality = arguments(case)
        if equality.any():
            continue
        polygon = np.array(run(f"geometry({json.dumps(case)}).region")).reshape(-1, 2)
        slack = points @ G.T - h
        edges, to_points = np.roll(polygon, -1, axis=0) - polygon, points[:, None] - polygon
        turns = edges[:, 0] * to_points[..., 1] - edges[:, 1] * to_points[..., 0]
        flat = not len(polygon) or not np.ptp(polygon, axis=0).all()
        in_polygon = (turns >= -1e-9).all(axis=1) & (not flat)
        clear = (np.abs(slack) > 1e-6)[:, G.any(axis=1)].all(axis=1)  # of every boundary
        assert (in_polygon == (slack >= 0).all(axis=1))[clear].all()
    line = {"rows": [[0, 1], [1, 0]], "h": [0.5, -1, 0], "equality": [True, False, False]}
    region = np.array(run(f"geometry({json.dumps(CASES[0] | line)}).region"))  # a part of a line
    assert_close(region[:, 1], 0.5, atol=1e-9)
    assert_close([region[:, 0].min(), region[:, 0].max()], [-1, 3], atol=1e-9)


def test_call_in_python_gives_the_result_beside_it(run):
    """The code that the page shows, run as it stands."""
    for case in CASES:
        text = run(f"python({json.dumps(case)}, geometry({json.dumps(case)}))")
        code, _, result = text.rpartition("\n# ")
        assignments, _, call = code.rpartition("\n")
        names = {"np": np, "project": project}
        exec(assignments, names)
        if "error" in result:
            with pytest.raises(ValueError, match="infeasible"):
                eval(call, names)
        else:
            assert_close(json.loads(result), eval(call, names), atol=1e-9 * case["scale"], rtol=6e-3)


def test_address_holds_the_state(run):
    for case in CASES:
        found = run(f"read('#' + write({json.dumps(case)}, 'ai'))")
        t = len(case["rows"])
        assert found["shown"] == "ai"
        for name in ("h", "equality"):
            assert found["state"].pop(name)[:t] == case[name][:t]
        assert found["state"] == {name: case[name] for name in found["state"]}
    assert run("write(START, SHOWN)") == ""


@pytest.mark.parametrize(
    "address", ["#", "#g=1", "#g=x,y&G=1,2&m=-3&s=0&k=1e9&w=", "#G=;;&eq=9&h=,1e5&show=<b>", "#s=NaN&&=="]
)
def test_any_address_gives_a_state_within_limits(run, address):
    found = run(f"read({json.dumps(address)})")
    state = found["state"]
    assert run(f"geometry({json.dumps(state)})")["exact"] is not None
    assert np.abs(np.array(state["rows"])).max() <= 2.4
    assert 1e-3 <= state["scale"] <= 1
    assert 0 <= state["margin"] <= 1
    assert 0 <= state["steps"] <= 20
    assert set(found["shown"]) <= set("ari")


def test_page_needs_no_script_for_its_picture_and_nothing_else(run):
    text, scene = PAGE.read_text(encoding="utf-8"), run("picture(geometry(START), SHOWN)")
    assert f'<g id="scene">{scene}</g>' in text, f"Put this into the scene of cone.html:\n{scene}"
    assert "A-GEM" in scene
    assert "GEM 2017" not in scene  # it lies on x there: a reader turns it on
    for reference in ("src=", "<link", "@import", "url(", "fetch(", "XMLHttpRequest", "http:", "https:"):
        assert reference not in text


HERO = runpy.run_path(str(PAGE.parents[1] / "hero.py"))
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.mark.parametrize("name", HERO["FILES"])
def test_pictures_are_those_that_the_script_draws_and_have_words(name):
    drawn, committed = HERO["FILES"][name](), (PAGE.parent / name).read_text(encoding="utf-8")
    again = f"Run python docs/hero.py to draw {name} again."
    assert NUMBER.sub("0", committed) == NUMBER.sub("0", drawn), again
    numbers = [np.array(NUMBER.findall(text), dtype=float) for text in (committed, drawn)]
    assert_close(*numbers, atol=0.11)  # one unit of the last digit
    root, namespace = ElementTree.fromstring(committed), "{http://www.w3.org/2000/svg}"
    words = [root.find(namespace + tag) for tag in ("title", "desc")]
    assert all(word.text for word in words)
    assert {word.get("id") for word in words} == set(root.get("aria-labelledby").split())


def test_what_the_pictures_say_is_so(run):
    G, g, x, agem = (HERO[name] for name in ("G", "g", "x", "agem"))
    start = run("START")
    assert_close(G, start["rows"], atol=0)
    assert_close(g, start["g"], atol=0)
    assert (G @ g)[1] < -0.1 < 0.1 < (G @ g)[0]  # g violates task 2 only
    assert (G @ agem)[1] < -0.1
    assert_close((G @ x)[1], 0.0, atol=1e-12)
    assert (G @ x)[0] > 0.1


def contrast(one, other):
    """Return the contrast of two colours, as WCAG defines it."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(colour) / 255]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("colours", "ground"), [("LIGHT", "#ffffff"), ("DARK", "#131416")])
def test_labels_of_the_pictures_have_contrast(colours, ground):
    """On the page, and where the cone has most of its colour."""

    def parse(colour):
        return np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)])

    found, ground = HERO[colours], parse(ground)
    cone = 0.42 * parse(found.cone) + 0.58 * ground
    for text, behind in [("ink", ground), ("agem", ground), ("exact", cone), ("soft", cone)]:
        assert contrast(parse(getattr(found, text)), behind) >= 4.5, text
