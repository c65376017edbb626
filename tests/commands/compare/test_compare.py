"""compare: the rules against figures worked by hand, and every kind of log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl import cli
from megarl.commands.compare.command import percentage, step_range
from megarl.commands.compare.logs import Log, console_line, read_log
from megarl.commands.compare.measures import NothingInCommon, accuracy, between, errors, spark, throughput
from megarl.commands.compare.rules import CompareOptions, compare_logs
from megarl.exit_status import guarded
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sinks import TensorBoardSink

NAN = math.nan
REWARD = "critic/rewards/mean"


def log(rewards: dict[int, float], rates: dict[int, float] | None = None, **more: dict[int, float]) -> Log:
    curves = {REWARD: rewards, "perf/throughput": rates or {}, **more}
    log = Log(Path("somewhere"), "JSONL")
    for name, curve in curves.items():
        for step, value in curve.items():
            log.add(step, {name: value})
    return log


class TestMathematics:
    def test_error_by_hand(self) -> None:
        """The error is a mean of absolute differences: neither relative, nor a root mean square, nor a mean of signed ones."""
        result = accuracy({1: 0.5, 2: 0.2, 3: 0.9}, {1: 0.4, 2: 0.4, 4: 0.9})
        # |0.1| and |-0.2| over two steps; their mean is 0.15, of the differences -0.05; mean |B| is 0.4
        assert result.error == pytest.approx(0.15)
        assert result.bias == pytest.approx(-0.05)
        assert result.relative == pytest.approx(0.375)
        assert (result.largest, result.largest_step) == (pytest.approx(0.2), 2)
        assert (result.steps, result.first, result.last, result.only_a, result.only_b) == (2, 1, 2, 1, 1)

    def test_at_the_bound_is_within(self) -> None:
        """A difference equal to the bound passes, although 0.54 - 0.5 is above 0.04 in binary."""
        assert 0.54 - 0.5 > 0.04
        assert accuracy({1: 0.54}, {1: 0.5}).within(0.04)
        assert not accuracy({1: 0.5401}, {1: 0.5}).within(0.04)

    @pytest.mark.parametrize(("a", "b"), [(NAN, 0.5), (0.5, math.inf), (NAN, NAN)])
    def test_a_nonfinite_value_is_never_within_the_bound(self, a: float, b: float) -> None:
        """A diverged run must not pass by its finite steps or because comparisons with NaN are false."""
        result = accuracy({1: 0.5, 2: a}, {1: 0.5, 2: b})
        assert result.error == 0 and result.steps == 1
        assert (result.not_finite_a, result.not_finite_b) == (not math.isfinite(a), not math.isfinite(b))
        assert not result.within(1.0)

    def test_no_finite_step_gives_a_nan_error(self) -> None:
        result = accuracy({1: NAN}, {1: 0.5})
        assert math.isnan(result.error) and math.isnan(result.relative) and result.largest_step is None

    def test_runs_without_common_steps_name_both_ranges(self) -> None:
        with pytest.raises(NothingInCommon, match="A has steps 1 to 2, B has step 7"):
            accuracy({1: 0.0, 2: 0.0}, {7: 0.0})

    def test_throughput_by_hand(self) -> None:
        """Only the first steps count, in any order in the file; the ratio is A over B."""
        result = throughput({5: 9000, 1: 100, 2: 200, 3: 300, 4: 200}, dict.fromkeys(range(1, 9), 400), 4)
        assert (result.mean_a, result.mean_b, result.ratio) == (200, 400, 0.5)
        assert result.within(0.5) and not result.within(0.51)

    @pytest.mark.parametrize("rates", [{1: NAN}, {1: 0.0}, {}])
    def test_throughput_ratio_is_nan_without_common_steps(self, rates: dict[int, float]) -> None:
        result = throughput({1: 5.0}, rates, 4)
        assert math.isnan(result.ratio) and not result.within(0.0)

    def test_errors_and_their_running_mean(self) -> None:
        gaps, means = errors({1: 1.0, 2: NAN, 3: 2.0}, {1: 0.0, 2: 0.0, 3: 5.0})
        assert gaps[1] == 1 and math.isnan(gaps[2]) and gaps[3] == 3
        assert means == {1: 1.0, 2: 1.0, 3: 2.0}

    def test_slice_of_steps_includes_both_ends(self) -> None:
        series = {step: float(step) for step in range(1, 6)}
        assert list(between(series, 2, 4)) == [2, 3, 4]
        assert list(between(series, None, 2)) == [1, 2] and list(between(series, 4, None)) == [4, 5]

    def test_spark(self) -> None:
        """Sparklines show means of stretches; missing and non-finite values stay visible."""
        assert spark({1: 0.0, 2: 1.0, 3: NAN}, [1, 2, 3, 4], 0.0, 1.0, 10) == "▁█× "
        assert spark({1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}, [1, 2, 3, 4], 0.0, 1.0, 2) == "▅█"
        assert spark({1: 3.0}, [1], 3.0, 3.0, 5) == "▁"


class TestConsoleLines:
    @pytest.mark.parametrize(
        "line",
        [
            "step:12 - critic/rewards/mean:0.500 - perf/throughput:812.250\n",  # its first versions
            "step:12 - critic/rewards/mean:np.float64(0.5) - perf/throughput:812.25\n",  # numpy 2
            "step:12 - critic/rewards/mean:tensor(0.5) - perf/throughput:8.1225e+02\n",
            "\x1b[36m(TaskRunner pid=3125)\x1b[0m step:12 - critic/rewards/mean:0.5 - perf/throughput:812.25\n",
            "(main_task pid=9, ip=10.0.0.7) step:12 - critic/rewards/mean:0.5 - perf/throughput:812.25 [repeated 2x]\n",
            "Epoch 1:  40%|##  | 2/5 [00:03<00:04,  1.5s/it]step:12 - critic/rewards/mean:0.5 - perf/throughput:812.25\n",
            "2025-07-01 10:00:00 INFO step:12 - critic/rewards/mean:0.5 - note:some text - perf/throughput:812.25\n",
        ],
    )
    def test_every_form(self, line: str) -> None:
        assert console_line(line) == (12, {REWARD: 0.5, "perf/throughput": 812.25}, "")

    def test_signs_exponents_and_nonfinite_values_are_parsed(self) -> None:
        parsed = console_line("step:3 - a/b:-1.5e-05 - c:nan - d:-inf - e:np.float64(nan) - f:.5 - train/time(s):2.\n")
        assert parsed is not None
        values = parsed[1]
        assert (values["a/b"], values["d"], values["f"], values["train/time(s)"]) == (-1.5e-05, -math.inf, 0.5, 2.0)
        assert math.isnan(values["c"]) and math.isnan(values["e"])

    def test_a_truncated_line_drops_its_last_value(self) -> None:
        """A cut line drops its last value: perf/throughput:81 may have been 812.25."""
        assert console_line("step:2 - a:0.5 - perf/throughput:81") == (2, {"a": 0.5}, "perf/throughput")

    @pytest.mark.parametrize(
        "line", ["training/global_step:7 - a:1\n", "global/step:7 - a:1\n", "epoch 0, step 7\n", "\n"]
    )
    def test_lines_without_metrics_give_none(self, line: str) -> None:
        assert console_line(line) is None


class TestLogs:
    def test_verl_json_lines(self, tmp_path: Path) -> None:
        """Metrics are under `data`; null stands for NaN; a validation is a second line of the step."""
        path = tmp_path / "verl.jsonl"
        path.write_text(
            '{"step": 1, "data": {"train/loss": 0.5, "text": "x", "flag": true}}\n'
            '{"step": 2, "elapsed_seconds": 3.0, "data": {"train/loss": null}}\n'
            '{"step": 2, "data": {"val/loss": 0.4}}\n'
            '{"step": 3, "data": {"train/lo'
        )
        log = read_log(path)
        assert log.kind == "JSONL" and set(log.metrics) == {"train/loss", "val/loss"}
        assert log.metrics["train/loss"][1] == 0.5 and math.isnan(log.metrics["train/loss"][2])
        assert not log.rewritten  # another metric of a step does not rewrite the step
        assert log.notes == ["1 line of verl.jsonl could not be read as metrics of a step"]

    def test_a_run_of_megarl(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/loss": 0.5}\n{"step": 2, "actor/loss": "NaN"}\n')
        log = read_log(tmp_path)
        assert log.kind == "megarl" and list(log.metrics) == ["actor/loss"]
        assert math.isnan(log.metrics["actor/loss"][2])

    def test_after_a_resume_the_last_value_of_a_step_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "log.txt"
        path.write_text("".join(f"step:{step} - {REWARD}:{value}\n" for step, value in [(1, 0.1), (2, 0.9), (2, 0.2)]))
        log = read_log(path)
        assert log.metrics[REWARD] == {1: 0.1, 2: 0.2} and log.rewritten == {REWARD: {2}}

    def test_tensorboard_events_of_verl(self, tmp_path: Path) -> None:
        """All steps are read, not a sample of 10,000, from two sessions in one folder, or in a single subfolder."""
        from torch.utils.tensorboard import SummaryWriter

        folder = tmp_path / "project" / "experiment"
        for first, last, value in ((1, 3, 0.25), (3, 10_050, 0.75)):
            writer = SummaryWriter(str(folder), filename_suffix=f".{first}")
            for step in range(first, last + 1):
                writer.add_scalar(REWARD, value, step)
            writer.close()
        for path in (folder, tmp_path):
            log = read_log(path)
            assert log.kind == "TensorBoard" and len(log.metrics[REWARD]) == 10_050
            assert [log.metrics[REWARD][step] for step in (2, 3, 10_050)] == [0.25, 0.75, 0.75]
            assert log.rewritten[REWARD] == {3}

    def test_tensorboard_events_of_megarl(self, tmp_path: Path) -> None:
        sink = TensorBoardSink(RunDirectory(tmp_path), 1)
        sink.write(1, {REWARD: 0.5})
        sink.write(2, {REWARD: NAN})
        sink.close("finished")
        for path in (tmp_path / "tensorboard", next((tmp_path / "tensorboard").iterdir())):
            curve = read_log(path).metrics[REWARD]
            assert curve[1] == 0.5 and math.isnan(curve[2])

    def test_a_dictionary_in_the_first_line_is_not_json(self, tmp_path: Path) -> None:
        """The settings that verl's SFT trainer prints first are skipped."""
        path = tmp_path / "log"
        path.write_text("{'data': {'train_batch_size': 512}}\nstep:1 - train/loss:0.5\n")
        assert read_log(path).kind == "verl console"


