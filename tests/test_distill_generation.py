"""Batched generation against transformers' own generate, and the features it captures."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from distill_samples import SAMPLING, TAPS, rollouts, tiny_target
from tiny_models import full_pass, words
from torch import Tensor

from sparksmith.distill.features import OnlineFeatures
from sparksmith.distill.generation import (
    BatchGenerator,
    GenerationSettings,
    Request,
    Response,
    uniforms_for,
)
from sparksmith.distill.nucleus import nucleus
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling, probabilities
from sparksmith.verify.rows import TargetRows
from sparksmith.verify.target import TransformersTarget

GREEDY = Sampling(temperature=0.0)
LENGTHS = [1, 9, 2, 7, 3, 3, 8, 1, 5, 4, 6, 2, 9]


def requests(count: int = len(LENGTHS)) -> list[Request]:
    return [
        Request(request_id=f"r{i}", prompt_ids=words(LENGTHS[i % len(LENGTHS)], seed=i))
        for i in range(count)
    ]


def responses(
    target: TransformersTarget, wanted: list[Request], settings: GenerationSettings, **run: object
) -> dict[str, Response]:
    generator = BatchGenerator(target, settings, max_prompt_tokens=9)
    found = {response.request_id: response for response in generator.run(wanted, **run)}
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_greedy_is_transformers_generate(kind: str) -> None:
    target = tiny_target(kind)
    stop = words(1, seed=99)[0]
    target.eos_token_ids = frozenset([stop])
    settings = GenerationSettings(sampling=GREEDY, max_new_tokens=24, batch_size=3)
    found = responses(target, requests(), settings)
    reasons = Counter(response.finish_reason for response in found.values())
    for request in requests():
        with torch.inference_mode():
            expected = target.model.generate(
                torch.tensor([request.prompt_ids]),
                attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=0,
            )[0, len(request.prompt_ids) :].tolist()
        response = found[request.request_id]
        assert response.token_ids == expected
        assert response.prompt_ids == request.prompt_ids
        assert response.finish_reason == ("stop" if expected[-1] == stop else "length")
    assert set(reasons) == {"stop", "length"}  # both ends occur


def test_samples_do_not_depend_on_companions() -> None:
    target = tiny_target()
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=16, batch_size=13, seed=5)
    together = responses(target, requests(), settings)
    few = responses(target, requests()[::-1], replace(settings, batch_size=3))
    alone = {}
    for request in requests():
        alone |= responses(target, [request], replace(settings, batch_size=1))
    # Rounding may push a uniform over an edge; one in a million draws here.
    assert together == few == alone
    other = responses(target, requests(), replace(settings, seed=6))
    assert sum(other[name].token_ids != together[name].token_ids for name in other) >= 12


def test_uniforms_are_those_of_request_and_seed() -> None:
    first = uniforms_for("a", 0, 5)
    assert np.array_equal(first, uniforms_for("a", 0, 9)[:5])
    assert not np.array_equal(first, uniforms_for("a", 1, 5))
    assert not np.array_equal(first, uniforms_for("b", 0, 5))


def test_samples_follow_the_distribution() -> None:
    """The first token of 2,000 requests with one prompt: a chi-square test against the target."""
    target = tiny_target()
    sampling = Sampling(temperature=6.0, top_p=0.9)
    prompt = words(5)
    same = [Request(request_id=f"{i}", prompt_ids=prompt) for i in range(2000)]
    settings = GenerationSettings(sampling=sampling, max_new_tokens=1, batch_size=500)
    counts = Counter(r.token_ids[0] for r in responses(target, same, settings).values())
    logits, _ = full_pass(target.model, prompt)
    probs = probabilities(logits[-1].double(), sampling)
    assert all(probs[word] > 0 for word in counts)
    expected = {word: 2000 * float(p) for word, p in enumerate(probs) if p > 0}
    assert len(expected) >= 3
    statistic = sum((counts[word] - e) ** 2 / e for word, e in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_prompts_that_start_together_are_of_about_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that little is spent on padding; and the long ones are not left to the end of the run."""
    started: list[list[int]] = []
    prefill = TargetRows.prefill

    def watched(self: TargetRows, rows: Tensor, prompts: list[list[int]]) -> Tensor:
        started.append([len(prompt) for prompt in prompts])
        return prefill(self, rows, prompts)

    monkeypatch.setattr(TargetRows, "prefill", watched)
    lengths = torch.randint(2, 40, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [Request(request_id=str(i), prompt_ids=words(n)) for i, n in enumerate(lengths)]
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=4, batch_size=32)
    list(BatchGenerator(tiny_target(), settings, max_prompt_tokens=40).run(asked))
    padded = sum(max(group) * len(group) for group in started)
    assert padded < 1.15 * sum(lengths)
    assert max(max(group) for group in started[: len(started) // 3]) > 35


def test_stop_finishes_the_rows_under_way_and_starts_no_other() -> None:
    target = tiny_target()
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=10, batch_size=3)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > 4

    found = responses(target, requests(), settings, stop=stop)
    assert set(found) == {"r0", "r1", "r2"}
    assert all(len(response.token_ids) == 10 for response in found.values())


def test_every_token_is_reported_and_a_generator_serves_twice() -> None:
    target = tiny_target()
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=6, batch_size=4)
    generator = BatchGenerator(target, settings, max_prompt_tokens=9)
    heard: list[int] = []
    first = {r.request_id: r.token_ids for r in generator.run(requests(), heard.append)}
    assert sum(heard) == sum(len(tokens) for tokens in first.values()) == 6 * len(LENGTHS)
    assert {r.request_id: r.token_ids for r in generator.run(requests())} == first


