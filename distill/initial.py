"""Start a draft by regression: weights in closed form, where training would search for them.

What the draft has to say at slot k is close to linear in what it is given: a ridge regression from
the features before the anchor and the anchor's embedding to the target's last hidden state already
beats a draft that has trained for minutes. So each part is fitted in turn, to what the parts
before it left over:

- the context projection, by reduced-rank regression on the hidden states of all slots;
- attention heads that look at fixed distances (the position before the anchor, the anchor itself,
  ...), made of fast rotary pairs and of directions in which every input is alike;
- attention heads that find the anchor's word earlier in the text, and so what followed it there,
  made of slow rotary pairs and of a part of the context that is regressed on the word itself;
- each layer's two output projections, by ridge regression on the heads' and on random gated units'
  outputs.

Shapes: F = taps * target width, H the draft's width, K slots of a block, D a head's size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparksmith.distill.samples import Batch, TrainingSample, make_batch
from sparksmith.draft.backbone import Attention, DraftLayer
from sparksmith.draft.model import DSparkDraft

LARGEST_WIDTH = 8192
"""Of the concatenated features: beyond it the normal equations do not pay."""

_BLOCKS = 48  # of each response
_BATCH = 8
_FEW = 6  # batches: a mean direction needs few positions
_SLOT_DECAY = 4.0
_FEATURE_RIDGE = 0.02
_OUTPUT_RIDGE = 0.01
_COPY = -1  # in place of an offset: a head that finds the anchor's word earlier in the text
_FIRST_OFFSETS = (1, 0, 2, 1, _COPY, 2, 1, 3, _COPY)
_LATER_OFFSETS = (1, None, 0, None, 2, None, 1, None, 3)
# The head is often tied to the embedding, and then the anchor's own embedding in the residual
# stream is a vote for the anchor's word: all that is added to the stream is made this much larger.
_OVER_EMBEDDING = 60.0
_FASTEST = 0.4  # radians a position; slower rotary pairs hardly tell neighbours apart
_SLOWEST = 0.005  # radians a position; pairs below it compare words over hundreds of positions
_CONTRAST = 5.0  # nats by which a head prefers its position to the one beside it
_POSITIONAL = 8.0  # the size of a positional pattern beside the random weights it stands on

Tick = Callable[[int, int], None]


@torch.no_grad()
def start_by_regression(
    draft: DSparkDraft, samples: Sequence[TrainingSample], tick: Tick = lambda done, total: None
) -> bool:
    """Fit the bound draft's backbone to the samples; its Markov and confidence heads stay as made.

    `tick` is told of batches done and in all. Returns False, with the draft as it was, when the
    features are too wide (`LARGEST_WIDTH`), no sample has a whole block, or the draft's attention
    is latent: its heads cannot be set one by one.
    """
    if draft.fc.in_features > LARGEST_WIDTH or not samples or draft.config.mla is not None:
        return False
    fit = _Fit(draft, samples, tick)
    if not fit.has_whole_blocks():
        return False
    anchor_directions = fit.context_projection()
    layers = draft.layers
    try:
        for number, layer in enumerate(layers):
            assert isinstance(layer, DraftLayer)
            draft.layers = layers[: number + 1]  # those that are still to come add nothing
            assert isinstance(layer.self_attn, Attention)
            _clear(layer)
            fit.wire(layer.self_attn, number, anchor_directions)
            fit.output(layer.self_attn.o_proj)
            fit.output(layer.mlp.down_proj)
    finally:
        draft.layers = layers
    return True


class _Fit:
    """The regressions of one draft on one set of samples."""

    def __init__(self, draft: DSparkDraft, samples: Sequence[TrainingSample], tick: Tick) -> None:
        self.draft = draft
        self.samples = samples
        self.device = draft.fc.weight.device
        self.size = draft.config.block_size
        self.weights = torch.exp(-torch.arange(self.size, device=self.device) / _SLOT_DECAY)
        self.head_input_size = _size_of_rows(
            torch.cat([s.features.hidden for s in samples[:64]]).float()
        ).to(self.device)
        embedding = draft.bound.embed.float()
        self.scale = _OVER_EMBEDDING * float(embedding.pow(2).mean().sqrt())
        attention = draft.layers[0].self_attn
        assert isinstance(attention, Attention)
        self.pattern = _Pattern.of(attention.head_dim, draft.config.rope_theta, self.device)
        heads = _FIRST_OFFSETS[: attention.num_heads]
        num_directions = len(self.pattern.slow) if _COPY in heads else 0
        self.word = self._word_directions(min(num_directions, draft.config.hidden_size // 6))
        self._tick = tick
        self._done = 0

    def has_whole_blocks(self) -> bool:
        return any(sample.num_anchors >= self.size for sample in self.samples)

    def batches(self, most: int | None = None) -> Iterator[Batch]:
        """All samples (or `most` batches of them), with the same anchors at every pass."""
        generator = torch.Generator().manual_seed(0)
        layers, every = len(self.draft.layers), math.ceil(len(self.samples) / _BATCH)
        total = (1 + 2 * layers) * every + layers * min(_FEW, every)
        for start in range(0, min(every, most or every) * _BATCH, _BATCH):
            chosen = self.samples[start : start + _BATCH]
            yield make_batch(chosen, self.size, _BLOCKS, generator).to(self.device)
            self._done += 1
            self._tick(self._done, total)

    def wanted(self, batch: Batch) -> Tensor:
        """What the residual stream should be at each supervised slot, [N, H]: the head's input,
        without the size that the final norm gives each dimension."""
        wanted: Tensor = batch.hidden[batch.positions] / self.head_input_size
        return wanted

    def _word_directions(self, count: int) -> Tensor:
        """[count, H]: the directions in which normed embeddings of the text differ, each made of
        unit size, so that equal words stand out."""
        tokens = torch.cat([sample.tokens for sample in self.samples]).to(self.device)
        rows = _normed(self.draft.embed(tokens)).float()
        values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
        first = len(values) - count
        directions: Tensor = vectors[:, first:] / values[first:].clamp(min=1e-6).sqrt()
        return directions.T

    def context_projection(self) -> Tensor:
        """Set `fc` and the final norm; returns the directions [H, H] of the anchor's normed
        embedding, those that say most about slot 0 first."""
        draft, hidden, size = self.draft, self.draft.config.hidden_size, self.size
        num_features = draft.fc.in_features
        some = torch.cat([s.features.taps[1:] for s in self.samples[:64]]).float()
        scale = some.std(0).to(self.device) + 1e-3
        num_words = len(self.word)
        sums = _Sums(num_features + hidden, size * hidden + num_words, self.device)
        for batch in self.batches():
            flat = torch.zeros(batch.anchors.numel() * size, hidden, device=self.device)
            flat[batch.slot_index] = batch.hidden[batch.positions]
            whole = torch.zeros(len(flat), dtype=torch.bool, device=self.device)
            whole[batch.slot_index] = True
            whole = whole.view(-1, size).all(1)
            before = (batch.anchors - 1).clamp(min=0)
            rows = before[..., None].expand(-1, -1, num_features)
            features = batch.features.gather(1, rows).flatten(0, 1) / scale
            said = _normed(draft.embed(batch.tokens.gather(1, before))).flatten(0, 1) @ self.word.T
            anchor = _normed(draft.embed(batch.tokens.gather(1, batch.anchors))).flatten(0, 1)
            targets = (flat.view(-1, size, hidden) * self.weights[:, None]).flatten(1)
            targets = torch.cat((targets, said), 1)
            sums.add(torch.cat((features, anchor), 1)[whole], targets[whole])
        solution = sums.solve(_FEATURE_RIDGE * sums.count)
        from_anchor = solution[num_features:, :hidden]
        from_features, word = torch.split(
            solution[:num_features], [size * hidden, num_words], dim=1
        )
        # The directions of the features that say most about the hidden states of all slots.
        gram = sums.gram[:num_features, :num_features]
        values, vectors = torch.linalg.eigh(from_features.T @ gram @ from_features)
        count = hidden - num_words
        values = values[-count:].flip(0).clamp(min=1e-6 * float(values[-1]))
        basis = from_features @ vectors[:, -count:].flip(1)
        # Half-way to equal sizes: weak directions should be seen, not their noise.
        basis = basis / (values / values.mean()) ** 0.25
        size_of = (basis * (gram @ basis)).sum().div(basis.shape[1]).sqrt()
        word_size = (word * (gram @ word)).sum().div(max(num_words, 1)).sqrt().clamp(min=1e-9)
        # The word's directions come last, each as large as the others are on average.
        basis = torch.cat((basis, word * (size_of / word_size)), 1) / scale[:, None]
        size_now = (some.to(self.device) @ basis).pow(2).mean().sqrt()
        draft.fc.weight.copy_((basis / size_now).T)
        draft.hidden_norm.weight.fill_(1.0)
        # A mean over what may follow is smaller than what follows: the norm makes up for it.
        draft.norm.weight.copy_(1.3 * self.head_input_size)
        _, _, directions = torch.linalg.svd(from_anchor.T)
        said_by_anchor: Tensor = directions
        return said_by_anchor

    def wire(self, attention: Attention, number: int, anchor_directions: Tensor) -> None:
        """Make each head look at one distance; the first layer's heads carry chosen directions."""
        draft, hidden = self.draft, self.draft.config.hidden_size
        queries, contexts = [], []
        with _inputs(attention.q_proj) as seen, _outputs(draft.hidden_norm) as fused:
            for batch in self.batches(most=_FEW):
                self._forward(batch)
                queries.append(seen.pop().reshape(-1, self.size, hidden))
                contexts.append(fused.pop()[:, 1:].flatten(0, 1))
        slots = torch.cat(queries)
        anchor, later = slots[:, 0], slots[:, 1:].flatten(0, 1)
        context = torch.cat(contexts)
        context = context[context.abs().sum(1) > 0]  # without padding
        query_direction = _alike([anchor, later])
        key_direction = _alike([context, anchor, later])
        pattern = self.pattern
        for projection in (attention.q_proj, attention.k_proj):
            nn.init.normal_(projection.weight, std=0.004)
        nn.init.normal_(attention.v_proj.weight, std=hidden**-0.5)
        offsets = _FIRST_OFFSETS if number == 0 else _LATER_OFFSETS
        group = attention.num_heads // attention.num_kv_heads
        used: dict[int, int] = {}
        for head in range(attention.num_heads):
            offset = offsets[head % len(offsets)]
            if offset is None or offset >= self.size:
                continue
            rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            copies = offset == _COPY
            if copies:
                slow = pattern.slow[: len(self.word)]
                attention.q_proj.weight[rows][slow] += _POSITIONAL * self.word
            else:
                query = pattern.query(offset)
                attention.q_proj.weight[rows] += _POSITIONAL * torch.outer(query, query_direction)
            if head % group:
                continue
            own = head // group
            rows = slice(own * attention.head_dim, (own + 1) * attention.head_dim)
            if copies:
                last = torch.eye(hidden, device=self.device)[hidden - len(self.word) :]
                attention.k_proj.weight[rows][slow] += _POSITIONAL * last
            else:
                key = pattern.query(0)
                attention.k_proj.weight[rows] += _POSITIONAL * torch.outer(key, key_direction)
            start = used.get(offset, 0)
            taken = min(attention.head_dim, hidden - start)
            if number == 0 and taken > 0:
                # An anchor's head carries its embedding's directions, the others the context's.
                context_directions = torch.eye(hidden, device=self.device)
                source = anchor_directions if offset == 0 else context_directions
                attention.v_proj.weight[rows].zero_()
                attention.v_proj.weight[rows][:taken] = source[start : start + taken]
                used[offset] = start + taken
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(1.0)
            norm.weight[pattern.query(0) > 0] = pattern.sharpness
            norm.weight[pattern.sines] = pattern.sharpness
            norm.weight[pattern.slow] = pattern.sharpness

    def output(self, projection: nn.Linear) -> None:
        """Ridge regression from a projection's inputs to what the residual stream still lacks."""
        sums = _Sums(projection.in_features, projection.out_features, self.device)
        with _inputs(projection) as seen, _inputs(self.draft.norm) as stream:
            for batch in self.batches():
                self._forward(batch)
                inputs = seen.pop().flatten(0, -2)[batch.slot_index]
                have = stream.pop().flatten(0, -2)[batch.slot_index]
                lacking = self.scale * self.wanted(batch) - have
                weights = self.weights[batch.slot_of_block][:, None].sqrt()
                sums.add(inputs * weights, lacking * weights)
        solution = sums.solve(_OUTPUT_RIDGE * float(sums.gram.diagonal().mean()))
        projection.weight.copy_(solution.T)

    def _forward(self, batch: Batch) -> None:
        self.draft.forward_blocks(batch.features, batch.tokens, batch.anchors, batch.valid)