class TestRules:
    def test_the_reward_is_preferred_and_a_loss_has_half_its_bound(self) -> None:
        curves = {1: 0.5}
        reward = compare_logs(
            log(curves, **{"actor/loss": {1: 9.0}}), log(curves, **{"actor/loss": {1: 0.0}}), CompareOptions()
        )
        assert (reward.rule, reward.bound, reward.within) == ("reward", 0.04, True)
        a, b = log({}, **{"actor/loss": {1: 0.52}}), log({}, **{"train/loss": {1: 0.5}})
        loss = compare_logs(a, b, CompareOptions())
        assert (loss.rule, loss.bound, loss.a.metric, loss.b.metric) == ("loss", 0.02, "actor/loss", "train/loss")
        assert loss.within
        assert not compare_logs(log({}, **{"actor/loss": {1: 0.521}}), b, CompareOptions()).within

    def test_a_policy_loss_is_not_bounded_by_the_rule_for_sft(self) -> None:
        base = log({1: 0.5}, **{"actor/loss": {1: 0.1}})
        with pytest.raises(ValueError, match="--max-error"):
            compare_logs(base, base, CompareOptions(metric="actor/loss"))
        assert compare_logs(base, base, CompareOptions(metric="actor/loss", max_error=0.01)).within

    def test_the_loss_of_preferences_has_no_rule(self) -> None:
        """Two DPO runs: the bound of the SFT loss says nothing about theirs."""
        base = log({}, **{"actor/loss": {1: 0.69}, "actor/dpo_accuracy": {1: 0.5}})
        for options in (CompareOptions(), CompareOptions(metric="actor/loss")):
            with pytest.raises(ValueError, match="--max-error"):
                compare_logs(base, base, options)
        assert compare_logs(base, base, CompareOptions(max_error=0.01)).rule == "actor/loss"

    def test_rl_against_sft_is_refused(self) -> None:
        with pytest.raises(ValueError, match="neither a reward"):
            compare_logs(
                log({1: 0.5}, **{"actor/loss": {1: 1.0}}), log({}, **{"train/loss": {1: 1.0}}), CompareOptions()
            )

    def test_a_missing_metric_suggests_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"A .* has no metric critic/reward/mean\. Nearest: critic/rewards/mean"):
            compare_logs(log({1: 0.5}), log({1: 0.5}), CompareOptions(metric="critic/reward/mean"))
        with pytest.raises(ValueError, match=r"B .*--metric-b"):
            compare_logs(log({1: 0.5}), log({1: 0.5}), CompareOptions(metric_b="zzz"))

    def test_the_step_range_applies_to_all_figures(self) -> None:
        a, b = log({1: 0.9, 2: 0.5, 3: 0.5}, {1: 1.0, 2: 50.0}), log({1: 0.1, 2: 0.5, 3: 0.5}, {1: 100.0, 2: 100.0})
        assert not compare_logs(a, b, CompareOptions()).within
        comparison = compare_logs(a, b, CompareOptions(first=2))
        assert comparison.within and comparison.throughput is not None and comparison.throughput.ratio == 0.5
        with pytest.raises(ValueError, match=r"none.*--steps.*In all, A has steps 1 to 3"):
            compare_logs(a, b, CompareOptions(first=50))

    def test_throughput_is_checked_only_against_a_given_ratio(self) -> None:
        a, b = log({1: 0.5}, {1: 50.0}), log({1: 0.5}, {1: 100.0})
        assert compare_logs(a, b, CompareOptions()).fast is None and compare_logs(a, b, CompareOptions()).within
        assert compare_logs(a, b, CompareOptions(min_throughput_ratio=0.5)).within
        assert not compare_logs(a, b, CompareOptions(min_throughput_ratio=0.6)).within
        with pytest.raises(ValueError, match="B did not log it"):
            compare_logs(a, log({1: 0.5}), CompareOptions(min_throughput_ratio=0.5))
        assert any(
            "B did not log perf/throughput" in note for note in compare_logs(a, log({1: 0.5}), CompareOptions()).notes
        )

    def test_notes_list_omitted_steps_and_filters(self) -> None:
        a = log({1: 0.5, 2: 0.6}, {3: 1.0}, **{"rollout/groups_filtered": {1: 0.0, 2: 5.0}})
        a.add(2, {REWARD: NAN})
        notes = "\n".join(compare_logs(a, log({2: 0.6}, {1: 1.0, 2: 1.0}), CompareOptions()).notes)
        for words in (
            "A: 1 step omitted: not in the other run; A has steps 1 to 2.",
            "A: 1 step written more than once (step 2)",
            "A: not finite (NaN or infinite) in 1 common step",
            "A: dynamic sampling filtered groups",
            "fewer than 4 steps; A has 1, B 2",
            "A's step 3, B's steps 1 to 2",
        ):
            assert words in notes


