"""From responses to a feature store: what is missing is captured, in the responses' order."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from sparksmith.distill.feature_coding import Coding, StoreDtype
from sparksmith.distill.feature_store import FeatureWriter
from sparksmith.distill.features import OnlineFeatures
from sparksmith.distill.generation import Response
from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.server_features import CaptureError
from sparksmith.distill.validation import Expectation, expected_acceptance
from sparksmith.draft.errors import UserError

_MOST_FAILURES = 3
"""In a row: a server that fails them all will fail the next ones too."""


class FeatureSource(Protocol):
    """Where exact features come from: a target in this process, or servers."""

    def samples(
        self, responses: Sequence[Response]
    ) -> Generator[tuple[Response, TrainingSample | CaptureError], None, None]: ...


class PrefillFeatures:
    """Features of the target in this process, as training without a store computes them."""

    def __init__(self, online: OnlineFeatures) -> None:
        self._online = online

    def samples(
        self, responses: Sequence[Response]
    ) -> Generator[tuple[Response, TrainingSample | CaptureError], None, None]:
        """Every response with its sample, in the order given."""
        for response in responses:
            yield response, self._online.compute(response)


@dataclass
class Captured:
    """What a run of `capture` did; `failed` has the reason for each response set aside."""

    samples: int = 0
    tokens: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def missing(responses: Sequence[Response], writer: FeatureWriter) -> list[Response]:
    """The responses that the store lacks.

    Raises UserError where it has one of the same id and other lengths: other responses.
    """
    store, todo = writer.store, []
    for response in responses:
        if response.request_id not in store:
            todo.append(response)
            continue
        index = store.index_of(response.request_id)
        found = (store.prompt_length(index), store.length(index))
        length = len(response.prompt_ids) + len(response.token_ids)
        if found != (len(response.prompt_ids), length):
            raise UserError(
                "--responses",
                response.request_id,
                "is another response than the one whose features are there",
                "Give another --out.",
            )
    return todo


def capture(
    responses: Sequence[Response],
    source: FeatureSource,
    writer: FeatureWriter,
    on_sample: Callable[[int], None] = lambda tokens: None,
) -> Captured:
    """Append the samples of `responses`; `on_sample` hears of each one's tokens.

    A response that cannot be captured is set aside. Raises UserError when several in a row cannot;
    what was captured until then is kept, as it is when the consumer is interrupted.
    """
    made = Captured()
    in_a_row = 0
    try:
        with closing(source.samples(responses)) as samples:
            for response, sample in samples:
                if isinstance(sample, CaptureError):
                    in_a_row += 1
                    made.failed[response.request_id] = str(sample)
                    on_sample(0)
                    if in_a_row == _MOST_FAILURES:
                        raise _given_up(response, sample)
                    continue
                in_a_row = 0
                writer.append(response, sample)
                made.samples += 1
                made.tokens += len(sample.tokens)
                on_sample(len(sample.tokens))
    finally:
        writer.seal()
    return made


def _given_up(response: Response, error: CaptureError) -> UserError:
    return UserError(
        "capture",
        response.request_id,
        f"and those before it could not be captured ({error})",
        "Put that right and run the same command again; what was captured is kept.",
    )


def stored_bytes(responses: Sequence[Response], coding: Coding) -> int:
    """What the features of `responses` will take on the disk, the shards' headers aside."""
    positions = sum(len(r.prompt_ids) + len(r.token_ids) for r in responses)
    answers = sum(len(r.token_ids) for r in responses)
    return positions * coding.bytes_per_position + answers * coding.bytes_per_response_token


def rounding_effect(
    objective: Objective,
    samples: Sequence[TrainingSample],
    codings: Sequence[Coding],
    *,
    greedy: bool = False,
) -> tuple[Expectation, dict[StoreDtype, Expectation]]:
    """Expected acceptance of a draft on exact features, and on them stored and read again."""
    exact = expected_acceptance(objective, samples, greedy=greedy)
    stored: dict[StoreDtype, Expectation] = {}
    for coding in codings:
        rounded = [
            TrainingSample(
                tokens=sample.tokens,
                prompt_length=sample.prompt_length,
                features=coding.decode(coding.encode(sample.features), sample.features.sampling),
            )
            for sample in samples
        ]
        stored[coding.dtype] = expected_acceptance(objective, rounded, greedy=greedy)
    return exact, stored
