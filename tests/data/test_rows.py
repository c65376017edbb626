"""Data files: rows and columns that are read, and messages for every fault."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.rows import Row, check_file, messages_of, sample_rows, unique_uids, write_parquet
from tests.support.rows import read_rows

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Wie viel ist 3 × 4?\n"}],
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "extra_info": {"index": 0, "split": "train"},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "四加四？"}],
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"index": 1, "split": "train"},
    },
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_parquet_and_jsonl_round_trip(tmp_path):
    write_parquet(tmp_path / "a.parquet", ROWS)
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    files = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    rows = read_rows(files, ("prompt", "data_source"), optional=("reward_model", "extra_info", "images"))
    assert [row.values for row in rows] == ROWS + ROWS
    assert rows[1].where.endswith("a.parquet, row 1") and rows[2].where.endswith("b.jsonl, line 1")


def test_only_the_named_columns_are_read(tmp_path):
    write_parquet(tmp_path / "a.parquet", ROWS)
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    for name in ("a.parquet", "b.jsonl"):
        assert read_rows([tmp_path / name], ("data_source",))[0].values == {"data_source": "openai/gsm8k"}


def test_the_same_rows_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", ROWS)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_name_of_the_hub_that_is_not_cached_is_not_taken_for_a_path():
    with pytest.raises(ValueError, match=r"^hf://openai/gsm8k/main/train is not in this machine's cache of the hub"):
        check_file(Path("hf://openai/gsm8k/main/train"))


def test_an_invalid_file_is_named_with_its_problem(tmp_path):
    write_parquet(tmp_path / "good.parquet", ROWS)
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "rows.csv").write_text("prompt\n")
    (tmp_path / "cut.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b\n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a"}\n{"prompt": "\\ud83d"}\n')
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    (tmp_path / "smile.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n')
    (tmp_path / "uneven.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "no.parquet")
    for name, message in {
        "missing.parquet": "missing.parquet: no such file; .* has cut.jsonl, deep.jsonl, empty.jsonl, good.parquet",
        "nowhere/a.parquet": "no such file .nor a directory .*`megarl data --help` lists the data sets",
        "text.parquet": "text.parquet is not a readable parquet file",
        "empty.jsonl": "empty.jsonl: the file has no rows",
        "no.parquet": "no.parquet: the file has no rows",
        "rows.csv": "rows.csv: data files are .parquet or .jsonl, not .csv",
        "cut.jsonl": "cut.jsonl, line 2 is not JSON",
        "deep.jsonl": "deep.jsonl, line 1 is nested too deeply",
        "half.jsonl": "half.jsonl, line 2 is not JSON: .*surrogates not allowed",
        "latin.jsonl": "latin.jsonl, line 1 is not UTF-8: .*invalid",
        "list.jsonl": r"list.jsonl, line 1 is \[1, 2\], not an object",
        "uneven.jsonl": "uneven.jsonl, line 2: no column 'prompt'; it has question",
    }.items():
        with pytest.raises(ValueError, match=message):
            sample_rows(tmp_path / name, 10, ("prompt",))
    assert sample_rows(tmp_path / "smile.jsonl", 10, ("prompt",))[0][0].values == {"prompt": "\U0001f600"}


def test_a_flipped_bit_in_a_parquet_file_is_refused_with_the_files_name(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, [{"prompt": f"what is {number} + {number}?"} for number in range(2000)])
    rows, content = read_rows([file], ("prompt",)), file.read_bytes()
    changed = refused = 0
    for place in range(0, len(content), len(content) // 100):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            changed += [row.values for row in read_rows([file], ("prompt",))] != [row.values for row in rows]
        except ValueError as error:
            assert "a.parquet is not a readable parquet file" in str(error)
            refused += 1
    assert changed <= 1 and refused >= 90, "headers have no checksum"


def test_missing_columns_are_named_with_the_existing_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"a.parquet: no column 'prompt' and 'reward_model'; it has question, answer"):
        read_rows([tmp_path / "a.parquet"], ("prompt", "reward_model"))
    with pytest.raises(ValueError, match="no column 'messages', or 'prompt' and 'response'; it has"):
        read_rows([tmp_path / "a.parquet"], ("messages",), ("prompt", "response"))
    assert len(read_rows([tmp_path / "a.parquet"], ("messages",), ("question", "answer"))) == 1


def test_values_of_the_wrong_type_are_named():
    row = Row("a.parquet, row 3", {"data_source": 5, "reward_model": None, "prompt": []})
    with pytest.raises(ValueError, match="row 3: column 'data_source' is 5, not a str"):
        row.need("data_source", str)
    with pytest.raises(ValueError, match="row 3: column 'reward_model' is empty"):
        row.need("reward_model", dict)
    for prompt in ([], 7, [{"role": "user"}], [{"content": "x"}], ["x"]):
        with pytest.raises(ValueError, match=r"row 3: .*prompt"):
            messages_of(Row("a.parquet, row 3", {"prompt": prompt}), "prompt")


def test_uids_are_stable_and_unique():
    def row(source, index):
        return Row("", {"data_source": source, "extra_info": None if index is None else {"index": index}})

    rows = [row("a", 0), row("a", None), row("a", 1), row("b", 0), row("a", 0), row("a", 0), row("a", "0#2")]
    uids = unique_uids(rows, "row")
    assert uids == ["a/0", "a/1", "a/1#2", "b/0", "a/0#3", "a/0#4", "a/0#2"]
    assert unique_uids([Row("", {}), Row("", {})], "sft") == ["sft/0", "sft/1"]


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/data cannot be created: Not a directory\. Choose another folder"):
        write_parquet(tmp_path / "file" / "data" / "train.parquet", ROWS)
