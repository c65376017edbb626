"""Answers of tools with images: the policy reads them in later turns, and the trainer gets them with the sample."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.agents import Answer, Context, Reply
from megarl.agents.mcp_tools import McpTools
from megarl.agents.setup import AgentSetup, image_notice
from megarl.agents.tool import ToolFault, describe
from megarl.agents.tool_process import ToolRequest, caller_of
from megarl.agents.tool_responses import AnswerTokens
from megarl.agents.toolbox import CallOutcome, Toolbox
from megarl.agents.trajectory import AgentLoop, Trajectory
from megarl.checkpoint.controller_state import read_group, write_group
from megarl.commands.data.tiny_tokenizer import EOS_ID, FIRST_IMAGE_ID, IMAGE_TOKENS, make_tiny_tokenizer
from megarl.data.images import ImageReader, joined
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engines.vllm.images import check_images
from megarl.megatron.images import ImageLayout, Images
from megarl.megatron.images import check_images as check_batch
from megarl.recipe.agent import AgentConfig, McpServer
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rollout.admission import TriedGroup
from megarl.rollout.assemble import vectors
from megarl.rollout.server import RolloutServer
from megarl.types import GenerationRequest, Group, InlineData, Prompt, Sample, SampleImages, SampleTokens, Sampling
from tests.agents.test_agents import Script
from tests.support.vl_model import MERGE, PATCH_VALUES, config, write_processor

IMAGE = FIRST_IMAGE_ID + IMAGE_TOKENS.index("<|image_pad|>")
CALL = '<tool_call>{"name": "show", "arguments": {"count": %d}}</tool_call>'


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, tokenizer and image processor of the tiny Qwen2.5-VL; its chat template also writes tool messages."""
    path = tmp_path_factory.mktemp("model")
    config(image_token_id=IMAGE).save_pretrained(path)
    write_processor(path)
    (path / "chat_template.jinja").unlink()
    make_tiny_tokenizer(path, images=True)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


