"""Draw the picture of the projection: `python docs/hero.py` writes hero-light.svg and hero-dark.svg.

The gradients are those with which docs/_static/cone.html starts.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemproj import project

FOLDER = Path(__file__).parent / "_static"

G = np.array([[0.42, 0.91], [1.0, -0.09]])
g = np.array([-1.69, 1.41])
x = project(G, g)
agem = project(G, g, method="agem")


@dataclass(frozen=True)
class Colours:
    """Colours that people with any colour vision tell apart; dashes and marks differ as well."""

    ink: str
    soft: str
    exact: str
    agem: str
    cone: str


LIGHT = Colours(ink="#1d2127", soft="#4f5761", exact="#00639c", agem="#b44a00", cone="#56b4e9")
DARK = Colours(ink="#eef1f4", soft="#aab3be", exact="#6cc3f5", agem="#f3a033", cone="#2f8fc6")

TITLE = "A gradient, its projection, and the answer of A-GEM"
TEXT = (
    "Two earlier tasks leave a cone of directions that keep both. The gradient g of the new task points out "
    "of it. So does A-GEM's answer, which violates task 2. The projection x is the point of the cone "
    "that is nearest to g; it lies on the boundary."
)


@dataclass(frozen=True)
class Sheet:
    """A sheet of paper: its size, where the origin is, and the length of the unit, in pixels."""

    width: int
    height: int
    origin: tuple[float, float]
    unit: float
    colours: Colours

    def at(self, p: np.ndarray) -> np.ndarray:
        """Return the place of a point of the plane."""
        return np.array(self.origin) + self.unit * np.array([p[0], -p[1]])


def place(*points: np.ndarray) -> str:
    """Return points as coordinates of a path."""
    return "L".join(" ".join(f"{v:.1f}" for v in p) for p in points)


def arrow(sheet: Sheet, tip: np.ndarray, colour: str, width: float, gap: float, dashes: str = "none") -> str:
    """Return an arrow from the origin that ends a few pixels, `gap`, before a point of the plane."""
    start, end = sheet.at(np.zeros(2)), sheet.at(tip)
    along = (end - start) / np.linalg.norm(end - start)
    head = 4.5 * width**0.75
    end = end - gap * along
    foot, half = end - head * along, 0.45 * head * np.array([-along[1], along[0]])
    return (
        f'<path d="M{place(start, foot + along)}" fill="none" stroke="{colour}" stroke-width="{width:.1f}" '
        f'stroke-dasharray="{dashes}"/><path d="M{place(end, foot + half, foot - half)}z" fill="{colour}"/>'
    )


def cone(sheet: Sheet) -> str:
    """Return the cone, fading out, and its two edges, with hatches on the sides that they forbid."""
    origin, far = sheet.at(np.zeros(2)), 1.1 * sheet.width / sheet.unit
    corners, lines = [origin], []
    for row, other in (G, G[::-1]):
        along = np.array([-row[1], row[0]]) / np.linalg.norm(row)
        along *= np.sign(other @ along)  # the half of the line that keeps the other task
        inward = row / np.linalg.norm(row)
        corners.append(sheet.at(far * along))
        lines.append(f'<path d="M{place(origin, sheet.at(far * along))}" stroke-width="1.6"/>')
        lines.append(
            f'<path d="M{place(origin, sheet.at(-far * along))}" stroke-width="1.2" stroke-dasharray="2 5"/>'
        )
        ticks = [
            place(sheet.at(s * along), sheet.at(s * along - 8 / sheet.unit * (inward - 0.7 * along)))
            for s in np.arange(14 / sheet.unit, far, 14 / sheet.unit)
        ]
        lines.append(f'<path d="M{"M".join(ticks)}" stroke-width="1" opacity="0.6"/>')
    colour = sheet.colours
    x0, y0 = origin
    fade = "".join(
        f'<stop offset="{offset}" stop-color="{colour.cone}" stop-opacity="{opacity}"/>'
        for offset, opacity in ((0, 0.42), (0.6, 0.22), (1, 0))
    )
    hide = '<stop offset="0.72" stop-color="#fff"/><stop offset="1" stop-color="#000"/>'
    whole = f'width="{sheet.width}" height="{sheet.height}"'
    place_of = f'gradientUnits="userSpaceOnUse" cx="{x0}" cy="{y0}" r="{0.6 * sheet.width:.0f}"'
    return (
        f'<defs><radialGradient id="fade" {place_of}>{fade}</radialGradient>'
        f'<radialGradient id="hide" {place_of}>{hide}</radialGradient>'
        f'<mask id="near"><rect {whole} fill="url(#hide)"/></mask></defs>'
        f'<path d="M{place(*corners)}z" fill="url(#fade)"/>'
        f'<g mask="url(#near)" stroke="{colour.soft}" fill="none">{"".join(lines)}</g>'
    )


def way(sheet: Sheet) -> str:
    """Return the way from g to x, and the right angle at which it meets the edge."""
    along, back = x / np.linalg.norm(x), (g - x) / np.linalg.norm(g - x)
    start = sheet.at(g - 9 / sheet.unit * back)  # at the ring around g
    corner = [sheet.at(x + 15 / sheet.unit * p) for p in (-along, back - along, back)]
    return (
        f'<g fill="none" stroke="{sheet.colours.exact}" stroke-width="1.6"><path d="M{place(*corner)}"/>'
        f'<path d="M{place(start, sheet.at(x))}" stroke-dasharray="2 5" stroke-linecap="round"/></g>'
    )


def arrows(sheet: Sheet, width: float) -> str:
    """Return the three arrows, each with a mark of its own at the tip: a diamond, a ring and a disc."""
    colour, thin, r = sheet.colours, 0.8 * width, 1.9 * width
    diamond = sheet.at(agem) + 1.3 * r * np.array([[0, -1], [1, 0], [0, 1], [-1, 0]])
    ring, disc = (f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}"' for p in (sheet.at(g), sheet.at(x)))
    return (
        way(sheet)
        + arrow(sheet, agem, colour.agem, thin, r, f"{2.6 * width:.0f} {1.4 * width:.0f}")
        + f'<path d="M{place(*diamond)}z" fill="{colour.agem}"/>'
        + arrow(sheet, g, colour.ink, thin, r)
        + f'{ring} r="{0.85 * r:.1f}" fill="none" stroke="{colour.ink}" stroke-width="{0.7 * width:.1f}"/>'
        + arrow(sheet, x, colour.exact, 1.15 * width, r)
        + f'{disc} r="{1.15 * r:.1f}" fill="{colour.exact}"/>'
    )


def label(at: np.ndarray, right: float, down: float, colour: str, bold: str, plain: str) -> str:
    """Return two lines of text, the first of them bold, beside a place."""
    start = f'<text x="{at[0] + right:.0f}" fill="{colour}"'
    return (
        f'{start} y="{at[1] + down:.0f}" font-weight="650">{bold}</text>' * bool(bold)
        + f'{start} y="{at[1] + down + 22:.0f}">{plain}</text>'
    )


def svg(sheet: Sheet, *parts: str) -> str:
    """Return a file."""
    size = f'viewBox="0 0 {sheet.width} {sheet.height}" width="{sheet.width}" height="{sheet.height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title text"
 font-family="-apple-system, BlinkMacSystemFont, Segoe UI, Helvetica, Arial, sans-serif" font-size="17">
<title id="title">{TITLE}</title>
<desc id="text">{TEXT}</desc>
{chr(10).join(parts)}
</svg>
"""


def hero(colours: Colours) -> str:
    """Return the picture with its labels."""
    sheet = Sheet(660, 380, (328, 304), 146, colours)
    px, apex, colour = sheet.at(x), sheet.at(np.zeros(2)), sheet.colours
    return svg(
        sheet,
        cone(sheet),
        arrows(sheet, 4),
        label(sheet.at(g), -66, -40, colour.ink, "g, the gradient", "of the new task"),
        label(sheet.at(agem), 20, -4, colour.agem, "A-GEM", "violates task 2"),
        label(px, 22, -1, colour.exact, "x, the projection", "nearest to g, keeps both tasks"),
        label(px, 120, 116, colour.soft, "the cone", "keeps both tasks"),
        label(apex, 147, 33, colour.soft, "", "task 1"),
        label(apex, 40, -278, colour.soft, "", "task 2"),
    )


FILES = {
    "hero-light.svg": lambda: hero(LIGHT),
    "hero-dark.svg": lambda: hero(DARK),
}

if __name__ == "__main__":
    for name, drawing in FILES.items():
        (FOLDER / name).write_text(drawing(), encoding="utf-8")
