"""The page as a document: well formed, one file, safe against names, readable by everyone; and its picture."""

import base64
import hashlib
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise, product

import pytest
from hypothesis import given, strategies as st

from kenosis_ort.errors import OutputError
from kenosis_ort.options import OptionChoice
from kenosis_ort.plan import Kind, NodeDecision
from kenosis_ort.report.evidence import OpTime, OpTimes
from kenosis_ort.report.html.layout import MAX_READERS, NODE_HEIGHT, NODE_WIDTH, layered, layout_of
from kenosis_ort.report.html.page import python_call, render_notebook
from kenosis_ort.report.html.picture import time_plot
from kenosis_ort.report.html.words import region_of
from kenosis_ort.storage.data import to_data
from tests.report.samples import evidence, full_report, fusion, kernel, plan, report

VOID = {"meta", "link", "br", "input", "img", "hr", "line", "rect", "circle", "path", "polyline"}
EVIL = "<script>alert(1)</script>\"'&</title><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Reads a page into tags; `problems` names what is not well formed."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"{tag} is not closed" for tag in self._open]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.problems.append(f"{tag} has an attribute twice: {names}")
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] == "style":
            self.styles.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def evil_report():
    """Names, reasons and options that try to be markup, wherever a model or a caller puts text."""
    node = kernel(EVIL, integer=False, kernel=EVIL, status="float", reason=EVIL, absorbed=(EVIL,))
    told = {"model_input": EVIL, "model_output": EVIL, "notes": (EVIL,), "warnings": (EVIL,), "versions": {EVIL: EVIL}}
    made = {"plan": plan(EVIL), "fusion": fusion(node), "evidence": evidence(EVIL, f"{EVIL}2")}
    return full_report(**told, **made, options={EVIL: OptionChoice(EVIL, "caller")})


REPORTS = {
    "full": full_report(),
    "bare": report(),
    "unverified": report(fusion=None, outputs=(), notes=(), warnings=(), options={}, size_after=0),
    "evil": evil_report(),
}


@pytest.fixture(params=list(REPORTS))
def page(request):
    return Page(REPORTS[request.param].to_html())


def test_it_is_well_formed_and_every_reference_leads_to_an_id(page):
    assert page.problems == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    names = ("aria-labelledby", "aria-describedby", "for")
    targets = [target for _, given in page.tags for name in names for target in (given.get(name) or "").split()]
    assert {*targets, *((link["href"] or "").removeprefix("#") for link in page.all("a"))} <= {*ids}


def test_it_has_landmarks_and_headings_that_skip_no_level_and_controls_and_pictures_have_names(page):
    counts = {name: len(page.all(name)) for name in ("header", "nav", "main", "footer", "h1")}
    assert counts == dict.fromkeys(counts, 1)
    assert (bool(page.all("title")), page.all("html")[0]["lang"]) == (True, "en")
    assert all("aria-labelledby" in section for section in page.all("section"))
    levels = [0, *(int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag))]
    assert all(b - a <= 1 for a, b in pairwise(levels))
    for svg in page.all("svg"):
        assert svg.get("aria-hidden") == "true" or svg.get("aria-labelledby") or svg.get("aria-label")
    assert all(button["type"] == "button" for button in page.all("button"))
    assert all(th.get("scope") in ("col", "row") for th in page.all("th"))
    assert all(canvas["aria-label"] and canvas["tabindex"] == "0" for canvas in page.all("canvas"))


def test_it_fetches_nothing_its_policy_allows_its_own_script_and_style_only_and_that_heeds_motion_and_print(page):
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "audio", "video", "base"), tag
        assert not any(name.startswith("on") or name in ("src", "style") for name in attributes), (tag, attributes)
    assert not any(text in style for style in page.styles for text in ("url(", "@import"))
    queries = ("prefers-color-scheme", "prefers-reduced-motion", "@media print", "scripting: none", "forced-colors")
    assert [query for query in queries if query not in page.styles[0]] == []
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert (policy.startswith("default-src 'none'"), "unsafe" in policy) == (True, False)
    for text in (page.styles[0], page.scripts[-1]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy


def test_names_are_never_read_as_markup():
    text = evil_report().to_html()
    page, notebook = Page(text), Page(render_notebook(evil_report()))
    assert (len(page.scripts), page.all("img"), notebook.all("script"), notebook.all("img")) == (2, [], [], [])
    assert (EVIL in json.loads(page.scripts[0])["texts"], "alert(1)</script>" in text) == (True, False)


def test_sections_appear_where_there_is_something_to_show():
    full, bare = full_report().to_html(), report().to_html()
    for text in ("Accuracy passes", "Time by operator", "By layer", "<canvas", "ten real samples", "1.25× to 1.75×"):
        assert (text in full, text in bare) == (True, False), text
    for text in ("opset raised from 9 to 13", "one [odd] thing", "no Q on its output", "host default", "31.2 dB"):
        assert (text in full, text in bare) == (True, True), text


def test_a_report_saves_its_page_and_says_why_it_cannot(tmp_path):
    original = full_report()
    original.save_html(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == original.to_html()
    with pytest.raises(OutputError, match="cannot be written"):
        original.save_html(tmp_path / "no" / "r.html")


def test_the_call_reads_the_recipe_file_and_names_libraries():
    call = python_call(full_report(options={"custom_op_libraries": OptionChoice(("ops.so",), "caller")}))
    compile(call, "call", "exec")
    shown = "recipe='out.recipe.toml'", "custom_op_libraries=['ops.so']", "# out.recipe.toml holds"
    assert [text for text in shown if text not in call] == []


@pytest.mark.parametrize(("status", "kind", "rule", "region"), [
    ("integer", Kind.INTEGER, "rule", "integer"), ("integer", Kind.PASS_THROUGH, "rule", "moves"),
    ("absorbed", Kind.ABSORBED, "rule", "fused"), ("removed", Kind.FLOAT, "rule", "other"),
    ("float", Kind.FLOAT, "rule", "float"), ("float", Kind.FLOAT, "caller-excluded", "protected"),
    ("float", Kind.INTEGER, "caller-excluded", "float"), ("float", None, "", "float"), ("", None, "", "other"),
    ("", Kind.ABSORBED, "rule", "fused"), ("", Kind.FLOAT, "protected-input", "protected"),
])  # fmt: skip
def test_a_node_is_in_the_region_of_its_kernel_or_of_the_plan(status, kind, rule, region):
    decision = None if kind is None else NodeDecision("node", "Conv", kind, rule, "because")
    assert region_of(decision, kernel("node", status=status) if status else None) == region


def test_a_large_model_stays_below_two_megabytes():
    names = [f"/encoder/layer.{i // 20}/{'relu' if i % 2 else 'conv'}_{i}" for i in range(1000)]
    large = full_report(plan=plan(*names[::2]), fusion=fusion(*map(kernel, names)), evidence=evidence(*names))
    assert len(large.to_html()) < 2_000_000
    assert len(json.dumps(to_data(large.evidence))) < 2_000_000


# ---- colours ------------------------------------------------------------------------------------------------------


def tokens():
    text = files("kenosis_ort.report.html").joinpath("static", "tokens.css").read_text(encoding="utf-8")
    parts = text.split("prefers-color-scheme: dark")
    schemes = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6});", part)) for part in parts]
    return dict(zip(("light", "dark"), schemes, strict=True))


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