class _Sums:
    """The normal equations of a ridge regression."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.gram = torch.zeros(inputs, inputs, device=device)
        self.cross = torch.zeros(inputs, outputs, device=device)
        self.count = 0

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        inputs, targets = inputs.float(), targets.float()
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, targets)
        self.count += len(inputs)

    def solve(self, ridge: float) -> Tensor:
        """Weights [inputs, outputs]."""
        damped = self.gram.clone()
        damped.diagonal().add_(ridge + 1e-9)
        solution: Tensor = torch.linalg.solve(damped, self.cross)
        return solution


class _Pattern:
    """A vector of rotary pairs whose product with itself, rotated, peaks at one distance."""

    def __init__(self, every: Tensor, head_dim: int) -> None:
        angles = every[every >= _FASTEST]
        self._angles = angles
        self._head_dim = head_dim
        # After the head norms a score is at most sharpness^2 * sqrt(D), at the wanted distance;
        # one position beside it, this share of it is gone.
        lost = float((1.0 - angles.cos()).mean())
        self.sharpness = math.sqrt(_CONTRAST / (math.sqrt(head_dim) * lost))
        half = head_dim // 2
        self.sines = torch.arange(half, half + len(angles), device=angles.device)
        still = (every <= _SLOWEST).nonzero()[:, 0]
        self.slow = torch.cat((still, still + half))

    @classmethod
    def of(cls, head_dim: int, theta: float, device: torch.device) -> "_Pattern":
        exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
        angles = 1.0 / theta**exponents
        return cls(angles, head_dim)

    def query(self, offset: int) -> Tensor:
        """The query's direction [D] that finds the same pattern `offset` positions before it."""
        half, count = self._head_dim // 2, len(self._angles)
        found = torch.zeros(self._head_dim, device=self._angles.device)
        found[:count] = torch.cos(-self._angles * offset)
        found[half : half + count] = torch.sin(-self._angles * offset)
        return found


def _clear(layer: DraftLayer) -> None:
    """A layer that adds nothing yet, with gated units that see inputs of unit size."""
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.fill_(1.0)
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        projection.weight.zero_()
    for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
        nn.init.normal_(projection.weight, std=projection.in_features**-0.5)


def _alike(groups: Sequence[Tensor]) -> Tensor:
    """A direction [H] whose product with the rows of every group is as near to 1 as it can be."""
    width, device = groups[0].shape[1], groups[0].device
    gram, total = torch.zeros(width, width, device=device), torch.zeros(width, device=device)
    for rows in groups:
        if len(rows):
            gram += rows.T @ rows / len(rows)
            total += rows.mean(0)
    gram.diagonal().add_(1e-5 * float(gram.diagonal().mean()) + 1e-9)
    direction: Tensor = torch.linalg.solve(gram, total)
    return direction


def _size_of_rows(rows: Tensor) -> Tensor:
    return rows.pow(2).mean(0).sqrt().clamp(min=1e-3)


def _normed(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


@contextmanager
def _inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """The inputs of a module's calls, appended to a list."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of a module's calls, appended to a list."""
    seen: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, _args, out: seen.append(out))
    try:
        yield seen
    finally:
        hook.remove()
