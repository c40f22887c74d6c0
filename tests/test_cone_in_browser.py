"""The page docs/_static/cone.html in a real browser: pointer, keyboard, screen reader, themes, sizes."""

import http.server
import re
import threading
from functools import partial

import numpy as np
import pytest
from chromium import BROWSER, Chromium
from test_cone import PAGE, contrast

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium or Chrome, from the system's packages"
)

ADDRESS = PAGE.as_uri()
THIRD = "#G=0.42,0.91;1,-0.09;0.8,-0.6"
STATE = "JSON.parse(JSON.stringify(state))"


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


def handle(i):
    return f".handle:nth-child({i + 1})"


def value_text(page, i):
    return page.evaluate(f"document.querySelector('{handle(i)}').getAttribute('aria-valuetext')")


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("width", [1280, 360])
def test_dragging_moves_the_tip_with_mouse_and_finger(page, i, width):
    page.open(ADDRESS + THIRD, width=width)
    before = page.evaluate("vectors()")
    unit = page.evaluate("document.querySelector('svg.plane').getScreenCTM().a * UNIT")
    page.drag(centre(page, handle(i) + " .knob"), (unit / 2, -unit / 4), finger=width == 360)
    after = page.evaluate("vectors()")
    moved = np.array(after) - np.array(before)
    expected = np.zeros((4, 2))
    expected[i] = 0.5, 0.25
    np.testing.assert_allclose(moved, expected, atol=1.5 / unit + 0.011)  # a pixel, and what is rounded
    shown = page.evaluate(
        f"[...tableRows[{i}].querySelectorAll('input[type=number]')].slice(0, 2).map((e) => +e.value)"
    )
    assert shown == after[i]


def test_dragging_ends_with_the_button_and_at_the_border(page):
    page.open(ADDRESS)
    page.drag(centre(page, handle(0) + " .knob"), (-3000, -3000))
    assert page.evaluate("state.g") == [-2.4, 2.4]
    x, y = centre(page, handle(0))
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 3, y=y + 3)
    assert page.evaluate("state.g") == [-2.4, 2.4]


def test_keys_move_the_focused_handle(page):
    page.open(ADDRESS + "#g=0,0", height=500)  # lower than the page: keys must not scroll it
    page.evaluate(f"document.querySelector('{handle(0)}').focus()")
    place = [0.0, 0.0]
    for key, shift, (right, up) in [
        ("ArrowRight", False, (0.05, 0)),
        ("ArrowUp", False, (0, 0.05)),
        ("ArrowLeft", False, (-0.05, 0)),
        ("ArrowDown", False, (0, -0.05)),
        ("PageUp", False, (0, 0.5)),
        ("PageDown", False, (0, -0.5)),
        ("ArrowRight", True, (0.5, 0)),
        ("Home", False, (-9, 0)),
        ("End", False, (9, 0)),
    ]:
        page.press(key, shift)
        place = np.clip([place[0] + right, place[1] + up], -2.4, 2.4)
        np.testing.assert_allclose(page.evaluate("state.g"), place, atol=1e-9)
        assert page.evaluate("+document.activeElement.getAttribute('aria-valuenow')") == page.evaluate(
            "state.g[0]"
        )
    assert page.evaluate("document.activeElement.getAttribute('class')") == "handle of-g"
    assert page.evaluate("scrollY") == 0


def test_tabulator_reaches_every_control_once(page):
    page.open(ADDRESS)
    controls = page.evaluate(
        "[...document.querySelectorAll('a, button, input, [tabindex]')].filter((e) => e.getClientRects().length).length"
    )
    page.evaluate(
        "window.seen = []; window.bare = 0; addEventListener('focusin', (e) => { seen.push(e.target); bare += getComputedStyle(e.target).outlineStyle === 'none' && !e.target.matches('.handle'); }); 0"
    )
    for _ in range(controls):
        page.press("Tab")
    assert page.evaluate("new Set(seen).size") == controls
    assert page.evaluate("bare") == 0  # all show the focus; handles with a ring


