"""Draws `docs/_static/badges.svg`: version, status, oldest releases; from the packages' files.

python tools/badges.py            # writes it
python tools/badges.py --check    # says whether it is what it would write
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "_static" / "badges.svg"
STYLE = "text{font:12px system-ui,sans-serif;fill:#fff}"
STACK = ("jax", "flax", "optax")
COLOURS = ("#444c56", "#1158c7")  # of a label and of its value


def texts() -> list[tuple[str, str]]:
    """What each badge says: a label and its value."""
    projects = [
        tomllib.loads(path.read_text())["project"]
        for path in ROOT.glob("packages/*/pyproject.toml")
    ]
    core = next(project for project in projects if project["name"] == "opt-core")
    classifiers = "\n".join(core["classifiers"])
    [status] = re.findall(r"Development Status :: \d - (.*)", classifiers)
    pythons = re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    required = "\n".join(line for project in projects for line in project["dependencies"])
    floors = [(name, re.findall(rf"^{name}>=([\d.]+)", required, re.M)) for name in STACK]
    return [
        ("version", core["version"]),
        ("status", status.lower()),
        ("Python", f"{pythons[0]} to {pythons[-1]}"),
        *((name, f"≥ {min(versions, key=_numbers)}") for name, versions in floors),
    ]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def draw(badges: list[tuple[str, str]]) -> str:
    """The badges in rows of three, as one picture."""
    parts, ends = [], []
    for first in range(0, len(badges), 3):
        x, y, three = 0.0, 28 * (first // 3), badges[first : first + 3]
        for text, colour in ((text, c) for b in three for text, c in zip(b, COLOURS, strict=True)):
            width = round(len(text) * 7 + 14)
            parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="22" fill="{colour}"/>')
            middle = f'x="{x + width / 2}" y="{y + 15}" text-anchor="middle"'
            parts.append(f"<text {middle}>{text}</text>")
            x += width + 6 * (colour == COLOURS[1])
        ends.append(x - 6)
    title = ", ".join(f"{label} {value}" for label, value in badges)
    size = f'width="{max(ends)}" height="{28 * len(ends) - 6}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{title}</title><style>{STYLE}</style>", *parts, "</svg>\n"])


if __name__ == "__main__":
    picture = draw(texts())
    if "--check" not in sys.argv:
        PAGE.write_text(picture)
    elif PAGE.read_text() != picture:
        sys.exit(f"{PAGE} is not up to date: run `python tools/badges.py`")
