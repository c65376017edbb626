"""Tokenizers of both kinds: ids, stop tokens, templates, and rejected directories and arguments."""

import io
import json
import shutil

import pytest

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import check_vocabulary, load_tokenizer

MESSAGES = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(out)
    return out


@pytest.fixture
def changed(directory, tmp_path):
    """Copy the directory, with changes to tokenizer_config.json."""

    def change(**settings):
        out = tmp_path / "changed"
        shutil.copytree(directory, out, dirs_exist_ok=True)
        path = out / "tokenizer_config.json"
        config = json.loads(path.read_text()) | settings
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return out

    return change


@pytest.fixture(scope="module")
def sentencepiece_directory(tmp_path_factory):
    import sentencepiece

    out = tmp_path_factory.mktemp("sentencepiece")
    model = io.BytesIO()
    lines = [f"what is {a} plus {b}? the answer is {a + b}." for a in range(20) for b in range(20)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=300, byte_fallback=True, minloglevel=2
    )
    (out / "tokenizer.model").write_bytes(model.getvalue())
    return out


@pytest.mark.parametrize(
    "text", ["", " 8*8=64. 4+64=68.\n#### 68", "naïve 四 🙂\t\r\n  x", "a <b> & 'c' .", " 1,080 ."]
)
def test_any_text_round_trips(directory, text):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tiny_tokenizer_has_one_token_per_digit(directory):
    tokenizer = load_tokenizer(directory)
    assert len(tokenizer.encode("68")) == 2 and len(tokenizer.encode("1080")) == 4
    assert 256 < tokenizer.vocab_size <= 512


def test_decoding_omits_special_tokens(directory):
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (2, (2,))
    assert tokenizer.decode([*tokenizer.encode("four"), tokenizer.eos_id]) == "four"


@pytest.mark.parametrize(
    "files, stops",
    [
        ({"generation_config.json": {"eos_token_id": [2, 0]}}, (2, 0)),
        ({"generation_config.json": {"eos_token_id": [0, 1]}}, (2, 0, 1)),
        ({"generation_config.json": {"eos_token_id": 1}, "config.json": {"eos_token_id": 0}}, (2, 1)),
        ({"generation_config.json": {"temperature": 1}, "config.json": {"eos_token_id": 0}}, (2, 0)),
    ],
)
def test_the_models_stop_tokens_are_added(directory, tmp_path, files, stops):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(directory, model_directory=tmp_path).stop_ids == stops


def test_chat_template(directory):
    tokenizer = load_tokenizer(directory)
    text = tokenizer.render_text(MESSAGES, chat_template=True)
    ids = tokenizer.encode(text)
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and ids.count(2) == 1 and tokenizer.leading_ids(True) == []
    assert tokenizer.render_text([{"role": "system", "content": "Q: "}, *MESSAGES], chat_template=False) == "Q: 2+2?"


def test_arguments_reach_the_template_and_unknown_ones_are_refused(changed):
    template = "{{ messages[0].content }}{% if not enable_thinking %}/no_think{% endif %}"
    tokenizer = load_tokenizer(changed(chat_template=template))
    assert tokenizer.render_text(MESSAGES, True, {"enable_thinking": False}) == "2+2?/no_think"
    assert tokenizer.render_text(MESSAGES, True, {"enable_thinking": True}) == "2+2?"
    with pytest.raises(ValueError, match="never reads 'enable_thinkng'"):
        tokenizer.render_text(MESSAGES, True, {"enable_thinkng": False})
    with pytest.raises(ValueError, match=r"need data\.chat_template: true"):
        tokenizer.render_text(MESSAGES, False, {"enable_thinking": False})


def test_a_missing_template_and_a_templates_error_are_raised(changed):
    with pytest.raises(ValueError, match=r"no chat template: set data\.chat_template: false"):
        load_tokenizer(changed(chat_template=None)).render_text(MESSAGES, True)
    refusing = load_tokenizer(changed(chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="roles must alternate"):
        refusing.render_text(MESSAGES, True)
    with pytest.raises(ValueError, match="must be text"):
        refusing.render_text([{"role": "user", "content": [{"type": "image"}]}], False)


def test_plain_text_begins_with_bos_if_the_tokenizer_adds_it(changed):
    directory = changed(bos_token="<|im_start|>")
    assert load_tokenizer(directory).bos_ids == ()  # a bos token that the tokenizer does not add
    tokenizer_json = json.loads((directory / "tokenizer.json").read_text())
    tokenizer_json["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.bos_ids == (1,)
    assert tokenizer.leading_ids(False) == [1]
    assert tokenizer.leading_ids(True) == [], "the template writes its own"
    assert 1 not in tokenizer.encode("2+2?")


def test_a_vocabulary_larger_than_the_models_is_refused(directory):
    tokenizer = load_tokenizer(directory)
    check_vocabulary(tokenizer, {"vocab_size": tokenizer.vocab_size})
    too_small = {"vocab_size": tokenizer.vocab_size - 1}
    for config in (too_small, {"text_config": too_small}):
        with pytest.raises(ValueError, match=f"up to {tokenizer.vocab_size - 1}, .* {tokenizer.vocab_size - 1}:"):
            check_vocabulary(tokenizer, config)


def test_a_bare_sentencepiece_model(sentencepiece_directory):
    tokenizer = load_tokenizer(sentencepiece_directory)
    assert tokenizer.vocab_size == 300 and tokenizer.stop_ids == (tokenizer.eos_id,) == (2,)
    question = "what is 3 plus 4?"
    ids = tokenizer.encode(question)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == question
    assert tokenizer.decode(tokenizer.encode("四")) == "四"
    assert tokenizer.encode_batch(["3", question])[1] == ids
    assert tokenizer.render_text(MESSAGES, False) == "2+2?" and tokenizer.leading_ids(False) == []
    with pytest.raises(ValueError, match=r"data\.chat_template: false"):
        tokenizer.render_text(MESSAGES, True)


def test_directories_without_a_usable_tokenizer_are_refused(tmp_path, changed):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"has no tokenizer .*, but notes\.txt"):
        load_tokenizer(empty)
    (empty / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        load_tokenizer(empty)
    (empty / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="transformers cannot load the tokenizer"):
        load_tokenizer(empty)
    with pytest.raises(ValueError, match="has no end token"):
        load_tokenizer(changed(eos_token=None))