def test_values_that_a_screen_reader_hears(page):
    """Names and numbers from the browser's accessibility tree, which DevTools shows without aria-valuetext."""
    page.open(ADDRESS + "#s=0.01")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]

    def of_role(role):
        return [n for n in nodes if not n["ignored"] and n["role"]["value"] == role]

    sliders = {n["name"]["value"]: n for n in of_role("slider")}
    names = [
        "Gradient g",
        "Task 1",
        "Task 2",
        "Scale of all gradients",
        "Margin (memory strength)",
        "Adam's metric",
    ]
    assert sorted(sliders) == sorted(names)
    assert sliders["Gradient g"]["value"]["value"] == pytest.approx(-1.69)
    limits = {p["name"]: p["value"].get("value") for p in sliders["Task 1"]["properties"]}
    assert [limits["valuemin"], limits["valuemax"]] == pytest.approx([-2.4, 2.4])
    assert value_text(page, 0) == "g: right \u22121.69, up 1.41; violates task 2"
    assert value_text(page, 1) == "task 1: right 0.42, up 0.91; g keeps it"
    assert value_text(page, 2) == "task 2: right 1.00, up \u22120.09; g violates it"
    assert page.evaluate("$('scale').getAttribute('aria-valuetext')") == "0.01"
    numbers = [n["name"]["value"] for n in of_role("spinbutton")]
    assert {"Gradient g, right", "Gradient g, up", "Task 2, right-hand side h"} <= set(numbers)
    boxes = [n["name"]["value"] for n in of_role("checkbox")]
    assert {"A-GEM", "GEM 2017, ridge 0.001", "I-GEM", "Task 1, equality"} <= set(boxes)
    for role in ("slider", "spinbutton", "checkbox", "button", "link"):
        assert all(n["name"]["value"].strip() for n in of_role(role)), role
    assert len(of_role("status")) == 1


def test_status_says_what_happened_at_most_once_a_second(page):
    page.open(ADDRESS)
    page.wait_for("$('status').textContent.includes('A-GEM violates task 2')")
    page.evaluate("""(async () => {
        window.said = [];
        new MutationObserver(() => said.push([Date.now(), $('status').textContent])).observe($('status'), { childList: true });
        for (let k = 0; k < 130; k++) {
            change(() => { state.g = [1, k / 100]; });
            await new Promise((next) => setTimeout(next, 10));
        }
    })()""")
    page.wait_for(
        "said.length && said[said.length - 1][1].startsWith('g violates no task. x = (1.00, 1.29)')"
    )
    times = page.evaluate("said.map(([when]) => when)")
    assert len(times) >= 2
    assert min(np.diff(times)) > 900


def test_typed_numbers_are_understood_and_limited(page):
    page.open(ADDRESS)
    page.evaluate(
        "tableRows[0].querySelector('[data-x]').select(); tableRows[0].querySelector('[data-x]').focus()"
    )
    for text, understood in [("1.50", 1.5), ("-", 1.5), ("", 1.5), ("77", 2.4)]:
        page.evaluate("document.activeElement.select()")
        page.call("Input.insertText", text=text) if text else page.evaluate(
            "document.activeElement.value = ''"
        )
        assert page.evaluate("state.g[0]") == understood
        assert page.evaluate("document.activeElement.value") == text.strip("-")  # as typed
    page.evaluate("document.activeElement.blur()")
    assert page.evaluate("tableRows[0].querySelector('[data-x]').value") == "2.4"


def test_address_opens_the_state_and_follows_it(page):
    page.open(ADDRESS + "#g=-1,0.5&m=0.25&show=i&k=4")
    assert page.evaluate("[state.g, state.margin, shown, state.steps]") == [[-1, 0.5], 0.25, "i", 4]
    page.evaluate("$('scale').value = -2; $('scale').dispatchEvent(new Event('input')); 0")
    page.wait_for("location.hash.includes('s=0.01')")
    page.evaluate("location.hash = '#w=4'; 0")
    page.wait_for("state.metric === 4")
    assert page.evaluate("[state.g, state.margin, shown]") == [[-1.69, 1.41], 0, "ar"]


@pytest.mark.parametrize("link", range(8))
def test_every_state_to_start_from_has_an_answer(page, link):
    page.open(ADDRESS + "#g=2,2&s=0.1")
    page.evaluate(f"document.querySelectorAll('nav a')[{link}].click()")
    page.wait_for("String(state.g) !== '2,2'")
    assert page.evaluate("geometry(state).exact !== null")


def test_third_task_comes_and_goes(page):
    page.open(ADDRESS)
    for tasks, hidden in [(3, False), (2, True)]:
        page.evaluate("$('third').click()")
        assert page.evaluate("state.rows.length") == tasks
        assert page.evaluate("tableRows[3].getClientRects().length === 0") is hidden
        assert page.evaluate(f"document.querySelector('{handle(3)}').getClientRects().length === 0") is hidden


def test_contradiction_is_said(page):
    page.open(ADDRESS + "#G=1,0;-1,0&h=0.5,0.5")
    assert "project says which" in page.evaluate("$('said-exact').textContent")
    page.wait_for("$('status').textContent.startsWith('These constraints contradict each other')")


def test_steps_play_only_when_asked(page):
    page.open(ADDRESS + "#show=i&k=7")
    assert page.evaluate("[state.steps, playing]") == [7, 0]
    page.evaluate("$('play').click()")
    assert page.evaluate("state.steps") == 0
    page.wait_for("state.steps >= 2")
    assert page.evaluate("$('play').textContent") == "Stop"
    page.evaluate("$('play').click()")
    assert page.evaluate("playing") == 0


def test_reduced_motion_jumps_to_the_end(page):
    page.open(ADDRESS + "#show=i&k=7", motion="reduce")
    page.evaluate("$('play').click()")
    assert page.evaluate("[state.steps, playing]") == [20, 0]
    page.open(ADDRESS)
    assert page.evaluate("document.getAnimations().length") == 0