class TestCommand:
    """The command line: exit status, stdout, stderr and the HTML page."""

    @staticmethod
    def status(*arguments: str) -> int:
        return guarded(
            lambda: cli.app(args=["compare", *arguments], prog_name="megarl", standalone_mode=False), debug=False
        )

    @pytest.fixture
    def logs(self, tmp_path: Path) -> tuple[str, str]:
        for name, value in (("a", 0.5), ("b", 0.55)):
            lines = (f"step:{step} - {REWARD}:{value} - perf/throughput:100.0\n" for step in range(1, 6))
            (tmp_path / name).write_text("".join(lines))
        return str(tmp_path / "a"), str(tmp_path / "b")

    def test_status(self, logs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert self.status(*logs) == 1
        assert capsys.readouterr().out.splitlines()[-1] == "outside the rules"
        assert self.status(*logs, "--max-error", "5%") == 0
        assert self.status(logs[0], logs[0], "--min-throughput-ratio", "1.01") == 1

    def test_json(self, logs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert self.status(*logs, "--json") == 1
        report = json.loads(capsys.readouterr().out)
        assert report["within"] is False and report["accuracy"]["error"] == pytest.approx(0.05)
        assert report["accuracy"]["bound"] == 0.04 and report["throughput"]["ratio"] == 1.0

    def test_nan_is_strict_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a").write_text(f"step:1 - {REWARD}:nan\n")
        assert self.status(str(tmp_path / "a"), str(tmp_path / "a"), "--json") == 1
        assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["accuracy"]["error"] == "NaN"

    def test_page(self, logs: tuple[str, str], tmp_path: Path) -> None:
        """The page is self-contained and escapes paths."""
        evil = tmp_path / "<script>alert(1)<"
        evil.write_bytes(Path(logs[0]).read_bytes())
        page = tmp_path / "page.html"
        assert self.status(str(evil), logs[1], "--html", str(page)) == 1
        text = page.read_text()
        assert "<script>alert" not in text and "&lt;script&gt;alert" in text
        assert "outside the rules" in text and "default-src 'none'" in text
        payload = json.loads(text.split('id="data"', 1)[1].split(">", 1)[1].split("</script>", 1)[0])
        assert [chart["title"] for chart in payload["charts"]] == ["Reward", "Absolute error", "Throughput"]
        assert payload["series"]["Absolute error running mean"]["y"] == [0.05] * 5

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["{a}", "nowhere"], "nowhere does not exist"),
            (["{a}", "{empty}"], "has no metrics"),
            (["{a}", "{folder}"], "no metrics.jsonl and no TensorBoard events"),
            (["{a}", "{b}", "--steps", "5-9"], "give FROM:TO"),
            (["{a}", "{b}", "--steps", "9:5"], "9 is greater than 5"),
            (
                ["{a}", "{b}", "--steps", "7:9"],
                "no step in common: A has none, B has none within --steps. In all, A has steps 1 to 5, B steps 1 to 5.",
            ),
            (["{a}", "{b}", "--max-error", "much"], "give a percentage"),
            (["{a}", "{b}", "--metric", "critic/reward"], "Nearest: critic/rewards/mean"),
            (["{a}", "{b}", "--throughput-steps", "0"], "throughput-steps"),
            (["{a}", "{b}", "--html", "no/such/page.html"], "does not exist"),
            (["{a}", "{b}", "--html", "{folder}"], "is a folder. Name a file in it"),
            (["{a}", "{b}", "--html", "{a}/page.html"], "is a file"),
            (["{a}", "{b}", "--html", "/proc/page.html"], "nothing can be written to the folder /proc"),
        ],
    )
    def test_bad_input(
        self,
        arguments: list[str],
        words: str,
        logs: tuple[str, str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "empty").write_text("Nothing was trained.\n")
        (tmp_path / "folder").mkdir()
        places = {"a": logs[0], "b": logs[1], "empty": tmp_path / "empty", "folder": tmp_path / "folder"}
        assert self.status(*(argument.format(**places) for argument in arguments)) == 2
        output = capsys.readouterr()
        assert words in " ".join(output.err.replace("│", " ").split()) and "Traceback" not in output.err


def test_percentages_and_ranges() -> None:
    assert percentage("4") == percentage("4 %") == 0.04 and percentage(".5%") == 0.005
    assert (step_range("5:40"), step_range("5:"), step_range(":40")) == ((5, 40), (5, None), (None, 40))
