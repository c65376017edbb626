"""Stages of environment, kernels and collectives: verdicts over given measurements."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist

from megarl.commands.accept.collective_rank import CollectiveRank, Timing
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.kernel_rank import Condition
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import collectives, environment, kernels
from megarl.commands.doctor.finding import Finding
from megarl.commands.doctor.recipe import needs_of
from megarl.platform.device_table import devices
from megarl.recipe.schema import Recipe, WeightSyncConfig

TRANSPORTS = get_args(get_type_hints(WeightSyncConfig)["transport"])


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return StageContext(Settings("cpu", 2), tmp_path, tmp_path, 1e9)


def failed(context: StageContext) -> list[str]:
    return [check.line() for check in context.checks if check.verdict == "FAIL"]


class TestEnvironment:
    def test_findings_of_the_doctor_are_checks(self):
        bad = environment.check_of(Finding("FAIL", "no devices", "pass them in", check="devices"))
        assert (bad.verdict, bad.name) == ("FAIL", "doctor: devices") and "no devices -> pass them in" in bad.line()
        assert environment.check_of(Finding("warning", "old", "new", check="x")).verdict == "REPORT"
        assert environment.check_of(Finding("ok", "fine", check="x", host="b", rank=2)).name == "doctor: x on b"

    def test_a_refused_route_fails_only_if_the_recipe_requires_it(self, context):
        capabilities = {"version": "0.11.0", "no_sharded": "vLLM 0.11.0 cannot reload its layers"}
        recipe = Recipe()
        context.__dict__["recipe"] = recipe
        environment._route(context, capabilities)
        (route,) = [check for check in context.checks if check.name.endswith("route")]
        assert route.value == "full, because vLLM 0.11.0 cannot reload its layers" and not failed(context)
        recipe.weight_sync.route = "sharded"
        environment._route(context, capabilities)
        assert "weight_sync.route=sharded: vLLM 0.11.0 cannot reload" in failed(context)[0]
        context.checks.clear()
        environment._route(context, capabilities | {"no_sharded": None})
        assert not failed(context)

    def test_every_transport_is_described(self, context):
        context.__dict__["recipe"] = recipe = Recipe()
        texts = {}
        for transport in TRANSPORTS:
            recipe.weight_sync.transport = transport
            environment._route(context, {"no_sharded": None})
            texts[transport] = next(str(c.value) for c in reversed(context.checks) if c.name.endswith("transport"))
        assert len({text.partition(": ")[2] for text in texts.values()}) == len(TRANSPORTS)
        assert "device memory" in texts["ipc"] and "/dev/shm" not in texts["collective"]

    def test_capabilities_have_the_fields_that_accept_reads(self):
        from megarl.engines.vllm.compat import Capabilities

        assert {"version", "device", "no_sharded"} <= set(Capabilities.__dataclass_fields__)

    def test_recipe_settings_are_checked_without_its_files_and_devices(self, context, tmp_path):
        """The recipe's settings are checked; an acceptance needs neither its files nor its devices."""
        path = tmp_path / "r.yaml"
        path.write_text("model: {path: absent}\ndata: {train_files: [absent.parquet]}\ncluster: {device: npu}\n")
        context.settings = replace(context.settings, recipe=str(path), overrides=("rollout.engine_args.nonsense=1",))
        environment._of_recipe(context, [("a", 2)])
        (line,) = failed(context)
        assert line.startswith("doctor: recipe: settings") and "nonsense" in line
        context.checks.clear()
        context.__dict__.pop("recipe")
        context.settings = replace(context.settings, overrides=())
        environment._of_recipe(context, [("a", 2)])
        verdicts = {check.name.split(": ")[-1]: check for check in context.checks}
        assert not failed(context) and verdicts["settings"].verdict == "PASS"
        assert verdicts["model"].verdict == "NOT RUN" and "absent/config.json" in verdicts["model"].cause
        assert "cluster.device=npu" in verdicts["devices"].cause

    def test_invalid_data_on_this_machine_is_a_failure(self, tmp_path):
        recipe = Recipe()
        file = tmp_path / "rows.jsonl"
        file.write_text("{}")
        recipe.data.train_files = [str(file)]
        finding = Finding("FAIL", "row 0 has no prompt", check="recipe: data")
        assert environment.not_here(recipe, finding, 1.0) == ""
        file.unlink()
        assert str(file) in environment.not_here(recipe, finding, 1.0)
        slow = Finding("FAIL", "it did not end within 5 s")
        assert "megarl doctor" in environment.not_here(recipe, slow, 5.0)

    def test_a_node_needs_memory_for_its_share_of_a_recipe(self, context):
        recipe = Recipe()
        recipe.cluster.trainers, recipe.rollout.engines, recipe.cluster.placement = 256, 256, "colocated"
        context.__dict__["recipe"] = recipe
        context.settings = replace(context.settings, device="npu", devices=16)
        whole = needs_of(recipe, {})
        assert environment.on_these_devices(context, whole).buckets == whole.buckets // 16
        context.settings = replace(context.settings, nodes=16)
        assert environment.on_these_devices(context, whole).buckets == whole.buckets // 16
        of_each = needs_of(recipe, {"NNODES": "16", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
        assert environment.on_these_devices(context, of_each).buckets == of_each.buckets < whole.buckets


class TestKernels:
    def test_condition_fails_with_its_cause(self, context):
        conditions = [
            Condition("copies on the host are page-locked", False, "pageable"),
            Condition("x", True, "unused"),
        ]
        kernels.record(context, [], conditions, "float32")
        (line,) = failed(context)
        assert line == "float32 copies on the host are page-locked: False (== True): pageable"


def timing(rank: int, **changes: Any) -> list[Timing]:
    timing = Timing("tensor", "all_reduce", (0, 1, 2, 3), 0.01, 0.0001, 1e9, True)
    return [replace(timing, **changes.get(f"r{rank}", {}))]


class StubRanks:
    """Ranks with given timings of collectives and pairs, and given free memory."""

    size = 4

    def __init__(self, timings: list[list[Timing]], memory: tuple[float, float] = (10.0, 9.9), slow: int = 9) -> None:
        self.timings, self.memory, self.slow = timings, list(memory), slow

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "memory":
            return [self.memory.pop(0)] * 4
        if method == "pair":
            first, second = args[:2]
            return [(10.0 if first == self.slow else 1.0) if rank == second else None for rank in range(4)]
        return self.timings


class TestCollectives:
    def of(
        self,
        monkeypatch: pytest.MonkeyPatch,
        context: StageContext,
        hosts: str = "aaaa",
        memory: tuple[float, float] = (10.0, 9.9),
        **changes: Any,
    ) -> list[str]:
        context.settings = replace(context.settings, device="cuda")
        ranks = StubRanks([timing(rank, **changes) for rank in range(4)], memory)
        collectives._group(context, ranks, "tensor", 1, list(hosts), devices()["H100"], "", ranks.call("memory"))
        return failed(context)

    def test_good_ranks(self, monkeypatch, context):
        assert self.of(monkeypatch, context, **{f"r{rank}": {"seconds": 0.003} for rank in range(4)}) == []

    def test_late_rank_is_named(self, monkeypatch, context):
        seconds = {"seconds": 0.003}
        lines = self.of(monkeypatch, context, r0=seconds, r1=seconds, r2=seconds | {"launch": 0.3}, r3=seconds)
        assert len(lines) == 1 and "rank 2 enters 0.3 s after the others" in lines[0]

    def test_early_rank_makes_no_other_rank_late(self, monkeypatch, context):
        late = {"seconds": 0.003, "launch": 0.3}
        assert self.of(monkeypatch, context, r0={"seconds": 0.003}, r1=late, r2=late, r3=late) == []

    def test_wrong_values_are_named(self, monkeypatch, context):
        seconds = {"seconds": 0.003}
        lines = self.of(monkeypatch, context, r0=seconds, r1=seconds, r2=seconds, r3=seconds | {"right": False})
        assert len(lines) == 1 and "wrong values on ranks [3]" in lines[0]

    def test_slow_group_names_its_limit(self, monkeypatch, context):
        (line,) = self.of(monkeypatch, context, r1={"seconds": 1.0})
        assert "rate: 1 GB/s (>= " in line and "60% of" in line and "(link of H100)" in line
        context.checks.clear()
        network = devices()["H100"].network
        (line,) = self.of(monkeypatch, context, hosts="aabb", r1={"seconds": 1.0})
        assert f"{network / 1e9:.3g} GB/s (network of H100)" in line

    @pytest.mark.parametrize(
        ("groups", "limit", "of"),
        [
            ([(0, 1), (2, 3)], 28, "28 GB/s (link of 910B between 2 devices of a full mesh of 8)"),
            ([(0, 2, 4, 6), (1, 3, 5, 7)], 84, "84 GB/s (link of 910B between 4 devices of a full mesh of 8)"),
            ([tuple(range(8))], 196, "196 GB/s (link of 910B between 8 devices of a full mesh of 8)"),
            (
                [tuple(range(16))],
                64,
                "64 GB/s (links and host_link of 910B for 16 devices in several full meshes of 8)",
            ),
        ],
    )
    def test_limit_of_a_group_counts_its_links_in_a_full_mesh(self, context, groups, limit, of):
        """Two devices of an Atlas A2 share one link of 28 GB/s."""
        context.settings = replace(context.settings, device="npu")
        timings = {
            rank: replace(timing(rank)[0], ranks=group, collective="all_reduce") for group in groups for rank in group
        }
        hosts = ["a"] * 16
        required, text = collectives.limit_of(context, timings, hosts, devices()["910B"])
        assert (required / 1e9, text) == (pytest.approx(0.6 * limit), of)
        for switched in ("910C", "H100"):
            assert collectives.limit_of(context, timings, hosts, devices()[switched])[0] == pytest.approx(
                0.6 * devices()[switched].link
            )

    def test_limit_of_sends_is_one_link_of_a_full_mesh(self, context):
        """p2p goes from each rank to the next. On the second host, ranks 8 to 15 have the devices 0 to 7."""
        context.settings = replace(context.settings, device="npu")
        hosts = ["a"] * 8 + ["b"] * 8
        for ranks in (tuple(range(8)), tuple(range(8, 16))):
            timings = {rank: replace(timing(rank)[0], ranks=ranks, collective="p2p") for rank in ranks}
            required, text = collectives.limit_of(context, timings, hosts, devices()["910B"])
            assert required == pytest.approx(0.6 * 28e9) and "28 GB/s (link of 910B between 2 devices" in text
        crossing = {rank: replace(timing(rank)[0], ranks=(7, 8)) for rank in (7, 8)}
        assert collectives.limit_of(context, crossing, hosts, devices()["910B"])[0] == pytest.approx(0.6 * 25e9)

    def test_memory_of_a_communicator_above_the_limit_fails(self, monkeypatch, context):
        seconds = {f"r{rank}": {"seconds": 0.003} for rank in range(4)}
        (line,) = self.of(monkeypatch, context, memory=(10.0, 8.0), **seconds)
        assert "memory of the communicator: 2 GiB (<= 1 GiB)" in line

    def test_memory_of_the_first_communicator_is_measured_before_the_first_transfer(self, monkeypatch, context):
        """Pairs of ranks and barriers already use the communicator of all ranks."""

        class Ranks(StubRanks):
            kept = 0.0

            def call(self, method: str, *args: Any) -> list[Any]:
                answers = {"describe": {"host": "a", "device": "NVIDIA H100"}, "memory": 10.0 - self.kept}
                if method == "lay_out":
                    return [{"all": (0, 1, 2, 3)}] * 4
                if method == "pair":
                    self.kept = 2.0
                return [answers[method]] * 4 if method in answers else super().call(method, *args)

        context.settings = replace(context.settings, device="cuda", devices=4)
        timings = [[replace(timing(rank)[0], group="all", seconds=0.003)] for rank in range(4)]
        monkeypatch.setattr(collectives, "all_ranks", lambda *_, **__: nullcontext(Ranks(timings)))
        monkeypatch.setattr(collectives, "_two_on_a_device", lambda _: None)
        collectives.run(context)
        assert next(line for line in failed(context) if "memory" in line).startswith(
            "all: memory of the communicator: 2"
        )

    def test_two_processes_on_a_device_need_two_devices_of_a_node(self, monkeypatch, context):
        """Two nodes of one device: a second rank of this node has no device."""
        monkeypatch.setattr("megarl.platform.kinds.kind_of", lambda _: SimpleNamespace(port_ranges=("X",)))
        monkeypatch.setattr(collectives, "local_ranks", lambda *_, **__: pytest.fail("ranks were started"))
        context.settings = replace(context.settings, device="cuda", devices=1, nodes=2)
        collectives._two_on_a_device(context)
        (check,) = context.checks
        assert check.verdict == "NOT RUN" and "one device" in check.cause

    def test_slow_pairs_are_named(self, context):
        context.settings = replace(context.settings, device="cuda")
        assert collectives.slow_pairs(context, StubRanks([], slow=2), 1000, "aaaa", None) == "2-3 (4e-07 GB/s)"
        assert "slow pairs: 2-3" in failed(context)[0]
        context.checks.clear()
        assert collectives.slow_pairs(context, StubRanks([]), 1000, "aaaa", None) == "" and not failed(context)

    def test_network_pairs_are_compared_with_other_network_pairs(self, context):
        """A network at a fifth of the links' rate passes if all pairs agree; a pair slower than the others fails."""
        context.settings = replace(context.settings, device="cuda")
        hosts = ["a"] * 8 + ["b"] * 8
        pairs = collectives.pairs_of(hosts)
        assert (0, 8) in pairs and (7, 15) in pairs and (0, 1) in pairs and len(pairs) == 14 + 8
        rates = {pair: 1.0 if hosts[pair[0]] == hosts[pair[1]] else 5.0 for pair in pairs}

        def call(_: str, first: int, second: int, __: int) -> list[float | None]:
            return [rates[first, second] if rank == second else None for rank in range(16)]

        ranks = SimpleNamespace(size=16, call=call)
        assert collectives.slow_pairs(context, ranks, 1000, hosts, devices()["H100"]) == "" and not failed(context)
        rates[3, 11] = 15.0
        assert collectives.slow_pairs(context, ranks, 1000, hosts, devices()["H100"]).startswith("3-11 ")
        assert "slowest pair of ranks between hosts, 3-11" in failed(context)[0]

    def test_pairs_between_meshes_are_compared_with_each_other(self, monkeypatch, context):
        """PCIe between the meshes of a machine may be slower than half a link of a mesh."""
        monkeypatch.setattr(collectives, "PAIRS", 120)
        context.settings = replace(context.settings, device="npu")
        slow = [(2, 3)]

        def call(_: str, first: int, second: int, __: int) -> list[float | None]:
            seconds = 9.0 if (first, second) in slow else 1.0 if first // 8 == second // 8 else 3.0
            return [seconds if rank == second else None for rank in range(16)]

        ranks = SimpleNamespace(size=16, call=call)
        assert collectives.slow_pairs(context, ranks, 1000, ["a"] * 16, devices()["910B"]).startswith("2-3 ")
        (line,) = failed(context)
        assert "slowest pair of ranks within a mesh, 2-3" in line
        assert any("between meshes of a host, median" in check.name for check in context.checks)

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_all_ranks_create_the_communicator_in_which_a_pair_sends(self, monkeypatch, rank):
        """The communicator of all ranks is created by its first message, and every rank takes part."""
        messages = []
        member = object.__new__(CollectiveRank)
        member.rank = rank
        # Tensors of the device are on "meta", so that messages of the host, such as a barrier's, do not count.
        member.platform = SimpleNamespace(device=lambda: torch.device("meta"), synchronize=lambda: None)

        def batch(operations: list[Any]) -> list[Any]:
            assert messages[:1] == [("all_reduce", "meta")], "a batch of two ranks waits for the others"
            messages.extend((operation[0], operation[1].device.type) for operation in operations)
            return []

        replaced = {
            "barrier": lambda: None, "P2POp": lambda kind, tensor, peer: (kind, tensor), "isend": "send", "irecv": "receive",
            "all_reduce": lambda tensor: messages.append(("all_reduce", tensor.device.type)), "batch_isend_irecv": batch,
        }  # fmt: skip
        for name, value in replaced.items():
            monkeypatch.setattr(dist, name, value)
        assert (member.pair(0, 1, 8) is None) == (rank != 1)
        assert messages == [("all_reduce", "meta")] + [({0: "send", 1: "receive"}.get(rank), "meta")] * (5 if rank < 2 else 0)  # fmt: skip

    def test_one_pair_gives_no_pass(self, context):
        context.settings = replace(context.settings, device="cuda")
        collectives.slow_pairs(context, StubRanks([]), 1000, "aa", None)
        assert not any(check.verdict == "PASS" for check in context.checks)

    def test_pairs_of_many_hosts_are_spread_over_all(self):
        hosts = [f"h{rank // 8}" for rank in range(256)]
        pairs = collectives.pairs_of(hosts)
        touched = {hosts[rank] for pair in pairs for rank in pair}
        assert len(pairs) <= 2 * collectives.PAIRS and len(touched) == 32

    def test_layout(self, context):
        assert collectives.layout(context)[0].tensor_parallel == 2
        recipe = Recipe()
        recipe.cluster.trainers, recipe.megatron.pipeline_parallel = 2, 2
        context.__dict__["recipe"] = recipe
        assert collectives.layout(context) == (recipe.megatron, "the recipe's")