REGIONS = ("integer", "moves", "fused", "float", "protected", "other", "terminal")
TEXT = [
    *product(("ink", "muted", "accent"), ("page", "surface")),
    *product(("ink", "muted"), ("sunken", "good-tint")),
    *((name, f"{name}-tint") for name in (*REGIONS, "good", "watch", "bad")),
    ("ink", "watch-tint"),
]
MARKS = [*((name, "surface") for name in REGIONS), ("edge", "surface"), ("focus", "page"), ("focus", "surface")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_have_enough_contrast(scheme):
    colours = tokens()[scheme]
    assert colours.keys() == tokens()["light"].keys()
    assert set(colours) >= {name for pair in TEXT + MARKS for name in pair}
    measured = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in (*TEXT, *MARKS)}
    assert {pair: measured[pair] for pair in TEXT if measured[pair] < 4.5} == {}
    assert {pair: measured[pair] for pair in MARKS if measured[pair] < 3} == {}


def test_notebook_fragment_tells_the_verdict():
    text = full_report()._repr_html_()
    assert [part for part in (full_report().verdict(), "1.50×", "no Q on its output") if part not in text] == []
    assert Page(text).problems == []


# ---- the picture: repeated stretches are what they say, nothing overlaps, edges lead down, and every node is placed -


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 60))
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=120, unique=True))
    return count, [(min(a, b), max(a, b)) for a, b in pairs if a != b]


@given(graphs())
def test_every_edge_leads_to_a_lower_layer(graph):
    count, edges = graph
    found = layered(count, edges)
    assert all(found.layer_of[a] < found.layer_of[b] for a, b in edges)
    assert sorted(n for layer in found.layers for n in layer) == [*range(len(found.layer_of))]


@given(graphs())
def test_no_two_nodes_overlap_and_routes_join_the_nodes_they_belong_to(graph):
    count, edges = graph
    layout, rows = layout_of(count, edges), defaultdict(list)
    for x, y in layout.centres:
        rows[y].append(x)
        assert 0 <= x - NODE_WIDTH / 2 < x + NODE_WIDTH / 2 <= layout.width
        assert 0 <= y - NODE_HEIGHT / 2 < y + NODE_HEIGHT / 2 <= layout.height
    assert all(b - a >= NODE_WIDTH for xs in rows.values() for a, b in pairwise(sorted(xs)))
    assert len(layout.routes) == len(layout.faint) == len(edges)
    for (a, b), route in zip(edges, layout.routes, strict=True):
        (xa, ya), (xb, yb) = layout.centres[a], layout.centres[b]
        assert (route[0], route[-1]) == ((xa, ya + NODE_HEIGHT / 2), (xb, yb - NODE_HEIGHT / 2))


def test_a_chain_stands_straight_and_is_folded():
    layout = layout_of(400, [*pairwise(range(400))])
    assert len({x for x, _ in layout.centres}) < 40
    assert 0.4 < layout.width / layout.height < 4


def test_a_value_that_all_read_is_drawn_faintly():
    readers = MAX_READERS + 4
    edges = [(0, i) for i in range(1, readers)] + [(i, i + 1) for i in range(1, readers - 1)]
    layout = layout_of(readers, edges)
    assert (sum(layout.faint), sum(layout.faint[readers:])) == (readers - 2, 0)


@pytest.mark.parametrize("edges", [[], [(2, 1)], [(0, 0)]])
def test_odd_edges_do_no_harm(edges):
    assert (len(layout_of(3, edges).centres), layout_of(0, []).centres) == (3, ())


def test_operators_of_equal_time_keep_their_order_in_every_process():
    names = [f"Op{i}" for i in range(9)]
    plot = time_plot(OpTimes(tuple(OpTime(name, name, name, 1.0) for name in names), ()))
    assert [row["op_type"] for row in plot["rows"]] == names
