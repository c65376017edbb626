"""Rows of a dataset class written for verl (`data.custom_cls`): the class runs once, and its rows are written to a file."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.agents import verl_stand_in
from megarl.commands.data import verl_rlhf_dataset
from megarl.commands.data.source import PreparedFiles
from megarl.data.prompts import AGENT_NAME
from megarl.data.rows import write_parquet
from megarl.registry import import_function

_READ_TWICE = 8  # rows
_DEFAULTS = {  # of verl's section data; long prompts are the recipe's matter
    "prompt_key": "prompt", "image_key": "images", "video_key": "videos", "reward_fn_key": "data_source",
    "max_prompt_length": 512, "max_response_length": 512, "filter_overlong_prompts": False, "truncation": "error",
    "return_raw_chat": True, "return_raw_input_ids": False, "return_full_prompt": False,
    "return_multi_modal_inputs": False, "shuffle": False, "seed": None, "apply_chat_template_kwargs": {},
}  # fmt: skip


def prepare(path: str, files: Sequence[str], out: Path, model: str | None, options: Mapping[str, Any]) -> PreparedFiles:
    """Create the class `path` (file.py:Name or module:Name) once for `files`, and write its rows to `out`, a parquet file.

    model: folder of the tokenizer and processor that the class receives; None: it receives none. options: verl's section
    `data`, for the class.

    Raises:
        ValueError: the class cannot be used, its rows cannot be carried over, or they change while the class is used.
    """
    if out.suffix != ".parquet":
        raise ValueError(f"--out {out} is not a .parquet file")
    verl_rlhf_dataset.provide()
    dataset = _create(path, files, model, options)
    count = len(dataset)
    if not count:
        raise ValueError(f"{path}: the class has no rows")
    names = {**_DEFAULTS, **options}
    rows = [_row(f"{path}, row {index}", dataset[index], names) for index in range(count)]
    for index in range(0, count, max(count // _READ_TWICE, 1)):
        if _row(f"{path}, row {index}", dataset[index], names) != rows[index]:
            raise ValueError(
                f"{path}: row {index} is another one when it is read again. megarl reads rows once, so a class that samples "
                "or changes them during training cannot be used"
            )
    write_parquet(out, rows)
    return PreparedFiles({out: count}, [])


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value``, with values as in YAML and dots in names for sections. ValueError for text without "="."""
    from omegaconf import OmegaConf

    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise ValueError(f"--option {wrong[0]} is not name=value")
    options: Any = OmegaConf.to_container(OmegaConf.from_dotlist([text.removeprefix("data.") for text in texts]))
    return dict(options)


def _create(path: str, files: Sequence[str], model: str | None, options: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf
    from torch.utils.data import Dataset, IterableDataset

    try:
        class_: Any = import_function(path, "dataset class")
    except ValueError as error:
        cause = error.__cause__
        hint = verl_stand_in.missing_hint(cause) if isinstance(cause, Exception) else ""
        raise ValueError(f"{error}{hint}") from error
    if not isinstance(class_, type) or not issubclass(class_, Dataset):
        raise ValueError(f"dataset class {path!r}: it is not derived from torch.utils.data.Dataset")
    if issubclass(class_, IterableDataset) or not hasattr(class_, "__len__"):
        raise ValueError(
            f"dataset class {path!r}: it has no fixed number of rows, and megarl draws rows by their number"
        )
    if hasattr(class_, "on_batch_end"):
        raise ValueError(
            f"dataset class {path!r}: its method on_batch_end changes the rows during training, and megarl reads them once"
        )
    config = OmegaConf.create({**_DEFAULTS, **options})
    tokenizer, processor = _tokenizer_of(model)
    try:
        return class_(data_files=list(files), tokenizer=tokenizer, processor=processor, config=config)
    except Exception as error:
        raise ValueError(f"dataset class {path!r} cannot be created: {type(error).__name__}: {error}") from error


def _tokenizer_of(model: str | None) -> tuple[Any, Any]:
    if model is None:
        return None, None
    from transformers import AutoProcessor, AutoTokenizer

    has_images = (Path(model) / "preprocessor_config.json").is_file()
    return AutoTokenizer.from_pretrained(model), AutoProcessor.from_pretrained(model) if has_images else None


def _row(where: str, item: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of docs/data.md for an item of the class. `extra_info` and `reward_model` are JSON text.

    names: the options with the item's keys.
    """
    prompt_key, image_key, video_key = names["prompt_key"], names["image_key"], names["video_key"]
    if not isinstance(item, dict):
        raise ValueError(f"{where} is a {type(item).__name__}, not a dict")
    messages = item["raw_prompt"] if item.get("raw_prompt") is not None else item.get(prompt_key)
    if messages is None:
        raise ValueError(
            f"{where} has neither raw_prompt nor {prompt_key}, but {', '.join(map(str, item)) or 'nothing'}"
        )
    info = dict(item.get("extra_info") or {})
    for key in ("tools_kwargs", "interaction_kwargs"):
        if item.get(key):
            info.setdefault(key, item[key])
    if item.get(video_key) is not None and len(item[video_key]):
        raise ValueError(
            f"{where} has videos, which are not converted: write rows with a column `videos` of frames (docs/videos.md)"
        )
    prompt, images = _messages(where, messages)
    if not images:
        images = [_image(where, image) for image in (item[image_key] if item.get(image_key) is not None else ())]
    row = {"prompt": prompt, "extra_info": _json(where, "extra_info", info)}
    if item.get(names["reward_fn_key"]) is not None:
        row["data_source"] = str(item[names["reward_fn_key"]])
    if item.get(AGENT_NAME) is not None:
        row[AGENT_NAME] = str(item[AGENT_NAME])
    if item.get("reward_model") is not None:
        row["reward_model"] = _json(where, "reward_model", item["reward_model"])
    return {**row, "images": images} if images else row


def _messages(where: str, messages: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the messages with text alone, `<image>` in place of each image, and the images in their order."""
    if isinstance(messages, str):
        return messages, []
    images: list[dict[str, Any]] = []
    written = []
    for message in _plain(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                if kind == "text":
                    parts.append(part["text"])
                elif kind == "image":
                    parts.append("<image>")
                    image = {name: value for name, value in part.items() if name != "type" and value is not None}
                    if image:
                        images.append(_image(where, image.get("image", image)))
                else:
                    raise ValueError(
                        f"{where}: a part of a message has the type {kind}, and megarl reads text and images"
                    )
            content = "".join(parts)
        written.append({**message, "content": content})
    return written, images


def _image(where: str, image: Any) -> dict[str, Any]:
    """Return the encoded bytes or the absolute path of an image."""
    from PIL import Image

    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    if isinstance(image, str):
        return {"bytes": None, "path": str(Path(image.removeprefix("file://")).absolute())}
    if not isinstance(image, Image.Image):
        raise ValueError(f"{where}: an image is a {type(image).__name__}, not bytes, a path or a picture of Pillow")
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return {"bytes": encoded.getvalue(), "path": None}


def _json(where: str, column: str, value: Any) -> str:
    try:
        return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {column} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Convert values of numpy, torch and OmegaConf to Python's lists and numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
