"""The page docs/_static/cone.html in a real browser: pointer, keyboard, screen reader, themes, sizes."""

import http.server
import re
import threading
from functools import partial

import numpy as np
import pytest
from chromium import BROWSER, Chromium
from test_cone import PAGE

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome, from system packages")

ADDRESS = PAGE.as_uri()
THIRD = "#G=0.42,0.91;1,-0.09;0.8,-0.6"


@pytest.fixture(scope="module")
def browser():
    with Chromium() as found:
        yield found


@pytest.fixture
def page(browser):
    """Return the browser; afterwards the page must have had no error and written nothing to the console."""
    browser.errors.clear()
    yield browser
    assert browser.errors == []


def centre(page, selector):
    """Return the middle of an element in the window."""
    return page.evaluate(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )


def count(page, selector, condition="true"):
    """Return how many elements e satisfy a condition."""
    return page.evaluate(f"[...document.querySelectorAll('{selector}')].filter((e) => {condition}).length")


def handle(i):
    return f".handle:nth-child({i + 1})"


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("width", [1280, 360])
def test_dragging_moves_the_tip_with_mouse_and_finger(page, i, width):
    page.open(ADDRESS + THIRD, width=width)
    before = page.evaluate("vectors()")
    unit = page.evaluate("document.querySelector('svg.plane').getScreenCTM().a * UNIT")
    page.drag(centre(page, handle(i) + " .knob"), (unit / 2, -unit / 4), finger=width == 360)
    after = page.evaluate("vectors()")
    expected = np.zeros((4, 2))
    expected[i] = 0.5, 0.25
    moved = np.array(after) - np.array(before)
    np.testing.assert_allclose(moved, expected, atol=1.5 / unit + 0.011)  # a pixel, and what is rounded
    numbers = f"[...tableRows[{i}].querySelectorAll('input[type=number]')].slice(0, 2).map((e) => +e.value)"
    assert page.evaluate(numbers) == after[i]


def test_keys_move_the_focused_handle(page):
    page.open(ADDRESS + "#g=0,0", height=500)  # lower than the page: keys must not scroll it
    page.evaluate(f"document.querySelector('{handle(0)}').focus()")
    steps = {"ArrowRight": (0.05, 0), "ArrowUp": (0, 0.05), "ArrowLeft": (-0.05, 0), "ArrowDown": (0, -0.05)}
    steps |= {"PageUp": (0, 0.5), "PageDown": (0, -0.5), "Home": (-9, 0), "End": (9, 0)}
    place = np.zeros(2)
    for key, step in steps.items():
        for shift in (False, True) if key.startswith("Arrow") else (False,):
            page.press(key, shift)
            place = np.clip(place + np.array(step) * (10 if shift else 1), -2.4, 2.4)
            np.testing.assert_allclose(page.evaluate("state.g"), place, atol=1e-9)
    assert page.evaluate("scrollY") == 0


def test_values_that_a_screen_reader_hears(page):
    """Names from the browser's accessibility tree, which DevTools shows without aria-valuetext."""
    page.open(ADDRESS + "#s=0.01")
    page.evaluate("$('numbers').open = true; 0")
    nodes = [n for n in page.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    for role, some in {
        "slider": {"Gradient g", "Task 1", "Scale of all gradients", "Margin (memory strength)"},
        "spinbutton": {"Gradient g, right", "Task 2, right-hand side h"},
        "checkbox": {"A-GEM", "GEM 2017, ridge 0.001", "I-GEM", "Task 1, equality"},
        "button": set(),
        "link": set(),
    }.items():
        names = {n["name"]["value"].strip() for n in nodes if n["role"]["value"] == role}
        assert some <= names, role
        assert "" not in names, role
    spoken = [page.evaluate(f"document.querySelector('{handle(i)}').ariaValueText") for i in range(3)]
    assert spoken[0] == "g: right \u22121.69, up 1.41; violates task 2"
    assert spoken[2] == "task 2: right 1.00, up \u22120.09; g violates it"


@pytest.mark.parametrize("width", [360, 639, 640, 1280])
@pytest.mark.parametrize("address", ["", THIRD + "&show=ari&m=0.5&h=-0.25,-0.25,-0.25&w=0.12&s=0.001"])
def test_everything_fits_into_the_window(page, width, address):
    page.open(ADDRESS + address, width=width)
    page.evaluate("$('numbers').open = true; 0")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    box = "e.getBoundingClientRect()"
    outside = f"{box}.width && ({box}.left < 0 || {box}.right > innerWidth)"
    assert count(page, "a, button, input, .reading, small, td, th, pre", outside) == 0
    assert count(page, "input[type=number], pre, .reading", "e.scrollWidth > e.clientWidth") == 0
    small = "parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a < 10"
    assert count(page, "svg.plane text", small) == 0
    assert count(page, ".handle .hit", f"{box}.width && {box}.width < 24") == 0  # pixels that a finger needs


def test_without_scripts_the_picture_is_there(page):
    page.open(ADDRESS, scripts=False)
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "A-GEM" in page.evaluate("document.querySelector('#scene').textContent")
    assert count(page, "#scene .exact.mark", "e.getBoundingClientRect().width > 5") == 1
    assert count(page, "#controls, nav", "e.getClientRects().length") == 0


@pytest.fixture
def site(tmp_path):
    """Serve a page with a theme, as furo sets it, that holds the cone in a frame; return its address."""
    (tmp_path / "cone.html").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    frame = '<iframe name="cone" src="cone.html" height="90"></iframe><a href="cone.html#s=0.01" target="cone">s</a>'
    text = f'<!DOCTYPE html><link rel="icon" href="data:,"><body data-theme="dark">{frame}'
    (tmp_path / "index.html").write_text(text, encoding="utf-8")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


def test_frame_follows_the_theme_of_its_page_and_is_as_high_as_it_needs(page, site):
    page.open(site)
    inner = "document.querySelector('iframe').contentWindow"
    for theme in ("dark", "light"):
        page.evaluate(f"document.body.dataset.theme = '{theme}'; 0")
        ground = page.evaluate(f"getComputedStyle({inner}.document.documentElement).backgroundColor")
        assert (np.mean([float(v) for v in re.findall(r"[\d.]+", ground)[:3]]) > 127) == (theme == "light")
    height = "document.querySelector('iframe').clientHeight"
    page.wait_for(f"{height} > 400 && {inner}.document.documentElement.scrollHeight <= {height} + 1")
    page.evaluate("document.querySelector('a').click()")
    page.wait_for(f"{inner}.location.hash === '#s=0.01' && {inner}.eval('state.scale') === 0.01")
