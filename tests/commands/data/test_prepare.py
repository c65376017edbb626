"""GSM8K rows, the word problems, and the quickstart's folder."""

import functools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from megarl.commands.data import geo3k, gsm8k, math, word_problems
from megarl.commands.data.command import app
from megarl.commands.data.quickstart import prepare_quickstart
from megarl.data import PromptDataset, SFTDataset, load_tokenizer
from megarl.data.rows import write_parquet
from megarl.recipe.schema import DataConfig
from megarl.rewards import ScoreRequest, resolve, score
from tests.support.rows import read_rows

SAMPLE = Path(__file__).parents[2] / "fixtures" / "gsm8k"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    out = tmp_path_factory.mktemp("problems")
    return out, word_problems.prepare(out, seed=3, train=2000, test=200, sft=4000)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart")
    return out, prepare_quickstart(out, seed=0)


def numbers(text):
    return tuple(re.findall(r"\d+", text))


def test_gsm8k_rows_have_verls_columns(tmp_path):
    files, _ = gsm8k.prepare(str(SAMPLE), tmp_path)
    assert files == {tmp_path / "train.parquet": 8, tmp_path / "test.parquet": 4}
    columns = ("data_source", "prompt", "ability", "reward_model", "extra_info")
    row = read_rows([tmp_path / "train.parquet"], columns)[2].values
    question = "A hall has 27 rows of 40 seats. How many seats does it have?"
    assert row["data_source"] == "openai/gsm8k" and row["ability"] == "math"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1080"}
    assert row["prompt"] == [{"role": "user", "content": f"{question}\n{gsm8k.INSTRUCTION}"}]
    assert row["extra_info"]["question"] == question and row["extra_info"]["answer"].endswith("#### 1,080")
    assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("train", 2)
    (learned,) = read_rows([tmp_path / "train.parquet"], ("prompt", "response"))[2:3]  # columns that SFT reads
    assert learned.values["response"] == row["extra_info"]["answer"]


