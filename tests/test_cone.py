"""The page docs/_static/cone.html, its mathematics against `project`; and the pictures of docs/hero.py."""

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from problems import assert_close

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
    kind = rng.choice(["generic", "repeated", "opposite", "nearly parallel", "nearly opposite", "zero"])
    turned = 0.01 * np.array([-G[0, 1], G[0, 0]]).round() + G[0]
    if kind != "generic":
        G[-1] = {
            "repeated": 2 * G[0],
            "opposite": -G[0],
            "nearly parallel": turned,
            "nearly opposite": -turned,
            "zero": 0 * G[0],
        }[kind].round(2)
    equality, h = np.zeros(3, bool), np.zeros(3)
    if rng.random() < 0.25:
        equality[rng.integers(t)] = True
    if rng.random() < 0.4:
        slack = rng.choice([0.0, 0.5], t)
        slack[equality[:t]] = 0.0
        h[:t] = G @ rng.uniform(-1, 1, 2) - slack
        h[:t][~G.any(axis=1)] = 0.0
        if rng.random() < 0.4:
            h[:t] = rng.uniform(-1, 1, t)
        h = np.clip(h, -2.4, 2.4).round(2)  # which often contradicts an opposite row or an equality
    return {
        "g": rng.uniform(-2, 2, 2).round(2).tolist(),
        "rows": G.tolist(),
        "h": h.tolist(),
        "equality": equality.tolist(),
        "margin": float(rng.choice([0.0, 0.0, 0.25, 0.5])),
        "metric": float(rng.choice([1.0, 1.0, 0.05, 8.0])),
        "scale": float(rng.choice([1.0, 0.1, 0.01, 0.001])),
        "steps": int(rng.integers(0, 12)),
    }


CASES = [draw(seed) for seed in range(200)]


def arguments(case):
    """Return G, g, the options of `project`, and the rows that are equalities, of a state."""
    G, g = np.array(case["rows"]), np.array(case["g"])
    h, equality = np.array(case["h"])[: len(G)], np.array(case["equality"])[: len(G)]
    options = {"margin": case["margin"], "metric": np.array([case["metric"], 1.0])}
    if h.any():
        options["h"] = case["scale"] ** 2 * h
    return G, g, options, h, equality


def or_none(projection, *arguments, **options):
    """Return what a projection returns, and None if there is none."""
    try:
        return projection(*arguments, **options)
    except ValueError as error:
        if "infeasible" not in str(error):
            raise


def test_cases_are_of_every_kind():
    infeasible = 0
    for case in CASES:
        G, g, options, _, equality = arguments(case)
        infeasible += or_none(project, G, g, equality=equality, **options) is None
    assert infeasible > 5
    assert sum(len(case["rows"]) == 3 for case in CASES) > 50
    for name, plain in {"margin": 0, "metric": 1, "scale": 1}.items():
        assert sum(case[name] != plain for case in CASES) > 50
    assert sum(any(case["equality"]) for case in CASES) > 20
    assert sum(any(case["h"]) for case in CASES) > 50


@pytest.mark.parametrize("part", range(10))
def test_geometry_is_what_project_computes(run, part):
    for case in CASES[part::10]:
        shape = run(f"geometry({json.dumps(case)})")
        G, g, options, h, equality = arguments(case)
        scale = case["scale"]
        size = np.linalg.norm(g) + np.abs(h).max() + case["margin"] * np.abs(G).sum()

        def computed(method, **more):
            return project(scale * G, scale * g, method=method, **options, **more) / scale  # noqa: B023

        if (x := or_none(computed, "exact", equality=equality)) is None:
            assert shape["exact"] is None
        else:
            assert_close(shape["exact"]["x"], x, atol=1e-11 * size * max(1, case["metric"]))
            check_optimality(shape["exact"], G, g, options, h, equality)
        takes_no_equality = equality.any()
        assert (shape["agem"] is None) == takes_no_equality
        assert (shape["recipe"] is None) == (takes_no_equality or h.any())
        if shape["agem"]:
            check_answer(shape["agem"], computed("agem"), G, g, h, equality, size)
        if shape["recipe"]:
            memory_strength = options.pop("margin")
            check_answer(shape["recipe"], computed(GEM2017(memory_strength)), G, g, h, equality, size)
            options["margin"] = memory_strength
        assert len(shape["steps"]) == case["steps"] + 1
        for k, step in enumerate(shape["steps"][1:], 1):
            x = computed(PGD(steps=k), equality=equality)
            check_answer(step, x, G, g, h, equality, size)


def check_optimality(exact, G, g, options, h, equality):
    """Multipliers are not unique for dependent rows: their optimality conditions, not their values."""
    lam, x = np.array(exact["multipliers"]), np.array(exact["x"])
    base = np.where(equality, 0.0, options["margin"])
    size = 1e-8 * (1 + np.abs(lam).max())
    assert_close(x, g + G.T @ lam / options["metric"], atol=size * max(1, 1 / options["metric"][0]))
    slack = G @ x - h
    assert_close(exact["slack"], slack, atol=1e-12)
    assert (slack >= -size).all()
    assert np.abs(slack[equality]).max(initial=0.0) <= size
    assert ((lam - base)[~equality] >= -size).all()
    assert np.abs(((lam - base) * slack)[~equality]).max(initial=0.0) <= size * (1 + np.abs(lam).max())


