"""The console of a run, for a terminal and for a log file."""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from megarl.errors import command_name
from megarl.observe.console import ConsoleStream, clock, make_console, short
from megarl.observe.console import plain as plain_module
from megarl.observe.console.figures import Pace, figures
from megarl.observe.console.live import LiveConsole
from megarl.observe.console.plain import PlainConsole
from megarl.observe.json_lines import read_lines
from megarl.observe.log import RunLog
from megarl.observe.metrics import read_metrics
from tests.support.log_recipe import make_recipe

STEP = {
    "critic/rewards/mean": 0.5125,
    "response_length/mean": 231.4,
    "response_length/clip_ratio": 0.031,
    "rollout/logprob_gap_mean": 1.2e-4,
    "perf/throughput": 23456.0,
    "timing_s/gen": 3.0,
    "timing_s/update_actor": 2.0,
    "timing_s/step": 6.0,
}


@pytest.mark.parametrize("kind", ["plain", "live", "quiet", "json"])
@pytest.mark.parametrize(("encoding", "text"), [("utf-8", "half of a pair: \ud800"), ("ascii", "reward \u2192 1")])
def test_texts_that_the_stream_cannot_encode_do_not_end_the_run(kind: str, encoding: str, text: str) -> None:
    """Names and reasons come from data sets and models."""
    written = io.BytesIO()
    console = make_console(make_recipe(console=kind), 0, 1, ConsoleStream(io.TextIOWrapper(written, encoding=encoding)))
    console.notice(text, True)
    console.close()
    assert b"\\u" in written.getvalue()


def test_plain_console_prints_one_line_per_step() -> None:
    stream = io.StringIO()
    plain = PlainConsole("run", 0, 11, stream)
    plain.reached("trainers have the model", 14.2)
    plain.step(0, {"eval/greedy": 0.25, "timing_s/step": 100.0})
    plain.step(1, STEP)
    plain.notice("look [bold]here[/bold]", True)
    first, start, before, line, notice = stream.getvalue().splitlines()
    assert first == "run: starts with step 1 of 11" and start == "start 0:14 | trainers have the model"
    assert before.startswith("before step 1 | eval/greedy 0.250 | 100.0 s | left -")
    for part in ("step 1/11", "reward 0.512", "length 231", "cut 3%", "gap 1.2e-04", "23.46k", "gen 3.0", "left 1:00"):
        assert part in line
    assert notice == "WARNING: look [bold]here[/bold]"


def test_progress_of_the_start_is_printed_and_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 2) as log:
        log.reached("trainers have the model")
    assert "start 0:00 | trainers have the model\n" in capsys.readouterr().out
    assert "trainers have" not in log.run_dir.notices.read_text()


def test_the_first_line_names_the_first_step() -> None:
    for done, line in ((0, "starts with step 1 of 6"), (4, "continues with step 5 of 6"), (6, "all of 6 steps done")):
        stream = io.StringIO()
        PlainConsole("run", done, 6, stream)
        assert stream.getvalue() == f"run: {line}\n"


