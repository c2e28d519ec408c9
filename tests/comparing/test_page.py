"""The HTML page of a report: well-formed, complete in itself, with the values of the records, whatever they hold."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from conftest import SHARED
from PIL import Image
from test_compare import command, write_run

from hfgpt.comparing import compare, read_runs
from hfgpt.comparing.page import as_page
from hfgpt.comparing.plots import MOST_POINTS, build_plots, round_numbers, short
from hfgpt.comparing.report import build_report

LOGS = SHARED / "reference_logs"
LOADING = {"script", "link", "img", "iframe", "object", "embed", "image", "use", "video", "audio", "source", "base"}


class Page(HTMLParser):
    """A page as a browser reads it: its tags with their attributes, and the text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.shown, self.open = text, [], [], []
        self.root = ET.fromstring(text)  # well-formed
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.shown.append(data)

    def loads_nothing(self):
        """Whether no tag, attribute or style names a file or an address."""
        assert not LOADING & {tag for tag, _ in self.tags}
        for _, attributes in self.tags:
            assert not {"src", "href", "xlink:href", "srcset", "style"} & attributes.keys()
            assert not any(name.startswith("on") for name in attributes)
        style = self.text[self.text.index("<style>") : self.text.index("</style>")]
        return not any(word in style for word in ("url(", "@import", "http"))

    def titles(self):
        return ["".join(one.itertext()) for one in self.root.iter("title")]


def page_of(*runs, **options):
    read = read_runs(runs, **options)
    page = Page(as_page(build_report(read, compare(read), with_plots=True)))
    assert page.loads_nothing()
    return page


def records(run, key):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if key in line]


def add(run, *lines, end=""):
    with open(run / "metrics.jsonl", "a", errors="surrogatepass") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + end)


def test_values_are_those_of_the_records(tmp_path):
    run = write_run(tmp_path / "a", steps=80)
    page = page_of(run)
    shown, last = " ".join(page.shown), records(run, "eval_loss")[-1]
    for value in (
        f"{last['eval_loss']:.4f}",
        f"{math.exp(last['eval_loss']):.4g}",
        f"{last['eval_bits_per_byte']:.4f}",
        short(last["num_input_tokens_seen"]),
        "2,048",  # tokens per second
        "NVIDIA GeForce RTX 4070 Ti",
        "finished",
    ):
        assert value in shown, value
    for record in records(run, "eval_loss"):
        tokens = short(record["num_input_tokens_seen"])
        assert f"evaluation at step {record['step']}, {tokens} tokens: {record['eval_loss']:.4f}" in page.titles()
    losses = {f"step {r['step']}, {short(r['step'] * 1024)} tokens\n{r['loss']:.4f}" for r in records(run, "loss")}
    assert len(losses & set(page.titles())) > 30


def test_curves_go_through_the_records(tmp_path):
    """Few records: each is a point of the path. The square of the path is 1000 wide and high."""
    run = write_run(tmp_path / "a", steps=30, evaluations=False)
    plot = build_plots(read_runs([run]))[0]
    path = page_of(run).root.find(".//figure[@id='loss_tokens']//svg[@class='curves']/path").get("d")
    points = [tuple(map(float, point.split(","))) for point in path.removeprefix("M").split()]
    losses = records(run, "loss")
    assert len(points) == len(losses) == 30
    for (x, y), record in zip(points, losses, strict=True):
        assert x / 1000 * plot.x[1] == pytest.approx(record["num_input_tokens_seen"], rel=0.01)
        shown = plot.y[1] - y / 1000 * (plot.y[1] - plot.y[0])
        assert shown == pytest.approx(min(record["loss"], 2 * plot.y[1] - plot.y[0]), abs=0.01)


def test_names_and_samples_are_text(tmp_path):
    name = '<script>alert("1")</script> & co'
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", config={"dataset": '"><img src=x>&amp;'})
    run = run.rename(tmp_path / name.replace("/", "\u2215"))
    odd = "once <b>upon</b> & \x00\x1b[31m\ud800 \u202e end"
    add(run, {"step": 30, "event": "sample", "prompt": "<i>", "text": odd})
    add(run, {"step": 40, "event": "skip_step", "reason": "loss <nan> & \x07"})
    for page in (page_of(run), page_of(run, other)):
        assert "<b>upon</b> & \ufffd\ufffd[31m\ufffd \u202e end" in "".join(page.shown)
        assert any("skip_step at step 40: reason loss <nan> & \ufffd" in title for title in page.titles())
        assert any("<script>alert" in text for text in page.shown)