def check_answer(answer, x, G, g, h, equality, size):
    """The point, the rows that it violates, and how much of the largest violation is left."""
    assert_close(answer["x"], x, atol=1e-11 * size)
    inverse = np.array([0.0 if not row.any() else 1 / np.linalg.norm(row) for row in G])

    def violation(point):
        s = (G @ point - h) * inverse
        return np.where(equality, np.abs(s), np.maximum(0.0, -s))

    off = violation(x)
    assert set(np.flatnonzero(off > 1e-6)) <= set(answer["violated"]) <= set(np.flatnonzero(off > 1e-12))


def test_what_is_left_of_a_violation(run):
    """One row of norm n keeps ridge / (n^2 + ridge) of its violation, in any direction of it."""
    for scale in (1.0, 0.1, 0.01, 0.001):
        state = {
            **CASES[0],
            "rows": [[0.6, 0.8]],
            "g": [-1, 0],
            "h": [0],
            "equality": [False],
            "margin": 0,
            "metric": 1,
            "scale": scale,
        }
        shape = run(f"geometry({json.dumps(state)})")
        assert shape["recipe"]["left"] == pytest.approx(1e-3 / (scale**2 + 1e-3))
        assert shape["agem"]["left"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("part", range(4))
def test_region_holds_the_points_that_satisfy_all_rows(run, part, rng):
    points = rng.uniform(-2.4, 2.4, (100, 2))
    for case in CASES[part::4]:
        G, _, _, h, equality = arguments(case)
        if equality.any():
            continue
        polygon = np.array(run(f"geometry({json.dumps(case)}).region")).reshape(-1, 2)
        slack = points @ G.T - h
        following = np.roll(polygon, -1, axis=0)
        edges, to_points = following - polygon, points[:, None] - polygon
        turns = edges[:, 0] * to_points[..., 1] - edges[:, 1] * to_points[..., 0]
        in_polygon = (turns >= -1e-9).all(axis=1) & bool(
            np.ptp(polygon, axis=0).all() if len(polygon) else False
        )
        clear = (np.abs(slack) > 1e-6)[:, G.any(axis=1)].all(axis=1)  # of every boundary
        assert (in_polygon == (slack >= 0).all(axis=1))[clear].all()


def test_region_of_an_equality_is_a_part_of_its_line(run):
    state = {**CASES[0], "rows": [[0, 1], [1, 0]], "h": [0.5, -1, 0], "equality": [True, False, False]}
    region = np.array(run(f"geometry({json.dumps(state)}).region"))
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
            x = eval(call, names)
            assert_close(json.loads(result), x, atol=1e-9 * case["scale"], rtol=6e-3)


def test_address_holds_the_state(run):
    for case in CASES:
        found = run(f"read('#' + write({json.dumps(case)}, 'ai'))")
        t = len(case["rows"])
        assert found["shown"] == "ai"
        for name in ("h", "equality"):
            assert found["state"].pop(name)[:t] == case[name][:t]
        assert found["state"] == {name: case[name] for name in found["state"]}
    assert run("write(START, 'ar')") == ""
    for shown in ("", "a", "r", "ari"):
        assert run(f"read(write(START, '{shown}'))")["shown"] == shown


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


def test_picture_without_scripts_is_that_of_the_start(run):
    scene = run("picture(geometry(START), 'ar')")
    text = PAGE.read_text(encoding="utf-8")
    assert f'<g id="scene">{scene}</g>' in text, f"Put this into the scene of cone.html:\n{scene}"


def test_page_needs_nothing_else():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 60_000
    for reference in (
        "src=",
        "<link",
        "@import",
        "url(",
        "fetch(",
        "XMLHttpRequest",
        "http:",
        "https:",
        "import ",
    ):
        assert reference not in text


HERO = runpy.run_path(str(PAGE.parents[1] / "hero.py"))
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.mark.parametrize("name", HERO["FILES"])
def test_pictures_are_those_that_the_script_draws(name):
    drawn = HERO["FILES"][name]()
    committed = (PAGE.parent / name).read_text(encoding="utf-8")
    assert NUMBER.sub("0", committed) == NUMBER.sub("0", drawn), (
        f"Run python docs/hero.py to draw {name} again."
    )
    numbers = [np.array(NUMBER.findall(text), dtype=float) for text in (committed, drawn)]
    assert_close(*numbers, atol=0.11)  # one unit of the last digit


@pytest.mark.parametrize("name", HERO["FILES"])
def test_pictures_have_a_title_and_readable_labels(name):
    root = ElementTree.fromstring((PAGE.parent / name).read_text(encoding="utf-8"))
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{namespace}title").text
    assert root.find(f"{namespace}desc").text
    assert {root.find(namespace + tag).get("id") for tag in ("title", "desc")} == set(
        root.get("aria-labelledby").split()
    )
    if name.startswith("hero"):
        assert root.get("width") == "720"
        assert float(root.get("font-size")) >= 13
        texts = {element.text for element in root.iter(f"{namespace}text")}
        assert {"g, the gradient", "x, the projection", "A-GEM", "violates task 2"} <= texts


def test_what_the_pictures_say_is_so(run):
    G, g, x, agem = (HERO[name] for name in ("G", "g", "x", "agem"))
    start = run("START")
    assert_close(G, start["rows"], atol=0)
    assert_close(g, start["g"], atol=0)
    assert (G @ g)[1] < -0.1  # g violates task 2 only
    assert (G @ g)[0] > 0.1
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
