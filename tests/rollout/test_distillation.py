"""Distillation: GKD's divergence by hand, against a slow reference and by properties; the advantage of sampled tokens; and
calls of the teacher."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import LossInputs, TokenOutcomes
from megarl.algorithms.losses.distillation_losses import divergence, gkd, with_rest
from megarl.algorithms.objective import needs_teacher, objective, runs_reference_pass, teacher_top_k
from megarl.engines.vllm.outputs import completions
from megarl.megatron.heads.output_heads import IMPOSSIBLE
from megarl.recipe.judge import TeacherConfig
from megarl.rollout.engine_handle import TeacherHandle
from megarl.rollout.fleet.fixed import FixedModelEngines
from megarl.rollout.teacher import server as teacher_server
from megarl.rollout.teacher.scoring import Teacher
from megarl.rollout.teacher.server import TeacherServer
from megarl.types import Completion, GenerationRequest, Group, InlineData, Sample, SampleTokens, TokenScores
from tests.support.fixed_engines import Fixed
from tests.support.loss_cases import assert_gradient, part_of, random_inputs, settings


def logs(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def distilling(seed: int, lengths: list[int], top_k: int = 3) -> LossInputs:
    """A batch with the log-probs of `top_k` of seven tokens a place, of a teacher and of the policy."""
    batch, random = random_inputs(seed, lengths), np.random.default_rng(seed + 100)
    for name in ("reference_top_log_probs", "top_log_probs"):
        whole = random.dirichlet(np.ones(7), size=sum(lengths))
        setattr(batch, name, torch.tensor(np.log(whole[:, :top_k])))
    batch.top_log_probs.requires_grad_()
    return batch


class TestDivergence:
    def test_by_hand(self) -> None:
        # Of "a", "b" and the rest: the teacher's 1/2, 1/4, 1/4; the policy's 1/4, 1/4, 1/2.
        teacher, policy = with_rest(logs([[0.5, 0.25]])), with_rest(logs([[0.25, 0.25]]))
        assert policy.exp()[0].tolist() == pytest.approx([0.25, 0.25, 0.5])
        # KL(teacher || policy) = 1/2 log 2 + 0 + 1/4 log 1/2; the other way round 1/4 log 1/2 + 0 + 1/2 log 2.
        assert divergence(teacher, policy, 0.0).item() == pytest.approx(0.25 * math.log(2))
        assert divergence(teacher, policy, 1.0).item() == pytest.approx(0.25 * math.log(2))
        # b = 1/4: m = 1/4 teacher + 3/4 policy = 5/16, 4/16, 7/16.
        expected = 0.25 * (0.5 * math.log(8 / 5) + 0.25 * math.log(4 / 7)) + 0.75 * (
            0.25 * math.log(4 / 5) + 0.5 * math.log(8 / 7)
        )
        assert divergence(teacher, policy, 0.25).item() == pytest.approx(expected)

    def test_the_two_directions_are_not_swapped(self) -> None:
        # The teacher is certain: KL(teacher || policy) = -log 1/8. The other way it is near 7/8 log(7/8 / 1e-6).
        teacher, policy = with_rest(logs([[1.0]])), with_rest(logs([[0.125]]))
        assert divergence(teacher, policy, 0.0).item() == pytest.approx(math.log(8), rel=1e-4)
        assert divergence(teacher, policy, 1.0).item() > 10

    def test_beta_0_and_1_are_limits_of_the_divergence(self) -> None:
        teacher, policy = with_rest(logs([[0.6, 0.1]])), with_rest(logs([[0.2, 0.3]]))
        small = 1e-6
        assert divergence(teacher, policy, small).item() / small == pytest.approx(
            divergence(teacher, policy, 0.0).item(), rel=1e-4
        )
        assert divergence(teacher, policy, 1 - small).item() / small == pytest.approx(
            divergence(teacher, policy, 1.0).item(), rel=1e-4
        )

    def test_top_tokens_alone_by_hand(self) -> None:
        """Without the rest: 1/2 log 2 + 1/4 log(1/2) for the first token; the second would be below 0."""
        batch = distilling(0, [2], top_k=2)
        batch.reference_top_log_probs = logs([[0.5, 0.125], [0.25, 0.25]])
        batch.top_log_probs = logs([[0.25, 0.25], [0.5, 0.25]]).requires_grad_()
        loss, _ = gkd(batch, settings(loss="gkd", distill_rest=False))
        assert loss.tolist() == pytest.approx([0.5 * math.log(2) - 0.125 * math.log(2), 0.0])
        (gradient,) = torch.autograd.grad(loss.sum(), batch.top_log_probs)
        np.testing.assert_allclose(gradient, [[-0.5, -0.125], [0.0, 0.0]])

    def test_low_log_probs_count_as_the_limit(self) -> None:
        batch = distilling(0, [1], top_k=2)
        batch.reference_top_log_probs = torch.tensor([[-1.0, -9.0]], dtype=torch.float64)
        batch.top_log_probs = torch.tensor([[-2.0, -7.0]], dtype=torch.float64, requires_grad=True)
        loss, _ = gkd(batch, settings(loss="gkd", distill_rest=False, distill_min_log_prob=-5.0))
        assert loss.item() == pytest.approx(math.exp(-1) * (-1 + 2) + math.exp(-5) * (-5 + 5))
        (gradient,) = torch.autograd.grad(loss.sum(), batch.top_log_probs)
        np.testing.assert_allclose(gradient, [[-math.exp(-1), 0.0]])

    @pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
    def test_divergence_is_zero_only_for_equal_distributions(self, beta: float) -> None:
        batch = distilling(0, [40])
        assert batch.reference_top_log_probs is not None and batch.top_log_probs is not None
        apart, _ = gkd(batch, settings(loss="gkd", distill_beta=beta))
        assert (apart > 0).all()
        batch.top_log_probs = batch.reference_top_log_probs.clone().requires_grad_()
        together, _ = gkd(batch, settings(loss="gkd", distill_beta=beta))
        (slope,) = torch.autograd.grad(together.sum(), batch.top_log_probs)
        assert together.abs().max() < 1e-12
        # The divergence has its minimum here, so its gradient is zero.
        assert slope.abs().max() < 1e-12

    def test_a_loss_above_the_limit_has_no_gradient(self) -> None:
        batch = distilling(0, [40])
        assert batch.top_log_probs is not None
        free, _ = gkd(batch, settings(loss="gkd"))
        limit = float(free.detach().median())
        limited, _ = gkd(batch, settings(loss="gkd", distill_max=limit))
        above = free.detach() > limit
        assert 0 < above.sum() < len(above)
        torch.testing.assert_close(limited, free.clamp(max=limit))
        (slope,) = torch.autograd.grad(limited.sum(), batch.top_log_probs, retain_graph=True)
        (expected,) = torch.autograd.grad(free.sum(), batch.top_log_probs)
        assert (slope[above] == 0).all()
        torch.testing.assert_close(slope[~above], expected[~above])

    def test_impossible_tokens_do_not_change_the_divergence(self) -> None:
        teacher, policy = logs([[0.5, 0.25]]), logs([[0.25, 0.25]])
        none = torch.full((1, 1), IMPOSSIBLE, dtype=torch.float64)
        for beta in (0.0, 0.3, 1.0):
            with_none = divergence(
                with_rest(torch.cat([teacher, none], 1)), with_rest(torch.cat([policy, none], 1)), beta
            )
            torch.testing.assert_close(with_none, divergence(with_rest(teacher), with_rest(policy), beta))

    def test_the_rest_of_a_whole_vocabulary_is_finite_in_float32(self) -> None:
        policy = torch.randn(50, 8).log_softmax(1).requires_grad_()
        teacher = torch.randn(50, 8).log_softmax(1)
        for beta in (0.0, 0.3, 1.0):
            loss = divergence(with_rest(teacher), with_rest(policy), beta)
            (slope,) = torch.autograd.grad(loss.sum(), policy)
            assert torch.isfinite(loss).all() and torch.isfinite(slope).all()
        exact = (teacher.exp() * (teacher - policy)).sum(1)
        torch.testing.assert_close(divergence(with_rest(teacher), with_rest(policy), 0.0), exact, rtol=1e-4, atol=1e-5)


def slow_gkd(teacher: np.ndarray, policy: np.ndarray, beta: float) -> float:
    """Loss of one position over the top-k tokens and the remaining mass, by the paper's formula."""
    p = [*np.exp(teacher), 1 - np.exp(teacher).sum()]
    q = [*np.exp(policy), 1 - np.exp(policy).sum()]
    if beta in (0.0, 1.0):
        a, b = (p, q) if beta == 0.0 else (q, p)
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return sum(beta * x * math.log(x / z) + (1 - beta) * y * math.log(y / z) for x, y, z in zip(p, q, m, strict=True))


