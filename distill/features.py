"""Features of responses by prefill: the target runs over prompt + response, nothing on disk.

Several responses stand side by side, padded on the right, where a causal model does not look; so
no mask is needed and every position has the features it had when the response was generated.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sparksmith.distill.generation import Response, SampleFeatures
from sparksmith.distill.nucleus import nucleus
from sparksmith.distill.samples import TrainingSample
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.target import TransformersTarget


def feature_bytes_per_token(target: TransformersTarget) -> int:
    """Memory of one cached position of a response: taps and final state in bfloat16, two float32
    scalars, the token. (A prompt's positions have no final state and no scalars.)"""
    return 2 * target.hidden_size * (len(target.recorder.taps) + 1) + 16


class OnlineFeatures:
    """Hands out training samples of responses, computing features where they are not yet known.

    Features are kept in memory while they fit into `cache_bytes` and computed again otherwise, so
    a later epoch costs no target pass when there is room. `take` runs the target on one response
    at a time, since its rounding depends on what stands beside it, and a resumed run must see the
    bits that it saw before; `fill`, called once at the start, packs passes of `tokens_per_pass`.
    """

    def __init__(
        self,
        target: TransformersTarget,
        responses: Sequence[Response],
        sampling: Sampling,
        *,
        cache_bytes: int = 4 << 30,
        tokens_per_pass: int = 4096,
    ) -> None:
        self.target = target
        self.responses = list(responses)
        self.sampling = sampling
        self._cached: dict[int, TrainingSample] = {}
        self._room = cache_bytes
        self._per_pass = tokens_per_pass
        require_plain_head(target)

    def __len__(self) -> int:
        return len(self.responses)

    def length(self, index: int) -> int:
        """Tokens of one sample, prompt included."""
        response = self.responses[index]
        return len(response.prompt_ids) + len(response.token_ids)

    def take(self, indices: Sequence[int]) -> list[TrainingSample]:
        """The samples of `indices`, in order."""
        found: dict[int, TrainingSample] = {}
        for index in dict.fromkeys(indices):
            sample = self._known(index)
            if sample is None:
                (sample,) = self._prefill([index])
                if self._fits(sample):
                    self._keep(index, sample)
            found[index] = sample
        return [found[index] for index in indices]

    def fill(self, on_samples: Callable[[int], None] = lambda count: None) -> None:
        """Compute the features that fit into memory now, shortest responses first; `on_samples`
        hears how many are done."""
        unknown = [index for index in range(len(self)) if self._known(index) is None]
        for group in self._passes(unknown):
            for index, sample in zip(group, self._prefill(group), strict=True):
                if not self._fits(sample):
                    return
                self._keep(index, sample)
            on_samples(len(group))

    def _known(self, index: int) -> TrainingSample | None:
        """The sample if its features are in memory, those captured in generation included."""
        if index in self._cached:
            return self._cached[index]
        captured = self.responses[index].features
        # Of another temperature or truncation they describe another distribution.
        if captured is None or captured.sampling not in (None, self.sampling):
            return None
        return TrainingSample.of(self.responses[index])

    def _fits(self, sample: TrainingSample) -> bool:
        return sample.num_bytes <= self._room

    def _keep(self, index: int, sample: TrainingSample) -> None:
        self._room -= sample.num_bytes
        self._cached[index] = sample

    def _passes(self, indices: list[int]) -> Iterator[list[int]]:
        """Groups of similar length, each of at most `tokens_per_pass` padded tokens."""
        group: list[int] = []
        for index in sorted(indices, key=self.length):
            if group and (len(group) + 1) * self.length(index) > self._per_pass:
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    @torch.inference_mode()
    def _prefill(self, group: list[int]) -> list[TrainingSample]:
        responses = [self.responses[index] for index in group]
        longest = max(self.length(index) for index in group) - 1
        tokens = torch.zeros(len(group), longest, dtype=torch.long, device=self.target.device)
        for row, response in enumerate(responses):
            # The target never ran on the last token of a response.
            sequence = torch.tensor((response.prompt_ids + response.token_ids)[:-1])
            tokens[row, : len(sequence)] = sequence
        hidden = self._run(tokens)
        taps = self.target.recorder.take()
        assert taps is not None, "the target has no taps"
        return [
            self._sample(response, taps[row], hidden[row]) for row, response in enumerate(responses)
        ]

    def _run(self, tokens: Tensor) -> Tensor:
        """The head's input [B, S, H]; the head itself is applied later, where it is needed."""
        inputs: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0])

        head = self.target.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(keep)
        try:
            every = torch.arange(tokens.shape[1], device=tokens.device)
            with _IdentityHead(head):
                self.target.model(input_ids=tokens, use_cache=False, logits_to_keep=every)
        finally:
            hook.remove()
        return inputs[0]

    def _sample(self, response: Response, taps: Tensor, hidden: Tensor) -> TrainingSample:
        start = len(response.prompt_ids) - 1
        end = start + len(response.token_ids)
        rows = hidden[start:end]
        log_norm, threshold = [], []
        for chunk in torch.split(rows, 512):
            logits = self.target.model.get_output_embeddings()(chunk)
            _, _, norm, edge = nucleus(logits, self.sampling)
            log_norm.append(norm.float())
            threshold.append(edge.float())
        return TrainingSample(
            tokens=torch.tensor(response.prompt_ids + response.token_ids),
            prompt_length=len(response.prompt_ids),
            features=SampleFeatures(
                taps=taps[:end].to("cpu", torch.bfloat16, copy=True),
                hidden=rows.to("cpu", torch.bfloat16, copy=True),
                log_norm=torch.cat(log_norm).cpu(),
                threshold=torch.cat(threshold).cpu(),
                sampling=self.sampling,
            ),
        )


class _IdentityHead:
    """Within it the head returns its input: a vocabulary-wide product of every position saved."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._forward = head.__dict__.get("forward")

    def __enter__(self) -> None:
        self._head.forward = lambda hidden: hidden

    def __exit__(self, *_error: object) -> None:
        if self._forward is None:
            del self._head.forward
        else:
            self._head.forward = self._forward


def require_plain_head(target: TransformersTarget) -> None:
    """Training recomputes logits from the head's input, so they must be just that product.

    Raises UserError for targets that cap or scale their logits afterwards.
    """
    if not target.head_is_plain():
        raise UserError(
            "target",
            type(target.model).__name__,
            "changes its logits after the head (a soft cap or a scale)",
            "Use a target whose logits are the head's product alone.",
        )
