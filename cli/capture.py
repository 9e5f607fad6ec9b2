"""`sparksmith capture`: responses in, the target's features out, from this process or vLLM."""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparksmith.cli.target import (
    Device,
    Dtype,
    OpenEnds,
    OpenTarget,
    Stream,
    TargetChoice,
    TargetName,
    Threads,
    TrustRemoteCode,
    open_ends,
    open_target,
    resolve,
)
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.cli.responses import Generated
    from sparksmith.distill.capture import Captured, FeatureSource
    from sparksmith.distill.feature_coding import StoreDtype
    from sparksmith.distill.feature_manifest import Contents
    from sparksmith.distill.feature_store import FeatureWriter
    from sparksmith.distill.generation import Response
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.run_record import RunRecord

EXAMPLE = "sparksmith capture --responses runs/responses --out runs/features"
FEATURES, SERVERS = "Features", "vLLM (instead of a target in this process)"
_MEASURED = 64


def capture(
    responses: Annotated[
        Path | None, typer.Option(help="Folder that `generate` wrote.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the features.", show_default=False)
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(help="Check every byte of a folder of features, and do nothing else."),
    ] = None,
    target: TargetName = "embedded",
    taps: Annotated[
        str | None,
        typer.Option(help="Target layers, such as 3,9,15,21,27.", rich_help_panel=FEATURES),
    ] = None,
    store: Annotated[
        str,
        typer.Option(help="bfloat16, float32, or int8: taps in 8 bits.", rich_help_panel=FEATURES),
    ] = "bfloat16",
    temperature: Annotated[
        float | None,
        typer.Option(
            help="At which the draft will serve (default: that of the responses).",
            rich_help_panel=FEATURES,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="The target's nucleus then (default: likewise).", rich_help_panel=FEATURES
        ),
    ] = None,
    shard_mib: Annotated[
        int, typer.Option(help="Size of a shard, held in memory.", rich_help_panel=FEATURES)
    ] = 256,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="A draft: print what each form of storage costs its expected acceptance length.",
            rich_help_panel=FEATURES,
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a server started for this; may be repeated.", rich_help_panel=SERVERS
        ),
    ] = None,
    shared: Annotated[
        list[Path] | None,
        typer.Option(
            help="The server's shared_storage_path as this machine sees it: one for all, or one "
            "for each endpoint.",
            rich_help_panel=SERVERS,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Its name there (default: the only one).", rich_help_panel=SERVERS),
    ] = None,
    in_flight: Annotated[
        int, typer.Option(help="Requests, and files, of a server at once.", rich_help_panel=SERVERS)
    ] = 4,
    print_server: Annotated[
        bool,
        typer.Option(
            "--print-server",
            help="Print the command that starts such a server, and do nothing else.",
            rich_help_panel=SERVERS,
        ),
    ] = False,
    hardware: Annotated[
        str, typer.Option(help="Of the printed server, as for `vllm`.", rich_help_panel=SERVERS)
    ] = "b300",
    stream: Stream = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Keep the target's features of responses, for `train --features`.

    Stop it at any moment: the same command goes on where it was. Responses that were added
    meanwhile are captured too.
    """
    if verify is not None:
        return _verify(verify)
    from sparksmith.cli.generate import check_at_least_one
    from sparksmith.cli.responses import read_generated
    from sparksmith.cli.train import parse_taps, serving_sampling, taps_of
    from sparksmith.distill.feature_coding import STORE_DTYPES

    check_at_least_one(shard_mib=shard_mib, in_flight=in_flight)
    if store not in STORE_DTYPES:
        raise UserError("--store", store, "is not known", f"Use one of {', '.join(STORE_DTYPES)}.")
    if responses is None:
        raise UserError("--responses", None, "is not given", "Give what `generate` wrote.")
    if shared and len(shared) not in (1, len(endpoint or [None])):
        raise UserError(
            "--shared", [str(path) for path in shared], "are not one for each --endpoint", _SHARED
        )
    if (endpoint or print_server) and not shared:
        raise UserError("--shared", None, "is not given", _SHARED)
    generated = read_generated(responses)
    # An empty answer has no features.
    whole = [one for one in generated.responses if one.prompt_ids and one.token_ids]
    generated = replace(generated, responses=whole)
    choice = TargetChoice(
        name=target,
        dtype=dtype,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        stream=stream,
    )
    chosen = taps_of(choice, parse_taps(taps))
    if print_server:
        return _print_server(choice, chosen, generated, str((shared or [])[0]), hardware)
    if out is None:
        raise UserError("--out", None, "is not given", "Give a folder for the features.")
    plan = _Plan(
        out=out,
        taps=chosen,
        dtype=store,
        sampling=serving_sampling(generated.sampling, temperature, top_p, validates=False),
        shard_bytes=shard_mib << 20,
        measure=measure,
    )
    servers = _Servers(
        urls=tuple(endpoint or ()),
        shared=tuple(shared or ()),
        model=model,
        in_flight=in_flight,
    )
    return _run(choice, generated, plan, servers)


_SHARED = "Give the folder where the server writes its states, once or once for each --endpoint."


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Which features are stored, and where."""

    out: Path
    taps: tuple[int, ...]
    dtype: "StoreDtype"
    sampling: "Sampling"
    shard_bytes: int
    measure: Path | None


@dataclass(frozen=True, kw_only=True)
class _Servers:
    """The options of --endpoint; no URL is the target in this process."""

    urls: tuple[str, ...]
    shared: tuple[Path, ...]
    model: str | None
    in_flight: int


def _run(choice: TargetChoice, generated: "Generated", plan: _Plan, servers: _Servers) -> int:
    """Everything after the options: all checks come before the first sample."""
    from sparksmith.cli.responses import check_answered_by
    from sparksmith.verify.run_record import check_folder

    check_folder(plan.out, "capture")
    opened: OpenTarget | OpenEnds
    source: FeatureSource
    with ExitStack() as stack:
        if servers.urls:
            opened, source = _served(choice, generated, plan, servers, stack)
        else:
            opened = open_target(choice, taps=plan.taps)
            check_answered_by(generated, opened)
            source = _in_process(opened, plan)
        return _store(opened, source, generated, plan, list(servers.urls))


def _store(
    opened: OpenTarget | OpenEnds,
    source: "FeatureSource",
    generated: "Generated",
    plan: _Plan,
    urls: list[str],
) -> int:
    """Capture what the folder lacks, say what it takes and, if asked to, what storing costs."""
    from sparksmith.distill.capture import missing, stored_bytes
    from sparksmith.distill.feature_store import FeatureWriter
    from sparksmith.verify.run_record import RunRecord

    contents = _contents(opened, generated, plan)
    record = RunRecord.open(
        plan.out,
        "capture",
        settings={
            **asdict(plan.sampling),
            "taps": list(plan.taps),
            "stream": contents.stream,
            "store": plan.dtype,
        },
        inputs={"target": opened.record},
        conditions={
            "responses": generated.record,
            "endpoints": urls,
            "shard_bytes": plan.shard_bytes,
        },
    )
    with record:
        writer = FeatureWriter(plan.out, contents, shard_bytes=plan.shard_bytes)
        for fault in writer.forgotten:
            _say(f"captured again: {fault}")
        todo = missing(generated.responses, writer)
        coding, needed = contents.coding, stored_bytes(todo, contents.coding)
        _say(
            f"{len(generated.responses)} responses, {len(generated.responses) - len(todo)} "
            f"captured already; {plan.dtype}: {coding.bytes_per_position} bytes for each token of "
            f"prompt and response and {coding.bytes_per_response_token} more for each of the "
            f"response, {needed / 1e9:.3f} GB in all"
        )
        _check_room(plan.out, needed)
        made = _capture(todo, source, writer)
        if plan.measure is not None:
            _measure(plan.measure, opened, (generated, contents), source)
        return _finish(record, plan.out, made)


def _in_process(opened: OpenTarget, plan: _Plan) -> "FeatureSource":
    from sparksmith.distill.capture import PrefillFeatures
    from sparksmith.distill.features import OnlineFeatures

    dtype = opened.target.dtype
    return PrefillFeatures(OnlineFeatures(opened.target, [], plan.sampling, dtype=dtype))


def _served(
    choice: TargetChoice,
    generated: "Generated",
    plan: _Plan,
    servers: _Servers,
    stack: ExitStack,
) -> "tuple[OpenEnds, FeatureSource]":
    """The servers, tried with the shortest response: what is wrong with all of them shows here."""
    from sparksmith.cli.responses import check_answered_by
    from sparksmith.distill.server_features import Server, ServerFeatures, check_servers
    from sparksmith.verify.endpoint import Endpoint

    shared = servers.shared * len(servers.urls) if len(servers.shared) == 1 else servers.shared
    pairs = [
        Server(endpoint=Endpoint(url, model=servers.model), shared=folder)
        for url, folder in zip(servers.urls, shared, strict=True)
    ]
    for server in pairs:
        stack.callback(server.endpoint.close)
    versions = check_servers(pairs, longest=_longest(generated))
    opened = open_ends(choice, taps=plan.taps)
    check_answered_by(generated, opened)
    if opened.target.stream == "prefix_sum":
        raise UserError(
            "--stream",
            opened.target.stream,
            "is a stream whose final state is not the one before the final norm, so the target's "
            "distribution cannot be computed from it",
            "Use --stream attn_res_mixture, and start the server as --print-server then says.",
        )
    source = ServerFeatures(
        pairs,
        opened.target,
        plan.sampling,
        tag=hashlib.sha256(str(plan.out.resolve()).encode()).hexdigest()[:10],
        in_flight=servers.in_flight,
    )
    left = source.clear()
    if left:
        _say(f"deleted {left} files of an earlier run on the servers' disk")
    shortest = min(generated.responses, key=lambda r: len(r.prompt_ids) + len(r.token_ids))
    source.adopt_dtype(shortest)
    opened.record["dtype"] = str(source.ends.dtype).removeprefix("torch.")
    _say(f"{', '.join(versions)}: states in {opened.record['dtype']}")
    return OpenEnds(target=source.ends, tokenizer=opened.tokenizer, record=opened.record), source


def _longest(generated: "Generated") -> int:
    """Tokens that the longest response sends: all but its last."""
    return max(len(r.prompt_ids) + len(r.token_ids) - 1 for r in generated.responses)


def _contents(opened: OpenTarget | OpenEnds, generated: "Generated", plan: _Plan) -> "Contents":
    from sparksmith.distill.feature_manifest import Contents

    return Contents(
        target=opened.record,
        taps=plan.taps,
        stream=opened.target.stream,
        dtype=plan.dtype,
        hidden_size=opened.target.hidden_size,
        vocab_size=opened.target.vocab_size,
        sampling=plan.sampling,
        responses_sampling=generated.sampling,
    )


def _check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            "--out",
            str(out),
            f"is on a disk with {free / 1e9:.1f} GB left, and the features take "
            f"{needed / 1e9:.1f} GB",
            "Free some space, give another folder, or use --store int8.",
        )


