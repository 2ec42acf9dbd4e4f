"""Plans on a terminal, on a page and from the command line."""

import re
import runpy
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from click.testing import CliRunner

import replicax as rx
from replicax._command_line import main
from replicax.planning import Collective, Estimate, Memory, Origin, Plan, PlannedVariable, Scaling
from replicax.planning._charts import _ticks

GIB = 2**30
EXAMPLE = Path(__file__).parents[2] / "examples" / "planning.py"


def made_up(topology="v5e:4x4", chips=16, name="train_step", needed=1.0, communication=1e-3):
    return Plan(
        program=name,
        topology=topology,
        chips=chips,
        replicas=chips,
        devices_per_replica=1,
        batch=64 * chips,
        memory=Memory(
            int(needed * 8 * GIB), GIB, 2**20, int(needed * 2 * GIB), 3 * 2**20, int(15.75 * GIB)
        ),
        flops=1e12,
        bytes_accessed=2e9,
        collectives=(
            Collective("all-reduce", GIB, chips, 1, 2, (Origin("/home/me/train.py", 7, "f", GIB),)),
        ),
        estimate=Estimate(5e-3, 2.4e-3, communication),
        variables=(
            PlannedVariable("<b>embedding</b>", (1, 2), "float32", int(needed * 8 * GIB), True),
        ),
        seconds_to_trace=0.1,
        seconds_to_compile=2.0,
    )


def test_a_plan_is_printed_as_tables():
    text = str(made_up())
    assert text.startswith("train_step on v5e:4x4: 16 chips, 16 replicas of one device")
    for line in (
        r"variables +8 GiB +51 %",
        r"needed +11 GiB +70 %",
        r"there is +15.75 GiB +fits",
        r"all-reduce +1 GiB +1 x 16 +2 +train.py:7",
        r"compute +1 TFLOP +5 ms",
        r"communication +3.75 GiB sent +1 ms",
        r"step +6 ms",
    ):
        assert re.search(line, text), f"{line!r} is not in\n{text}"


def test_warnings():
    assert made_up(needed=0.5).warnings == ()
    fits_not, replicated = made_up(needed=2.0).warnings
    assert "needs 21 GiB on a device that has 15.75 GiB" in fits_not
    assert "Variables and inputs alone do not fit" in fits_not
    assert "Variable '<b>embedding</b>' (16 GiB) is whole on every device" in replicated
    (communication,) = made_up(needed=0.5, communication=1.0).warnings
    assert "bound by communication: 1 s of it" in communication
    assert "all-reduce of 1 GiB that comes from train.py:7" in communication


def test_a_larger_share_of_chips_is_compared_with_the_first():
    scaling = Scaling((made_up(), made_up("v5e:8x8", 64, communication=7e-3)))
    assert scaling.efficiency(scaling.plans[0]) == 1.0
    assert scaling.efficiency(scaling.plans[1]) == pytest.approx(0.5)
    assert re.search(r"v5e:8x8 +64 +4096 +11 GiB +12 ms +communication .* 50 %", str(scaling))