def test_nothing_stays_hooked_to_the_head() -> None:
    target = tiny_target()
    head = target.model.get_output_embeddings()
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=6, batch_size=4)
    generator = BatchGenerator(target, settings, max_prompt_tokens=9, capture=True)
    assert not head._forward_pre_hooks
    list(generator.run(requests()))
    assert not head._forward_pre_hooks
    run = generator.run(requests())
    next(run)
    assert head._forward_pre_hooks
    run.close()
    assert not head._forward_pre_hooks


def test_unfit_prompts_are_refused_before_any_work() -> None:
    target = tiny_target()
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=6, batch_size=4)
    generator = BatchGenerator(target, settings, max_prompt_tokens=4)
    for prompt in ([], words(5)):
        wrong = Request(request_id="odd", prompt_ids=prompt)
        with pytest.raises(UserError, match="prompt odd"):
            next(generator.run([requests()[0], wrong]))
    for name in ("batch_size", "max_new_tokens"):
        with pytest.raises(UserError, match=name):
            replace(settings, **{name: 0})
    with pytest.raises(UserError, match="512 positions"):
        BatchGenerator(target, settings, max_prompt_tokens=508)


@pytest.mark.parametrize(
    "sampling", [SAMPLING, Sampling(temperature=1.0, top_p=1.0), Sampling(top_k=5, top_p=1.0)]
)
def test_captured_features_are_those_of_an_ordinary_pass(sampling: Sampling) -> None:
    target = tiny_target()
    for response in rollouts(target, 20, length=7, sampling=sampling, capture=True):
        assert response.features is not None
        tokens = response.prompt_ids + response.token_ids
        logits, taps = full_pass(target.model, tokens[:-1], TAPS)
        features = response.features
        assert features.sampling == sampling
        assert features.taps.shape == (len(tokens) - 1, 2 * target.hidden_size)
        assert torch.allclose(features.taps.float(), taps, rtol=1e-2, atol=1e-2)
        start = len(response.prompt_ids) - 1
        plain = features.hidden.float() @ target.head_weight.T
        assert torch.allclose(plain, logits[start:], atol=0.02 * float(logits.abs().max()))
        # The row that chose a token gives it its probability, and the rest theirs.
        scaled = logits[start:] / sampling.temperature
        kept = scaled >= features.threshold[:, None]
        found = (scaled - features.log_norm[:, None]).exp() * kept
        expected = probabilities(logits[start:], sampling)
        assert torch.allclose(found, expected, atol=1e-5)
        chosen = expected.gather(1, torch.tensor(response.token_ids)[:, None])
        assert bool((chosen > 0).all())


def test_captured_features_are_the_prefills() -> None:
    target = tiny_target()
    captured = rollouts(target, 6, capture=True)
    bare = [replace(response, features=None) for response in captured]
    recomputed = OnlineFeatures(target, bare, SAMPLING).take(range(6))
    for response, sample in zip(captured, recomputed, strict=True):
        features = response.features
        assert features is not None
        for name in ("taps", "hidden", "log_norm", "threshold"):
            ours, theirs = getattr(features, name), getattr(sample.features, name)
            assert ours.dtype == theirs.dtype
            assert torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-3)