class TestGKD:
    @pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
    def test_value_and_gradient_equal_the_slow_reference(self, beta: float) -> None:
        batch = distilling(1, [7, 5])
        config = settings(loss="gkd", reference="teacher", advantage="none", distill_beta=beta)
        loss, metrics = objective(batch, config)
        assert batch.top_log_probs is not None and batch.reference_top_log_probs is not None
        teacher, at = batch.reference_top_log_probs.numpy(), batch.top_log_probs.detach().numpy()
        weights, share = batch.loss_weights.numpy(), batch.token_share.numpy()

        def slow(flat: np.ndarray) -> float:
            rows = flat.reshape(at.shape)
            return sum(w * slow_gkd(t, p, beta) for w, t, p in zip(weights, teacher, rows, strict=True))

        assert loss.item() == pytest.approx(slow(at.ravel()), rel=1e-10)
        (gradient,) = torch.autograd.grad(loss, batch.top_log_probs)
        assert_gradient(gradient.flatten(), slow, at.ravel())
        assert metrics["actor/distill_mass"].item() == pytest.approx((share * np.exp(at).sum(1)).sum())
        assert metrics["actor/distill_teacher_mass"].item() == pytest.approx((share * np.exp(teacher).sum(1)).sum())

    def test_splits_add_up(self) -> None:
        batch = distilling(2, [5, 9, 1, 7])
        config = settings(loss="gkd", reference="teacher", advantage="none")
        whole, _ = objective(batch, config)
        parts = [objective(part_of(batch, part), config)[0] for part in ([3], [1, 0], [2])]
        torch.testing.assert_close(sum(parts), whole)

    def test_excluded_tokens_have_no_effect(self) -> None:
        batch = distilling(3, [6, 8])
        config = settings(loss="gkd", reference="teacher", advantage="none")
        expected, metrics = objective(batch, config)
        assert batch.reference_top_log_probs is not None
        (slope,) = torch.autograd.grad(expected, batch.top_log_probs)
        masked = batch.loss_mask == 0
        for nonsense in (-50.0, math.nan):
            with torch.no_grad():
                batch.reference_top_log_probs[masked] = nonsense
                batch.top_log_probs[masked] = nonsense
            other, other_metrics = objective(batch, config)
            torch.testing.assert_close((other, other_metrics), (expected, metrics))
            torch.testing.assert_close(torch.autograd.grad(other, batch.top_log_probs)[0], slope)
        assert not slope[masked].any()

    def test_descent_ends_at_the_teacher(self) -> None:
        """Descent reaches the teacher for all tokens: those outside the top k share the remaining mass."""
        teacher = logs([[0.6, 0.2, 0.15, 0.05]])
        logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(3000):
            policy = logits.log_softmax(1)
            loss = divergence(with_rest(teacher[:, :2]), with_rest(policy[:, :2]), 0.0)
            (slope,) = torch.autograd.grad(loss.sum(), logits)
            with torch.no_grad():
                logits -= slope
        assert policy.exp()[0].tolist() == pytest.approx([0.6, 0.2, 0.1, 0.1], abs=1e-6)


