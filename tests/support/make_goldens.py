"""Write the reference results of `megarl accept`: `python -m tests.support.make_goldens [FOLDER]`.

transformers computes them, in float64 and one sequence at a time: no layer, kernel or optimizer of megarl takes part.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.commands.accept import goldens
from megarl.commands.accept.tiny_families import FAMILIES, IMAGE, LENGTHS, batch, sketch_signs, write_family

CLASSES = {
    "dense": "Qwen3ForCausalLM",
    "moe": "Qwen3MoeForCausalLM",
    "mla": "DeepseekV3ForCausalLM",
    "vl": "Qwen2_5_VLForConditionalGeneration",
}


def golden_of(family: str, folder: Path) -> goldens.Golden:
    import transformers

    model = getattr(transformers, CLASSES[family]).from_pretrained(
        write_family(family, folder), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    outputs: list[list[torch.Tensor]] = []  # by layer, then sequence: [L, h]
    layers = (model.model.language_model if family == "vl" else model.model).layers
    for layer in layers:
        outputs.append([])
        layer.register_forward_hook(lambda _, __, out, kept=outputs[-1]: kept.append(first(out)[0].detach()))
    before = torch.cat(log_probs_of(model, family)).detach()
    sketches, squares = sketched(outputs)
    names = [name for name, _ in model.named_parameters()]
    parameters = [parameter for _, parameter in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=goldens.LEARNING_RATE, betas=goldens.BETAS, eps=goldens.EPSILON, weight_decay=0.0
    )
    advantages = torch.cat([torch.from_numpy(sample.advantages) for sample in batch(family)]).double()
    norms, tensor_norms = [], {}
    for step in range(goldens.STEPS):
        optimizer.zero_grad()
        loss = (-torch.cat(log_probs_of(model, family)) * advantages).sum() / sum(LENGTHS)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, goldens.CLIP_GRAD)))
        if step == 0:
            kept = zip(names, parameters, strict=True)
            tensor_norms = {
                published(name): float(p.grad.norm())
                for name, p in kept
                if p.grad is not None and "experts." not in name
            }
        optimizer.step()
    after = torch.cat(log_probs_of(model, family)).detach()
    return goldens.Golden(before.numpy(), after.numpy(), sketches, squares, tuple(norms), tensor_norms)


def published(name: str) -> str:
    """Return the parameter's name in the checkpoint's files."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def log_probs_of(model: Any, family: str) -> list[torch.Tensor]:
    """Log-probs [L] of each sequence, 0 for its first token."""
    rows = []
    for sequence in batch(family):
        tokens = torch.from_numpy(sequence.tokens)
        inputs: dict[str, torch.Tensor] = {"input_ids": tokens[None]}
        if sequence.images:
            inputs["pixel_values"] = torch.cat([torch.from_numpy(image.pixels) for image in sequence.images]).double()
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in sequence.images])
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()[None]
        scores = model(**inputs).logits[0, :-1].log_softmax(-1)
        picked = scores.gather(1, tokens[1:, None]).squeeze(1)
        rows.append(torch.cat([picked.new_zeros(1), picked]))
    return rows


def sketched(outputs: list[list[torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    sketches, squares = [], []
    for of_layer in outputs:
        hidden = torch.cat(of_layer).numpy()
        signs = sketch_signs(np.arange(len(hidden)), hidden.shape[1])
        sketches.append(np.einsum("th,tsh->s", hidden, signs.astype(np.float64)))
        squares.append((hidden**2).sum())
    return np.array(sketches), np.array(squares)


def write_golden(family: str, golden: goldens.Golden, folder: Path) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    path = folder / f"{family}.safetensors"
    arrays = {
        "log_probs": golden.log_probs,
        "log_probs_after": golden.log_probs_after,
        "sketches": golden.sketches,
        "squares": golden.squares,
        "grad_norms": np.array(golden.grad_norms),
        "tensor_norms": np.array(list(golden.tensor_norms.values())),
    }
    save_file(arrays, path, metadata={"tensors": json.dumps(list(golden.tensor_norms))})
    return path


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else goldens.FOLDER
    torch.manual_seed(0)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as models:
            golden = golden_of(family, Path(models))
        path = write_golden(family, golden, folder)
        low, high = golden.log_probs.min(), golden.log_probs.mean()
        print(
            f"{path}: {path.stat().st_size} bytes, log-probs from {low:.2f}, mean {high:.2f}, gradient norms {golden.grad_norms}"
        )


if __name__ == "__main__":
    main()
