"""`data.chat_template`: a file, a text or a name, in tokenization and in exported models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import PromptDataset, SFTDataset, load_tokenizer
from megarl.data.chat_template import CHATML
from megarl.data.tokenizer import template_text, turn_end_notice
from megarl.errors import RecipeError
from megarl.megatron import export
from megarl.preflight.load import load_recipe
from megarl.recipe import Recipe, to_yaml
from megarl.recipe.schema import DataConfig

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tiny_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def recipe_of(value: str, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"data.chat_template={value}", *overrides])


class TestInARecipe:
    @pytest.mark.parametrize(("value", "read"), [("true", True), ("false", False), ("chatml", "chatml")])
    def test_switches_and_names(self, value: str, read: bool | str) -> None:
        assert recipe_of(value).data.chat_template == read

    def test_a_file_is_read_once(self, tmp_path: Path) -> None:
        (tmp_path / "mine.jinja").write_text(PLAIN)
        recipe = recipe_of(str(tmp_path / "mine.jinja"))
        assert recipe.data.chat_template == PLAIN
        (tmp_path / "mine.jinja").unlink()
        (tmp_path / "resolved.yaml").write_text(to_yaml(recipe))
        assert load_recipe(tmp_path / "resolved.yaml") == recipe

    def test_a_text(self) -> None:
        assert recipe_of(json.dumps(PLAIN)).data.chat_template == PLAIN

    def test_refusals(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jinja").write_text("no template")
        (tmp_path / "dollar.jinja").write_text("${{ messages }}")
        for value, words in (
            ("no/such.jinja", "the file cannot be read: No such file"),
            (str(tmp_path / "empty.jinja"), "contains no Jinja template"),
            (str(tmp_path / "dollar.jinja"), "contains ${"),
            ("3", "this is a switch, not a number"),
            ("[a]", "give a value of type bool or str"),
        ):
            with pytest.raises(RecipeError) as caught:
                recipe_of(value)
            assert caught.value.key == "data.chat_template" and words in str(caught.value)
            assert caught.value.origin == "command line"


class TestInTokenization:
    def test_a_template_replaces_the_tokenizers(self, directory: Path) -> None:
        tokenizer = load_tokenizer(directory, chat_template=PLAIN)
        assert tokenizer.render_text([{"role": "user", "content": "1"}], True) == "[user] 1<|im_end|>[bot]"
        assert tokenizer.chat_template == template_text(PLAIN, str(directory)) == PLAIN
        assert template_text(True, str(directory)) is template_text(False, str(directory)) is None

    def test_prompts_and_demonstrations(self, directory: Path, tmp_path: Path) -> None:
        row = {"prompt": "1+1?", "response": "2", "data_source": "a", "reward_model": {"ground_truth": "2"}}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        tokenizer, config = load_tokenizer(directory, chat_template=PLAIN), DataConfig(chat_template=PLAIN, cache=None)
        assert PromptDataset([tmp_path / "rows.jsonl"], tokenizer, config)[0].text == "[user] 1+1?<|im_end|>[bot]"
        other = PLAIN.replace("[bot]", "[assistant] ")
        tokenizer, config = load_tokenizer(directory, chat_template=other), DataConfig(chat_template=other, cache=None)
        example = SFTDataset([tmp_path / "rows.jsonl"], tokenizer, config, 100)[0]
        learned = tokenizer.decode(example.tokens[example.loss_mask], special=True)
        assert learned == "2<|im_end|>"

    def test_names(self, directory: Path) -> None:
        assert load_tokenizer(directory, chat_template="chatml").chat_template == CHATML
        assert template_text("chatml", str(directory)) == CHATML
        with pytest.raises(ValueError, match="there is no template 'chatlm', but chatml"):
            load_tokenizer(directory, chat_template="chatlm")
        templates = [{"name": "default", "template": CHATML}, {"name": "short", "template": PLAIN}]
        change(directory / "tokenizer_config.json", chat_template=templates)
        assert load_tokenizer(directory, chat_template="short").chat_template == PLAIN

    def test_a_template_whose_tokens_are_missing(self, directory: Path) -> None:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != "<|im_start|>"]
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ValueError, match=r"writes <\|im_start\|>, which the tokenizer would split"):
            load_tokenizer(directory, chat_template="chatml")

    def test_a_turn_that_does_not_end_where_engines_stop(self, directory: Path) -> None:
        assert turn_end_notice(load_tokenizer(directory, chat_template=PLAIN)) is None
        notice = turn_end_notice(load_tokenizer(directory, chat_template=PLAIN.replace("im_end", "endoftext")))
        assert notice is not None and "ends answers with '<|endoftext|>', but engines stop at '<|im_end|>'" in notice


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_an_exported_model_has_the_template(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    for name in ("get_rank", "barrier"):
        monkeypatch.setattr(torch.distributed, name, lambda: 0)
    weights = {"model.norm.weight": torch.ones(2)}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    (directory / "chat_template.json").write_text("{}")
    for template in (None, PLAIN):
        out = tmp_path / f"out-{template is None}"
        export.save_hf(out, directory, iter(weights.items()), export.ExportChange(chat_template=template))
        read = load_tokenizer(out)
        assert read.chat_template == (template or load_tokenizer(directory).chat_template)
        assert read.encode("12") == load_tokenizer(directory).encode("12")
        assert (out / "chat_template.json").exists() == (template is None)