class Camera:
    """A tool that answers with `count` pictures, all different."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []
        self.pictures: list[bytes] | None = None  # in place of drawn ones

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> CallOutcome:
        if self.pictures is not None:
            return CallOutcome(Answer("", images=tuple(self.pictures)), 0.1)
        images = tuple(png(60, 60 + 30 * number, seed=len(self.shown) + number) for number in range(arguments["count"]))
        self.shown += images
        return CallOutcome(Answer(f"{len(images)} pictures<|image_pad|>", images=images), 0.1)


def play(
    tokenizer: Tokenizer, reader: ImageReader | None, texts: list[str], request: GenerationRequest, **caller: Any
) -> tuple[Trajectory, Script]:
    def show(count: int) -> str:
        """Shows pictures."""
        return ""

    settings = AgentConfig(tools=["x"], retries=0, attempts=1)
    box = Toolbox([describe(show)], {"show": caller.get("camera", Camera())}, 5.0, 0)
    loop = AgentLoop(settings, "hermes", tokenizer, AnswerTokens(tokenizer, {}, 100, images=reader), box)
    script = Script(tokenizer, texts)
    return asyncio.run(loop.run(request, script.first(), script.sample)), script


def request_of(reader: ImageReader | None = None) -> GenerationRequest:
    """A prompt of 3 tokens; with a reader, an image in the middle."""
    sampling = Sampling(n=1, max_tokens=2000)
    if reader is None:
        return GenerationRequest(3, Prompt("row/1", (7, 8, 9), "?", "x"), sampling, 11)
    image = replace(reader.encoded(png(60, 60, seed=99), "of the row"), start=1)
    prompt = Prompt("row/1", (7, *[IMAGE] * image.tokens, 9), "?", "x", images=(image,))
    return GenerationRequest(3, prompt, sampling, 11, images=reader.prepare(prompt))


@pytest.mark.parametrize("in_prompt", [False, True])
def test_a_later_turn_reads_the_images_of_all_earlier_answers(
    model: Path, tokenizer: Tokenizer, in_prompt: bool
) -> None:
    reader, camera = ImageReader(str(model)), Camera()
    request = request_of(reader if in_prompt else None)
    done, script = play(tokenizer, reader, [CALL % 2, CALL % 1, "ok"], request, camera=camera)
    assert done.failure is None and done.finish_reason == "stop" and len(script.requests) == 2
    prepared = [reader.encoded(image, "here") for image in camera.shown]
    before = 1 if in_prompt else 0
    for later, count in zip(script.requests, (2, 3), strict=True):
        assert later.images is not None and len(later.images.starts) == before + count
        check_images(later.images, later.prompt.tokens, MERGE)
        assert later.prompt.tokens.count(IMAGE) == sum(
            image.tokens for image in [*request.prompt.images, *prepared[:count]]
        )
    sample = vectors(request, done, "", "", True)
    assert sample.images is not None and not sample.loss_mask[sample.tokens == IMAGE].any()
    for number, image in enumerate(camera.shown):
        expected = reader.prepare(Prompt("", (), "", "", images=(reader.encoded(image, "here"),)))
        assert expected is not None
        ends = np.cumsum(sample.images.grids.prod(1))
        here = sample.images.pixels[ends[before + number] - len(expected.pixels) : ends[before + number]]
        np.testing.assert_array_equal(here, expected.pixels)
        np.testing.assert_array_equal(sample.images.grids[before + number], expected.grids[0])
    layout = ImageLayout(MERGE, 14, PATCH_VALUES)
    check_batch(Images.of([sample.images]), torch.from_numpy(sample.tokens), [len(sample.tokens)], layout)  # type: ignore[arg-type]
    text = tokenizer.decode(done.tokens.tolist(), special=True)
    assert text.count("<|vision_start|>") == 3 and "2 pictures" in text


def test_a_sample_without_images_is_as_before(model: Path, tokenizer: Tokenizer) -> None:
    done, script = play(tokenizer, ImageReader(str(model)), [CALL % 0, "ok"], request_of())
    assert done.images is None and script.requests[0].images is None
    plain, _ = play(tokenizer, None, [CALL % 0, "ok"], request_of())
    assert plain.tokens.tolist() == done.tokens.tolist()


def test_images_that_cannot_be_read_fail_the_sample(model: Path, tokenizer: Tokenizer) -> None:
    done, _ = play(tokenizer, None, [CALL % 1, "ok"], request_of())
    assert done.failure is not None and "the model reads no images" in done.failure.cause

    for broken, words in (
        (b"no image", "cannot be read"),
        (b"", "is empty"),
        (png(60, 60)[:2000], "cannot be decoded"),
    ):
        camera = Camera()
        camera.pictures = [broken]
        done, _ = play(tokenizer, ImageReader(str(model)), [CALL % 1, "ok"], request_of(), camera=camera)
        assert done.failure is not None and f"image 0 of the answer of tool 'show' {words}" in done.failure.cause


def test_images_without_room_end_the_sample_and_are_not_decoded(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(request_of(), sampling=Sampling(n=1, max_tokens=60))
    monkeypatch.setattr("megarl.data.images.decode", lambda _: pytest.fail("it was decoded"))
    done, script = play(tokenizer, ImageReader(str(model)), [CALL % 20, "ok"], request)
    assert (done.finish_reason, done.failure, script.requests) == ("length", None, [])


def test_a_template_that_leaves_images_out_is_refused(model: Path, tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace(
        "{{ message.content or '' }}", "{{ message.content | string }}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"does not read parts, and writes a content as \[\{'type': 'image'\}"):
        play(load_tokenizer(tmp_path), ImageReader(str(model)), [CALL % 1, "ok"], request_of())


def test_a_tool_may_return_pillow_images(model: Path) -> None:
    def draw() -> Answer:
        """Draws."""
        return Answer("a square", 0.5, images=(Image.new("RGB", (70, 40), "red"), png(60, 60)))

    answer = caller_of(describe(draw))(ToolRequest({}))
    assert [Image.open(io.BytesIO(image)).size for image in answer.images] == [(70, 40), (60, 60)]
    assert Image.open(io.BytesIO(answer.images[0])).convert("RGB").getpixel((3, 3)) == (255, 0, 0)
    cmyk = caller_of(replace(describe(draw), function=lambda: Answer("", images=(Image.new("CMYK", (9, 9)),))))(
        ToolRequest({})
    )
    assert Image.open(io.BytesIO(cmyk.images[0])).mode == "RGB"
    for images, words in ((5, "are a int, not a list"), ((5,), "image 0 of its answer is neither bytes nor a Pillow")):
        tool = describe(draw)
        failed = caller_of(replace(tool, function=lambda images=images: Answer("", images=images)))(ToolRequest({}))
        assert words in str(failed.exception()) and isinstance(failed.exception(), ToolFault)


def test_the_third_argument_of_a_reply_still_ends_the_conversation() -> None:
    assert Reply("bye", 0.5, True).ends and not Reply("bye", 0.5, True).images


def test_images_of_an_mcp_server(model: Path) -> None:
    """A model without images reads a note instead."""
    content = [
        SimpleNamespace(type="image", data=base64.b64encode(png(60, 60)).decode()),
        SimpleNamespace(type="text", text="here"),
        SimpleNamespace(type="audio", data=""),
        SimpleNamespace(type="image", data="not base64!"),
        SimpleNamespace(type="image", data=base64.b64encode(b"<svg/>").decode()),
    ]
    notes = "[audio, which is not text]\n[image, which is not text]\n[image, which is not text]"

    class Client:
        async def call_tool(self, *_: Any) -> Any:
            return SimpleNamespace(content=content, is_error=False, structured_content=None)

    def ask(**options: Any) -> Answer:
        server = McpTools("far", McpServer(command=["x"]), **options)
        return asyncio.run(server._ask(Client(), "look", {}, 5.0)).answer

    seen = ask(reads_images=True)
    assert (seen.text, seen.images) == (f"here\n{notes}", (png(60, 60),))
    assert ask() == Answer(f"[image, which is not text]\nhere\n{notes}")


def test_joined_images_keep_their_times() -> None:
    first = SampleImages(np.ones((4, 6), np.float32), np.array([[1, 2, 2]]), np.array([3]))
    film = replace(first, grids=np.array([[2, 2, 2]]), pixels=np.ones((8, 6), np.float32), seconds=np.array([0.5]))
    both = joined(first, film, 10)
    assert both is not None and both.starts.tolist() == [3, 13] and both.pixels.shape == (12, 6)
    assert both.seconds is not None and both.seconds.tolist() == [0.0, 0.5]
    assert joined(None, None, 4) is None and joined(first, None, 4) is first
    after = joined(None, first, 4)
    assert after is not None and after.starts.tolist() == [7] and after.seconds is None


def test_checkpoints_keep_each_samples_images() -> None:
    first = SampleImages(np.ones((4, 6), np.float32), np.array([[1, 2, 2]]), np.array([3]))
    two = joined(first, first, 10)
    tokens = [
        SampleTokens(np.arange(3), np.ones(3, bool), np.zeros(3, np.float32), images=images)
        for images in (first, two, None, first)
    ]
    samples = [Sample(5, index, InlineData(tokens), 1, 2, 2) for index in range(4)]
    saved: dict[str, np.ndarray] = {}
    group = TriedGroup(Group(5, "row/1", "x", samples), accepted=True)
    written = json.loads(json.dumps(write_group(group, saved)))
    read = [sample.images for sample in read_group(written, saved).group.samples[0].data.get()]
    assert read[0] is not None and read[1] is not None and read[2] is None and read[3] is not None
    assert read[3] is read[0] and sum(name.endswith("images.pixels") for name in saved) == 2
    assert read[0].starts.tolist() == read[3].starts.tolist() == [3] and read[1].starts.tolist() == [3, 13]


def test_a_template_without_images_is_a_notice_of_the_start(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    setup = AgentSetup(AgentConfig(tools=["x"]), {}, {})
    assert image_notice(setup, tokenizer, ImageReader(str(model))) is None
    notice = image_notice(setup, load_tokenizer(tmp_path), ImageReader(str(model)))
    assert notice is not None and "writes no placeholder for images of tool messages" in notice


def test_a_rollout_process_reads_images_of_tools(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.engines.create", lambda name, spec: object())
    setup, reader = AgentSetup(AgentConfig(tools=["tests.support.agent_tools:add"]), {}, {}), ImageReader(str(model))
    server = RolloutServer("fake", None, str(model), RewardConfig(), [], SandboxConfig(), reader, setup)  # type: ignore[arg-type]
    assert server.agents is not None

    async def reads() -> bool:
        assert server.agents is not None
        try:
            loop = await server.agents.start()
            return isinstance(loop, AgentLoop) and loop.answers is not None and loop.answers.writes_images
        finally:
            await server.agents.close()

    assert asyncio.run(reads())
