"""Rows on the hub: huggingface_hub's own code against a server with the hub's endpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.hf import hub
from tests.support.fake_hub import FakeHub, use_hub

README = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - {split: test, path: [main/test-a.parquet, main/test-b.parquet]}
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
# Text
"""

FILE = "main/train/0000.parquet"  # as the hub names a converted file
ROWS: Callable[[str], bytes] = str.encode


class TestData:
    def pin(self, text: str) -> list[str]:
        name = hub.data_name(text)
        assert name is not None
        pinned, _ = hub.pin_data(name)
        hub.data_files(pinned)
        return [str(file) for file in pinned]

    def test_splits_of_the_readme(self, server: FakeHub, home: Path) -> None:
        files = ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet", "main/test-a.parquet"]
        files += ["main/test-b.parquet", "socratic/train-00000-of-00001.parquet"]
        commit = server.dataset("openai/gsm8k").commit({"README.md": README, **{name: ROWS(name) for name in files}})
        start = f"hf://openai/gsm8k@{commit}"
        assert self.pin("hf://openai/gsm8k/main/train") == [f"{start}/{name}" for name in files[:2]]
        assert self.pin("hf://openai/gsm8k/main/test") == [f"{start}/{name}" for name in files[2:4]]
        assert self.pin("hf://openai/gsm8k/test") == [f"{start}/{name}" for name in files[2:4]]
        assert self.pin("hf://openai/gsm8k/main/test-*.parquet") == [f"{start}/{name}" for name in files[2:4]]
        assert self.pin(f"{start}/main/train") == [f"{start}/{name}" for name in files[:2]]
        with pytest.raises(hub.HubError) as caught:  # two configurations have it
            self.pin("hf://openai/gsm8k/train")
        assert "has no rows 'train': name one of hf://openai/gsm8k/main/train, " in str(caught.value)

    def test_a_file(self, server: FakeHub, home: Path) -> None:
        server.dataset("org/rows").commit({"deep/er/a.jsonl": b"{}\n", "code.py": b""})
        (pinned,) = self.pin("hf://org/rows/deep/er/a.jsonl")
        name = hub.data_name(pinned)
        assert name is not None
        file = hub.data_files([name])[0]
        assert file.read_bytes() == b"{}\n" and hub.name_of_file(str(file)) == name
        assert hub.cached_files(pinned) == hub.cached_files("hf://org/rows/deep/er/a.jsonl") == [str(file)]
        assert hub.cached_files("hf://org/rows/train") == hub.cached_files("a.jsonl") == []
        assert server.downloads() == ["a.jsonl"]

    @pytest.mark.parametrize("file", ["train.jsonl", "data/train-00000-of-00001.parquet", "train/0000.parquet"])
    def test_splits_by_file_names(self, server: FakeHub, home: Path, file: str) -> None:
        file = f"default/{file}" if file == "train/0000.parquet" else file
        server.dataset("org/rows").commit({file: b"rows", "data/other.csv": b""})
        (pinned,) = self.pin("hf://org/rows/train")
        assert pinned.endswith(file)

    def test_converted_by_the_hub(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = server.dataset("org/csv")
        data.commit({"rows.csv": b"a,b"})
        converted = data.commit({"main/train/0000.parquet": b"rows"}, "refs/convert/parquet")
        expected = [f"hf://org/csv@{converted}/main/train/0000.parquet"]
        assert self.pin("hf://org/csv/main/train") == self.pin("hf://org/csv/train") == expected
        data.commit({"main/train/0000.parquet": b"newer"}, "refs/convert/parquet")
        assert self.pin(f"hf://org/csv@{converted}/main/train") == expected  # what a resumed run asks for
        with pytest.raises(hub.HubError, match=r"has no rows 'main/test': name one of hf://org/csv/main/train$"):
            self.pin("hf://org/csv/main/test")

    def test_converted_rows_of_the_cache_are_not_those_of_a_revision_or_a_file(
        self, server: FakeHub, home: Path
    ) -> None:
        data = server.dataset("org/csv")
        commit = data.commit({"rows.csv": b"a,b"})
        data.commit({"main/train/0000.parquet": b"rows"}, "refs/convert/parquet")
        self.pin("hf://org/csv/main/train")
        (file,) = hub.cached_files("hf://org/csv/main/train")
        assert hub.cached_files("hf://org/csv@refs/convert/parquet/main/train") == [file]
        for other in ("@v2/main/train", f"@{commit}/main/train", f"@{commit}/{FILE}", f"@v2/{FILE}", f"/{FILE}"):
            assert hub.cached_files(f"hf://org/csv{other}") == []

    def test_no_rows(self, server: FakeHub, home: Path) -> None:
        server.dataset("org/csv").commit({"rows.csv": b"a,b"})
        with pytest.raises(hub.HubError, match=r"it has neither splits .* nor \.parquet"):
            self.pin("hf://org/csv/train")
        with pytest.raises(hub.HubError, match="has no data set org/none"):
            self.pin("hf://org/none/train")

    def test_offline(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server.dataset("openai/gsm8k").commit({"README.md": README, "main/train-0.parquet": b"rows"})
        online = self.pin("hf://openai/gsm8k/main/train")
        use_hub(monkeypatch, server.url, home, offline=True)
        assert self.pin("hf://openai/gsm8k/main/train") == online

    @pytest.mark.parametrize("has_list", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_a_part_of_a_split_in_the_cache(
        self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, has_list: bool
    ) -> None:
        shards = [f"data/train-0000{number}-of-00002.parquet" for number in range(2)]
        server.dataset("org/rows").commit(dict.fromkeys(shards, b"rows"))
        self.pin(f"hf://org/rows/{shards[0]}")
        if not has_list:  # written by an old huggingface_hub
            (tree,) = home.rglob("trees/*.json")
            tree.unlink()
        assert hub.cached_files("hf://org/rows/train") == []
        for offline in (True, False):
            use_hub(monkeypatch, server.url, home, offline=offline)
            server.fails = True
            with pytest.raises(hub.HubError, match=r"org/rows.* is not complete in the cache"):
                self.pin("hf://org/rows/train")
            assert self.pin(f"hf://org/rows/{shards[0]}")[0].endswith(shards[0])
        server.fails = False
        self.pin("hf://org/rows/train")
        assert [Path(file).name for file in hub.cached_files("hf://org/rows/train")] == [Path(s).name for s in shards]

    @pytest.mark.parametrize(
        "files",
        [
            ("train.jsonl", "train.parquet"),
            ("train.jsonl", "data/train.jsonl"),
            ("data/train-00000-of-00001.parquet", "data/train-00000-of-00002.parquet"),
        ],
    )
    def test_several_forms_of_a_split(self, server: FakeHub, home: Path, files: tuple[str, ...]) -> None:
        server.dataset("org/rows").commit(dict.fromkeys(files, b"rows"))
        with pytest.raises(
            hub.HubError, match="default/train in several forms, so its rows would be doubled"
        ) as caught:
            self.pin("hf://org/rows/train")
        assert all(file in str(caught.value) for file in files)
        form = str(caught.value).split(" or ")[-1]
        assert len(self.pin(form)) == 1

    def test_files_of_other_folders(self, tmp_path: Path) -> None:
        assert hub.name_of_file(str(tmp_path / "train.parquet")) is None
        copied = tmp_path / "datasets--org--rows/snapshots" / ("0" * 40) / "train.parquet"  # of another cache
        assert hub.name_of_file(str(copied)) is None
