"""What a server's files must be before they become features, and where its words may lead."""

import fcntl
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from distill_samples import SAMPLING, TAPS, cut, fitting_draft, rollouts, tiny_target
from safetensors.torch import save_file
from test_distill_feature_store import contents
from tiny_models import LAYERS, full_pass
from torch import Tensor

from sparksmith.distill.capture import PrefillFeatures, capture, missing, rounding_effect
from sparksmith.distill.feature_coding import STORE_DTYPES, Coding
from sparksmith.distill.feature_store import FeatureStore, FeatureWriter
from sparksmith.distill.features import OnlineFeatures
from sparksmith.distill.generation import Response
from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.server_features import (
    CaptureError,
    Server,
    ServerFeatures,
    check_servers,
    inside,
    lock_of,
)
from sparksmith.draft.errors import UserError
from sparksmith.verify.endpoint import Endpoint, Retries
from sparksmith.verify.target import TransformersTarget
from sparksmith.verify.target_ends import TargetEnds, load_target_ends

# Hooks of one pass must not see another's.
_PASS = threading.Lock()
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def ends_of(target: TransformersTarget) -> TargetEnds:
    return TargetEnds(
        config=target.config,
        taps=target.taps,
        stream="residual",
        embed_weight=target.embed_weight.detach(),
        norm_weight=target.model.get_decoder().norm.weight.detach(),
        head_weight=target.head_weight.detach(),
        norm_epsilon=target.config.rms_norm_eps,
        eos_token_ids=frozenset(),
    )


class Wire:
    """An HTTP transport that writes files as a server would, and goes wrong where told to: a real
    server does not do that on demand (tests/test_vllm_capture.py has the real one)."""

    def __init__(self, target: TransformersTarget, shared: Path) -> None:
        self.target, self.shared = target, shared
        self.change: Change = lambda tensors: tensors
        self.where: Callable[[str], Any] = lambda name: str(shared / name)
        self.next_token: int | None = None
        self.failing: set[int] = set()
        self.most_files = 0
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 64}]})
        if request.method == "GET":
            return httpx.Response(404)
        body = json.loads(request.content)
        with _PASS:
            self.asked += 1
            if self.asked in self.failing:
                return httpx.Response(400, json={"error": {"message": "out of luck"}})
            name = f"cmpl-{body['request_id']}-0-abc.safetensors"
            every = [*TAPS, LAYERS - 1]
            hidden: list[Tensor] = []
            norm = self.target.model.get_decoder().norm
            hook = norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0][0]))
            logits, taps = full_pass(self.target.model, body["prompt"], TAPS)
            hook.remove()
            states = torch.cat([taps, hidden[0]], -1).view(len(taps), len(every), -1)
            token = int(logits[-1].argmax()) if self.next_token is None else self.next_token
            self._write(name, {"hidden_states": states, "token_ids": torch.tensor(body["prompt"])})
        answer = {"text": "", "token_ids": [token], "finish_reason": "length"}
        return httpx.Response(
            200,
            json={
                "choices": [answer],
                "kv_transfer_params": {"hidden_states_path": self.where(name)},
            },
        )

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        (self.shared / f"{name}.lock").touch()
        save_file(self.change(tensors), self.shared / name)
        self.most_files = max(self.most_files, len(list(self.shared.glob("*.safetensors"))))


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def responses(target: TransformersTarget) -> list[Response]:
    return [cut(r, 3 + i % 9) for i, r in enumerate(rollouts(target, 10))]


@pytest.fixture
def wire(target: TransformersTarget, tmp_path: Path) -> Wire:
    (tmp_path / "shared").mkdir()
    return Wire(target, tmp_path / "shared")


def served(*wires: Wire, **changes: Any) -> ServerFeatures:
    servers = [
        Server(
            endpoint=Endpoint(
                "http://server",
                transport=httpx.MockTransport(wire),
                retries=Retries(attempts=2, first=0.01),
            ),
            shared=wire.shared,
        )
        for wire in wires
    ]
    return ServerFeatures(servers, ends_of(wires[0].target), SAMPLING, tag="t", **changes)


def test_a_servers_states_are_the_targets_features(
    wire: Wire, target: TransformersTarget, responses: list[Response]
) -> None:
    online = OnlineFeatures(target, responses, SAMPLING, dtype=torch.float32)
    found = list(served(wire).samples(responses))
    assert [response for response, _ in found] == responses
    for index, (_, sample) in enumerate(found):
        assert isinstance(sample, TrainingSample)
        own = online.take([index])[0]
        assert torch.equal(sample.tokens, own.tokens)
        for name in ("taps", "hidden", "log_norm", "threshold"):
            ours, theirs = getattr(own.features, name), getattr(sample.features, name)
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), name
    assert not list(wire.shared.iterdir())


