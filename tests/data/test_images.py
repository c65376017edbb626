"""Prompts with images have as many placeholder tokens per image as the image processor returns."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl import load_recipe
from megarl.data import PromptDataset, SFTDataset, Tokenizer, load_tokenizer
from megarl.data.image_files import MAX_PIXELS
from megarl.data.images import ImageReader
from megarl.data.rows import write_parquet
from megarl.engines.vllm.images import check_images
from megarl.errors import RecipeError
from megarl.preflight.survey import prepare_training
from megarl.recipe.schema import DataConfig
from tests.support.vl_model import END, IMAGE, MERGE, PATCH_VALUES, START, config, write_processor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, tokenizer and image processor of the tiny Qwen2.5-VL."""
    path = tmp_path_factory.mktemp("model")
    config().save_pretrained(path)
    write_processor(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def picture(width: int, height: int, mode: str = "RGB", kind: str = "PNG", seed: int = 0) -> bytes:
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values.squeeze(), mode).save(file, format=kind)
    return file.getvalue()


def row(content: Any, images: Any, **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    values = {"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "1"}, "images": images}
    return {**values, **columns}


def parquet(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    write_parquet(tmp_path / "rows.parquet", rows)
    return tmp_path / "rows.parquet"


def jsonl(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def dataset(file: Path, tokenizer: Tokenizer, reader: ImageReader, **settings: Any) -> PromptDataset:
    return PromptDataset([file], tokenizer, DataConfig(cache=None, **settings), images=reader)


def test_the_counted_image_tokens_equal_the_processors(model: Path) -> None:
    """Tokens counted from the header equal those made from the pixels, for any shape and for limits that enlarge or
    shrink."""
    sizes = [(1, 1), (28, 28), (41, 43), (130, 90), (1, 150), (500, 30), (700, 900), (2000, 11)]
    for limits in ((None, None), (None, 6000), (50_000, None), (3136, 3136)):
        reader = ImageReader(str(model), *limits)
        for width, height in sizes:
            inputs = reader._processor()(images=[Image.new("RGB", (width, height))], return_tensors="np")
            assert reader.tokens(width, height) == inputs["image_grid_thw"].prod() // MERGE**2, (limits, width, height)
            assert len(inputs["pixel_values"]) == inputs["image_grid_thw"].prod()


def test_a_row_becomes_tokens_and_pixels(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    """By hand: 90 x 130 pixels become round(90 / 28) x round(130 / 28) = 3 x 5 squares, 15 tokens, 6 x 10 patches; 60
    x 60 pixels become 2 x 2 squares, 4 tokens. Expanding the text, as transformers' processor does, gives the same
    ids."""
    first, second = picture(130, 90), picture(60, 60, seed=1)
    reader = ImageReader(str(model))
    file = parquet(
        tmp_path, row("w7 <image> w8 <image>w9", [{"bytes": first, "path": None}, {"bytes": second, "path": "b.png"}])
    )
    data = dataset(file, tokenizer, reader)
    (prompt,) = data
    assert data.has_images
    around = [START, *[IMAGE] * 15, END, 8, START, *[IMAGE] * 4, END, 9]
    assert list(prompt.tokens) == [3, 7, *around, 4, 5]
    pieces = prompt.text.split("<|image_pad|>")
    text = pieces[0] + "<|image_pad|>" * 15 + pieces[1] + "<|image_pad|>" * 4 + pieces[2]
    assert tokenizer.encode(text) == list(prompt.tokens)

    images = copy.deepcopy(reader).prepare(prompt)
    assert images is not None
    assert images.starts.tolist() == [3, 3 + 15 + 3] and images.grids.tolist() == [[1, 6, 10], [1, 4, 4]]
    assert images.pixels.shape == (60 + 16, PATCH_VALUES) and images.pixels.dtype == np.float32
    check_images(images, prompt.tokens, MERGE)
    pictures = [Image.open(io.BytesIO(encoded)) for encoded in (first, second)]
    expected = reader._processor()(images=pictures, return_tensors="np")
    np.testing.assert_array_equal(images.pixels, expected["pixel_values"])
    assert len(pickle.dumps(prompt)) < len(first) + len(second) + 2000, "the encoded files are sent"


@pytest.mark.parametrize(
    ("kind", "source"),
    [(kind, source) for kind in ("parquet", "jsonl") for source in ("path", {"bytes": None, "path": "sub/a.png"})]
    + [("parquet", "bytes")],
)
def test_bytes_and_paths_are_the_same_images(
    tmp_path: Path, model: Path, tokenizer: Tokenizer, kind: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the row file, for any working directory of the reader."""
    image = picture(70, 50)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(image)
    value = {"path": "sub/a.png", "bytes": image}.get(source, source) if isinstance(source, str) else source
    file = (parquet if kind == "parquet" else jsonl)(tmp_path, row("<image>", [value]))
    monkeypatch.chdir(tmp_path)
    reader = ImageReader(str(model))
    (prompt,) = dataset(Path(file.name), tokenizer, reader)
    (whole,) = dataset(parquet(tmp_path, row("<image>", [image])), tokenizer, reader)
    monkeypatch.chdir("/")
    assert prompt.tokens == whole.tokens
    single, other = reader.prepare(prompt), reader.prepare(whole)
    assert single is not None and other is not None
    np.testing.assert_array_equal(single.pixels, other.pixels)


def test_contents_in_parts_equal_contents_with_placeholders(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    """Parquet gives the text's part an `image` of None, and Qwen's template would write a second image for it."""
    parts = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": "w7", "image": None}]
    reader = ImageReader(str(model))
    (prompt,) = dataset(parquet(tmp_path, row(parts, [picture(60, 60)])), tokenizer, reader)
    (other,) = dataset(parquet(tmp_path, row("<image>w7", [picture(60, 60)])), tokenizer, reader)
    assert prompt.tokens == other.tokens


def test_an_error_of_a_content_names_the_row_once(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    for content, problem in (
        (5, "a message's content is 5, neither text nor a list of parts"),
        ("w7", "the prompt has 0"),
    ):
        with pytest.raises(ValueError, match=rf"^\S*rows\.jsonl, line 1: {problem}"):
            dataset(jsonl(tmp_path, row(content, ["a.png"])), tokenizer, ImageReader(str(model)))


def test_rows_without_images_are_tokenized_as_text(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    rows = [row("w7", None), row("w7", []), row("<image>", [picture(60, 60)])]
    data = dataset(parquet(tmp_path, *rows), tokenizer, ImageReader(str(model)))
    assert data[0].tokens == data[1].tokens == (3, 7, 4, 5) and not data[0].images
    plain = {name: value for name, value in row("w7 <image> w8", None).items() if name != "images"}
    (prompt,) = dataset(jsonl(tmp_path, plain), tokenizer, ImageReader(str(model)))  # without the column, rows are text
    assert IMAGE not in prompt.tokens and ImageReader(str(model)).prepare(prompt) is None


def test_transparent_is_white(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    """Black lines on nothing, as drawings of geometry are kept: plainly converted, all of it would be black."""
    reader = ImageReader(str(model))

    def prepared(image: Image.Image) -> np.ndarray:
        file = io.BytesIO()
        image.save(file, format="PNG")
        (prompt,) = dataset(parquet(tmp_path, row("<image>", [file.getvalue()])), tokenizer, reader)
        images = reader.prepare(prompt)
        assert images is not None
        return images.pixels

    clear = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (10, 10, 20, 50))
    white = Image.new("RGB", (56, 56), "white")
    white.paste((0, 0, 0), (10, 10, 20, 50))
    np.testing.assert_array_equal(prepared(clear), prepared(white))
    grey = white.convert("L")
    np.testing.assert_array_equal(prepared(grey), prepared(white))
    np.testing.assert_array_equal(prepared(white.convert("1")), prepared(white))


def test_the_length_counts_every_placeholder(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    """90 x 130 pixels are 15 + 6 tokens, 60 x 60 are 4 + 6. With at most 3136 pixels both are 4 and less, + 6."""
    file = parquet(tmp_path, row("w7<image>", [picture(130, 90)]), row("w7<image>", [picture(60, 60)]))
    reader = ImageReader(str(model))
    with pytest.raises(ValueError, match=r"1 of 2 prompts are longer .* the longest has 21 \(.*row 0\)"):
        dataset(file, tokenizer, reader, max_prompt_length=20)
    kept = dataset(file, tokenizer, reader, max_prompt_length=20, overlong_prompts="filter")
    assert [len(prompt.tokens) for prompt in kept] == [10] and kept.filtered == 1
    small = dataset(file, tokenizer, ImageReader(str(model), None, 3136), max_prompt_length=10)
    assert len(small) == 2


def test_the_cache_serves_every_limit(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    """The cache holds text only: an entry serves every pixel limit, and a path may hold another image."""
    (tmp_path / "a.png").write_bytes(picture(130, 90))
    file = jsonl(tmp_path, *[row("w7<image>", ["a.png"]) for _ in range(1000)])
    settings = DataConfig(cache=str(tmp_path / "cache"))

    def lengths(*limits: int | None) -> set[int]:
        data = PromptDataset([file], tokenizer, settings, images=ImageReader(str(model), *limits))
        return {len(prompt.tokens) for prompt in data}

    assert lengths() == {21} and len(list((tmp_path / "cache").rglob("*.bin"))) == 1
    assert lengths(None, 3136) == {6 + ImageReader(str(model), None, 3136).tokens(130, 90)}
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    assert lengths() == {10} and len(list((tmp_path / "cache").rglob("*.bin"))) == 1


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is so large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("w7", [picture(60, 60)], r"row 0: the prompt has 0 <image> and the column 'images' has 1"),
        ("<image><image>", [picture(60, 60)], "has 2 <image> and the column 'images' has 1"),
        ("<image>", [], "has 1 <image> and the column 'images' has 0"),
        ("<image>", None, "has 1 <image> and the column 'images' has 0"),
        (
            "<image><|image_pad|>",
            [picture(60, 60)],
            r"row 0: the rendered prompt has 2 image placeholders",
        ),
        ("<image>", [b"no image"], "row 0, image 0 cannot be read as one of PNG, JPEG"),
        ("<image>", [picture(60, 60)[:20]], "row 0, image 0 cannot be read"),
        ("<image>", [EPS], "row 0, image 0 cannot be read"),  # Pillow would start Ghostscript
        ("<image>", [bomb(10_000, 10_000)], rf"10000 x 10000 pixels; more than {MAX_PIXELS:,} are not opened"),
        ("<image>", [bomb(30_000, 30_000)], "row 0, image 0 cannot be read .*DecompressionBomb"),
        ("<image>", [picture(60_001, 30, "L")], r"row 0, image 0 \(60001 x 30\): .*aspect ratio"),
        ("<image>", ["gone.png"], r"row 0, image 0: no such file .*/gone.png"),
        ("<image>", ["https://example.org/a.png"], "no such file"),
        ("<image>", [{"bytes": None, "path": None}], "row 0, image 0 is neither bytes nor a path"),
        ("<image>", picture(60, 60), "row 0: column 'images' is b.* not a list"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_invalid_image_rows_are_refused(
    tmp_path: Path, model: Path, tokenizer: Tokenizer, content: str, images: Any, message: str
) -> None:
    """Rows are refused before training; the error names the row."""
    file = parquet(tmp_path, row(content, images), row("<image>", images))
    with pytest.raises(ValueError, match=message) as refused:
        dataset(file, tokenizer, ImageReader(str(model)))
    assert len(str(refused.value)) < 500 + len(str(tmp_path)), "no pages of bytes"


def test_a_changed_or_damaged_image_file_is_named(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    reader = ImageReader(str(model))
    (tmp_path / "a.png").write_bytes(picture(130, 90))
    (prompt,) = dataset(jsonl(tmp_path, row("<image>", ["a.png"])), tokenizer, reader)
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    with pytest.raises(ValueError, match="line 1, image 0 takes 4 tokens; it took 15 when its header was read"):
        reader.prepare(prompt)
    (tmp_path / "a.png").write_bytes(picture(130, 90)[:2000])
    with pytest.raises(ValueError, match="line 1, image 0 cannot be decoded"):
        reader.prepare(prompt)


def test_images_are_refused_without_template_or_processor(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    file = parquet(tmp_path, row("<image>", [picture(60, 60)]))
    with pytest.raises(ValueError, match="row 0: images need a chat template"):
        dataset(file, tokenizer, ImageReader(str(model)), chat_template=False)
    answers = parquet(tmp_path, row("<image>", [picture(60, 60)], response="w9"))
    with pytest.raises(ValueError, match="row 0: column 'images' is not empty, and demonstrations"):
        SFTDataset([answers], tokenizer, DataConfig(), 100)
    other = shutil.copytree(model, tmp_path / "other")
    (other / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(
        ValueError, match="CLIPImageProcessorPil, which is not supported: an image processor must return image_grid_thw"
    ):
        dataset(file.rename(tmp_path / "a.parquet"), tokenizer, ImageReader(str(other)))


def test_images_and_pixel_limits_need_a_vision_model(tmp_path: Path, quickstart_data: Path) -> None:
    """A language model's recipe with images, and limits that would apply to none."""
    file = parquet(tmp_path, row("<image>", [picture(60, 60)]))
    settings = [f"model.path={quickstart_data}/model", "reward.function=unscored", "evaluation.at_end=false", "data.eval_files=[]",
        "evaluation.at_start=false"]  # fmt: skip
    recipe = load_recipe("recipes/quickstart.yaml", [*settings, f"data.train_files=[{file}]"])
    with pytest.raises(ValueError, match=r"row 0 has images: the model in .* \(qwen3_moe\) reads no images"):
        prepare_training(recipe)
    recipe = load_recipe(
        "recipes/quickstart.yaml",
        [*settings, f"data.train_files=[{quickstart_data}/data/train.parquet]", "data.max_pixels=9000"],
    )
    with pytest.raises(RecipeError, match="the model reads no images"):
        prepare_training(recipe)
    with pytest.raises(RecipeError, match=r"above data\.max_pixels=9000"):
        load_recipe("recipes/quickstart.yaml", [*settings, "data.max_pixels=9000", "data.min_pixels=9001"])
