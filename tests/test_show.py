"""What lands under a notebook's cell: alt text, tables, and code cut from the right place of the right file."""

from __future__ import annotations

import html
import math
import re
import types
from html.parser import HTMLParser

import pytest

from kda_lab import show
from kda_lab.plots import figure

SOURCE = """\
// The manual of this step: { braces in comments do not count.
#include <cmath>

namespace kda::cpu::step1 {

void activate_gate(float *g, int n);

// The gate of one token.
template <typename T>
float activate_gate(const T *g,  // [K] bf16
                    int n) {
  const char *brace = "}";
  if (n > 0) {
    return g[0];
  }
  return 0.0f;
}

void forward(const KdaArgs &args) { activate_gate(args.g, 1); }

}  // namespace kda::cpu::step1
"""


class Tags(HTMLParser):
    """Every start tag with its attributes, and that each is closed in order."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(markup)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def numbered(shown) -> list[tuple[int | None, int | None, str, str]]:
    """(number before, number after, kind, code) of a diff's lines."""
    row = r'<span class="kda-line">(.{4})(.{5})</span> <span class="kda-(\w+)">. (.*)</span>'
    found = re.findall(row, shown.markup)
    plain = [(html.unescape(re.sub("<[^>]*>", "", code)).strip(), *rest) for *rest, code in found]
    return [(int(a) if a.strip() else None, int(b) if b.strip() else None, kind, code) for code, a, b, kind in plain]


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A registry of two steps whose sources this test wrote."""
    folder = tmp_path / "steps"
    folder.mkdir()
    paths = {1: folder / "1_naive_exp.cpp", 2: folder / "2_rebased_ex2.cpp"}
    paths[1].write_text(SOURCE, encoding="utf-8")
    paths[2].write_text(SOURCE.replace("return g[0];", "return 2 * g[0];"), encoding="utf-8")

    def get(step, device="cpu"):
        return types.SimpleNamespace(sources={"cpu": (paths[step], *paths[step].with_suffix("").glob("*.cuh"))})

    monkeypatch.setattr(show.registry, "get", get)
    return paths


def test_source_shows_the_definition_with_its_comment_and_line_numbers(steps):
    shown = show.source(1, "activate_gate")
    assert shown.text.splitlines()[0] == "1_naive_exp.cpp, line 8"
    assert shown.text.splitlines()[1:] == SOURCE.splitlines()[7:17]
    assert '<span class="kda-line">  17 ' in shown.markup
    assert '<span class="kda-line">  18 ' not in shown.markup
    Tags(shown.markup)


def test_source_shows_what_the_file_says_now(steps):
    steps[1].write_text(SOURCE.replace("0.0f", "7.5f"), encoding="utf-8")
    assert "7.5f" in show.source(1, "activate_gate").text


def test_source_and_diff_know_the_parts_of_a_step(steps):
    part = steps[2].with_suffix("") / "part.cuh"
    part.parent.mkdir()
    part.write_text("// Its manual.\n\nfloat only_here() {\n  return 3.0f;\n}\n", encoding="utf-8")
    title = "2_rebased_ex2/part.cuh, line 3"
    assert show.source(2, "only_here").text.splitlines() == [title, *part.read_text().splitlines()[2:]]
    with pytest.raises(ValueError, match=r"it defines activate_gate, forward, only_here$"):
        show.source(2, "elsewhere")
    shown = show.diff(1, 2)
    assert (None, 4, "added", "return 3.0f;") in numbered(shown)
    assert (13, 13, "equal", "if (n > 0) {") in numbered(shown)
    assert shown.text.index("+ // ---- 2_rebased_ex2/part.cuh") < shown.text.index("+ // ---- 2_rebased_ex2.cpp")
    assert "manual" not in shown.text
    with pytest.raises(ValueError, match="defines no function 'only_here'"):
        show.diff(1, 2, "only_here")


@pytest.mark.parametrize("stage", [None, "activate_gate"])
def test_diff_counts_lines_as_the_files_do(steps, stage):
    steps[2].write_text("// One more line.\n" + steps[2].read_text(encoding="utf-8"), encoding="utf-8")
    rows = numbered(show.diff(1, 2, stage))
    assert (14, None, "removed", "return g[0];") in rows
    assert (None, 15, "added", "return 2 * g[0];") in rows
    assert (13, 14, "equal", "if (n > 0) {") in rows
    assert (15, 16, "equal", "}") in rows


def test_source_of_a_missing_function_names_those_there_are(steps):
    with pytest.raises(ValueError, match=r"defines no function 'apply_decay'; it defines activate_gate, forward$"):
        show.source(1, "apply_decay")


def test_a_unified_diff_of_one_line_has_a_hunk_that_patch_can_read(steps):
    steps[1].write_text("int a;\n", encoding="utf-8")
    steps[2].write_text("int b;\n", encoding="utf-8")
    assert [*show.text_diff(1, 2)] == [
        "--- 1_naive_exp.cpp",
        "+++ 2_rebased_ex2.cpp",
        "@@ -1 +1 @@",
        "-int a;",
        "+int b;",
    ]


def test_source_of_a_missing_device_says_what_there_is():
    with pytest.raises(ValueError, match="6_register_state runs on cuda, not on cpu"):
        show.source(6, "consume")
    with pytest.raises(ValueError, match="6_register_state runs on cuda, not on cpu"):
        show.diff(5, 6, device="cpu")


def test_diff_takes_cuda_where_a_step_is_on_no_cpu():
    shown = show.diff(5, 6, "recurrence")
    assert shown.text.startswith("5_fused_two_kernel.cu → 6_register_state/recurrence.cuh in recurrence: ")
    assert show.diff(2, 3, "forward").text.startswith("2_rebased_ex2.cpp → ")
    with pytest.raises(ValueError, match="nosuch"):
        show.diff(5, "nosuch")


def test_a_condition_is_no_function():
    with pytest.raises(ValueError, match=r"defines no function 'constexpr'; it defines (?!.*constexpr)"):
        show.source(6, "constexpr", "cuda")


def test_a_mark_is_an_arrow_and_not_only_a_colour(steps):
    marked = show.source(1, "activate_gate", mark="return g")
    assert marked.markup.count('"kda-marked"') == 1
    assert "14 ▸" in marked.markup
    with pytest.raises(ValueError, match="no line of"):
        show.source(1, "activate_gate", mark="exp2f")


def test_diff_counts_and_signs_the_changed_lines(steps):
    shown = show.diff(1, 2)
    assert "1 line removed, 1 added" in shown.text
    assert "-     return g[0];" in shown.text
    assert "+     return 2 * g[0];" in shown.text
    assert "lines unchanged" in shown.text
    assert "#include" not in shown.text
    tags = Tags(shown.markup).seen
    assert [attrs.get("class") for _, attrs in tags].count("kda-added") == 1


def test_diff_leaves_out_the_manual_and_changes_of_white_space(steps):
    changed = (
        steps[2]
        .read_text(encoding="utf-8")
        .replace("The manual", "Another manual")
        .replace("  return 0.0f", "return 0.0f")
    )
    steps[2].write_text(changed, encoding="utf-8")
    shown = show.diff(1, 2).text
    assert "1 line removed, 1 added" in shown
    assert "manual" not in shown


def test_diff_of_a_function_that_did_not_change_is_empty(steps):
    assert "0 lines removed, 0 added" in show.diff(1, 2, "forward").text


def test_table_has_header_cells_a_caption_and_says_what_was_not_measured():
    shown = show.table(
        [{"step": "a<b", "ms": 1.23456}, {"step": "c", "ms": None}, {"step": "d", "ms": math.nan}],
        {"step": "Step", "ms": "Time, ms"},
        "Times",
    )
    tags = Tags(shown.markup).seen
    assert [attrs["scope"] for tag, attrs in tags if tag == "th"] == ["col", "col", "row", "row", "row"]
    assert "a&lt;b" in shown.markup
    for cell in ("1.235", "not measured", "NaN", "Times"):
        assert cell in shown.markup
        assert cell in shown.text


def test_table_without_rows_says_not_measured():
    assert show.table([], caption="GPU times").text == "GPU times: not measured"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (0.0, "0"),
        (1e-9, "1.0e-09"),
        (math.nan, "NaN"),
        (2048, "2,048"),
        (True, "True"),
        (23520.4, "23,520"),
        (49152.0, "49,152"),
        (-1234.5, "-1,234"),
        (999.96, "1000"),
        (0.01017, "0.01017"),
        ((1.0, 23520.0), "1, 23,520"),
    ],
)
def test_number(value, text):
    assert show.number(value) == text


def test_show_displays_an_image_whose_alt_text_is_escaped(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    fig = figure(2, 1)
    fig.alt = 'a "quoted" <finding>'
    show.show(fig)
    markup = shown[0]._repr_html_()
    (attrs,) = (attrs for tag, attrs in Tags(markup).seen if tag == "img")
    assert attrs["alt"] == 'a "quoted" <finding>'
    assert "<p>a &quot;quoted&quot; &lt;finding&gt;</p></details>" in markup
    assert attrs["src"].startswith("data:image/png;base64,iVBOR")
    assert "width:200px" in attrs["style"]


def test_show_refuses_a_figure_without_alt_text():
    with pytest.raises(ValueError, match="alt="):
        show.show(figure(2, 1))
