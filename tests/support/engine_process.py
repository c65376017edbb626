"""A vLLM engine in a separate process, and the Hugging Face models that its tests compare it with.

The test's process plays the trainer: it holds the Hugging Face model, changes its weights and sends them through the
weight sync.
"""

import contextlib
import os
import pkgutil
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np
import torch

from megarl.engines import create, engine_env
from megarl.engines.base import EngineSpec
from megarl.engines.group import Rendezvous
from megarl.platform.cpu import CPUPlatform
from megarl.types import GenerationRequest, Prompt, Sampling
from megarl.weight_sync.full.sender import FullSender
from tests.support import forks

VOCABULARY = 250  # not a multiple of vLLM's padding
MAX_LENGTH = 128
PATIENCE = 300  # seconds, for any call of an engine: starts compile, on a machine that may be busy


def serve(connection):
    """Main loop of the engine's process: runs (number, method, arguments) in threads, answers (number, error, value)."""
    state = {}

    def start(spec, *group_rank):
        if "engine" in state:  # one that failed may still be at its end, which takes vLLM's groups of the process down
            state["engine"].shutdown()
        state["engine"] = create("vllm", spec)
        return state["engine"].start(*group_rank)

    def open_rendezvous(host):
        state["rendezvous"] = Rendezvous(host)
        return state["rendezvous"].first

    def generate(requests):
        order, completions = [], {}
        state["finished"] = order
        state["engine"].generate(requests, lambda group, c: (order.append(group), completions.update({group: c})))
        return order, completions

    def finished():
        return state["finished"]

    def replace(module, name, function):
        """Replace a function of `module`, or of a class in it ("module:Class"), by ``function`` of this file.
        None restores the original."""
        owner = pkgutil.resolve_name(module)
        former = state.setdefault((module, name), getattr(owner, name))
        setattr(owner, name, former if function is None else globals()[function])

    def rpc(method, *arguments):
        """Call a method in each of the engine's workers; returns their results."""
        engine = state["engine"]
        return engine.call(lambda: engine._backend._engine.collective_rpc(method, args=arguments))

    functions = {
        "rpc": rpc,
        "start": start,
        "open_rendezvous": open_rendezvous,
        "generate": generate,
        "finished": finished,
        "replace": replace,
    }

    def run(number, method, arguments):
        try:
            target = functions.get(method) or getattr(state["engine"], method)
            answer = (number, None, target(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again in the other process
            traceback.clear_frames(error.__traceback__)
            answer = (number, copy_of(error), None)
        with lock:
            connection.send(answer)

    lock = threading.Lock()
    while (message := connection.recv()) is not None:
        threading.Thread(target=run, args=message).start()


def with_digests(spec, device):
    """For `replace`: the engine's arguments, with workers that report digests of their parameters."""
    from megarl.engines.vllm.args import build_engine_args

    return build_engine_args(spec, device) | {"worker_extension_cls": "tests.support.digests.Extension"}


def some_whole(model, tensors):
    """For `replace`: needed slices of an engine that loads layer 0's attention and layer 1's experts as whole tensors."""
    from megarl.engines.vllm.needed_slices import needed_slices
    from megarl.weight_sync.sharded.slices import SLICE_COLUMNS, SliceTableBuilder

    need = needed_slices(model, tensors)
    layers = ("model.layers.0.self_attn.qkv_proj.", "model.layers.1.mlp.experts.")
    sources = {name: (shape, dtype) for name, shape, dtype in tensors}
    builder, whole = SliceTableBuilder(), {}
    for tensor, row, column, rows, columns, parameter, offset, stride in need.slices.tolist():
        name, parameter_name = need.tensors[tensor], need.parameters[parameter]
        if parameter_name.startswith(layers):
            whole[name] = None
            continue
        number = builder.parameter(parameter_name, need.dtypes[parameter])
        builder.add(builder.tensor(name, sources[name][0]), (row, column, rows, columns), number, offset, stride)
    for name in whole:
        builder.add_whole(name, *sources[name])
    assert len(SLICE_COLUMNS) == 8 and len(whole) > 10
    return builder.build()


class SwappingKeyAndValue:
    """For `replace`: a vLLM that joins the adapters of one linear in an order other than the declared order."""

    @staticmethod
    def pack(loras):
        from vllm.lora.lora_weights import PackedLoRALayerWeights

        return PackedLoRALayerWeights.pack([loras[0], *reversed(loras[1:])])


def flipping(_, memory):
    """For `replace`: a fingerprint of bytes with one flipped bit."""
    from megarl.weight_sync.fingerprint import StreamingFingerprint

    changed = memory.clone()
    changed[len(changed) // 2] ^= 8
    return StreamingFingerprint(changed)


def dying(_, memory):
    """For `replace`: an engine that dies after it has received a bucket."""
    os._exit(9)


def nothing(*_):
    """For `replace`: a missing fix."""
    return {}


def topk_method_alone(*_):
    """For `replace`: half of the fix `_missing_routing`."""
    return {"topk_method": "noaux_tc"}


def copy_of(error):
    """A copy of the error without references to other objects, so that it can be pickled."""
    try:
        return type(error)(str(error))
    except TypeError:  # the class has another constructor
        return RuntimeError(f"{type(error).__name__}: {error}")


class EngineProcess:
    def __init__(self):
        environment = engine_env("vllm", CPUPlatform().rollout_env(), threads=1, engine_args={})
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/engine")
            listener.listen()
            listener.settimeout(PATIENCE)
            module = "tests.support.engine_main"
            self.process = forks.start("engine", module, [f"{folder}/engine"], {**os.environ, **environment})
            self.connection = Connection(listener.accept()[0].detach())
        self.futures: dict[int, Future] = {}
        threading.Thread(target=self._answers, daemon=True).start()

    def _answers(self):
        while True:
            try:
                number, error, value = self.connection.recv()
            except (EOFError, OSError):
                for future in self.futures.values():
                    future.set_exception(RuntimeError("the engine's process is gone"))
                return
            future = self.futures.pop(number)
            future.set_exception(error) if error is not None else future.set_result(value)

    def begin(self, method, *arguments):
        number, future = time.monotonic_ns(), Future()
        self.futures[number] = future
        self.connection.send((number, method, arguments))
        return future

    def __getattr__(self, method):
        return lambda *arguments: self.begin(method, *arguments).result(PATIENCE)

    def close(self):
        self.connection.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()


def build_model(path, kind="qwen3_moe", layers=2, expert_width=32, width=64):
    """Write a tiny model with random weights. `width`: of the hidden states; FP8 layers need a multiple of 128."""
    import transformers

    torch.manual_seed(0)
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=96 if width == 64 else 2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **common, num_key_value_heads=2, head_dim=32, num_experts=4, moe_intermediate_size=expert_width
        )
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
        return str(path)
    if kind == "qwen3":
        config = transformers.Qwen3Config(
            **{k: v for k, v in common.items() if k not in ("num_experts_per_tok", "norm_topk_prob")},
            num_key_value_heads=2,
            head_dim=32,
        )
        transformers.Qwen3ForCausalLM(config).save_pretrained(path)
        return str(path)
    if kind in ("qwen2", "qwen2_tied"):
        config = transformers.Qwen2Config(
            **{**common, "hidden_size": 128, "tie_word_embeddings": kind == "qwen2_tied"}, num_key_value_heads=2
        )
        transformers.Qwen2ForCausalLM(config).save_pretrained(path)
        return str(path)
    if kind == "glm4_moe":  # routed like DeepSeek-V3, without latent attention
        config = transformers.Glm4MoeConfig(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            use_qk_norm=True,
            moe_intermediate_size=expert_width,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.0,
        )
        transformers.Glm4MoeForCausalLM(config).save_pretrained(path)
        return str(path)
    latent = dict(kv_lora_rank=512, q_lora_rank=width, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
    experts = dict(
        moe_intermediate_size=max(64, expert_width), n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1
    )
    config = transformers.DeepseekV3Config(
        **common, **latent, **experts, num_key_value_heads=4, first_k_dense_replace=1, routed_scaling_factor=1.0
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(path)
    return str(path)


def load_model(path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def change(model, seed, directory):
    """New weights for `model`; returns them under their checkpoint names."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def make_requests(count=6, n=3, max_tokens=20, temperature=1.0, seed=0, **sampling):
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(3, VOCABULARY, 4 + i).tolist()) for i in range(count)]
    return [
        GenerationRequest(
            i, Prompt(f"p{i}", tokens, "", "x"), Sampling(n, max_tokens, temperature, **sampling), 100 * i
        )
        for i, tokens in enumerate(prompts)
    ]


@torch.no_grad()
def reference(model, prompt, tokens, temperature=1.0):
    """log-probs [response, vocabulary] of the Hugging Face model before each response token."""
    sequence = torch.tensor([[*prompt, *tokens]])
    logits = model(sequence).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


def gaps(model, request, sample):
    """Absolute difference of the engine's and the Hugging Face model's log-probs, for each token."""
    expected = reference(model, request.prompt.tokens, sample.tokens.tolist(), request.sampling.temperature)
    expected = expected.gather(1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0]
    return np.abs(expected.numpy() - sample.log_probs)


def assert_exact(model, requests, completions, bound=5e-5):
    for request in requests:
        assert len(completions[request.group]) == request.sampling.n
        for sample in completions[request.group]:
            assert sample.tokens.dtype == np.int32 and sample.log_probs.dtype == np.float32
            assert gaps(model, request, sample).max() < bound


def same(first, other):
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for group in first
        for a, b in zip(first[group], other[group], strict=True)
    )


def assert_same_digests(first, second, where="the engine"):
    """Assert that two engines have the same parameters. Each argument: for each rank, digests by parameter name."""
    for rank, (left, right) in enumerate(zip(first, second, strict=True)):
        differing = [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]
        assert differing == [], f"{where}, rank {rank}"


def full_sender(engine, info):
    sender = FullSender.open(
        "127.0.0.1", [tuple(r) for r in info["receivers"]], bucket_bytes=1 << 18, timeout=120.0, heartbeat_timeout=8.0
    )
    engine.connect_weight_sync(sender.session)
    return sender


def update(engine, sender, weights, version=1):
    """Send `weights` as `version`."""
    update_all([engine], sender, weights, version)


def update_all(engines, sender, weights, version):
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, version, weights.items)
        updates = [engine.begin("update_weights", version) for engine in engines]
        for update in updates:
            update.result(PATIENCE)
        sending.result(PATIENCE)


def spec(path, **changes):
    return EngineSpec(**{"name": "e0", "model_path": path, "dtype": "float32", "max_model_len": MAX_LENGTH, **changes})
