"""Tiny models that read images and videos, and sequences for them: text alone, and images and videos of different sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.megatron_models import LENGTHS, rows_of_logits

IMAGE, VIDEO, START, END = 250, 251, 252, 253
GRIDS = {1: [(2, (4, 6))], 2: [(3, (8, 4)), (14, (6, 10))], 5: [(8, (4, 4))]}
"""By number of the sequence: (index of the first token, (rows, columns) of patches) of each of its images."""
VIDEOS = {2: [(31, (2, 4, 4), 0.5)], 5: [(2, (2, 2, 4), 0.75)], 6: [(2, (2, 2, 4), 0.3)]}
"""By number of the sequence: (index of the first token, (time steps, rows, columns) of patches, seconds from step to step) of its videos.

With timestamps, a token of text comes before each later step. The times of a video's steps are at most its longer side, because
transformers 5.19 continues after the longer side, and the published model after the largest position.
"""
MERGE, WINDOW, PATCH_VALUES = 2, 56, 3 * 2 * 14 * 14
CHAT_TEMPLATE = (  # Qwen2.5-VL's template with words of the tiny tokenizer
    "{% for message in messages %}w3 {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' or 'video' in part %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %} w4 {% endfor %}{% if add_generation_prompt %}w5 {% endif %}"
)


TEXT = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def config(**fields: Any) -> Any:
    """Configuration with head sizes that vLLM's CPU kernels support; the grids are not multiples of the 2 x 2 windows."""
    import transformers

    rotary = {"type": "mrope", "mrope_section": [4, 6, 6]}
    text = {**TEXT, "intermediate_size": 128, "rope_theta": 10000.0, "rope_scaling": rotary}
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": WINDOW,
        "fullatt_block_indexes": [1, 3],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **{**IDS, "tie_word_embeddings": False, **fields}
    )


def qwen3_config(**fields: Any) -> Any:
    """Configuration of Qwen3-VL, with experts if `fields` have `num_experts`.

    Two features of the tower are tapped, one of them from its last layer. Learned positions are fewer than some images' rows and
    columns, and more than others'.
    """
    import transformers

    rotary = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_theta": 10000.0}
    experts = {name: fields.pop(name) for name in tuple(fields) if name.startswith(("num_exp", "moe_", "norm_"))}
    text = {**TEXT, "head_dim": 32, "intermediate_size": 96, "rope_parameters": rotary, **experts}
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [1, 3],
    }
    make = transformers.Qwen3VLMoeConfig if experts else transformers.Qwen3VLConfig
    return make(text_config=text, vision_config=vision, **IDS, **{"tie_word_embeddings": False, **fields})


