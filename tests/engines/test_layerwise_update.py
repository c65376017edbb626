"""Updates of a live model slice by slice, and their checks of complete layers, through vLLM's reload on small layers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="no vLLM is installed")

from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from megarl.engines.vllm import compat, worker
from megarl.engines.vllm.layerwise_update import (
    LayerwiseUpdate,
    _check_filled,
    check_complete,
    expert_tables,
    experts_from,
    live_needed_slices,
)
from megarl.engines.vllm.needed_slices import needed_slices
from megarl.weight_sync.sharded.slices import SliceTable

TENSORS = [
    ("embed", (6, 4), "float32"),
    ("up", (8, 4), "float32"),
    ("down", (4, 8), "float32"),
    ("norm", (4,), "float32"),
]


class Model(torch.nn.Module):
    """An embedding with two rows of padding, two layers and a norm. Its loader copies each tensor to one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 8, bias=False)
        self.embed.num_embeddings_per_partition, self.embed.num_org_embeddings_per_partition = 8, 6
        self.up, self.down = torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.transposed = False  # the loader transposes "down"
        self.twice = False  # the loader copies "norm" twice
        self.read = False  # the loader reads a value of "norm"
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.weight_loader = copy
        with torch.device("cpu"):
            record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            parameter = getattr(self, name).weight
            if name == "norm" and self.read:
                weight.max().item()
            for _ in range(2 if name == "norm" and self.twice else 1):
                parameter.weight_loader(parameter, weight.t() if name == "down" and self.transposed else weight)


