"""Process prompts with videos as transformers' own processors do.

They need torchvision, so this is a program: ``python -m tests.support.transformers_videos FOLDER`` reads FOLDER/cases.pickle, a list of
(processor class, model directory, prompt, images, videos, frames per second of each video, size limits of the videos or None), and
writes FOLDER/results.pickle: a dict of numpy arrays and lists for each.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any


def process(
    name: str, model: str, text: str, images: Any, videos: Any, rates: list[float], size: Any
) -> dict[str, Any]:
    import transformers
    from PIL import Image

    processor = getattr(transformers, name)(
        transformers.AutoImageProcessor.from_pretrained(model, backend="pil"),
        transformers.AutoTokenizer.from_pretrained(model),
        transformers.AutoVideoProcessor.from_pretrained(model),
    )
    metadata = [
        {"total_num_frames": len(video), "fps": fps, "frames_indices": list(range(len(video)))}
        for video, fps in zip(videos, rates, strict=True)
    ]
    outputs = processor(
        text=[text],
        images=[Image.fromarray(image) for image in images] or None,
        videos=videos or None,
        videos_kwargs={"video_metadata": metadata, "do_sample_frames": False} | ({"size": size} if size else {}),
    )
    return {key: value for key, value in outputs.items() if key != "video_metadata"}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = [process(*case) for case in pickle.loads((folder / "cases.pickle").read_bytes())]  # noqa: S301 - the test's own
    (folder / "results.pickle").write_bytes(pickle.dumps(results))