VL_MODELS: dict[str, Callable[[], Any]] = {
    "vl": config,
    "vl_tied": functools.partial(config, tie_word_embeddings=True),
    "qwen3_vl": qwen3_config,
    "qwen3_vl_tied": functools.partial(qwen3_config, tie_word_embeddings=True),
    # Experts of width 32: vLLM 0.23's CPU kernel takes multiples of 32, and transformers does not transpose square matrices.
    "qwen3_vl_moe": functools.partial(
        qwen3_config, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
"""Configurations of the tiny models."""


def has_timestamps(name: str) -> bool:
    """Return True if the model of this name in `VL_MODELS` has each time step of a video as a separate image."""
    return name.startswith("qwen3")


def write_vl_model(path: Path, name: str = "vl", *, vocabulary: int = 0, **ids: int) -> Path:
    """Save a model of `VL_MODELS` at `path`; its weights are the same every time.

    vocabulary: another number of tokens; `ids` are those of its special tokens, by their fields in config.json.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    made = VL_MODELS[name]()
    made.text_config.vocab_size = vocabulary or made.text_config.vocab_size
    for field, token in ids.items():
        setattr(made.text_config if field in ("eos_token_id", "bos_token_id") else made, field, token)
    model = transformers.AutoModelForImageTextToText.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.05)
    model.save_pretrained(path)
    if name == "qwen3_vl_moe":
        file = path / "model.safetensors"
        save_file(published_experts(load_file(file)), file, metadata={"format": "pt"})
    return path


def published_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transpose experts as published checkpoints of Qwen3-VL store them; transformers 5 does so when it loads, not when it saves."""
    stacks = {name: weight for name, weight in weights.items() if ".experts." in name}
    assert len(stacks) == 2 * TEXT["num_hidden_layers"]
    return weights | {name: weight.transpose(1, 2).contiguous() for name, weight in stacks.items()}


class Picture(NamedTuple):
    """An image, or a run of a video's tokens."""

    start: int  # index of the first token
    pixels: torch.Tensor  # [patches, values per patch]
    grid: torch.Tensor  # int64 [3]
    seconds: float  # from time step to time step; 0 for an image
    token: int  # the placeholder


def sequences(*, timestamps: bool) -> list[tuple[torch.Tensor, list[Picture]]]:
    """Tokens of each sequence, and its images and videos in the order of their tokens.

    timestamps: each time step of a video is a separate image, as in Qwen3-VL.
    """
    generator = torch.Generator().manual_seed(3)
    result = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(0, 250, (length,), generator=generator)
        grids = [(start, (1, *grid), 0.0, IMAGE) for start, grid in GRIDS.get(number, [])]
        for start, (steps, rows, columns), seconds in VIDEOS.get(number, []):
            if timestamps:
                count = rows * columns // MERGE**2 + 1  # and a token of text
                grids += [(start + step * count, (1, rows, columns), 0.0, VIDEO) for step in range(steps)]
            else:
                grids.append((start, (steps, rows, columns), seconds, VIDEO))
        pictures = []
        for start, (steps, rows, columns), seconds, token in sorted(grids):
            count = steps * rows * columns // MERGE**2
            tokens[start - 1], tokens[start : start + count], tokens[start + count] = START, token, END
            pixels = torch.randn(steps * rows * columns, PATCH_VALUES, generator=generator)
            pictures.append(Picture(start, pixels, torch.tensor([steps, rows, columns]), seconds, token))
        result.append((tokens, pictures))
    return result


def sample_images(pictures: list[Picture]) -> Any:
    """Return the SampleImages of a sequence; None if it has no images."""
    from megarl.types import SampleImages

    if not pictures:
        return None
    starts, pixels, grids, seconds, _ = zip(*pictures, strict=True)
    with_steps = any(grid[0] > 1 for grid in grids)
    return SampleImages(
        torch.cat(pixels).numpy(),
        torch.stack(grids).numpy(),
        np.array(starts),
        np.array(seconds) if with_steps else None,
    )


def images_of(numbers: list[int], *, timestamps: bool) -> Any:
    """The images of a micro batch of the sequences `numbers`; None if it has no images."""
    from megarl.megatron.images import Images

    every = sequences(timestamps=timestamps)
    return Images.of([sample_images(every[number][1]) for number in numbers])


def transformers_model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def transformers_inputs(*, timestamps: bool) -> list[dict[str, torch.Tensor]]:
    """Arguments of transformers' model for each sequence alone."""
    every = []
    for number, (tokens, pictures) in enumerate(sequences(timestamps=timestamps)):
        inputs: dict[str, torch.Tensor] = {"input_ids": tokens[None]}
        if pictures:
            inputs["mm_token_type_ids"] = ((tokens == IMAGE) + 2 * (tokens == VIDEO)).int()[None]
        if number in GRIDS:
            inputs["pixel_values"] = torch.cat([picture.pixels for picture in pictures if picture.token == IMAGE])
            inputs["image_grid_thw"] = torch.tensor([[1, *grid] for _, grid in GRIDS[number]])
        if number in VIDEOS:
            inputs["pixel_values_videos"] = torch.cat(
                [picture.pixels for picture in pictures if picture.token == VIDEO]
            )
            inputs["video_grid_thw"] = torch.tensor([grid for _, grid, _ in VIDEOS[number]])
            if not timestamps:
                inputs["second_per_grid_ts"] = torch.tensor([seconds for _, _, seconds in VIDEOS[number]])
        every.append(inputs)
    return every


@functools.cache
@torch.no_grad()
def vl_of_transformers(path: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Transformers' (log-probs, entropy) of each sequence alone, [length] each."""
    model = transformers_model(path)
    inputs_of = transformers_inputs(timestamps=has_timestamps(path.name))
    return [rows_of_logits(model(**inputs).logits[0], inputs["input_ids"][0]) for inputs in inputs_of]


def check_upstream(path: str) -> None:
    """Each assertion fails when mbridge or transformers fixes a defect that megarl/megatron/model/qwen2_5_vl.py works around."""
    import inspect
    from types import SimpleNamespace

    import transformers
    from mbridge.models.qwen2_5_vl import transformer_config
    from mbridge.models.qwen2_5_vl.attention import Qwen2_5VLSelfAttention
    from mbridge.models.qwen2_5_vl.model import Qwen2_5VLModel
    from mbridge.models.qwen2_5_vl.vision_model import VisionRotaryEmbedding

    assert not hasattr(transformers.AutoConfig.from_pretrained(path), "hidden_size"), "_add_fields"
    sizes = transformer_config.get_vision_model_config(SimpleNamespace(num_layers=4, layernorm_epsilon=1e-5))
    assert (sizes.num_layers, sizes.hidden_size, sizes.layernorm_epsilon) == (32, 1280, 1e-5), "_tower_config"
    attention = inspect.signature(Qwen2_5VLSelfAttention.forward).parameters
    assert "rotary_pos_cos_sin" not in attention, "_accepting_later_arguments"
    rotary = VisionRotaryEmbedding(16)
    exact = rotary(60)
    assert (rotary.bfloat16()(60) - exact).abs().max() > 0.05, "_angles"
    assert "vp_stage" not in inspect.signature(Qwen2_5VLModel.__init__).parameters, "layout.py refuses virtual stages"

    from megarl.megatron.model import qwen2_5_vl

    qwen2_5_vl._fix_layers()
    assert torch.equal(rotary(60), exact), "mended, the angles do not depend on the model's dtype"


def write_processor(path: Path, processor_class: str = "Qwen2_5_VLProcessor") -> None:
    """Write tokenizer and image processor files, which vLLM requires, although nothing is tokenized or processed."""
    import json

    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(IMAGE)} | special, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w2", pad_token="w0", additional_special_tokens=list(special)
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor_class,
        "patch_size": 14,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))


def write_video_processor(path: Path, name: str, smallest: int, largest: int) -> None:
    """Write the settings of the video processor class `name`, with its limits in pixels."""
    import json

    settings = {
        "video_processor_type": name,
        "size": {"shortest_edge": smallest, "longest_edge": largest},
        "patch_size": 14,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