def test_files_in_flight_are_bounded_and_several_servers_share_the_work(
    target: TransformersTarget, responses: list[Response], tmp_path: Path
) -> None:
    wires = []
    for name in "ab":
        (tmp_path / name).mkdir()
        wires.append(Wire(target, tmp_path / name))
    found = list(served(*wires, in_flight=2).samples(responses * 2))
    assert all(isinstance(sample, TrainingSample) for _, sample in found)
    assert [response for response, _ in found] == responses * 2
    assert sum(wire.asked for wire in wires) == 20
    assert all(wire.asked and wire.most_files <= 2 for wire in wires)


def test_where_one_server_fails_another_answers(
    target: TransformersTarget, responses: list[Response], tmp_path: Path
) -> None:
    wires = []
    for name in "ab":
        (tmp_path / name).mkdir()
        wires.append(Wire(target, tmp_path / name))
    wires[0].failing = set(range(1, 100))
    found = list(served(*wires).samples(responses))
    assert all(isinstance(sample, TrainingSample) for _, sample in found)


def drop_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "hidden_states": tensors["hidden_states"][:, 1:].contiguous()}


def other_ids(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "token_ids": tensors["token_ids"].flip(0).contiguous()}


def not_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    states = tensors["hidden_states"].clone()
    states[1, 0, 2] = float("nan")
    return {**tensors, "hidden_states": states}


def other_state_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    states = tensors["hidden_states"].clone()
    states[:, -1] = states[:, 0]
    return {**tensors, "hidden_states": states}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_one, "captured layers"),
        (other_ids, "other token ids"),
        (not_finite, "not all finite"),
        (other_state_last, "another state last"),
        (lambda tensors: {"hidden_states": tensors["hidden_states"]}, "hold hidden_states and"),
        (lambda tensors: {**tensors, "token_ids": torch.ones(2, dtype=torch.long)}, "number of"),
    ],
)
def test_a_wrong_file_is_named(
    change: Change, words: str, wire: Wire, responses: list[Response]
) -> None:
    wire.change = change
    # A long text, so that its next token is not the same by chance.
    ((_, error),) = served(wire).samples([responses[8]])
    assert isinstance(error, CaptureError)
    assert words in str(error)
    assert not list(wire.shared.iterdir())


def test_another_models_token_is_noticed(wire: Wire, responses: list[Response]) -> None:
    wire.next_token = 10_000
    ((_, error),) = served(wire).samples([responses[8]])
    assert "another model" in str(error)


@pytest.mark.parametrize(
    "where",
    [
        "..",
        "/",
        "",
        "/x/.hidden.safetensors",
        "/x/features",
        "/x/a\nb.safetensors",
        "C:\\x\\y.safetensors",
    ],
)
def test_a_path_that_is_no_file_of_the_folder(where: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="names a file"):
        inside(tmp_path, where)


def test_a_path_never_leads_out(wire: Wire, responses: list[Response], tmp_path: Path) -> None:
    outside = tmp_path / "precious.safetensors"
    save_file({"a": torch.ones(1)}, outside)
    assert inside(wire.shared, f"../../{outside.name}") == wire.shared / outside.name
    assert inside(wire.shared, str(outside)).parent == wire.shared

    # Neither does a link that the server leaves in its folder.
    def link(name: str) -> str:
        (wire.shared / name).unlink()
        (wire.shared / name).symlink_to(outside)
        return str(wire.shared / name)

    wire.where = link
    ((_, error),) = served(wire).samples([responses[0]])
    assert "cannot be opened" in str(error)
    assert outside.exists()
    assert not list(wire.shared.iterdir())


def test_a_server_without_the_connector(wire: Wire, responses: list[Response]) -> None:
    wire.where = lambda name: None
    ((_, error),) = served(wire).samples([responses[0]])
    assert "ExampleHiddenStatesConnector" in str(error)


def test_a_file_is_read_once_its_writer_lets_go(wire: Wire, responses: list[Response]) -> None:
    """The server holds the lock before the file is there, and while it is half written."""
    held: list[Any] = []

    def late(name: str) -> str:
        path = wire.shared / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        lock = lock_of(path).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        held.append(time.monotonic())

        def finish() -> None:
            time.sleep(0.3)
            path.write_bytes(whole)
            lock.close()

        threading.Thread(target=finish).start()
        return str(path)

    wire.where = late
    ((_, sample),) = served(wire).samples([responses[0]])
    assert isinstance(sample, TrainingSample)
    assert time.monotonic() - held[0] >= 0.3