def test_the_verdict_comes_before_everything_else(tmp_path):
    a, b = (
        write_run(tmp_path / "a", tokens="a"),
        write_run(tmp_path / "b", tokens="b", seed=1, scale=0.97, step_seconds=1.0),
    )
    text = "".join(page_of(a, b).shown)
    places = [text.index(words) for words in ("% better", "perplexity", "Loss against tokens", "Settings that")]
    assert places == sorted(places) and "at equal tokens; b is 2.00x slower per token" in text
    assert "Noise: " in text and "At equal FLOPs" in text


def test_events_are_marked_where_they_happened(tmp_path):
    run = write_run(tmp_path / "a")
    add(run, {"step": 100, "event": "resume", "checkpoint": "checkpoint-100"}, {"step": 100, "event": "save"})
    add(run, {"step": 200, "event": "oom_retry", "micro_batch": 2}, {"step": 250, "event": "end", "fault": "SIGTERM"})
    add(run, *({"step": 300, "event": "skip_step", "reason": f"loss nan {n}"} for n in range(500)))
    page = page_of(run)
    svg = page.root.find(".//figure[@id='loss_tokens']//svg[@class='chart']")
    lines = [line for line in svg.iter("line") if line.get("class", "").startswith("mark")]
    assert [line.get("x1") for line in lines] == ["25.00%", "50.00%", "62.50%", "75.00%"]
    assert ["fault" in line.get("class") for line in lines] == [False, True, True, True]
    for part in ("resume at step 100: checkpoint checkpoint-100", "oom_retry at step 200", "fault SIGTERM", "495 more"):
        assert any(part in title for title in page.titles()), part


def test_a_loss_that_is_no_longer_finite_is_on_the_loss_chart(tmp_path):
    run = write_run(tmp_path / "a", steps=40, model={"n_layer": 1})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"loss": None} if "loss" in line and line["step"] > 1 else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if "eval_loss" not in line))
    documents = [{"row_of_step": n, "text": f"row {n}\n of <text>"} for n in range(8)]
    skipped = {"event": "skip_step", "reason": "loss nan", "ranks": [0, 1], "documents": documents}
    add(run, *({"step": step, **skipped} for step in range(2, 41)))
    page = page_of(run)
    marks = page.root.findall(".//figure[@id='loss_tokens']//svg[@class='flag fault']")
    assert len(marks) == 39 and "1 layer," in " ".join(page.shown)
    assert "training, mean from step 1 on; not finite in the end" in page.shown
    line = 'skip_step at step 2: reason loss nan, ranks 0, 1, documents (8, the first with "row 0 of <text>")'
    assert line in page.titles() and any(line in text for text in page.shown)
    changed = {"optim": {"from": "adamw", "to": "muon"}, "min_learning_rate": {"from": None, "to": 0.1}}
    add(run, {"step": 40, "event": "resume", "max_steps": 50, "changed_settings": changed})
    line = "resume at step 40: changed_settings optim from adamw to muon, min_learning_rate from None to 0.1"
    assert any(line in title for title in page_of(run).titles())


def test_what_a_chart_leaves_out_is_stated(tmp_path):
    """The first records, and a run that stays far above all others."""
    good = [write_run(tmp_path / name, noise=0.001, scale=0.5) for name in "ab"]
    bad = write_run(tmp_path / "bad", noise=0.001, scale=4)
    plot = build_plots(read_runs([*good, bad]))[0]
    assert plot.y[1] < 3.5 and plot.note.endswith("and all of bad.") and "up to 23.3" in plot.note
    assert any(plot.note in text for text in page_of(*good, bad).shown)
    assert build_plots(read_runs([good[0], bad]))[0].y[1] > 10  # of two, neither is the odd one
    plot = build_plots(read_runs(good[:1]))[0]
    assert plot.note.startswith(f"Not shown: records above {plot.y[1]:.4f}, up to 2.91")