def test_on_policy_distillation_uses_the_kl_penalties_as_advantages() -> None:
    # Two samples; the second's first token is a prompt's. Outcomes of 5 and 7, and steps' rewards of 9, are not looked at.
    outcomes = TokenOutcomes(
        np.array([5.0, 7.0]),
        np.array([True, True, False, True]),
        [2, 2],
        step_rewards=np.array([0.0, 9.0, 0.0, 9.0]),
        penalties=np.array([-0.5, 0.25, 3.0, -1.0]),
    )
    estimate = ADVANTAGES["on_policy_distillation"].of_tokens
    assert estimate(outcomes, settings()).tolist() == [-0.5, 0.25, 0.0, -1.0]
    assert estimate(outcomes, settings(distill_max=0.4)).tolist() == [-0.4, 0.25, 0.0, -0.4]


def test_reference_pass_and_teacher_follow_the_settings() -> None:
    start, teacher = settings(kl_coef=0.1), settings(kl_coef=0.1, reference="teacher")
    assert runs_reference_pass(start) and not needs_teacher(start)
    assert needs_teacher(teacher) and not runs_reference_pass(teacher)
    assert teacher_top_k(teacher) == 0
    top = settings(loss="gkd", reference="teacher", distill_top_k=9)
    assert needs_teacher(top) and teacher_top_k(top) == 9
    assert not needs_teacher(settings()) and not runs_reference_pass(settings())


