"""Reports: pictures that are sound XML, tables without gaps in their meaning, a page that needs nothing else."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import browser as browsers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eigendamage import Plan
from eigendamage.charts.drawing import shortened, text_width, wrapped
from eigendamage.charts.scales import log_ticks, nice_ticks, scale_for, tick_labels
from eigendamage.compress import Report
from eigendamage.cost import Cost
from eigendamage.layers import LayerShape
from eigendamage.plan_report import plan_section
from eigendamage.plans import Choice
from eigendamage.report import (
    Code,
    Figure,
    Matrix,
    Section,
    Series,
    TableData,
    _numeric_columns,
    markdown,
    page,
    svg,
    write_page,
)

# To check an annotation, beartype looks at a random item of a container.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

NAN = math.nan
NASTY = "<script>alert('x')</script> & \"quoted\" \x00 ]]> `code` | {0}"
SPACE = "{http://www.w3.org/2000/svg}"

LINES = Figure(
    "Accuracy",
    "weights left",
    "test accuracy",
    [
        Series("EigenDamage", [0.1, 0.2, 0.5, 1.0], [0.6, 0.8, 0.9, 0.93], [0.5, 0.7, 0.88, 0.93], [0.7, 0.9, 0.92, 0.93]),
        Series("Kron-OBD", [0.1, 0.2, 0.5, 1.0], [0.4, NAN, None, 0.93], dashed=True),
    ],
    percent_x=True,
    percent_y=True,
    note="Three seeds.",
)
LAYERS = [f"stages.{stage}.blocks.{block}.conv{conv}" for stage in range(3) for block in range(5) for conv in (1, 2)]
BARS = Figure("Ranks", "", "rank", [Series("in", range(30), list(range(1, 31)))], kind="bars", categories=LAYERS)
HEAT = Figure(
    "Fisher", "", "size", matrices=[Matrix("F", [[1, 2, 0.5], [1e-3, None, 2]])] * 2, kind="heatmap", log_y=True, note="Small."
)
TABLE = TableData(
    "Table 1",
    ["method", "accuracy", "best"],
    [["EigenDamage", "93.4 ± 0.1", 0.934567], ["Kron-OBD", None, NAN]] * 10,
    note="Bold is best.",
    bold={(0, 1)},
)
SECTIONS = [
    Section("Tables", ["A paragraph.", TABLE]),
    Section("Figures", [LINES, BARS, HEAT]),
    Section(
        "Commands",
        [Code(["eigendamage reproduce table1 --seeds 0 1 2 --scale small --out a/rather/long/name/of/a/folder", "ls"])],
    ),
]


def points_of(figure: Figure) -> list[list[list[object]]]:
    """What a page hovers over, for each series."""
    picture = ElementTree.fromstring(svg(figure, embedded=True))
    groups = {g.get("data-series", ""): g for g in picture.iter(f"{SPACE}g") if g.get("class", "").startswith("series")}
    return [json.loads(groups[name].get("data-points", "")) for name in sorted(groups)]


# --- scales -----------------------------------------------------------------------------------------------------------------

SIZES = st.floats(-1e12, 1e12).filter(lambda value: not value or abs(value) > 1e-12)


@given(SIZES, SIZES, st.integers(3, 12))
def test_ticks_are_few_round_and_cover_the_values(one: float, other: float, about: int) -> None:
    low, high = sorted([one, other])
    ticks = nice_ticks(low, high, about)
    step = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= about
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= high - 1e-6 * step
    assert all(later > earlier for earlier, later in pairwise(ticks))
    if high - low > 1e-6 * max(abs(low), abs(high)):
        assert re.fullmatch(r"(1|2|5)(\.0+)?|2\.50*", f"{step / 10 ** math.floor(math.log10(step) + 1e-6):.3f}")
        assert ticks[-1] - ticks[0] <= 5 * about * (high - low)


@given(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30), st.integers(3, 12))
def test_log_ticks_are_few_and_cover_the_values(one: float, other: float, about: int) -> None:
    low, high = sorted([one, other])
    ticks = log_ticks(low, high, about)
    assert 2 <= len(ticks) <= about + 1
    assert ticks[0] <= low * (1 + 1e-9) and high <= ticks[-1] * (1 + 1e-9)
    assert all(later > earlier for earlier, later in pairwise(ticks))


@given(SIZES, SIZES, st.booleans())
def test_labels_tell_ticks_apart(one: float, other: float, percent: bool) -> None:
    if abs(one - other) < 1e-6 * max(abs(one), abs(other)):
        return
    ticks = nice_ticks(min(one, other), max(one, other))
    labels = tick_labels(ticks, percent=percent)
    assert len(set(labels)) == len(ticks)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.1, 0.3, ["0.10", "0.15", "0.20", "0.25", "0.30"]),
        (0, 20e6, ["0", "5M", "10M", "15M", "20M"]),
        (-3, 3, ["−4", "−2", "0", "2", "4"]),
        (0, 3e-5, ["0", "10⁻⁵", "2×10⁻⁵", "3×10⁻⁵"]),
        (7, 7, ["6.6", "6.8", "7.0", "7.2", "7.4"]),
    ],
)
def test_ticks_read_well(low: float, high: float, labels: list[str]) -> None:
    assert tick_labels(nice_ticks(low, high)) == labels


def test_scales_leave_out_what_they_cannot_show() -> None:
    scale = scale_for([1, None, NAN, 0, -2, math.inf, 100], log=True)
    assert (scale.ticks[0], scale.ticks[-1]) == (1, 100)
    assert [scale.share(value) for value in (1, 10, 100, 0, -1, None, NAN)] == [0, 0.5, 1, None, None, None, None]
    assert scale_for([]).ticks[0] == 0  # nothing to show is shown too


@given(st.text(max_size=60), st.floats(20, 400))
def test_shortened_texts_fit(text: str, room: float) -> None:
    assert text_width(shortened(text, room)) <= room
    assert all(text_width(line) <= room for line in wrapped(text, room))


# --- pictures ---------------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.none(), st.just(NAN), st.integers(-5, 5), st.floats(-1e6, 1e6))


@st.composite
def figures(draw: st.DrawFn) -> Figure:
    texts = st.text(max_size=30)
    count = draw(st.integers(0, 5))
    lists = st.lists(NUMBERS, min_size=count, max_size=count)
    kind = draw(st.sampled_from(["lines", "bars"]))
    series = [
        Series(
            draw(texts),
            range(count) if kind == "bars" else draw(lists),
            draw(lists),
            draw(lists),
            draw(lists),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(0, 9)))
    ]
    flags = {name: draw(st.booleans()) for name in ("log_x", "log_y", "percent_x", "percent_y")}
    names = [draw(texts) for _ in range(count)]
    return Figure(draw(texts), draw(texts), draw(texts), series, kind=kind, note=draw(texts), categories=names, **flags)


@given(figures(), st.sampled_from([360, 860]), st.booleans())
def test_any_figure_is_sound_xml_inside_its_bounds(figure: Figure, width: int, embedded: bool) -> None:
    picture = ElementTree.fromstring(svg(figure, width, embedded))
    assert "nan" not in ElementTree.tostring(picture, "unicode").replace(figure.title, "") or "nan" in str(figure)
    height = float(picture.get("viewBox", "").split()[3])
    for text in picture.iter(f"{SPACE}text"):
        if "transform" not in text.attrib:
            assert 0 <= float(text.get("y", "")) <= height
    for bar in picture.iter(f"{SPACE}rect"):
        assert float(bar.get("width", "")) >= 0


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=4), st.booleans())
def test_any_matrix_can_be_drawn(values: list[list[float | int | None]], log: bool) -> None:
    figure = Figure("h", "x", "y", matrices=[Matrix("m", values)], kind="heatmap", log_y=log)
    picture = ElementTree.fromstring(svg(figure, embedded=True))
    (panel,) = (g for g in picture.iter(f"{SPACE}g") if g.get("class") == "panel")
    cells = json.loads(panel.get("data-cells", ""))
    shown = [v is not None and not math.isnan(v) and (not log or v > 1e-290) for row in values for v in row]
    assert [text != "–" for row in cells for text in row] == shown
    lengths = [int(length) for path in panel.iter(f"{SPACE}path") for length in re.findall(r"h(\d+)", path.get("d", ""))]
    assert sum(lengths) == sum(shown)


def test_every_text_is_escaped() -> None:
    series = [Series(NASTY, [1, 2], [1, 2]), Series(NASTY + "2", [1, 2], [1, 2])]
    figure = Figure(NASTY, NASTY, NASTY, series, note=NASTY)
    bars = Figure(NASTY, NASTY, NASTY, [Series(NASTY, [0], [1])], kind="bars", categories=[NASTY])
    heat = Figure(NASTY, NASTY, NASTY, matrices=[Matrix(NASTY, [[1]])], kind="heatmap")
    table = TableData(NASTY, [NASTY, NASTY], [[NASTY, NASTY]], NASTY, {(0, 0), (0, 1)})
    for picture in (figure, bars, heat):
        ElementTree.fromstring(svg(picture))
    text = page(NASTY, NASTY, [Section(NASTY, [figure, bars, heat, table, NASTY, Code(NASTY)]), Section("2", [])])
    assert "<script>alert" not in text and "\x00" not in text
    assert text.count("<script>") == text.count("</script>") == 1


def test_unknown_values_are_gaps() -> None:
    first, second = points_of(LINES)
    assert [point[3] for point in first] == ["60% (50% to 70%)", "80% (70% to 90%)", "90% (88% to 92%)", "93% (93% to 93%)"]
    assert [point[2:] for point in second] == [["weights left 10%", "40%"], ["weights left 100%", "93%"]]
    whole = Figure("t", "x", "y", [Series("s", [1, 2, 3, 4, 5], [1, 2, None, 4, 5])])
    lines = [path for path in ElementTree.fromstring(svg(whole)).iter(f"{SPACE}path") if path.get("stroke-width") == "2.2"]
    assert [path.get("d", "").count("M") for path in lines] == [2]


def test_a_point_between_gaps_has_a_marker() -> None:
    many = [None if x % 2 else float(x) for x in range(400)]
    picture = svg(Figure("t", "x", "y", [Series("s", range(400), many)]))
    assert picture.count("translate(") == 200


def test_styles_hold_across_figures() -> None:
    first = svg(Figure("t", "x", "y", [Series("a", [1], [1], style=3)]))
    second = svg(Figure("t", "x", "y", [Series("b", [1], [1]), Series("a", [1], [1], style=3)]))
    assert "#cc79a7" in first and "#cc79a7" in second and "#0072b2" not in first


@pytest.mark.parametrize("figure", [LINES, BARS, HEAT], ids=lambda figure: figure.kind)
def test_a_picture_alone_has_title_note_and_a_white_ground(figure: Figure) -> None:
    picture = ElementTree.fromstring(svg(figure))
    texts = [text.text for text in picture.iter(f"{SPACE}text")]
    assert figure.title in texts and (figure.note or figure.title) in texts
    ground = next(picture.iter(f"{SPACE}rect"))
    assert ground.get("fill") == "#ffffff" and ground.get("width") == picture.get("width")
    assert "data-points" not in svg(figure)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Series("s", [1, 2], [1]), "y of series 's': must have as many values as x (2); got 1"),
        (lambda: Series("s", [1], [1], low=[1]), "low and high of series 's': must be given together"),
        (lambda: Figure("t", "x", "y", kind="pie"), "kind: must be one of 'lines', 'bars', 'heatmap'; got 'pie'"),
        (lambda: Figure("t", "x", "y", kind="heatmap"), "a heatmap has matrices"),
        (
            lambda: Figure("t", "x", "y", [Series("s", [1], [1])], kind="bars", categories=["a"]),
            "indices of the 1 categories; got 1",
        ),
        (lambda: Matrix("m", [[1, 2], [1]]), "row 1 must have 2 values; got 1"),
        (lambda: TableData("t", ["a"], [["b", "c"]]), "row 0 must have 1 cells; got 2"),
    ],
)
def test_wrong_data_is_named(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong()


# --- tables and pages -------------------------------------------------------------------------------------------------------


def test_markdown() -> None:
    table = TableData("Best | of", ["method", "accuracy"], [["a*b", "93.4 ± 0.1"], ["c", None]], "A note.", {(0, 1)})
    assert markdown(table) == (
        "**Best \\| of**\n\n| method | accuracy |\n| :--- | ---: |\n| a\\*b | **93.4 ± 0.1** |\n| c | – |\n\nA note.\n"
    )


def test_tables_of_a_page() -> None:
    text = page("t", "s", [Section("one", [TABLE])])
    assert '<th scope="row"><div>EigenDamage</div></th><td class="number"><strong>93.4 ± 0.1</strong></td>' in text
    assert '<td class="number">0.9346</td>' in text
    assert text.count('<td class="number">–</td>') == 20
    assert "<nav" not in text


@pytest.mark.parametrize("cell", ["93.4 ± 0.1", "3.58e-07", "1.18M → 484k", "67.3%", "1.2×", "12 ms", "-1", "20/32", "–"])
def test_numbers_are_aligned_to_the_right(cell: str) -> None:
    assert markdown(TableData("", ["a", "b"], [["x", cell]])).splitlines()[1] == "| :--- | ---: |"


@pytest.mark.parametrize("cell", ["resnet20", "in 1/1, out 20/32", "CIFAR-10", "3 stages", "e", ""])
def test_texts_are_aligned_to_the_left(cell: str) -> None:
    assert markdown(TableData("", ["a", "b"], [["1", cell]])).splitlines()[1] == "| :--- | :--- |"


def test_a_page_refers_to_nothing_outside() -> None:
    text = page("title", "summary", SECTIONS)
    addresses = set(re.findall(r"https?://[^\"' <)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")|\ssrc=", text)
    assert html.unescape(re.findall(r"<code>(.*?)</code>", text, re.S)[0]).endswith("\nls")


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_page(path, "é", "s", SECTIONS)
    assert path.read_text("utf-8") == page("é", "s", SECTIONS)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_page(path, "another", "s", SECTIONS)
    assert path.read_text("utf-8") == page("é", "s", SECTIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_page(tmp_path / "none" / "page.html", "t", "s", [])


def test_the_section_of_a_plan() -> None:
    shape = LayerShape("conv", 4, 6, (3, 3), True, input_positions=16, output_positions=9, axis_positions=(12, 9))
    layers = {
        "first": Choice(shape, "bottleneck", {"in": 2, "out": 3}, 0.25),
        "second": Choice(shape, reason="its channels are fixed"),
    }
    plan = Plan("eigendamage", layers)
    section = plan_section(plan, Report(Cost(100, 1000), Cost(50, 400), plan))
    totals, weights, ranks, table = section.parts
    assert isinstance(totals, TableData) and totals.rows[0] == ["parameters", "100", "50", "50.0%"]
    assert isinstance(weights, Figure) and list(weights.series[0].y) == [layers["first"].params / shape.params, 1]
    assert isinstance(ranks, Figure) and [(list(s.x), list(s.y)) for s in ranks.series] == [([0], [0.5]), ([0], [0.5])]
    assert isinstance(table, TableData) and table.rows[1][-1] == "its channels are fixed" and table.rows[2][0] == "all layers"
    assert "EigenDamage: what each layer becomes" in page("t", "s", [section])
    assert len(plan_section(Plan("eigendamage", {})).parts) == 1


# --- in a browser -----------------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(
    not (browsers.CHROMIUM and browsers.DRIVER), reason="there is no chromium with its chromedriver on this machine"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[browsers.Browser]:
    with browsers.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_page(path, "A report", "Its summary.", SECTIONS)
    return path


SPOT = """
const [kind, series, at] = arguments;
const picture = [...document.querySelectorAll(`.chart.${kind}`)].find((one) => one.getClientRects().length);
picture.scrollIntoView({block: "center", behavior: "instant"});
const data = picture.querySelector(`[data-points][data-series="${series}"]`);
const box = data ? null : JSON.parse(picture.querySelector(".panel").dataset.box);
const [x, y] = data ? JSON.parse(data.dataset.points)[at] : [box[0] + 2, box[1] + 2];
const spot = new DOMPoint(x, y).matrixTransform(picture.getScreenCTM());
return [spot.x, spot.y];
"""
TIP = "const tip = document.getElementById('tip'); return tip.hidden ? null : tip.innerText;"


@needs_browser
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_in_a_browser(tab: browsers.Browser, written: Path, phone: bool, dark: bool) -> None:
    tab.show(written, 390 if phone else 1280, dark=dark, phone=phone)
    assert tab.script("return document.documentElement.scrollWidth <= innerWidth")
    ground = tab.script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
    point = tab.tap if phone else tab.hover
    for kind, series, at, said in [
        ("lines", 0, 2, "EigenDamage\nweights left 50%: 90% (88% to 92%)"),
        ("lines", 1, 0, "Kron-OBD\nweights left 10%: 40%"),
        ("bars", 0, 9, f"{LAYERS[9]}: 10"),
        ("heatmap", 0, 0, "F\nrow 1, column 1: 1"),
    ]:
        point(*tab.script(SPOT, kind, series, at))
        assert tab.script(TIP) == said
        box = tab.script("const b = document.getElementById('tip').getBoundingClientRect(); return [b.left, b.right]")
        assert box[0] >= 0 and box[1] <= (390 if phone else 1280)
    assert tab.complaints() == []


def settle(tab: browsers.Browser) -> None:
    """What takes the focus is scrolled to, and scrolling hides the tooltip: wait until the page stands still."""
    before = None
    while (now := tab.script("return [scrollX, scrollY]")) != before:
        before = now
        time.sleep(0.3)


def shown(tab: browsers.Browser) -> str:
    """The tooltip, as soon as a busy machine shows it."""
    for _ in range(50):
        if text := tab.script(TIP):
            return str(text)
        time.sleep(0.1)
    return ""


@needs_browser
def test_by_keyboard_and_legend(tab: browsers.Browser, written: Path) -> None:
    tab.show(written, 1280)
    tab.script("document.querySelector('figure .wide').focus()")
    settle(tab)
    right, down = "\ue014", "\ue015"
    tab.press(right, right)
    assert shown(tab).startswith("EigenDamage")
    tab.press(down)
    assert shown(tab).startswith("Kron-OBD")
    tab.press("\ue00c")  # escape
    assert tab.script(TIP) is None
    tab.script("document.querySelector('figure .wide .key[data-series=\"1\"]').focus()")
    tab.press(" ")
    hidden = "return getComputedStyle(document.querySelector('figure .wide .series[data-series=\"1\"]')).display"
    assert tab.script(hidden) == "none"
    tab.hover(*tab.script(SPOT, "lines", 1, 0))
    assert not (tab.script(TIP) or "").startswith("Kron-OBD")
    tab.press(" ")
    assert tab.script(hidden) != "none"
    assert tab.complaints() == []


@needs_browser
def test_letters_do_not_overlap(tab: browsers.Browser, written: Path) -> None:
    overlaps = """
    const found = [];
    for (const picture of document.querySelectorAll(".chart")) {
      if (!picture.getClientRects().length) continue;
      const texts = [...picture.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
      const outer = picture.getBoundingClientRect();
      for (const [name, a] of texts) {
        if (a.left < outer.left - 6 || a.right > outer.right + 6) found.push(name);
        for (const [other, b] of texts)
          if (name < other && a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
            found.push([name, other]);
      }
    }
    return found;"""
    for width in (390, 1280):
        tab.show(written, width, phone=width < 600)
        assert tab.script(overlaps) == []


def test_columns_are_told_apart_in_no_time_however_long_a_cell_is() -> None:
    table = TableData("", ["name", "numbers"], [["a", "1 " * 200 + "q"], ["b", "12k, 3.5M, 4 ms, 7B, 1e-3, 1.5×"]])
    assert _numeric_columns(table) == [False, False]
    assert _numeric_columns(TableData("", ["name", "numbers"], table.rows[1:])) == [False, True]