def copy(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    parameter.data[: len(weight)].copy_(weight)


def tensors_of(*names: str) -> list[tuple[str, tuple[int, ...], str]]:
    return [tensor for tensor in TENSORS if not names or tensor[0] in names]


def values_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- slices fill every layer -----------------------------------------------------------------------


def test_slices_fill_all_layers_except_for_padding() -> None:
    model = Model()
    _check_filled(model, needed_slices(model, TENSORS), leave_out=())


@pytest.mark.parametrize(
    ("lacking", "words"),
    [("up", "up of the engine's model lacks 32 of its 32"), ("embed", "embed of .* lacks 24 of its 32 elements")],
)
def test_a_layer_without_all_of_its_slices_is_refused(lacking: str, words: str) -> None:
    model = Model()
    needed = needed_slices(model, [tensor for tensor in TENSORS if tensor[0] != lacking])
    with pytest.raises(ValueError, match=words):
        _check_filled(model, needed, leave_out=())
    _check_filled(model, needed, leave_out=(lacking,))


def test_a_layer_with_some_of_its_slices_is_refused() -> None:
    model = Model()
    needed = needed_slices(model, [("up", (7, 4), "float32"), *tensors_of("embed", "down", "norm")])
    with pytest.raises(ValueError, match="up of the engine's model lacks 4 of its 32 elements"):
        _check_filled(model, needed, leave_out=())


def test_a_layer_that_is_filled_twice_is_refused() -> None:
    model = Model()
    model.twice = True
    with pytest.raises(ValueError, match="norm of the engine's model is loaded in a way that sharded updates do not"):
        _check_filled(model, needed_slices(model, TENSORS), leave_out=())


def test_attention_with_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM processes it at the end of a reload, when its projections have been processed."""
    model = Model()
    needed = needed_slices(model, TENSORS)
    monkeypatch.setattr(compat, "is_deferred_attention", lambda layer: layer is model.up)
    with pytest.raises(ValueError, match="up of the engine's model is loaded in a way"):
        _check_filled(model, needed, leave_out=())


def test_a_layer_without_slices_is_loaded_by_vllms_loader() -> None:
    model = Model()
    model.transposed = True
    needed = needed_slices(model, TENSORS)
    assert needed.whole == {"down"}
    _check_filled(model, needed, leave_out=())


def test_a_shared_tensor_fills_both_of_its_layers() -> None:
    model = Model()
    model.tied = torch.nn.Linear(4, 8, bias=False)
    model.tied.weight = torch.nn.Parameter(model.up.weight.data, requires_grad=False)
    _check_filled(model, needed_slices(model, TENSORS), leave_out=())


# --- a load has been complete -----------------------------------------------------------------------


def load(model: Model, *names: str) -> None:
    """Begin a reload and load the tensors `names`."""
    initialize_layerwise_reload(model)
    model.load_weights((name, torch.ones(shape)) for name, shape, _ in tensors_of(*names))


def test_a_complete_load_is_accepted_with_its_padding_missing() -> None:
    model = Model()
    load(model, "embed", "up", "down", "norm")
    check_complete(model, leave_out=())


def test_a_layer_that_was_not_loaded_is_named() -> None:
    model = Model()
    load(model, "embed", "up", "norm")
    with pytest.raises(
        ValueError, match="down of the engine's model lacks 32 of its 32 elements: the trainer's export"
    ):
        check_complete(model, leave_out=())
    check_complete(model, leave_out=("down",))


def test_only_the_padding_of_a_vocabulary_may_be_missing() -> None:
    model = Model()
    initialize_layerwise_reload(model)
    model.load_weights([("embed", torch.ones(5, 4)), *((name, torch.ones(shape)) for name, shape, _ in TENSORS[1:])])
    with pytest.raises(ValueError, match="embed of the engine's model lacks 4 of its 32 elements"):
        check_complete(model, leave_out=())


# --- an update of a live model ----------------------------------------------------------------------


def write(update: LayerwiseUpdate, needed: SliceTable, name: str, value: float) -> None:
    """Write all of the parameter `name` except for padding, as the receiver does."""
    number = needed.parameters.index(name)
    rows = needed.slices[needed.slices[:, 5] == number]
    elements = int((rows[:, 3] * rows[:, 4]).sum())
    update.tensor(number).flatten()[:elements].fill_(value)
    update.mark_written(number, elements)


@pytest.fixture
def live() -> tuple[Model, SliceTable]:
    model = Model()
    return model, live_needed_slices(model, TENSORS)


def test_an_update_replaces_the_values_of_the_live_parameters(live: tuple[Model, SliceTable]) -> None:
    model, needed = live
    parameters = dict(model.named_parameters())
    update = LayerwiseUpdate(model, needed)
    for value, name in enumerate(needed.parameters):
        write(update, needed, name, float(value))
    update.finish(model_config=None)
    for value, name in enumerate(needed.parameters):
        parameter = parameters[name]
        assert dict(model.named_parameters())[name] is parameter, "engines keep pointers to live parameters"
        padding = parameter[6:] if name == "embed.weight" else parameter[:0]
        assert (parameter[: len(parameter) - len(padding)] == value).all() and (padding == 0).all()


class SpreadExperts(torch.nn.Module):
    """The part of vLLM's layers of experts that finds the number of an expert on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_expert_map", torch.tensor([-1, 0, 1, -1]), persistent=False)

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return self._expert_map[expert_id].item()


def test_loaders_find_the_experts_of_an_engine_that_sleeps() -> None:
    """Its device memory, with the tables, is released when a colocated engine joins a session."""
    model = torch.nn.Sequential(SpreadExperts(), torch.nn.Linear(2, 2))
    tables = expert_tables(model)
    model[0]._expert_map.fill_(10**6)
    find = "_map_global_expert_id_to_local_expert_id"
    with pytest.raises(ValueError, match="no values"), experts_from(tables):
        assert [getattr(model[0], find)(expert) for expert in range(4)] == [-1, 0, 1, -1]
        raise ValueError("no values")
    assert getattr(model[0], find)(1) == 10**6, "the layer's own method is back"


def test_a_rank_that_joins_asleep_traces_its_loader_with_the_tables_of_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = torch.nn.Sequential(SpreadExperts()), []
    sampler = SimpleNamespace(
        logprobs_mode="raw_logprobs", topk_topp_sampler=SimpleNamespace(logprobs_mode="raw_logprobs")
    )
    rank = SimpleNamespace(
        rank=1,
        model_runner=SimpleNamespace(sampler=sampler, get_model=lambda: model),
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        megarl_disconnect=lambda: None,
        _megarl_context=contextlib.nullcontext,
    )
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(device_type="npu"))
    assert worker.WorkerExtension.megarl_start(rank)[0] == 1
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs", (
        "vllm-ascend leaves raw"
    )

    model[0]._expert_map.fill_(10**6)  # asleep
    receiver = SimpleNamespace(collect_held=list, publish_needed=seen.append)
    monkeypatch.setattr(worker, "Session", SimpleNamespace(from_json=lambda _: SimpleNamespace(sharded=True)))
    monkeypatch.setattr(worker, "ShardedReceiver", lambda *_: receiver)
    monkeypatch.setattr(worker, "held_tensors", lambda _: [])
    find = "_map_global_expert_id_to_local_expert_id"
    monkeypatch.setattr(worker, "live_needed_slices", lambda model, _: [getattr(model[0], find)(e) for e in range(4)])
    assert worker.WorkerExtension.megarl_connect(rank, "{}", "e0") is None
    assert seen == [[-1, 0, 1, -1]]


