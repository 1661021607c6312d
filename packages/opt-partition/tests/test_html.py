"""Pages stand alone and well-formed; pictures have the shards that there are."""

import html.parser
import re
import xml.etree.ElementTree as ET
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh
from opt_partition import MemoryPlan, memory_plan
from opt_partition._cli.html import page
from opt_partition._cli.pictures import Family, families, plan_items
from opt_partition._cli.svg import Side, picture
from opt_partition._display import Table
from opt_partition._memory.tables import plan_tables

VOID = {"meta", "line"}
NASTY = "<script>alert('&\"')</script>"


class Checker(html.parser.HTMLParser):
    """Reads a page and holds it to what it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {"src", "href", "onload", "xlink:href"} & {name for name, _ in attrs}
        if tag not in VOID and tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert not {"script", "link", "img", "iframe", "object"} & checker.tags
    assert "http" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch"}
    return checker


def small_plan(name: str = "layers_", **kwargs: Any) -> MemoryPlan:
    params = {f"{name}{n}": {"w": jax.ShapeDtypeStruct((8, 32), "float32")} for n in range(4)}
    axes = {key: {"w": ("embed", "mlp")} for key in params}
    mesh = AbstractMesh((4, 2), ("data", "model"))
    return memory_plan(
        optax.adam(0.1), params, axes, [("mlp", "model"), ("embed", None)], mesh, **kwargs
    )


def page_of(plan: MemoryPlan) -> str:
    return page("plan", "of a test", plan_tables(plan), families(plan_items(plan)))


def cards_of(family: Family) -> list[tuple[tuple[str, ...], list[str], tuple[str, int]]]:
    return [(card.fields, card.item.dimensions, card.item.copies) for card in family.cards]


def test_a_page_says_what_the_plan_says() -> None:
    plan = small_plan(zero="data")
    checker = checked(page_of(plan))
    for number in (plan.param_bytes_per_device, plan.state_bytes_per_device, plan.total_bytes):
        assert f"{number:,}" in checker.text
    assert "layers_{0..3}/w (4)" in checker.text
    assert "4 copies: data=4" in checker.text
    assert {"svg", "pattern", "table", "figure"} <= checker.tags


def test_text_is_escaped() -> None:
    plan = small_plan(NASTY)
    checker = checked(page_of(plan))
    assert NASTY.replace("/", "~1") in checker.text  # as a key of a path
    assert NASTY not in page_of(plan)
    table = Table(NASTY, (NASTY,), ((NASTY,),))
    assert checked(page(NASTY, NASTY, [table], [])).text.count(NASTY) == 6


def test_parameters_that_lie_alike_are_drawn_once() -> None:
    first, last = families(plan_items(small_plan(zero="data")))
    assert (first.paths, first.count) == (("layers_{0..3}/w (4)",), 4)
    assert cards_of(first) == [
        (
            ("params float32", "grads float32"),
            ["dim 0, embed: 8", "dim 1, mlp: 32 / model=2 = 16"],
            ("data=4", 4),
        ),
        (
            ("ScaleByAdamState.mu float32", "ScaleByAdamState.nu float32"),
            first.cards[1].item.dimensions,
            ("", 1),
        ),
    ]
    assert any("data=4" in line for line in first.cards[1].item.dimensions)
    assert last.paths == ("0/count",)
    assert cards_of(last) == [(("ScaleByAdamState.count int32",), [], ("data=4 x model=2", 8))]


def rects(svg: str) -> dict[str, list[ET.Element]]:
    found: dict[str, list[ET.Element]] = {}
    for rect in ET.fromstring(svg).iter("rect"):
        found.setdefault(rect.attrib["class"], []).append(rect)
    return found


def test_every_dimension_is_in_the_picture() -> None:
    """Of many shards there is a gap in place of most."""
    sides = [Side(0, 80), Side(1, 64, 8, "model=8"), Side(2, 128), Side(3, 8192, 8, "fsdp=8")]
    svg = ET.fromstring(picture(sides, 64, "a <leaf>"))
    texts = [text.text for text in svg.iter("text")]
    assert sorted(map(str, texts)) == ["dim 0", "dim 1: model=8", "dim 2", "dim 3: fsdp=8"]
    found = rects(picture([Side(0, 4096, 4096, "data")], 1, "leaf"))
    assert (len(found["mine"]), len(found["rest"]), len(found["gap"])) == (1, 6, 1)
    assert [title.text for title in svg.iter("title")] == ["a <leaf>"]