def test_gsm8k_from_parquet_is_the_same(tmp_path):
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (SAMPLE / f"{split}.jsonl").read_text().splitlines()]
        write_parquet(tmp_path / "source" / f"{split}.parquet", rows)
    gsm8k.prepare(str(SAMPLE), tmp_path / "a")
    gsm8k.prepare(str(tmp_path / "source"), tmp_path / "b")
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_gsm8k_from_a_copy_of_the_hubs_folder_is_the_same(tmp_path):
    """The hub has the files in a folder per configuration; another configuration has other answers."""
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (SAMPLE / f"{split}.jsonl").read_text().splitlines()]
        write_parquet(tmp_path / "source" / "main" / f"{split}-00000-of-00001.parquet", rows)
        write_parquet(tmp_path / "source" / "socratic" / f"{split}-00000-of-00001.parquet", rows[:1])
    gsm8k.prepare(str(SAMPLE), tmp_path / "a")
    gsm8k.prepare(str(tmp_path / "source"), tmp_path / "b")
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_invalid_gsm8k_sources_are_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "2+2?", "answer": "It is 4."}\n')
    with pytest.raises(ValueError, match=r"train.jsonl, line 1: the answer has no number after '####': ...'It is 4.'"):
        gsm8k.prepare(str(tmp_path), tmp_path / "out")
    (tmp_path / "train.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    with pytest.raises(ValueError, match=r"have no test\.jsonl, test\.parquet or .*\(they have: train\.jsonl\)"):
        gsm8k.prepare(str(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nothing half-written
    with pytest.raises(ValueError, match="neither a file, nor a folder, nor a hub name"):
        gsm8k.prepare("./no/such/folder", tmp_path / "out")


@pytest.mark.parametrize("dataset", [gsm8k, math, geo3k])
def test_one_file_for_two_splits_is_refused(tmp_path, dataset):
    """Otherwise train and test would have the same rows."""
    with pytest.raises(ValueError, match=r"train\.jsonl is one file; name a folder with train and test"):
        dataset.prepare(str(SAMPLE / "train.jsonl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_held_out_numbers_never_appear_in_training(problems):
    out, _ = problems
    names = ("train", "test", "sft", "sft_test", "preferences", "preferences_test")
    rows = {name: read_rows([out / f"{name}.parquet"], ("prompt",)) for name in names}
    test = {numbers(row.values["prompt"][0]["content"]) for row in rows["test"]}
    train = {numbers(row.values["prompt"][0]["content"]) for row in rows["train"]}
    demonstrated = {numbers(row.values["prompt"]) for row in rows["sft"]}
    assert len(test) > 100 and len(train) > 1000 and len(demonstrated) > 1000
    assert not test & train and not test & demonstrated
    for trained_on in ("sft", "preferences"):
        learned, held_out = (
            {numbers(row.values["prompt"]) for row in rows[n]} for n in (trained_on, f"{trained_on}_test")
        )
        assert len(held_out) > 100 and not held_out & learned
    assert {len(numbers) for numbers in test} == {2, 3}  # the sum of two people has two numbers, all others three


def test_word_problems_have_correct_answers(problems):
    out, _ = problems
    scorer = resolve(None, ["megarl/word_problems"])["megarl/word_problems"]
    for row in read_rows([out / "test.parquet"], ("prompt", "reward_model", "extra_info")):
        info, truth = row.values["extra_info"], row.values["reward_model"]["ground_truth"]
        assert row.values["prompt"] == [{"role": "user", "content": f"Question: {info['question']}\nAnswer:"}]
        working = info["answer"].partition("\n")[0]
        for left, sign, right, result in re.findall(r"(\d+)([*+-])(\d+)=(\d+)\.", working):
            assert {"*": int.__mul__, "+": int.__add__, "-": int.__sub__}[sign](int(left), int(right)) == int(result)
        assert working.endswith(f"={truth}.")
        assert score(scorer, ScoreRequest(info["answer"], truth, "megarl/word_problems")).value == 1


def test_only_the_chosen_answer_scores(problems):
    out, _ = problems
    scorer = resolve(None, ["megarl/word_problems"])["megarl/word_problems"]
    rejected = 0
    for row in read_rows([out / "preferences.parquet"], ("prompt", "chosen", "rejected")):
        chosen, truth = row.values["chosen"], row.values["chosen"].rpartition("#### ")[2]
        assert "=" in chosen and score(scorer, ScoreRequest(chosen, truth, "megarl/word_problems")).value == 1
        rejected += score(scorer, ScoreRequest(row.values["rejected"], truth, "megarl/word_problems")).value == 1
        assert row.values["rejected"] != chosen
    assert rejected < 400, "few of 4096: guesses that hit"


@pytest.mark.parametrize(
    "question, answer",
    [  # one problem of each template, worked by hand
        ("X has 4 eggs. X buys 8 jars with 8 eggs each. How many eggs does X have now?", (4, 8, 8, 68)),
        ("X buys 3 jars of eggs. There are 5 eggs in each. Y gives X 7 more. How many", (7, 3, 5, 22)),
        ("X has 20 eggs and puts 5 eggs into each of 3 jars. How many eggs are left", (20, 3, 5, 5)),
        ("X has 10 eggs and finds 6 more. Then X gives 9 eggs to Y. How many", (10, 6, 9, 7)),
        ("X had 10 eggs. Y took 6 of them, and later X found 9 more. How many", (10, 6, 9, 13)),
        ("X has 10 eggs. Y has 6 eggs more than X. How many eggs do they", (10, 6, 9, 26)),
    ],
)
def test_each_templates_steps_solve_its_question(question, answer):
    a, b, c, result = answer
    matching = [
        template
        for template in word_problems.TEMPLATES
        if template.text.format(n="X", m="Y", a=a, b=b, c=c, i="eggs", x="jars").startswith(question)
    ]
    assert len(matching) == 1
    assert word_problems.Problem("", matching[0].steps(a, b, c)).results[1] == result


def test_demonstrations_are_of_the_stated_quality():
    rng = random.Random(0)
    kinds = Counter()
    for _ in range(8000):
        problem = word_problems.draw(rng, held_out=False)
        response = word_problems.demonstrate(problem, rng)
        worked, scorable = "=" in response, "#### " in response
        kinds[worked, scorable] += 1
        stated = int(numbers(response)[-1])
        error = abs(stated - problem.results[1])
        assert error == 0 if worked else error <= 5
        assert response.startswith(" ") and scorable != response.endswith(f"The answer is {stated}.")
    shares = {kind: count / 8000 for kind, count in kinds.items()}
    assert shares[False, True] == pytest.approx(0.25 * 0.4, abs=0.02)
    assert shares[False, False] == pytest.approx(0.25 * 0.6, abs=0.02)
    assert shares[True, True] == pytest.approx(0.75 * 0.4, abs=0.02)


def test_equal_seeds_give_equal_problems(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        word_problems.prepare(tmp_path / name, seed, train=20, test=20, sft=20)
    for split in ("train", "test", "sft"):
        a, b, c = ((tmp_path / name / f"{split}.parquet").read_bytes() for name in "abc")
        assert a == b != c


def test_the_quickstart_folder_fits_its_recipes(quickstart):
    out, prepared = quickstart
    tokenizer = load_tokenizer(out / "model")
    config = DataConfig(chat_template=False, max_prompt_length=64)
    train = PromptDataset([out / "data" / "train.parquet"], tokenizer, config)
    test = PromptDataset([out / "data" / "test.parquet"], tokenizer, config)
    assert (len(train), len(test)) == (4096, 256) and train.data_sources == ["megarl/word_problems"]
    assert list(prepared.rows.values()) == [4096, 256, 60_000, 256, 4096, 256]
    assert sum(len(prompt.tokens) for prompt in train) / 4096 == pytest.approx(33, abs=3)
    path = out / "few.parquet"
    rows = pyarrow.parquet.read_table(out / "data" / "sft.parquet").slice(0, 500).to_pylist()
    write_parquet(path, rows)
    for row, example in zip(rows, SFTDataset([path], tokenizer, config, 128), strict=True):
        response = example.tokens[example.loss_mask]
        assert response[-1] == tokenizer.eos_id and tokenizer.decode(response) == row["response"]
        assert len(response) <= 48  # the recipe's limit of a response


@pytest.fixture
def few_rows(monkeypatch):
    """The quickstart with fewer problems, where their number does not matter."""
    few = functools.partial(word_problems.prepare, train=8, test=8, sft=8, preferences=8)
    monkeypatch.setattr(word_problems, "prepare", few)


def test_an_intact_quickstart_is_kept_and_a_changed_one_rewritten(few_rows, tmp_path):
    out = tmp_path / "quickstart"
    prepared = prepare_quickstart(out, seed=0)
    assert prepared.reason
    weights = out / "model" / "model.safetensors"
    before = weights.read_bytes(), weights.stat().st_mtime_ns
    again = prepare_quickstart(out, seed=0)
    assert not again.reason and again.files == prepared.files
    assert (weights.read_bytes(), weights.stat().st_mtime_ns) == before
    (out / "data" / "test.parquet").unlink()
    repaired = prepare_quickstart(out, seed=0)
    assert repaired.reason == "data/test.parquet was missing"
    weights.write_bytes(before[0][:-1] + b"\x00\x00")
    assert prepare_quickstart(out, seed=0).reason == "model/model.safetensors had changed"
    assert weights.read_bytes() == before[0]
    assert "'seed': 0" in prepare_quickstart(out, seed=1).reason
    assert weights.read_bytes() != before[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        prepare_quickstart(tmp_path / "file", seed=0)


@pytest.mark.parametrize("manifest", ["{}", "[]", '{"settings": {}, "sha256": [], "rows": {}}', "{"])
def test_a_damaged_manifest_is_rewritten(few_rows, tmp_path, manifest):
    prepare_quickstart(tmp_path, seed=0)
    (tmp_path / "quickstart.json").write_text(manifest)
    assert prepare_quickstart(tmp_path, seed=0).reason == "quickstart.json was damaged"
    assert not prepare_quickstart(tmp_path, seed=0).reason


def test_the_commands(few_rows, tmp_path):
    done = CliRunner().invoke(app, ["gsm8k", "--source", str(SAMPLE), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert re.search(r"train.parquet +\d+ KiB +8 rows\n.*test.parquet +\d+ KiB +4 rows", done.output)
    failed = CliRunner().invoke(app, ["gsm8k", "--source", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert isinstance(failed.exception, ValueError)
    for seed in ("5", "5"):
        done = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "q"), "--seed", seed])
    assert done.exit_code == 0 and "sft.parquet" in done.output and "8 rows" in done.output and "kept" in done.output