def colours(page, *expressions):
    found = page.evaluate(f"[{', '.join(expressions)}]")
    return [[float(v) for v in re.findall(r"[\d.]+", colour)[:3]] for colour in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_and_contrast(page, scheme):
    page.open(ADDRESS + "#show=ari", scheme=scheme)
    [ground, cone, well] = colours(
        page,
        "getComputedStyle(document.documentElement).backgroundColor",
        "getComputedStyle(document.querySelector('.region')).fill",
        "getComputedStyle($('python')).backgroundColor",
    )
    assert (np.mean(ground) > 127) == (scheme == "light")
    for look in ("g", "exact", "agem", "recipe", "igem", "row"):
        [text] = colours(page, f"getComputedStyle(document.querySelector('text.{look}')).fill")
        assert contrast(text, ground) >= 4.5, look
        assert contrast(text, cone) >= 3, look  # arrows and marks; texts have a halo of the ground
    [inside, soft, ink] = colours(
        page,
        "getComputedStyle(document.querySelector('text.inside')).fill",
        "getComputedStyle(document.querySelector('.soft')).color",
        "getComputedStyle($('python')).color",
    )
    assert contrast(inside, cone) >= 4.5
    assert contrast(soft, ground) >= 4.5
    assert contrast(ink, well) >= 4.5


def test_answers_differ_by_more_than_colour(page):
    page.open(ADDRESS + "#show=ari")
    dashes = page.evaluate(
        "['exact', 'agem', 'recipe', 'igem'].map((look) => getComputedStyle(document.querySelector(`#scene .${look}.shaft`)).strokeDasharray)"
    )
    assert len(set(dashes)) == 4
    texts = page.evaluate("[...document.querySelectorAll('#scene text')].map((t) => t.textContent)")
    assert {"g", "x", "A-GEM", "GEM 2017", "I-GEM, 3", "task 1", "task 2"} <= set(texts)


@pytest.mark.parametrize("width", [360, 390, 639, 640, 1280])
@pytest.mark.parametrize("address", ["", THIRD + "&show=ari&m=0.5&h=-0.25,-0.25,-0.25&w=0.12&s=0.001"])
def test_everything_fits_into_the_window(page, width, address):
    page.open(ADDRESS + address, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        "[...document.querySelectorAll('a, button, input, .reading, small, td, th, pre')].filter((e) => "
        "{ const b = e.getBoundingClientRect(); return b.width && (b.left < 0 || b.right > innerWidth); }).length"
    )
    assert outside == 0
    cut = page.evaluate(
        "[...document.querySelectorAll('input[type=number], pre, .reading')].filter((e) => e.scrollWidth > e.clientWidth).length"
    )
    assert cut == 0
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg.plane text')].map((e) => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)"
    )
    assert min(sizes) >= 10
    targets = page.evaluate(
        "[...document.querySelectorAll('.handle .hit')].map((e) => e.getBoundingClientRect().width).filter(Boolean)"
    )
    assert min(targets) >= 24  # pixels that a finger needs


def test_without_scripts_the_picture_is_there(page):
    page.open(ADDRESS, scripts=False)
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "A-GEM" in page.evaluate("document.querySelector('#scene').textContent")
    assert page.evaluate("document.querySelector('#scene .exact.mark').getBoundingClientRect().width > 5")
    assert page.evaluate("document.querySelector('#controls').getClientRects().length") == 0
    assert page.evaluate("document.querySelector('nav').getClientRects().length") == 0


@pytest.fixture
def site(tmp_path):
    """Serve a page with a theme, as furo sets it, that holds the cone in a frame; return its address."""
    (tmp_path / "cone.html").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "index.html").write_text(
        '<!DOCTYPE html><link rel="icon" href="data:,"><body data-theme="dark"><iframe name="cone" src="cone.html" height="90"></iframe>'
        '<a href="cone.html#s=0.01" target="cone">scale</a>',
        encoding="utf-8",
    )

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    thread.join()
    server.server_close()


def test_frame_follows_the_theme_of_its_page_and_is_as_high_as_it_needs(page, site):
    page.open(site)
    inner = "document.querySelector('iframe').contentWindow"
    scheme = f"getComputedStyle({inner}.document.documentElement).backgroundColor"
    assert np.mean(colours(page, scheme)) < 127
    page.evaluate("document.body.dataset.theme = 'light'; 0")
    assert np.mean(colours(page, scheme)) > 127
    page.wait_for(
        f"document.querySelector('iframe').clientHeight > 400 && {inner}.document.documentElement.scrollHeight <= document.querySelector('iframe').clientHeight + 1"
    )
    page.evaluate("document.querySelector('a').click()")
    page.wait_for(f"{inner}.location.hash === '#s=0.01' && {inner}.eval('state.scale') === 0.01")
