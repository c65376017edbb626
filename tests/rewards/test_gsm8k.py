"""The GSM8K scorer, on hand-made strings and on all solutions of the data set."""

import pytest

from megarl.commands.data.gsm8k import prepare
from megarl.rewards import RewardError, ScoreRequest, resolve, score
from tests.support.gsm8k import GSM8K, SAMPLE, needs_gsm8k
from tests.support.rows import read_rows

SCORER = resolve("gsm8k", ["openai/gsm8k"])["openai/gsm8k"]


def value(response, ground_truth):
    result = score(SCORER, ScoreRequest(response, ground_truth, "openai/gsm8k", uid="row"))
    assert result.parts == {"accuracy": result.value}
    return result.value


@pytest.mark.parametrize(
    "response, ground_truth, expected",
    [
        ("#### 72", "72", 1),
        ("48/2=24.\n#### 72", 72, 1),
        ("#### -3", "-3", 1),
        ("#### 3", "-3", 0),
        ("#### 1,080", "1080", 1),
        ("#### 1080", "1,080", 1),
        ("#### 10,80", "1080", 1),  # separators at any place are ignored
        ("#### 12", "$12", 1),
        ("#### 1080", "30*40=<<30*40=1080>>1,080 pages.\n#### 1,080", 1),  # the hub's column `answer`
        ("#### 36", "48-19=<<48-19=29>>29 stay.\n29+7=<<29+7=36>>36 ride on.\n#### 36", 1),
        ("#### 29", "48-19=<<48-19=29>>29 stay.\n29+7=<<29+7=36>>36 ride on.\n#### 36", 0),
        ("#### 2", "#### 1\n#### 2", 1),
        ("#### 0.5", "0.5", 1),
        ("#### 72.0", "72", 0),
        ("#### 72.", "72", 0),
        ("#### 72\nand the rest is silence", "72", 1),
        ("#### 72 eggs", "72", 1),
        ("#### 720", "72", 0),
        ("#### 172", "72", 0),
        ("#### 71\n#### 72", "72", 1),
        ("#### 72\n#### 71", "72", 0),
        ("#### 72\n#### none", "72", 1),  # only a number counts as an answer
        ("####72", "72", 0),
        ("####  72", "72", 0),
        ("### 72", "72", 0),
        ("##### 72", "72", 1),
        ("#### $72", "72", 0),  # the answer's form has no currency
        ("#### ,", "72", 0),
        ("#### ٧٢", "72", 0),  # digits of another script
        ("#### 72", "7２", 0),
        ("The answer is 72.", "72", 0),
        ("", "72", 0),
        ("#### 72" + "." * 293 + "x", "72", 0),  # the dots belong to the number
        ("#### 72" + " " * 293, "72", 1),  # exactly the last 300 characters
        ("#### 72" + " " * 294, "72", 0),  # one past them
        ("#### 72\n" * 50_000, "72", 1),
        ("#### " * 100_000, "72", 0),
    ],
)
def test_strings(response, ground_truth, expected):
    assert value(response, ground_truth) == expected


@pytest.mark.parametrize("ground_truth", [None, "", " ", ",", "48-19=29\n####", 72.0, True, ["72"]])
def test_a_row_without_a_usable_answer_is_an_error_not_a_zero(ground_truth):
    with pytest.raises(RewardError, match="ground_truth"):
        value("#### 72", ground_truth)


def check_references(source, out):
    """Assert that every reference solution scores 1, and 0 with an altered answer. Returns the number of solutions."""
    files = list(prepare(str(source), out)[0])
    rows = read_rows(files, ("reward_model", "extra_info"))
    for row in rows:
        reference, truth = row.values["extra_info"]["answer"], row.values["reward_model"]["ground_truth"]
        assert value(reference, truth) == 1, row
        working, _, answer = reference.rpartition("#### ")
        first = answer.lstrip("-")[0]
        wrong = [answer + "0", f"-{answer}", "1" + answer, answer.replace(first, str((int(first) + 1) % 10), 1)]
        for other in wrong:
            assert value(f"{working}#### {other}", truth) == 0, (other, row)
        assert value(working, truth) == 0, row
    return len(rows)


def test_references_of_the_sample(tmp_path):
    assert check_references(SAMPLE, tmp_path) == 12


@needs_gsm8k
def test_references_of_the_real_data_set(tmp_path):
    assert check_references(GSM8K, tmp_path) == 7473 + 1319