class Reader(HTMLParser):
    """Notes what a page consists of, and that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.attributes, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "rect", "line", "polyline", "circle") or tag == "rect":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag in ("line", "circle"):
            return
        assert self._open.pop() == tag

    def handle_data(self, words):
        self.words.append(words)


def test_the_page_needs_nothing_else_and_says_it_all(tmp_path):
    scaling = Scaling((made_up(), made_up("v5e:8x8", 64, "<script>alert(1)</script>", 2.0)))
    path = scaling.save_html(tmp_path / "plan.html")
    text = path.read_text(encoding="utf-8")
    page = Reader(text)
    assert not {"script", "link", "img", "iframe", "object"} & {*page.tags}
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert page.tags.count("svg") == 1  # scaling
    assert page.attributes.count(("class", "track")) == 4  # memory and time of both
    words = " ".join(page.words)
    for said in ("v5e:8x8", "train.py:7 (1 GiB)", "<b>embedding</b>", "does not fit", "15.75 GiB"):
        assert said in words
    assert "prefers-color-scheme: dark" in text


def test_the_page_of_one_plan(tmp_path):
    plan = rx.planning.plan(_program(), "cpu:2")
    page = Reader(plan.save_html(tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 0  # nothing to compare
    assert page.attributes.count(("class", "track")) == 1  # no times
    assert "planning.py:" in " ".join(page.words)


def test_the_page_begins_with_a_verdict(tmp_path):
    scaling = Scaling((made_up(communication=9e-3), made_up("v5e:8x8", 64, needed=2.0)))
    text = scaling.save_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    words = " ".join(" ".join(Reader(text).words).split())
    assert "v5e:4x4 Fits: 70 % of memory; bound by communication." in words
    assert "v5e:8x8 Does not fit: 133 % of memory; bound by compute." in words
    assert text.index("133 %") < text.index("<table")
    for said in ("11 GiB of 15.75 GiB (70 %)", "communication 64 %", "relative to v5e:4x4"):
        assert said in words


def test_numbers_are_on_the_right_and_names_on_the_left(tmp_path):
    text = made_up().save_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert '<td class="number">11 GiB</td>' in text
    assert "<td>v5e:4x4</td>" in text
    assert "<td>&lt;b&gt;embedding&lt;/b&gt;</td>" in text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.8, 1.25, [0.8, 0.9, 1.0]),
        (8.0, 125.0, [10, 20, 50, 100]),
        (137e3, 853e3, [150e3, 200e3, 300e3, 400e3, 500e3, 600e3, 700e3, 800e3]),
    ],
)
def test_the_axis_has_round_numbers(low, high, ticks):
    assert _ticks(low, high) == pytest.approx(ticks)


def test_where_the_page_goes_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made_up().save_html().name == "plan.html"
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!")


def _program():
    return runpy.run_path(str(EXAMPLE))["program"]


@pytest.mark.slow
@pytest.mark.skipif(browser.BROWSER is None, reason="no chromium; `apt-get install chromium`")
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_in_a_browser(tmp_path, dark, width):
    scaling = Scaling((made_up(), made_up("v5e:8x8", 64, needed=2.0)))
    page = scaling.save_html(tmp_path / "plan.html")
    picture = tmp_path / "plan.png"
    with browser.Browser(tmp_path / "profile") as shown:
        shown.open(page.as_uri(), (width, 2400), dark=dark)
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        words = "[...document.querySelectorAll('svg text')].map(x => x.getBoundingClientRect())"
        assert min(shown.evaluate(f"{words}.map(box => box.height)")) > 11  # pixels
        shown.screenshot(picture)
    seen = browser.colours(picture)
    variables, temporaries, ground = (
        ("#6ea5e0", "#e3ab5c", "#14181d") if dark else ("#2f6fb5", "#d08a2e", "#ffffff")
    )
    assert seen.most_common(1)[0][0] == ground
    assert seen[variables] > 4000  # bars
    assert seen[temporaries] > 1000
    assert sum(seen.values()) == width * 2400


def command(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)], catch_exceptions=False)


def test_the_command(tmp_path):
    page = tmp_path / "plan.html"
    done = command(
        f"{EXAMPLE}:program", "--topology", "cpu:2", "--topology", "cpu:4", "--html", page,
        "--batch", 256,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for said in ("step on cpu:2: 2 chips", "step on cpu:4", "planning.py:", "scaling", "256"):
        assert said in done.output
    assert page.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["program", "--topology", "cpu:2"], "does not name a program"),
        (["nowhere.py:program", "--topology", "cpu:2"], "no file 'nowhere.py'"),
        (["no_such_module:program", "--topology", "cpu:2"], "no module 'no_such_module'"),
        ([f"{EXAMPLE}:nothing", "--topology", "cpu:2"], "has no 'nothing'"),
        ([f"{EXAMPLE}:ROWS", "--topology", "cpu:2"], "is not a function"),
        ([f"{EXAMPLE}:program", "--topology", "v9:1"], "Those that work"),
        ([f"{EXAMPLE}:program", "--topology", "cpu:2", "--batch", 3], "A batch of 3 rows"),
        ([f"{EXAMPLE}:program", "--topology", "cpu:2", "--computation-shape", "a"], "such as 2x2"),
        ([f"{EXAMPLE}:program"], "--topology"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in re.sub(r"\s+", " ", done.output)
    assert "Traceback" not in done.output
