"""Features of responses by prefill: the target runs over prompt + response, nothing on disk.

A causal model gives every position the features it had when the response was generated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparksmith.distill.generation import Response, SampleFeatures
from sparksmith.distill.nucleus import nucleus
from sparksmith.distill.samples import TrainingSample
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.target import TransformersTarget


class OnlineFeatures:
    """Hands out training samples of responses, computing features where they are not yet known.

    Features are kept in memory while they fit into `cache_bytes` and computed again otherwise, so
    a later epoch costs no target pass when there is room. The target runs on one response at a
    time, since its rounding depends on what stands beside it, and a resumed run must see the bits
    that it saw before.
    """

    def __init__(
        self,
        target: TransformersTarget,
        responses: Sequence[Response],
        sampling: Sampling,
        *,
        cache_bytes: int = 4 << 30,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`dtype` is that of the features handed out, whatever the target runs in."""
        self.dtype = dtype
        self.target = target
        self.responses = list(responses)
        self.sampling = sampling
        self._cached: dict[int, TrainingSample] = {}
        self._room = cache_bytes
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
                sample = self.compute(self.responses[index])
                if sample.num_bytes <= self._room:
                    self._room -= sample.num_bytes
                    self._cached[index] = sample
            found[index] = sample
        return [found[index] for index in indices]

    def _known(self, index: int) -> TrainingSample | None:
        """The sample if its features are in memory, those captured in generation included."""
        if index in self._cached:
            return self._cached[index]
        captured = self.responses[index].features
        # Of another temperature or truncation they describe another distribution.
        if captured is None or captured.sampling not in (None, self.sampling):
            return None
        return TrainingSample.of(self.responses[index])

    @torch.inference_mode()
    def compute(self, response: Response) -> TrainingSample:
        """The sample of any response, by a pass of the target."""
        # The target never ran on the last token of a response.
        sequence = (response.prompt_ids + response.token_ids)[:-1]
        hidden = self._run(torch.tensor([sequence], device=self.target.device))
        taps = self.target.recorder.take()
        assert taps is not None, "the target has no taps"
        return self._sample(response, taps[0], hidden[0])

    def _run(self, tokens: Tensor) -> Tensor:
        """The head's input [1, S, H]; the head itself is applied later, where it is needed."""
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
                taps=taps[:end].to("cpu", self.dtype, copy=True),
                hidden=rows.to("cpu", self.dtype, copy=True),
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