def test_a_file_that_never_comes(wire: Wire, responses: list[Response]) -> None:
    wire.where = lambda name: "/elsewhere/other.safetensors"
    ((_, error),) = served(wire, timeout=0.2).samples([responses[0]])
    assert "--shared" in str(error)


def test_what_a_killed_run_left_is_deleted_and_nothing_else(wire: Wire) -> None:
    for name in ("cmpl-sparksmith-t-1-0.safetensors", "cmpl-sparksmith-t-1-0.safetensors.lock"):
        (wire.shared / name).touch()
    (wire.shared / "cmpl-sparksmith-u-1-0.safetensors").touch()
    (wire.shared / "notes.txt").touch()
    assert served(wire).clear() == 1
    assert {path.name for path in wire.shared.iterdir()} == {
        "cmpl-sparksmith-u-1-0.safetensors",
        "notes.txt",
    }


def test_a_response_that_fails_is_set_aside(
    wire: Wire, responses: list[Response], tmp_path: Path
) -> None:
    wire.failing = {3}
    writer = FeatureWriter(tmp_path / "out", contents())
    made = capture(responses, served(wire, in_flight=1), writer)
    assert made.failed == {responses[2].request_id: "HTTP 400: out of luck"}
    again = FeatureWriter(tmp_path / "out", contents())
    assert missing(responses, again) == [responses[2]]
    capture(missing(responses, again), served(wire), again)
    assert len(FeatureStore.open(tmp_path / "out")) == len(responses)


def test_a_server_that_fails_them_all_ends_the_run(
    wire: Wire, responses: list[Response], tmp_path: Path
) -> None:
    wire.failing = set(range(5, 100))
    writer = FeatureWriter(tmp_path / "out", contents())
    with pytest.raises(UserError, match="out of luck"):
        capture(responses, served(wire, in_flight=1), writer)
    assert len(FeatureStore.open(tmp_path / "out")) == 4
    assert wire.asked < 10


def test_a_server_for_shorter_texts(wire: Wire, tmp_path: Path) -> None:
    source = served(wire)
    check_servers(source.servers, longest=63)
    with pytest.raises(UserError, match="--max-model-len 65"):
        check_servers(source.servers, longest=64)
    gone = Server(endpoint=source.servers[0].endpoint, shared=tmp_path / "gone")
    with pytest.raises(UserError, match="not a folder"):
        check_servers([gone], longest=3)


def test_another_response_of_the_same_id(
    target: TransformersTarget, responses: list[Response], tmp_path: Path
) -> None:
    source = PrefillFeatures(OnlineFeatures(target, [], SAMPLING, dtype=torch.float32))
    writer = FeatureWriter(tmp_path, contents())
    capture(responses, source, writer)
    shorter = [cut(responses[4], 2), *responses[5:]]
    with pytest.raises(UserError, match="another response"):
        missing(shorter, FeatureWriter(tmp_path, contents()))


def test_what_storing_costs_a_draft(target: TransformersTarget, responses: list[Response]) -> None:
    online = OnlineFeatures(target, rollouts(target, 6), SAMPLING, dtype=torch.float32)
    objective = Objective(fitting_draft(target), LossWeights(), SAMPLING.temperature)
    codings = [Coding(dtype=name, num_taps=2, hidden_size=32) for name in STORE_DTYPES]
    exact, stored = rounding_effect(objective, online.take(range(6)), codings)
    assert exact.num_blocks > 0
    assert stored["float32"] == exact
    lengths = {name: found.acceptance_length for name, found in stored.items()}
    assert lengths["int8"] != exact.acceptance_length
    for length in lengths.values():
        assert length == pytest.approx(exact.acceptance_length, abs=0.01)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_ends_of_a_checkpoint_give_the_targets_logits(kind: str, tmp_path: Path) -> None:
    from tiny_targets import save_tiny_target
    from transformers import AutoModelForCausalLM

    save_tiny_target(tmp_path, kind)
    ends, tokenizer = load_target_ends(tmp_path, dtype="float32", taps=(0, 1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True)
        before: list[Tensor] = []
        model.get_decoder().norm.register_forward_pre_hook(lambda _, a: before.append(a[0]))
        model(input_ids=torch.tensor([[5, 6, 7]]))
        logits = ends.logits(ends.head_input(before[0]))
    assert torch.allclose(logits, output.logits, atol=1e-4)
    assert ends.eos_token_ids == {model.generation_config.eos_token_id[0], 7, 77}
    assert len(tokenizer) <= ends.vocab_size


def test_ends_whose_logits_are_capped(tmp_path: Path) -> None:
    from tiny_targets import save_tiny_target

    save_tiny_target(tmp_path, "gemma2")
    with pytest.raises(UserError, match="final_logit_softcapping"):
        load_target_ends(tmp_path, dtype="float32")