def test_equal_curves_are_drawn_in_colors_of_the_legend(tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    plot = build_plots(read_runs(runs))[0]
    assert [curve.is_smoothed for curve in plot.curves] == [True, False]  # no faint curve over another
    paths = page_of(*runs).root.findall(".//figure[@id='loss_tokens']//svg[@class='curves']/path")
    assert [path.get("class") for path in paths] == ["c0 faint", "c0 dash0", "c1 dash1"]


def test_ticks_are_at_round_steps(tmp_path):
    ticks = build_plots(read_runs([write_run(tmp_path / "a", steps=1000)]))[0].x_ticks
    assert [tick.label for tick in ticks] == ["step 0", "200", "400", "600", "800", "1k"]
    assert [tick.below for tick in ticks][:2] == ["0 tokens", "205k"]


def test_samples_of_one_step_are_shown_together(tmp_path):
    run = write_run(tmp_path / "a")
    add(run, *({"step": step, "event": "sample", "prompt": f"{step} {n}", "text": ""} for step in (1, 2) for n in "ab"))
    root = page_of(run).root
    assert [one.text for one in root.findall(".//section[@class='samples']/figure/blockquote/b")] == ["2 a", "2 b"]
    assert [one.text for one in root.findall(".//section[@class='samples']/details/figure/blockquote/b")] == [
        "1 a",
        "1 b",
    ]


def test_cost_is_bounded_by_points_not_by_records(tmp_path):
    short_run, long_run = write_run(tmp_path / "short", steps=5000), write_run(tmp_path / "long", steps=15000)
    add(long_run, *({"step": 9000 + n, "event": "skip_step", "reason": "loss nan"} for n in range(2000)))
    sizes = [len(page_of(run).text) for run in (short_run, long_run)]
    assert max(sizes) < 1.2 * min(sizes) and max(sizes) < 200_000
    for plot in build_plots(read_runs([long_run])):
        for curve in plot.curves:
            assert max(map(len, (curve.records, curve.trend, curve.evaluations))) <= MOST_POINTS
    losses = [record["loss"] for record in records(long_run, "loss")]
    drawn = build_plots(read_runs([long_run]))[0].curves[0].records
    assert drawn.max() == max(losses) and drawn.min() == min(losses)  # thinning keeps what stands out
    assert drawn.iloc[-1] == losses[-1]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "num_input_tokens_seen": 1024, "wall_seconds": 0.5, "loss": 4.0}],
        [{"step": 1, "loss": None, "mfu": None}, {"step": 2, "loss": float("nan"), "tokens_per_second": None}],
        [{"step": 0, "num_input_tokens_seen": 0, "eval_loss": 5.0}],
        [{"step": n, "num_input_tokens_seen": n, "wall_seconds": -1, "loss": 10.0**n} for n in range(1, 120)],
        [{"step": 5, "loss": 10**400, "num_input_tokens_seen": "7"}, {"step": 6, "loss": 0, "eval_loss": True}],
        [{"step": 3, "event": ["x"]}, {"step": 4, "event": "resume"}, {"step": 4, "event": "sample", "text": 7}],
    ],
    ids=["nothing", "one record", "not a number", "one evaluation", "explodes", "odd values", "only events"],
)
def test_runs_with_little_or_odd_records(tmp_path, lines):
    run = write_run(tmp_path / "a", steps=3)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "lo')
    assert "last is incomplete" in "".join(page_of(run).shown)  # as while it is written
    page_of(run, write_run(tmp_path / "b", steps=50))
    (run / "run.json").unlink()
    page_of(run)


@pytest.mark.skipif(not LOGS.is_dir(), reason="the reference logs are not beside this checkout")
def test_pages_of_other_logs(tmp_path):
    nanogpt, llmc = (
        LOGS / "nanogpt_shakespeare_char_reference.txt",
        LOGS / "llmc_adamw_gpt2_124M_fineweb10B_9536steps.log",
    )
    assert "1.8857" in "".join(page_of(nanogpt).shown)
    assert "not comparable" in "".join(page_of(nanogpt, llmc, write_run(tmp_path / "a")).shown)


def test_the_command_writes_each_format(monkeypatch, capsys, tmp_path):
    a, b = write_run(tmp_path / "a", tokens="a", steps=2000), write_run(tmp_path / "b", tokens="b", steps=500)
    (tmp_path / "new").mkdir()
    code, out, err = command(monkeypatch, capsys, a, b, "--output", tmp_path / "new" / "r.HTML")
    assert (code, err) == (0, f"written: {tmp_path}/new/r.HTML\n") and "b against a" in out
    Page((tmp_path / "new" / "r.HTML").read_text())
    assert len(list((tmp_path / "new").iterdir())) == 1
    code, _, err = command(monkeypatch, capsys, a, "--output", tmp_path / "curve.png")
    assert (code, err) == (0, f"written: {tmp_path}/curve.png\n")
    picture = Image.open(tmp_path / "curve.png")
    assert picture.size == (1600, 900) and picture.convert("RGB").getpixel((5, 450)) == (255, 255, 255)
    assert (tmp_path / "curve.png").stat().st_size < 60_000
    (a / "metrics.jsonl").write_text("")
    code, _, err = command(monkeypatch, capsys, a, "--output", tmp_path / "none.png")
    assert code == 2 and err.count("\n") == 1 and "no records to draw" in err


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.31, 0.62, [0.4, 0.5, 0.6]), (7, 7, [7]), (0, 1, None)],
)
def test_round_numbers(start, end, expected):
    found = round_numbers(start, end, 6)
    assert found == pytest.approx(expected) if expected else len(found) == 6


def test_short():
    assert [short(value) for value in (0, 7, 999, 999.9, 12_500, 999_960, 3e6, 10e9, 1.5e12, 3e30)] == [
        "0", "7", "999", "1k", "12.5k", "1M", "3M", "10B", "1.5T", "3e30",
    ]  # fmt: skip