class Entry(SimpleNamespace):
    """vLLM's Logprob."""

    logprob: float
    rank: int


class Flat(SimpleNamespace):
    """vLLM's FlatLogprobs."""

    start_indices: list[int]

    def __len__(self) -> int:
        return len(self.start_indices)


def output(prompt_logprobs: Any) -> Any:
    sample = SimpleNamespace(index=0, token_ids=[3], logprobs=None, finish_reason="length")
    return SimpleNamespace(prompt_token_ids=[4, 9, 2], prompt_logprobs=prompt_logprobs, outputs=[sample])


def test_both_forms_of_vllms_prompt_log_probs_are_read() -> None:
    """Token 9 is the second most likely at its position; token 2 is not among the two most likely."""
    flat = Flat(start_indices=[0, 0, 3], token_ids=[9, 7, 9, 2, 1, 5], logprobs=[-0.9, -0.4, -0.9, -3.0, -0.2, -1.5])
    dicts = [
        None,
        {9: Entry(logprob=-0.9, rank=2), 7: Entry(logprob=-0.4, rank=1)},
        {2: Entry(logprob=-3.0, rank=6), 1: Entry(logprob=-0.2, rank=1), 5: Entry(logprob=-1.5, rank=2)},
    ]
    for form in (flat, dicts):
        (completion,) = completions(output(form), 2)
        scores = completion.prompt
        assert scores is not None
        np.testing.assert_allclose(scores.log_probs, [0, -0.9, -3.0], rtol=1e-6)
        assert scores.top_tokens.tolist() == [[0, 0], [7, 9], [1, 5]]
        np.testing.assert_allclose(scores.top_log_probs, [[0, 0], [-0.4, -0.9], [-0.2, -1.5]], rtol=1e-6)
    assert completions(output(None), None)[0].prompt is None
    with pytest.raises(RuntimeError, match="of 2 of a prompt's 3 tokens"):
        completions(output(dicts[:2]), 2)


class Engine:
    """Return each token's number as its log-prob, finishing the last request first."""

    def __init__(self) -> None:
        self.calls: list[list[GenerationRequest]] = []

    def generate(self, requests: list[GenerationRequest], finished: Callable[[int, list[Completion]], None]) -> None:
        self.calls.append(requests)
        for request in requests[::-1]:
            tokens = np.array(request.prompt.tokens, dtype=np.float32)
            scores = TokenScores(tokens, np.zeros((len(tokens), 2), np.int32), np.zeros((len(tokens), 2), np.float32))
            finished(request.group, [Completion(np.array([1]), np.array([0.0]), "length", None, scores)])


class Service:
    """A TeacherServer in this process."""

    def __init__(self, name: str, server: TeacherServer):
        self.name, self.server, self.calls = name, server, list[str]()

    def call(self, method: str, *args: Any) -> Future[Any]:
        self.calls.append(method)
        answer: Future[Any] = Future()
        answer.set_result(asyncio.run(getattr(self.server, method)(*args)))
        return answer

    def call_with_data(self, method: str, *args: Any) -> Future[Any]:
        control, vectors = self.call(method, *args).result()
        answer: Future[Any] = Future()
        answer.set_result((control, InlineData(vectors)))
        return answer


