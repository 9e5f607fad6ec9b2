"""What a draft holds: its own tensors under the layout's names, and the target's by reference."""

import pytest
import torch
from draft_models import VOCABULARY, tiny_config, tiny_draft

from sparksmith.draft.errors import UserError


def test_embedding_and_head_are_the_targets_own() -> None:
    draft = tiny_draft(bind=False)
    embed, head = torch.randn(VOCABULARY, 24), torch.randn(VOCABULARY, 24)
    draft.bind(embed, head)
    assert draft.bound.embed.data_ptr() == embed.data_ptr()
    assert draft.bound.head.data_ptr() == head.data_ptr()
    pointers = {weight.data_ptr() for weight in draft.state_dict().values()}
    assert not pointers & {embed.data_ptr(), head.data_ptr()}
    shapes = {tuple(weight.shape) for weight in draft.state_dict().values()}
    assert (VOCABULARY, 24) not in shapes


def test_a_reduced_head_has_the_draft_words_rows_in_their_order() -> None:
    draft = tiny_draft(bind=False, draft_vocab_size=20)
    head = torch.arange(VOCABULARY).float().unsqueeze(1).expand(-1, 24)
    draft.bind(torch.zeros(VOCABULARY, 24), head)
    assert draft.bound.head[:, 0].tolist() == [float(word) for word in draft.target_ids]
    rows = head[draft.target_ids].clone()
    draft.bind(torch.zeros(VOCABULARY, 24), rows)
    assert draft.bound.head.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    ("embed", "head", "field"),
    [
        ((50, 23), (50, 24), "embedding"),
        ((49, 24), (50, 24), "embedding"),
        ((50, 24), (50, 25), "head"),
        ((50, 24), (21, 24), "head"),
    ],
)
def test_binding_an_unfit_target_names_it(
    embed: tuple[int, int], head: tuple[int, int], field: str
) -> None:
    draft = tiny_draft(bind=False, draft_vocab_size=20)
    with pytest.raises(UserError, match="does not fit the draft") as caught:
        draft.bind(torch.zeros(embed), torch.zeros(head))
    assert field in caught.value.field
    assert "target" in caught.value.remedy


def test_names_and_shapes_are_those_of_the_checkpoint_layout() -> None:
    config = tiny_config()
    shapes = {name: tuple(w.shape) for name, w in tiny_draft().state_dict().items()}
    layer = {
        "input_layernorm.weight": (24,),
        "post_attention_layernorm.weight": (24,),
        "self_attn.q_proj.weight": (32, 24),
        "self_attn.k_proj.weight": (16, 24),
        "self_attn.v_proj.weight": (16, 24),
        "self_attn.o_proj.weight": (24, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (40, 24),
        "mlp.up_proj.weight": (40, 24),
        "mlp.down_proj.weight": (24, 40),
    }
    assert config.num_hidden_layers == 2
    assert shapes == {
        "fc.weight": (24, 40),
        "hidden_norm.weight": (24,),
        "norm.weight": (24,),
        **{f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()},
        "markov_head.markov_w1.weight": (50, 6),
        "markov_head.markov_w2.weight": (50, 6),
        "confidence_head.proj.weight": (1, 30),
        "confidence_head.proj.bias": (1,),
    }
    gated = tiny_draft(markov_head_type="gated", draft_vocab_size=20).state_dict()
    assert gated["markov_head.gate_proj.weight"].shape == (6, 30)
    assert gated["markov_head.gate_proj.bias"].shape == (6,)
    assert gated["markov_head.markov_w1.weight"].shape == (50, 6)
    assert gated["markov_head.markov_w2.weight"].shape == (20, 6)
    rnn = tiny_draft(markov_head_type="rnn").state_dict()
    assert rnn["markov_head.joint_proj.weight"].shape == (18, 36)
    plain = tiny_draft(confidence_head_with_markov=False, markov_rank=0).state_dict()
    assert plain["confidence_head.proj.weight"].shape == (1, 24)
    assert not any("markov" in name for name in plain)
