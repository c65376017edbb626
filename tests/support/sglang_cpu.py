"""A real SGLang on the CPU, behind megarl's adapter: run by tests/engines/test_sglang.py in an environment that has SGLang.

    python -m tests.support.sglang_cpu qwen3|qwen3_moe FOLDER

SGLang imports a stand-in for its kernels (tests/stand_ins/sgl_kernel) and computes in torch. Two things differ from a
device: the attention backend is not checked for deterministic inference, and operators are not replaced by batch-invariant
versions, which do not exist for the CPU. Prints one line of JSON per figure.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from megarl.engines.base import EngineSpec
from megarl.engines.sglang import args as sglang_args
from megarl.engines.sglang import engine as adapter
from megarl.engines.sglang.args import build_engine_args
from megarl.types import Completion, GenerationRequest, Prompt, Sampling
from megarl.weight_sync.full.sender import FullSender
from megarl.weight_sync.session import compare_reports

STOPS = (127, 9)


def run_scheduler(*args: Any, **options: Any) -> Any:
    """SGLang's scheduler process."""
    import sglang.srt.batch_invariant_ops as operators
    from sglang.srt.managers.scheduler import run_scheduler_process

    operators.enable_batch_invariant_mode = lambda: None
    return run_scheduler_process(*args, **options)


def on_the_cpu() -> None:
    import sglang.srt.server_args
    from sglang.srt.entrypoints.engine import Engine

    sglang.srt.server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    Engine.run_scheduler_process_func = staticmethod(run_scheduler)
    sglang_args.check_plan = lambda *_: None  # it refuses a CPU

    def arguments(spec: EngineSpec, device: str) -> dict[str, Any]:
        fixed = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "max_total_tokens": 4096}
        return {**build_engine_args(spec, device), **fixed, "disable_cuda_graph": True, "mem_fraction_static": 0.1}

    adapter.build_engine_args = arguments


def make_model(kind: str, folder: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1,
        eos_token_id=127, bos_token_id=126, pad_token_id=125,
    )  # fmt: skip
    if kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    else:
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))
    model.float().save_pretrained(folder)
    return model


def exported(model: Any):
    """The weights with a checkpoint's names: each expert separately."""
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert in range(len(value)):
                gate, up = value[expert].chunk(2, 0)
                yield name.replace("gate_up_proj", f"{expert}.gate_proj.weight"), gate.contiguous()
                yield name.replace("gate_up_proj", f"{expert}.up_proj.weight"), up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert in range(len(value)):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), value[expert].contiguous()
        else:
            yield name, value


def requests(temperature: float) -> list[GenerationRequest]:
    sampling = Sampling(3, 20, temperature=temperature, stop_token_ids=STOPS)
    return [GenerationRequest(g, Prompt(f"p{g}", (3 + g, 5, 7), "", "x"), sampling, seed=10 * g) for g in range(4)]


def largest_gap(model: Any, batch: list[GenerationRequest], done: dict[int, list[Completion]]) -> float:
    """Largest absolute difference between the engine's and transformers' log-probs."""
    worst = 0.0
    for request in batch:
        for sample in done[request.group]:
            tokens = torch.tensor([[*request.prompt.tokens, *sample.tokens.tolist()]])
            with torch.no_grad():
                logits = model(tokens).logits[0].float() / request.sampling.temperature
            at = len(request.prompt.tokens)
            expected = logits.log_softmax(-1)[at - 1 : -1].gather(1, tokens[0, at:, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(expected - sample.log_probs).max()))
    return worst


def same(first: Completion, other: Completion) -> bool:
    return np.array_equal(first.tokens, other.tokens)


def error_of(function: Any) -> str:
    try:
        return f"no error: {function()}"
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def say(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


def main(kind: str, folder: str) -> None:
    model = make_model(kind, folder)
    on_the_cpu()
    engine = adapter.SglangEngine(EngineSpec("e0", folder, "float32", 200, load_weights=False))
    info = engine.start()
    say("info", info)
    sender = FullSender.open("127.0.0.1", info["receivers"], bucket_bytes=1 << 16, timeout=60.0, heartbeat_timeout=8.0)
    engine.connect_weight_sync(sender.session)

    def generate(batch: list[GenerationRequest]) -> dict[int, list[Completion]]:
        done: dict[int, list[Completion]] = {}
        engine.generate(batch, lambda group, samples: done.update({group: samples}))
        return done

    def in_thread(function: Any) -> tuple[threading.Thread, list[Any]]:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(function()))
        thread.start()
        return thread, box

    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        thread, box = in_thread(lambda version=version: sender.send(version, lambda: exported(model)))
        report = engine.update_weights(version)
        thread.join()
        compare_reports(box[0], report)
        say("gap", [largest_gap(model, batch, generate(batch)) for batch in (requests(1.0), requests(0.7))])
    sampled_requests = requests(1.0)
    done = generate(sampled_requests)
    again = generate(sampled_requests)
    say("repeats", all(same(a, b) for group in done for a, b in zip(done[group], again[group], strict=True)))
    say("differ", all(not same(samples[0], samples[1]) for samples in done.values()))
    alone = GenerationRequest(
        9, sampled_requests[2].prompt, Sampling(1, 20, stop_token_ids=STOPS), seed=sampled_requests[2].seed + 1
    )
    say("seed_plus_1", same(generate([alone])[9][0], done[2][1]))
    say("ends", sorted({s.finish_reason for samples in done.values() for s in samples}))
    say("stops", all(s.tokens[-1] in STOPS for ss in done.values() for s in ss if s.finish_reason == "stop"))
    engine.pause()
    thread, box = in_thread(lambda: list(generate([sampled_requests[0]])))
    thread.join(1.0)
    say("paused", box)
    engine.resume()
    thread.join(30)
    say("resumed", box)
    long = GenerationRequest(7, sampled_requests[0].prompt, Sampling(2, 190), seed=1)
    thread, box = in_thread(lambda: error_of(lambda: generate([long])))
    time.sleep(0.3)
    engine.abort()
    thread.join(30)
    say("aborted", box)
    say("after_abort", list(generate([sampled_requests[1]])))
    thread, box = in_thread(lambda: error_of(lambda: sender.send(3, lambda: list(exported(model))[:-1])))
    say("weight_left_out", error_of(lambda: engine.update_weights(3)))
    thread.join()
    say("told_to_the_sender", box)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