def group(number: int, samples: int) -> Group:
    vectors = [
        SampleTokens(np.array([number, index, 5]), np.array([False, True, True]), np.zeros(3))
        for index in range(samples)
    ]
    data = InlineData(vectors)
    return Group(number, "p", "s", [Sample(number, index, data, 1, 2, 2) for index in range(samples)])


def around(services: list[Service]) -> FixedModelEngines[TeacherHandle]:
    """Return the engines of one teacher."""
    handles: Any = [TeacherHandle(service) for service in services]  # type: ignore[arg-type]
    return FixedModelEngines("teacher", handles, TeacherConfig(), lambda handle: None, lambda text, event: None, 5.0)


@pytest.mark.parametrize("engines", [1, 2, 5])
def test_every_sample_has_its_teachers_scores(engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Engine] = []
    monkeypatch.setattr(teacher_server.engines, "create", lambda name, spec: created.append(Engine()) or created[-1])
    spec: Any = SimpleNamespace(prompt_top_k=2)
    services = [Service(f"teacher{number}", TeacherServer("fake", spec)) for number in range(engines)]
    groups = [group(10, 2), group(11, 3), group(14, 1)]
    Teacher({"": around(services)}, lambda: None).score(groups)
    for scored in groups:
        for sample in scored.samples:
            vectors = sample.data.get()[sample.index]
            assert vectors.teacher.log_probs.tolist() == vectors.tokens.tolist() == [scored.number, sample.index, 5]
    calls = [call for engine in created for call in engine.calls]
    assert len(calls) == min(engines, 3), "each engine receives one call for all its groups"
    (request, *_) = calls[0]
    assert request.prompt_top_k == 2 and request.sampling.max_tokens == 1
    assert not any(service.server._scored for service in services), "nothing is kept once it was collected"


def test_the_teacher_of_a_data_source_scores_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """`code` has two engines, `math` one, and `idle` has no rows in this batch."""
    created: list[Engine] = []
    monkeypatch.setattr(teacher_server.engines, "create", lambda name, spec: created.append(Engine()) or created[-1])
    spec: Any = SimpleNamespace(prompt_top_k=2)
    services = [Service(f"teacher{number}", TeacherServer("fake", spec)) for number in range(4)]
    groups = [group(10, 1), group(11, 2), group(12, 1), group(13, 1)]
    for each, source in zip(groups, ("math", "code", "math", "code"), strict=True):
        each.data_source = source
    teachers = {"code": around(services[:2]), "math": around(services[2:3]), "idle": around(services[3:])}
    Teacher(teachers, lambda: None).score(groups)
    read = [[request.prompt.tokens[0] for request in engine.calls[0]] if engine.calls else [] for engine in created]
    assert read == [[11, 11], [13], [10, 12], []]
    for scored in groups:
        for sample in scored.samples:
            vectors = sample.data.get()[sample.index]
            assert vectors.teacher.log_probs.tolist() == [scored.number, sample.index, 5]


@pytest.mark.parametrize("dies", ["while it scores", "before it has located its vectors"])
def test_the_part_of_a_teacher_that_dies_is_scored_again(dies: str) -> None:
    """As a whole and in one call, so that it forms the same engine batch; the parts of others are scored once."""
    teachers, groups = Fixed(2, "teacher"), [group(number, 1) for number in range(10, 14)]
    first, second = teachers.processes
    vectors = {number: InlineData([]) for number in range(10, 14)}

    def check() -> None:
        """Answer the oldest call of an engine; the first one dies."""
        if first.dead is None:
            if dies != "while it scores":
                first.answer(None)
            first.die()
            return
        method, args, _ = next(call for call in second.calls if not call[2].done())
        second.answer(None if method == "score" else (None, vectors[args[0]]))

    Teacher({"": teachers.engines}, check).score(groups)
    assert [scored.samples[0].data for scored in groups] == [*vectors.values()]
    parts = [[part.number for part in args[0]] for method, args, _ in second.calls if method == "score"]
    assert parts == [[12, 13], [10, 11]]