def test_a_live_console_names_the_current_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The console names the current step, and the step of the figures below it."""
    stream = io.StringIO()
    live = LiveConsole("run", 0, 2, stream)

    def shown() -> str:
        stream.truncate(0)
        live._live.refresh()
        return stream.getvalue()

    live.phase("start")
    live.reached("trainers have the model", 3.0)
    assert "step 1/2" in (text := shown()) and "0:03: trainers have the model" in text and "step 0" not in text
    live.step(0, {"eval/greedy": 0.25})
    assert "step 1/2" in (text := shown()) and "before step 1" in text and "trainers" not in text
    live.step(1, STEP)
    assert "step 2/2" in (text := shown()) and "after step 1" in text
    live.step(2, STEP)
    assert "step 2/2" in (text := shown()) and "after step 2" in text
    live.close()


def test_live_console_shows_the_run_and_restores_the_terminal() -> None:
    stream, stdout, before = io.StringIO(), sys.stdout, set(threading.enumerate())
    with pytest.raises(RuntimeError):
        live = LiveConsole("my run", 0, 11, stream)
        try:
            live.phase("gen")
            live.step(1, STEP)
            live.notice("tags [red]stay[/red]", True)
            print("printed by a library")
            live._live.refresh()
            raise RuntimeError
        finally:
            live.close()
    live.close()  # a second call has no effect
    assert sys.stdout is stdout, "print was not restored"
    patience = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < patience:
        time.sleep(0.01)  # rich stops its thread without waiting for it
    assert set(threading.enumerate()) <= before, "the console's threads have ended"
    shown = stream.getvalue()
    for part in (
        "my run",
        "step 2/11",
        "after step 1",
        "left 1:00",
        "0.512",
        "tags [red]stay[/red]",
        "1 warning",
        "library",
    ):
        assert part in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor must be visible in the end"


def test_a_live_console_does_not_hide_the_cursor(tmp_path: Path) -> None:
    """SIGKILL runs no cleanup, so the cursor may not be hidden while the display is up."""
    stream = io.StringIO()
    live = LiveConsole("run", 0, 2, stream)
    for _ in range(3):
        live._live.refresh()
    shown = stream.getvalue()
    live.close()
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l")


def test_auto_is_plain_without_a_terminal() -> None:
    recipe = make_recipe(console="auto")
    assert isinstance(make_console(recipe, 0, 1, ConsoleStream(io.StringIO())), PlainConsole)


def test_times_and_numbers_are_formatted_for_reading() -> None:
    assert [clock(seconds) for seconds in (None, 75, 3700, 100000)] == ["-", "1:15", "1:01:40", "1d 3:46:40"]
    assert [short(value) for value in (0.12345, 9876.0, 23456.0, 1.5e6)] == ["0.1235", "9876", "23.46k", "1.5M"]
    assert figures({"eval/pass@1": 0.5, "critic/rewards/mean": math.nan}) == [
        ("eval/pass@1", "0.500"),
        ("reward", "nan"),
    ]
    pace = Pace(10, 20)
    assert pace.left() is None
    pace.done(11, 2.0)
    pace.done(12, 4.0)
    assert pace.left() == 24.0


def test_the_reward_covers_all_sampled_groups() -> None:
    sampled, trained = {"rollout/rewards/mean": 0.96}, {"critic/rewards/mean": 0.81}
    assert figures(sampled | trained) == [("reward", "0.960"), ("trained on", "0.810")]
    assert figures(sampled | {"critic/rewards/mean": 0.96}) == [("reward", "0.960")], "nothing was filtered"
    assert figures(trained) == [("reward", "0.810")]


def test_the_gap_of_old_tokens_is_not_taken_for_a_numerical_one():
    """With engines that sample ahead, the mean gap contains the policy's change; the gap of the newest tokens is shown, with its lag."""
    ahead = {
        "critic/rewards/mean": 0.5,
        "rollout/logprob_gap_mean": 0.3,
        "rollout/staleness_mean": 2.25,
        "rollout/logprob_gap_by_lag/10": 0.5,
        "rollout/logprob_gap_by_lag/2": 0.0012,
    }
    assert figures(ahead) == [("reward", "0.500"), ("lag", "2.2"), ("gap at lag 2", "1.2e-03")]


def test_sft_prints_loss_and_its_phases() -> None:
    line = {
        "actor/loss": 3.97,
        "actor/pg_loss": 3.97,
        "actor/grad_norm": 1.84,
        "actor/lr": 3.2e-3,
        "response_length/mean": 21.0,
    }
    line |= {
        "response_length/clip_ratio": 0.0,
        "timing_s/data": 0.001,
        "timing_s/update_actor": 0.148,
        "timing_s/step": 0.16,
    }
    stream = io.StringIO()
    PlainConsole("sft", 0, 12, stream).step(12, line)
    last = stream.getvalue().splitlines()[-1]
    assert last == "step 12/12 | loss 3.97 | grad 1.84 | lr 0.0032 | length 21 | 0.16 s (update_actor 0.15) | left 0:00"


def test_a_log_of_a_long_run_has_a_line_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(plain_module.time, "monotonic", lambda: now[0])

    def shown(total: int, seconds: float, odd: dict[int, dict[str, float]]) -> list[int]:
        stream = io.StringIO()
        plain = PlainConsole("run", 0, total, stream)
        for step in range(1, total + 1):
            now[0] += seconds
            plain.step(step, {"actor/loss": 1.0, "timing_s/step": seconds, **odd.get(step, {})})
        lines = stream.getvalue().splitlines()
        assert ("one line every" in lines[0]) == (total > 100)
        return [int(line.split("/")[0].removeprefix("step ")) for line in lines[1:] if line.startswith("step ")]

    assert shown(100, 1.0, {}) == [*range(1, 101)]
    assert shown(1200, 0.05, {}) == [1, *range(50, 1201, 50)]
    assert shown(105, 1.0, {7: {"eval/loss": 0.5}, 8: {"source/a/scoring_failed": 1.0}})[:5] == [1, 5, 7, 8, 10]
    assert shown(1000, 20.0, {})[:5] == [1, 3, 5, 7, 9], "30 s without a line are too many"
    assert shown(101, 40.0, {}) == [*range(1, 102)]


@pytest.mark.parametrize("kind", ["plain", "live", "quiet", "json"])
def test_a_run_goes_on_without_a_reader_of_its_output(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`megarl train | tee log`, and tee dies."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with RunLog(make_recipe(console=kind), tmp_path, 1, 3) as log:
            log.step(1)
            os.close(reader)
            log.warn("a warning without a reader")
            log.step(2)
            log.step(3)
        print("what the command prints after the run", flush=True)
    texts = [line["text"] for line in read_lines(log.run_dir.notices)[0]]
    assert [text for text in texts if "BrokenPipeError" in text] == [
        "writing to stdout failed (BrokenPipeError: [Errno 32] Broken pipe): the console is off until the end of this command. "
        f"Follow the run with: {command_name()} view {tmp_path}"
    ]
    assert [line["step"] for line in read_metrics(log.run_dir.metrics)] == [1, 2, 3]
    assert capsys.readouterr().err.count("BrokenPipeError") == 1
