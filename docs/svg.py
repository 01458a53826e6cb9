"""
# Drawing: a figure as SVG

`Drawing` collects shapes and texts, and writes them as one SVG element of a page.

All figures of the book use the same colours for the same things, so that a reader learns them once.
A shape names its colour by its meaning, `whole` for instance, and the style sheet says which colour
that is in the light and in the dark theme:

| colour | meaning |
|---|---|
| `shard` | a shard, at rest |
| `flight` | an all-gather in flight |
| `whole` | full parameters |
| `grad` | full gradients |
| `reduce` | a reduce-scatter in flight |
| `reduced` | the gradient of a shard |
| `state` | optimizer states |
| `compute` | computation |
| `file` | a file |

Text is never written in these colours, because not all of them are readable on the page. A shape is
pale with a border in its full colour, so that text on it can be read in both themes. Whatever is in
flight is striped, so that figures can be read without colours too.

**Run this**: `make docs`.

**Not covered, and what that costs**: text is not measured. A letter is taken to be 0.54 times as
wide as the font is high, as in a wide font, so some texts have more room than they need.
"""

from html import escape
from typing import Any

FONT = 13  # height of text, in the units of the drawing; a unit is a pixel at full width
LETTER = 0.54  # width of a letter, in heights
STRIPED = ("flight", "reduce")
WIDE = 640  # width of a drawing for wide windows
PHONE = 360  # width of a drawing for phones
BAR = 22  # height of a bar with a text


class Drawing:
    """
    ## A drawing of a fixed size
    """

    def __init__(self, width: float, height: float, title: str, about: str):
        """
        ### Begin an empty drawing

        * `title` and `about` are read aloud by screen readers; `about` tells everything that the
          figure shows
        """
        self.width = width
        self.height = height
        self.title = title
        self.about = about
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, color: str, *,
             pale: bool = True, border: bool = True) -> None:
        """
        ### A rectangle

        * `color` is a meaning, or `muted`, `fg`, `line`, `accent`
        """
        name = paint(color)
        fill = f"url(#stripes-{color})" if color in STRIPED else name
        opacity = "" if color in STRIPED or not pale else "fill-opacity:.28;"
        stroke = f"stroke:{name};stroke-width:1.3" if border else "stroke:none"
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.1):.1f}" '
                          f'height="{height:.1f}" rx="2" style="fill:{fill};{opacity}{stroke}"/>')

    def text(self, x: float, y: float, text: str, color: str = "fg", *, anchor: str = "start",
             bold: bool = False, size: float = FONT, mono: bool = False) -> None:
        """
        ### A line of text

        * `x, y` is the point on the baseline at which it begins; with another `anchor`, its middle
          or its end
        * `color` is `fg` or `muted`

        Raises `ValueError` if it does not fit into the drawing.
        """
        wide = len(text) * size * (0.62 if mono else LETTER)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if left < -1 or left + wide > self.width + 1:
            raise ValueError(f"the text {text!r} does not fit into a drawing that is {self.width} "
                             f"wide: it goes from {left:.0f} to {left + wide:.0f}")
        more = "font-weight:600;" * bold + "font-family:var(--mono);" * mono
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
                          f'font-size="{size:g}" style="{more}fill:{paint(color)}">'
                          f"{escape(text)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = "muted", *,
             dashed: bool = False, arrow: bool = False, width: float = 1.3) -> None:
        """
        ### A line, or an arrow that ends at the second point
        """
        dash = "stroke-dasharray:4 3;" * dashed
        style = f"fill:none;{dash}stroke:{paint(color)};stroke-width:{width:g}"
        self.parts.append(f'<path d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}" style="{style}"/>')
        if arrow:
            length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1
            dx = (x2 - x1) / length
            dy = (y2 - y1) / length
            corners = " ".join(f"{x2 - 7 * dx + side * dy:.1f},{y2 - 7 * dy - side * dx:.1f}"
                               for side in (-3.5, 3.5))
            self.parts.append(f'<polygon points="{x2:.1f},{y2:.1f} {corners}" '
                              f'style="fill:{paint(color)}"/>')

    def tag(self, text: str) -> None:
        """
        ### Anything else, as SVG
        """
        self.parts.append(text)

    def over(self, x: float, y: float, text: str, **how: Any) -> None:
        """
        ### A line of text on stripes, which stay away from its letters

        * `how` is as for `text`
        """
        self.text(x, y, text, **how)
        halo = "paint-order:stroke;stroke:var(--bg);stroke-width:5px;stroke-linejoin:round;"
        self.parts[-1] = self.parts[-1].replace('style="', f'style="{halo}', 1)

    def inside(self, x: float, y: float, text: str, color: str, **how: Any) -> None:
        """
        ### A line of text in the middle of a shape of this colour
        """
        put = self.over if color in STRIPED else self.text
        put(x, y, text, anchor="middle", **how)

    def __str__(self) -> str:
        """
        ### The SVG element
        """
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} '
                f'{self.height:g}" role="img" font-family="system-ui, sans-serif" '
                f'font-size="{FONT}">\n<title>{escape(self.title)}</title>\n'
                f"<desc>{escape(self.about)}</desc>\n" + "\n".join(self.parts) + "\n</svg>")


def paint(color: str) -> str:
    """
    ## The CSS property of a colour
    """
    own = ("fg", "muted", "line", "accent", "bg", "bad")
    return f"var(--{color})" if color in own else f"var(--c-{color})"


def stripes() -> str:
    """
    ## The patterns of whatever is in flight, once for each page
    """
    patterns = "".join(
        f'<pattern id="stripes-{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" style="fill:{paint(name)};'
        f'fill-opacity:.18"/><rect width="2.5" height="6" style="fill:{paint(name)};'
        'fill-opacity:.75"/></pattern>' for name in STRIPED)
    return ('<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
            f"{patterns}</defs></svg>")


def origin(run: dict[str, Any], ranks: int | str) -> str:
    """
    ## The end of a caption: the run that the figure is drawn from
    """
    return f"{ranks} ranks, {run['device']}, torch {run['torch']}, commit {run['commit']}"


def figure(wide: Drawing | str, phone: Drawing | str, caption: str) -> str:
    """
    ## A figure of a page: one drawing for wide windows and one for phones

    * `caption` is text; it ends with the origin of the run
    """
    return (f'<figure class="drawn"><div class="on-wide">{wide}</div><div class="on-phone">{phone}'
            f"</div><figcaption>{escape(caption)}</figcaption></figure>")
