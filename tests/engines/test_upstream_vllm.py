"""vLLM's faults that megarl mends, each without its mend: a test here that fails says that the mend can go.

See docs/upstream.md. The mended behaviour is held by tests/engines/test_vllm.py and tests/weight_sync/test_engine_gap.py.
"""

import os
import subprocess
import sys

import pytest

from megarl.engines import engine_env
from tests.support.engine_process import (
    EngineProcess,
    build_model,
    change,
    full_sender,
    gaps,
    load_model,
    make_requests,
    spec,
    update,
)

pytestmark = [pytest.mark.stack, pytest.mark.slow]

BOUND = 5e-5  # of a log-prob in float32, where all is well
COMPAT, ARGS = "megarl.engines.vllm.compat", "megarl.engines.vllm.args"


@pytest.fixture(scope="module")
def process():
    process = EngineProcess()
    yield process
    process.close()


@pytest.fixture
def without(process):
    """Leaves functions of megarl out of the engine's process, by module and name, until the test's end."""
    left_out = []

    def leave_out(module, name, instead="nothing"):
        left_out.append((module, name))
        process.replace(module, name, instead)

    yield leave_out
    for module, name in left_out:
        process.replace(module, name, None)
    process.shutdown()


def largest_gap(process, model):
    requests = make_requests(3)
    completions = process.generate(requests)[1]
    return max(gaps(model, request, sample).max() for request in requests for sample in completions[request.group])


def printed(code):
    """Return the last word that `code` prints in a new process."""
    environment = os.environ | engine_env("vllm", {}, threads=1, engine_args={})
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    return done.stdout.split()[-1]


def test_rotary_operator_on_cpu_is_wrong_with_latent_attention(process, without, tmp_path):
    path = build_model(tmp_path, "deepseek_v3")
    without(ARGS, "_without_rotary_op")
    process.start(spec(path))
    assert largest_gap(process, load_model(path)) > 100 * BOUND


def test_softmax_routing_where_config_json_names_none(process, without, tmp_path):
    path = build_model(tmp_path, "deepseek_v3")
    without(ARGS, "_missing_routing", "topk_method_alone")
    process.start(spec(path))
    assert largest_gap(process, load_model(path)) > 100 * BOUND


def test_expert_kernels_keep_old_weights_over_a_reload(process, without, tmp_path):
    path = build_model(tmp_path, "qwen3_moe")
    model = load_model(path)
    without(COMPAT, "drop_packed_experts")
    sender = full_sender(process, process.start(spec(path)))
    update(process, sender, change(model, 1, tmp_path))
    assert largest_gap(process, model) > 100 * BOUND
    sender.close()


def test_reload_waits_for_a_tied_output_layer(process, without, tmp_path):
    path = build_model(tmp_path, "qwen2_tied")
    model = load_model(path)
    without(COMPAT, "tied_layers")
    sender = full_sender(process, process.start(spec(path)))
    with pytest.raises(ValueError, match=r"1 parameters of the engine's model got no weights: lm_head\.weight"):
        update(process, sender, change(model, 1, tmp_path))
    sender.close()


def test_reload_leaves_a_tied_output_layer_packed(process, without, tmp_path):
    path = build_model(tmp_path, "qwen2_tied")
    model = load_model(path)
    without(COMPAT, "repack_tied")
    sender = full_sender(process, process.start(spec(path)))
    update(process, sender, change(model, 1, tmp_path))
    assert largest_gap(process, model) > 100 * BOUND
    sender.close()


def test_reload_needs_named_weight_loaders():
    """Until loaders are named, the layers of a reload are never seen as complete: it fails."""
    code = (
        "import functools, torch\n"
        "from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise\n"
        "from megarl.engines.vllm.compat import name_partial_loaders\n"
        "model = torch.nn.Linear(2, 2, bias=False)\n"
        "model.weight.weight_loader = functools.partial(print)\n"
        "try: layerwise._get_weight_loader(model.weight).__name__; unnamed = 'named'\n"
        "except AttributeError: unnamed = 'unnamed'\n"
        "name_partial_loaders(model)\n"
        "print(unnamed + '-' + layerwise._get_weight_loader(model.weight).__name__)\n"
    )
    assert printed(code) == "unnamed-print"


def test_loader_of_gpt_oss_writes_past_the_weight_loaders():
    """Read, not run. tests/engines/test_layerwise_update.py has a loader like it."""
    code = (
        "import inspect; from vllm.model_executor.models.gpt_oss import GptOssModel as M;"
        "source = inspect.getsource(M._load_weights_other);"
        "print(source.count('param.copy_(narrow_weight)'), source.count('weight.zero_()'), sep='-')"
    )
    assert printed(code) == "3-1", "another loader: adapt or remove compat.directly_loaded"


def test_expert_kernel_on_cpu_ignores_the_expert_map():
    """Read, not run: with expert parallel it ends its process."""
    code = (
        "import inspect; from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as E;"
        "print(inspect.getsource(E.apply).count('expert_map'))"
    )
    assert printed(code) == "1", "it does more with the map than to take it"


def test_communicator_for_cpus_has_no_uneven_collectives():
    code = (
        "from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase as B;"
        "from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator as C;"
        "print(C.all_gatherv is B.all_gatherv and C.reduce_scatterv is B.reduce_scatterv)"
    )
    assert printed(code) == "True", "it has its own implementation"


_BIASED = """
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
{fix}
logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([-1.0, 0.0, 0.0, 0.9])
router = CPURouter(top_k=2, global_num_experts=4, e_score_correction_bias=bias)
weights, chosen = router._compute_routing(None, logits, None)
print("-".join(map(str, sorted(chosen[0].tolist()))))
"""


def test_router_on_cpu_ignores_a_bias():
    """By the softmax the first two experts are the best; with the bias the second and the last."""
    assert printed(_BIASED.format(fix="")) == "0-1", "it applies the bias: remove compat.fix_routing_biases_on_cpu"
    fix = "from megarl.engines.vllm import compat; compat.fix_routing_biases_on_cpu()"
    assert printed(_BIASED.format(fix=fix)) == "1-3"


_REPEATED = """
import torch
from types import SimpleNamespace
from vllm.platforms.cpu import CpuPlatform
CpuPlatform.import_kernels()
CpuPlatform.register_triton_kernel_overrides()
{fix}
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)
repeated = expand_batch_to_tokens(torch.tensor([0.5, 0.7]), torch.tensor([1, 3], dtype=torch.int32), 3)
print([round(value, 3) for value in repeated.tolist()] == [0.5, 0.7, 0.7])
"""


def test_temperatures_of_drafts_are_uninitialized_on_cpu():
    assert printed(_REPEATED.format(fix="")) == "False", "it repeats them: remove compat.fix_rejection_of_drafts_on_cpu"
    fix = "from megarl.engines.vllm import compat; compat.fix_rejection_of_drafts_on_cpu()"
    assert printed(_REPEATED.format(fix=fix)) == "True"