def test_vllms_loader_finds_experts_by_this_method() -> None:
    experts = pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts", reason="vLLM before 0.32")
    text = inspect.getsource(experts.RoutedExperts)
    assert "self._map_global_expert_id_to_local_expert_id(" in text and '"_expert_map", self.expert_map_manager' in text


def test_an_update_that_ends_within_a_layer_is_refused(live: tuple[Model, SliceTable]) -> None:
    model, needed = live
    update = LayerwiseUpdate(model, needed)
    for name in ("embed.weight", "down.weight", "norm.weight"):
        write(update, needed, name, 1.0)
    number = needed.parameters.index("up.weight")
    update.tensor(number)[:3] = 1.0
    update.mark_written(number, 12)
    with pytest.raises(ValueError, match="up of the engine's model lacks 32 of its 32 elements"):
        update.finish(model_config=None)


@pytest.mark.parametrize("fault", ["a tensor is missing", "the loader reads values", "the loader copies twice"])
def test_a_model_that_cannot_be_updated_by_slices_is_unchanged(fault: str) -> None:
    """Its engine serves on with full updates, so its parameters must be the same tensors with the same values."""
    model = Model()
    model.read, model.twice = fault == "the loader reads values", fault == "the loader copies twice"
    parameters, values = dict(model.named_parameters()), values_of(model)
    with pytest.raises(ValueError):
        live_needed_slices(model, TENSORS[:-1] if fault == "a tensor is missing" else TENSORS)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and torch.equal(parameter, values[name])
    model.read = model.twice = False
    load(model, "embed", "up", "down", "norm")
    check_complete(model, leave_out=())


# --- layers that a loader fills without their weight loaders ------------------------------------------


class Experts(torch.nn.Module):
    """Two experts of two layers of gpt-oss, as vLLM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 6, 4), requires_grad=False)
        self.w2_bias = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)


class GptOssForCausalLM(torch.nn.Module):
    """Its loader transposes the experts of a layer and copies them into the parameter; rank 1 clears their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            layer = torch.nn.Module()
            layer.mlp = torch.nn.Module()
            layer.mlp.experts = torch.nn.Module()
            layer.mlp.experts.routed_experts = Experts()
            layer.norm = torch.nn.LayerNorm(4, bias=False)
            layer.norm.weight.requires_grad_(False).weight_loader = copy
            self.layers.append(layer)
        with torch.device("cpu"):
            record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            layer = self.layers[int(name.split(".")[1])]
            if name.endswith("gate_up_proj"):
                layer.mlp.experts.routed_experts.w13_weight.copy_(weight.permute(0, 2, 1).contiguous())
            elif name.endswith("bias"):
                layer.mlp.experts.routed_experts.w2_bias.copy_(weight.zero_())
            else:
                layer.norm.weight.weight_loader(layer.norm.weight, weight)


GPT_OSS = [
    (f"layers.{layer}.{name}", shape, "float32")
    for layer in range(2)
    for name, shape in (("mlp.experts.gate_up_proj", (2, 4, 6)), ("mlp.experts.down_proj_bias", (2, 4)), ("norm", (4,)))
]


def test_layers_that_are_written_directly_are_updated() -> None:
    """vLLM's reload alone would lose these weights."""
    model = GptOssForCausalLM()
    live = dict(model.named_parameters())
    for parameter in live.values():
        parameter.fill_(-1.0)
    needed = live_needed_slices(model, GPT_OSS)
    assert needed.whole == {name for name, _, _ in GPT_OSS if "experts" in name}
    values = {name: torch.randn(shape) for name, shape, _ in GPT_OSS}
    update = LayerwiseUpdate(model, needed)
    for number in range(len(needed.parameters)):
        tensor = needed.tensors[needed.slices[needed.slices[:, 5] == number][0, 0]]
        update.tensor(number).copy_(values[tensor])
        update.mark_written(number, values[tensor].numel())
    update.finish(model_config=None)
    for number in range(2):
        got = live[f"layers.{number}.mlp.experts.routed_experts.w13_weight"]
        assert model.layers[number].mlp.experts.routed_experts.w13_weight is got
        assert torch.equal(got, values[f"layers.{number}.mlp.experts.gate_up_proj"].transpose(1, 2))
        assert (live[f"layers.{number}.mlp.experts.routed_experts.w2_bias"] == 0).all()
        assert torch.equal(live[f"layers.{number}.norm.weight"], values[f"layers.{number}.norm"])


def test_layers_that_are_written_directly_are_refused_on_the_full_route() -> None:
    model = GptOssForCausalLM()
    with pytest.raises(
        ValueError, match=r"GptOssForCausalLM writes layers\.0\.mlp\.experts .*weight_sync\.route=sharded"
    ):
        worker.load(model, iter(()), None)
