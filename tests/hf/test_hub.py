"""Names on the hub: huggingface_hub's own code against a server with the hub's endpoints."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from megarl.hf import hub
from megarl.hf.hub.errors import without_secrets
from tests.support.fake_hub import FakeHub, use_hub

MODEL = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling_custom.py": b"raise SystemExit",
    "original/consolidated.safetensors": b"a copy",
    "original/params.json": b"{}",
    "sub/folder/config.json": b"{}",
    "sub/spiece.model": b"",
    "sub/x.jinja": b"",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "consolidated.safetensors": b"a copy",
}
SMALL = {"config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}


def model(text: str) -> hub.HubName:
    name = hub.model_name(text)
    assert name is not None, text
    return name


class TestNames:
    @pytest.mark.parametrize(
        ("text", "repo", "revision"),
        [
            ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B", None),
            ("Qwen/Qwen3-1.7B@v1", "Qwen/Qwen3-1.7B", "v1"),
            ("hf://Qwen/Qwen3-1.7B@refs/pr/3", "Qwen/Qwen3-1.7B", "refs/pr/3"),
        ],
    )
    def test_of_models(self, text: str, repo: str, revision: str | None) -> None:
        assert hub.model_name(text) == hub.HubName(repo, revision)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "model",
            "models/Qwen3-8B",
            "runs/x",
            "output/step-10",
            "ckpt/x",
            "pretrained/x",
            "weights/x",
            "Results/x",
            "a/b.json",
            "/a/b",
            "./a/b",
            "~/a",
            "a/b/c",
            "../a",
            "a//b",
            "a/b@",
            "a b/c",
        ],
    )
    def test_paths_are_no_names(self, text: str) -> None:
        assert hub.model_name(text) is None

    def test_a_folder_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "Qwen").mkdir()
        assert hub.model_name("Qwen/Qwen3-8B") is None  # a folder that is not there yet
        assert hub.model_name("hf://Qwen/Qwen3-8B") == hub.HubName("Qwen/Qwen3-8B")

    def test_of_data(self) -> None:
        assert hub.data_name("data/train.parquet") is None
        assert hub.data_name("hf://openai/gsm8k/main/train") == hub.HubName("openai/gsm8k", None, "main/train")
        assert hub.data_name("hf://datasets/openai/gsm8k@v1/train") == hub.HubName("openai/gsm8k", "v1", "train")
        converted = hub.data_name("hf://openai/gsm8k@refs/convert/parquet/main/train/0000.parquet")
        assert converted == hub.HubName("openai/gsm8k", "refs/convert/parquet", "main/train/0000.parquet")
        with pytest.raises(hub.HubError, match=r"CONFIG/\]SPLIT"):
            hub.data_name("hf://openai/gsm8k")
        with pytest.raises(hub.HubError, match="hf://OWNER/NAME"):
            hub.model_name("hf://Qwen3-8B")

    def test_are_read_back(self) -> None:
        for text in ("hf://a/b@refs/pr/1", "hf://a/b"):
            assert str(hub.model_name(text)) == text
        for text in ("hf://a/b@v1/main/train", "hf://a/b/x.jsonl"):
            assert str(hub.data_name(text)) == text


class TestModels:
    def test_pinned_at_the_commit(self, server: FakeHub, home: Path) -> None:
        first = server.model("org/tiny").commit(MODEL)
        pinned, notice = hub.pin_model(model("org/tiny"))
        assert (str(pinned), notice, pinned.is_pinned) == (f"hf://org/tiny@{first}", None, True)
        server.model("org/tiny").commit({**MODEL, "model.safetensors": b"other"})
        folder = hub.model_folder(pinned)
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert hub.pin_model(model("org/tiny"))[0] != pinned
        assert hub.local_model(str(folder)) == str(folder)
        assert hub.name_of_folder(str(folder)) == pinned
        assert hub.local_model("/a/folder") == "/a/folder" and hub.name_of_folder("/a/folder") is None

    def test_neither_code_nor_pickles(self, server: FakeHub, home: Path) -> None:
        server.model("org/tiny").commit(MODEL)
        folder = hub.model_folder(hub.pin_model(model("org/tiny"))[0])
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert names == {*SMALL, "model.safetensors"}
        assert {*server.downloads()} == {Path(name).name for name in names}

    def test_a_complete_cache_needs_no_request(self, server: FakeHub, home: Path) -> None:
        server.model("org/tiny").commit(MODEL)
        pinned, _ = hub.pin_model(model("org/tiny"))
        server.requests.clear()
        assert hub.model_folder(pinned).is_dir()
        assert not server.requests

    def test_another_node_downloads_the_same_commit(
        self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        server.model("org/tiny").commit(MODEL)
        first = hub.model_folder(hub.pin_model(model("org/tiny"))[0])
        server.model("org/tiny").commit({**MODEL, "model.safetensors": b"other"})
        use_hub(monkeypatch, server.url, tmp_path / "of another node")
        assert hub.local_model(str(first)) == str(first)  # it sees that folder
        shutil.rmtree(home)
        tokenizer = Path(hub.local_model(str(first), weights=False))
        assert {path.name for path in tokenizer.iterdir()} == {Path(name).parts[0] for name in SMALL}
        folder = Path(hub.local_model(str(first)))
        assert folder.is_relative_to(tmp_path / "of another node")
        assert (folder / "model.safetensors").read_bytes() == b"weights"

    def test_branches_and_tags(self, server: FakeHub, home: Path) -> None:
        tagged = server.model("org/tiny").commit(MODEL, "v1", "refs/pr/3")
        server.model("org/tiny").commit({**MODEL, "model.safetensors": b"newer"})
        for revision in ("v1", "refs/pr/3", tagged):
            assert hub.pin_model(model(f"org/tiny@{revision}"))[0].revision == tagged

    def test_without_weights(self, server: FakeHub, home: Path) -> None:
        server.model("org/tiny").commit(MODEL)
        pinned, _ = hub.pin_model(model("org/tiny"), weights=False)
        assert (hub.model_folder(pinned, weights=False) / "config.json").is_file()
        assert "model.safetensors" not in server.downloads()
        assert hub.cached_model(model("org/tiny")) is None
        folder = hub.model_folder(pinned)
        assert hub.cached_model(model("org/tiny")) == hub.cached_model(pinned) == folder

    def test_offline(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = server.model("org/tiny").commit(MODEL)
        hub.pin_model(model("org/tiny"))
        use_hub(monkeypatch, server.url, home, offline=True)
        server.requests.clear()
        pinned, notice = hub.pin_model(model("org/tiny"))
        assert pinned.revision == commit and hub.model_folder(pinned).is_dir()
        assert notice == f"HF_HUB_OFFLINE is set: org/tiny is taken from the cache, at commit {commit[:12]}"
        assert not server.requests

    def test_hub_that_does_not_answer(self, server: FakeHub, home: Path) -> None:
        server.model("org/tiny").commit(MODEL)
        first, _ = hub.pin_model(model("org/tiny"))
        server.fails = True
        pinned, notice = hub.pin_model(model("org/tiny"))
        assert pinned == first
        assert notice is not None and "answers with HTTP status 503: org/tiny is taken from the cache" in notice

    @pytest.mark.parametrize("status", [401, 404, 429])
    def test_a_pinned_commit_in_the_cache_needs_no_answer(self, server: FakeHub, home: Path, status: int) -> None:
        server.model("org/tiny").commit(MODEL)
        server.dataset("org/rows").commit({"train.jsonl": b"{}", "README.md": b"# Rows"})
        pinned, _ = hub.pin_model(model("org/tiny"))
        (rows,), _ = hub.pin_data(hub.HubName("org/rows", None, "train"))
        hub.data_files([rows])
        server.refuses = status
        server.requests.clear()
        assert hub.pin_model(pinned) == (pinned, None) and hub.model_folder(pinned).is_dir()
        assert hub.pin_data(rows) == ([rows], None) and hub.data_files([rows])[0].is_file()
        assert not server.requests
        for tree in home.rglob("trees/*.json"):  # written by an old huggingface_hub
            tree.unlink()
        again, notice = hub.pin_model(pinned)
        assert again == pinned and notice is not None and f"HTTP status {status}" in notice

    def test_the_wait_for_an_answer_is_bounded(
        self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = server.model("org/tiny").commit(MODEL)
        server.waits = 2.0
        monkeypatch.setattr("megarl.hf.hub.files.TIMEOUT", 0.2)
        assert "does not answer" in refused("org/tiny")
        server.waits = 0.0
        assert hub.pin_model(model("org/tiny"))[0].revision == commit
        assert len([path for _, path in server.requests if "/revision/" in path or path.endswith("org/tiny")]) == 2


def refused(name: str) -> str:
    with pytest.raises(hub.HubError) as caught:
        hub.model_folder(hub.pin_model(model(name))[0])
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestRefusals:
    def test_no_such_model(self, home: Path) -> None:
        text = refused("org/no-such")
        assert "there is no folder of this name" in text and "has no such model" in text and "correct the name" in text

    def test_no_such_revision(self, server: FakeHub, home: Path) -> None:
        server.model("org/tiny").commit(MODEL)
        assert "org/tiny has no revision 'v9': name a branch, a tag or a commit" in refused("org/tiny@v9")

    def test_gated(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server.model("org/tiny").commit(MODEL)
        server.model("org/tiny").gated = True
        text = refused("org/tiny")
        assert "org/tiny is gated" in text and f"accept its terms at {server.url}/org/tiny" in text
        assert "hf auth login" in text and "HF_TOKEN" in text
        monkeypatch.setenv("HF_TOKEN", "good")
        assert hub.pin_model(model("org/tiny"))[0].is_pinned

    def test_offline_without_a_cache(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use_hub(monkeypatch, server.url, home, offline=True)
        text = refused("org/tiny@v1")
        assert "HF_HUB_OFFLINE is set" in text and "`hf download org/tiny --revision v1`" in text and "HF_HOME" in text

    def test_offline_with_a_part(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server.model("org/tiny").commit(MODEL)
        folder = hub.model_folder(hub.pin_model(model("org/tiny"))[0])
        (folder / "tokenizer.json").unlink()
        use_hub(monkeypatch, server.url, home, offline=True)
        assert "org/tiny is not complete in the cache" in refused("org/tiny")

    def test_offline_with_config_alone(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server.model("org/tiny").commit(MODEL)
        hub.config_folder(model("org/tiny"))
        use_hub(monkeypatch, server.url, home, offline=True)
        assert hub.config_folder(model("org/tiny")).is_dir()
        assert "HF_HUB_OFFLINE is set, and org/tiny is not complete in the cache" in refused("org/tiny")

    def test_offline_without_the_config(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A check of config.json does not need the weights, and names the command for this file."""
        use_hub(monkeypatch, server.url, home, offline=True)
        with pytest.raises(hub.HubError, match=r"config\.json of org/tiny@v1 is not in the cache") as error:
            hub.config_folder(model("org/tiny@v1"))
        assert "`hf download org/tiny config.json --revision v1`" in error.value.remedy
        use_hub(monkeypatch, server.url, home)
        server.model("org/tiny").commit(MODEL)
        (hub.config_folder(model("org/tiny")) / "config.json").unlink()
        use_hub(monkeypatch, server.url, home, offline=True)
        with pytest.raises(hub.HubError, match=r"config\.json of org/tiny is not in the cache"):
            hub.config_folder(model("org/tiny"))

    def test_no_network(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use_hub(monkeypatch, "http://127.0.0.1:9", home)
        text = refused("org/tiny")
        assert "http://127.0.0.1:9 does not answer" in text and "HF_ENDPOINT to a mirror" in text
        assert text.startswith("there is no folder of this name")

    @pytest.mark.parametrize("status", [401, 403, 418, 429, 503])
    def test_the_status_without_the_secrets_of_the_address(
        self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, status: int
    ) -> None:
        server.refuses = status
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        use_hub(monkeypatch, server.url.replace("://", "://user:p@ssword@"), home)
        text = refused("org/tiny")
        assert f"HTTP status {status}" in text and server.url in text
        assert "user" not in text and "ssword" not in text

    def test_secrets_in_texts(self) -> None:
        text = without_secrets(
            "404 for 'https://me:x@hub.example/a/b?token=1' and hf://org/name@v1 (why? see http://h/?q=2)"
        )
        assert text == "404 for 'https://hub.example/a/b' and hf://org/name@v1 (why? see http://h/)"

    def test_errors_of_xet_are_no_errors_of_the_disk(
        self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.model("org/tiny").commit(MODEL)
        error = type("XetError", (OSError,), {"__module__": "hf_xet.errors"})

        def fail(*_: object, **__: object) -> None:
            raise error("no route")

        monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
        text = refused("org/tiny")
        assert "the download of org/tiny failed: no route" in text and "HF_HOME" not in text

    @pytest.mark.parametrize(("code", "word"), [(errno.ENOSPC, "is full"), (errno.EROFS, "cannot be written to")])
    def test_disk(self, server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, code: int, word: str) -> None:
        server.model("org/tiny").commit(MODEL)

        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
        text = refused("org/tiny")
        assert word in text and str(home) in text and "HF_HOME" in text

    def test_no_safetensors(self, server: FakeHub, home: Path) -> None:
        server.model("org/old").commit({"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
        text = refused("org/old")
        assert "org/old has no *.safetensors, but weights in pytorch_model.bin" in text and "org/old@refs/pr/N" in text
        assert not server.downloads()
        server.model("org/copy").commit({"config.json": b"{}", "consolidated.safetensors": b"weights"})
        assert "org/copy has no model*.safetensors, but weights in consolidated.safetensors" in refused("org/copy")