def dense(words_: Tensor, probs: Tensor, vocab: int) -> Tensor:
    return torch.zeros(len(probs), vocab, dtype=probs.dtype).scatter_(1, words_, probs)


SAMPLINGS = [
    Sampling(temperature=0.7, top_p=0.95),
    Sampling(temperature=1.0, top_p=1.0),
    Sampling(temperature=1.0, top_p=1.0, top_k=7),
    Sampling(temperature=1.5, top_p=0.9, top_k=100),
    Sampling(temperature=3.0, top_p=0.999),
    Sampling(temperature=0.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_nucleus_is_the_distribution_of_serving(sampling: Sampling, spread: float) -> None:
    vocab = 1500  # wide nuclei of flat rows need more than one round
    logits = spread * torch.randn(12, vocab, generator=torch.Generator().manual_seed(0))
    words_, probs, log_norm, threshold = nucleus(logits, sampling)
    expected = probabilities(logits, sampling)
    assert torch.allclose(dense(words_, probs, vocab), expected, rtol=1e-4, atol=1e-7)
    if not sampling.greedy:
        scaled = logits / sampling.temperature
        found = (scaled - log_norm[:, None]).exp() * (scaled >= threshold[:, None])
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_nucleus_of_narrow_and_wide_rows_together() -> None:
    """Rows that fit into the words first looked at stay right when others need more."""
    vocab = 1500
    spread = torch.tensor([40.0, 0.1, 3.0, 0.1])[:, None]
    logits = spread * torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.7, top_p=0.95)
    words_, probs, log_norm, threshold = nucleus(logits, sampling)
    expected = probabilities(logits, sampling)
    assert sorted({int((row > 0).sum()) < 64 for row in expected}) == [False, True]
    assert torch.allclose(dense(words_, probs, vocab), expected, rtol=1e-4, atol=1e-7)
    scaled = logits / sampling.temperature
    found = (scaled - log_norm[:, None]).exp() * (scaled >= threshold[:, None])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_p=0.8), Sampling(top_k=4)])
def test_nucleus_with_ties(sampling: Sampling) -> None:
    # Half-precision logits: most words share their level with others.
    logits = (4 * torch.randn(40, 200, generator=torch.Generator().manual_seed(0))).round() / 2
    words_, probs, log_norm, threshold = nucleus(logits, sampling)
    found, expected = dense(words_, probs, 200), probabilities(logits, sampling)
    # Which of the tied words at the edge are kept is the sort's choice; how many is not.
    assert torch.allclose(found.sort(-1).values, expected.sort(-1).values, atol=1e-6)
    scaled = logits / sampling.temperature
    kept = scaled >= threshold[:, None]
    described = (scaled - log_norm[:, None]).exp() * kept
    assert torch.allclose(described.sum(-1), torch.ones(40), atol=1e-5)
    for row in range(40):
        sampled = found[row] > 0
        assert bool((kept[row] | ~sampled).all())
        edge = scaled[row][sampled].min()
        assert bool((scaled[row][kept[row]] >= edge).all())


def test_words_of_probability_zero_are_passed_over() -> None:
    """Untruncated, the words stand in their plain order with zeros among them."""
    target = tiny_target(sharpness=40.0)
    sampling = Sampling(temperature=40.0, top_p=1.0)
    with torch.no_grad():
        target.head_weight[::2] = 0.0  # far below the best of the others: probability 0
        target.head_weight[1::2] *= 3.0
    settings = GenerationSettings(sampling=sampling, max_new_tokens=1, batch_size=4)
    zeros = 0
    for name, response in responses(target, requests(), settings).items():
        logits, _ = full_pass(target.model, response.prompt_ids)
        probs = probabilities(logits[-1].double(), sampling)
        point = uniforms_for(name, 0, 1)[0]
        expected = int((probs.cumsum(0) > point).nonzero()[0])
        zeros += int((probabilities(logits[-1], sampling)[:expected] < 1e-30).sum())
        assert response.token_ids == [expected]
    assert zeros > 0