def _capture(
    todo: "Sequence[Response]", source: "FeatureSource", writer: "FeatureWriter"
) -> "Captured":
    from sparksmith.cli.progress import progress
    from sparksmith.distill.capture import capture as capture_all

    with progress("capture", total=len(todo), unit="responses") as bar:
        return capture_all(todo, source, writer, lambda tokens: bar.advance(1, tokens=tokens))


def _measure(
    draft: Path,
    opened: OpenTarget | OpenEnds,
    stored: "tuple[Generated, Contents]",
    source: "FeatureSource",
) -> None:
    """Print the draft's expected acceptance length on exact features and on stored ones."""
    from sparksmith.cli.progress import progress
    from sparksmith.distill.capture import rounding_effect
    from sparksmith.distill.feature_coding import STORE_DTYPES, Coding
    from sparksmith.distill.loss import LossWeights
    from sparksmith.distill.objective import Objective
    from sparksmith.distill.samples import TrainingSample
    from sparksmith.draft.checkpoint import load_draft

    generated, contents = stored
    found = load_draft(draft)
    if found.config.target_layer_ids != contents.taps:
        raise UserError(
            "--measure",
            str(draft),
            f"taps {list(found.config.target_layer_ids)}, and the features are of "
            f"{list(contents.taps)}",
            "Give a draft of the same taps.",
        )
    found = found.to(opened.target.device).eval()
    found.bind(opened.target.embed_weight, opened.target.head_weight)
    step = max(1, len(generated.responses) // _MEASURED)
    some = generated.responses[::step][:_MEASURED]
    samples = []
    with progress("measure", total=len(some), unit="responses") as bar:
        for _, sample in source.samples(some):
            if isinstance(sample, TrainingSample):
                samples.append(sample)
            bar.advance(1)
    objective = Objective(found, LossWeights(), contents.sampling.temperature)
    codings = [
        Coding(dtype=name, num_taps=len(contents.taps), hidden_size=contents.hidden_size)
        for name in STORE_DTYPES
    ]
    exact, rounded = rounding_effect(objective, samples, codings, greedy=generated.sampling.greedy)
    numbers = opened.record["dtype"]
    print(
        f"expected acceptance length of {draft} on {len(samples)} responses, "
        f"{exact.num_blocks} blocks: {exact.acceptance_length:.4f} on the target's own {numbers}"
    )
    for coding in codings:
        length = rounded[coding.dtype].acceptance_length
        print(
            f"  {coding.dtype:8} {length:.4f} ({length - exact.acceptance_length:+.4f}), "
            f"{coding.bytes_per_position} bytes a token"
        )


def _finish(record: "RunRecord", out: Path, made: "Captured") -> int:
    from sparksmith.distill.feature_store import FeatureStore

    store = FeatureStore.open(out)
    size = sum(shard.bytes for shard in store.shards)
    record.finish(
        "complete",
        samples=len(store),
        tokens=sum(shard.tokens for shard in store.shards),
        bytes=size,
        failed=made.failed,
        shards={shard.file: shard.sha256 for shard in store.shards},
    )
    print(f"features of {len(store)} responses, {size / 1e9:.3f} GB, in {out}")
    for request_id, reason in list(made.failed.items())[:10]:
        print(f"not captured: {request_id}: {reason}")
    return 1 if made.failed else 0


def _verify(folder: Path) -> int:
    from sparksmith.cli.features import verify_features
    from sparksmith.distill.feature_store import FeatureStore

    store = FeatureStore.open(folder)
    verify_features(store)
    for fault in store.faults:
        print(f"damaged: {fault}")
    total = sum(shard.samples for shard in store.shards)
    if store.faults:
        print(
            f"{len(store)} of {total} samples are usable; delete the files named, and the same "
            "`capture` captures their samples again"
        )
        return 1
    print(f"{total} samples in {len(store.shards)} shards, as they were written")
    return 0


def _print_server(
    choice: TargetChoice,
    taps: tuple[int, ...],
    generated: "Generated",
    shared: str,
    hardware: str,
) -> int:
    from sparksmith.verify.extraction_server import extraction_plan
    from sparksmith.verify.loading import target_sizes
    from sparksmith.verify.target_ends import stream_of
    from sparksmith.verify.vllm_config import HARDWARE

    if hardware not in HARDWARE:
        raise UserError("--hardware", hardware, "is unknown", f"Use one of {', '.join(HARDWARE)}.")
    path = resolve(choice.name)
    plan = extraction_plan(
        taps,
        target_sizes(path, choice.trust_remote_code).num_layers,
        shared,
        longest=_longest(generated),
        stream=stream_of(path, choice.stream, choice.trust_remote_code),
        hardware=HARDWARE[hardware],
    )
    print(plan.command(path))
    for name, reason in plan.reasons.items():
        _say(f"{name}: {reason}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
