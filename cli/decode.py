"""`sparksmith decode`: one answer on the terminal, and which of its tokens were drafted."""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from sparksmith.cli.answer import LEGENDS, PICTURES, STYLES, AnswerPrinter, Marks, marks_for
from sparksmith.cli.draft_choice import (
    DRAFT_TEMPERATURE,
    NGRAM,
    NOTHING,
    DraftTemperature,
    DraftTopP,
    MinSurvival,
    NumTokens,
    bind_draft,
    check_choice,
    drafting_of,
    load,
    num_tokens_of,
    read_draft_config,
    stream_of,
)
from sparksmith.cli.endpoint import EndpointChoice, EndpointModel, EndpointUrl, open_endpoint
from sparksmith.cli.errors import INTERRUPTED
from sparksmith.cli.target import (
    Device,
    Dtype,
    OpenTarget,
    TargetChoice,
    Threads,
    TrustRemoteCode,
    open_target,
)

if TYPE_CHECKING:
    from sparksmith.cli.evaluating import Drafting
    from sparksmith.draft.model import DSparkDraft
    from sparksmith.draft.proposal import Drafter
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.decode import DecodeSettings
    from sparksmith.verify.response import DecodeResult

EXAMPLE = 'sparksmith decode "Write a function that reverses a list." --draft runs/draft/best'
DECODING = "Decoding"


def decode(
    prompt: Annotated[str, typer.Argument(help="What to ask the target.")],
    draft: Annotated[
        str,
        typer.Option(help="Folder of a draft, `ngram` for prompt lookup, or `none` for neither."),
    ] = NGRAM,
    target: Annotated[
        str | None,
        typer.Option(
            help="A transformers folder, a name on the Hub, `embedded` or `k3-mini`.",
            show_default="embedded",
            rich_help_panel="Target",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=DECODING)
    ] = 0.7,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=DECODING)] = 0.95,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=DECODING)] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(help="The longest answer.", rich_help_panel=DECODING)
    ] = 256,
    num_tokens: NumTokens = None,
    draft_temperature: DraftTemperature = DRAFT_TEMPERATURE,
    draft_top_p: DraftTopP = 1.0,
    min_survival: MinSurvival = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.", rich_help_panel=DECODING)] = 0,
    marks: Annotated[
        Marks | None,
        typer.Option(help="How drafted tokens are shown (default: as the terminal can)."),
    ] = None,
    endpoint: EndpointUrl = None,
    model: EndpointModel = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Stream one answer, and show which of its tokens were drafted.

    The answer goes to stdout, the legend and the figures to stderr.

    Ctrl-C ends it with the figures so far.
    """
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.decode import DecodeSettings

    if endpoint is not None:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        server = EndpointChoice(url=endpoint, model=model)
        return stream_live(server, prompt, (sampling, max_new_tokens, seed), marks)
    config = read_draft_config(draft)
    settings = DecodeSettings(
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        max_new_tokens=max_new_tokens,
        num_tokens=num_tokens_of(num_tokens, config),
        seed=seed,
    )
    drafting = drafting_of((draft_temperature, draft_top_p, min_survival), config, device)
    choice = TargetChoice(
        name=target or "embedded",
        dtype=dtype,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        stream=stream_of(draft),
    )
    check_choice(config, choice, draft)
    loaded = load(draft)
    opened = open_target(choice, taps=config.target_layer_ids if config else (), identify=False)
    drafter = make_drafter(opened, draft, loaded, settings, drafting)
    return stream(opened, drafter, prompt, settings, marks)


def make_drafter(
    opened: OpenTarget,
    name: str,
    draft: "DSparkDraft | None",
    settings: "DecodeSettings",
    drafting: "Drafting",
) -> "Drafter | None":
    """The drafter of this request; None for plain decoding. UserError where the draft is unfit."""
    from sparksmith.cli.evaluating import drafter_maker

    if name == NOTHING:
        return None
    if draft is not None:
        bind_draft(draft, opened.target, name)
    return drafter_maker(opened.target, draft, drafting)(settings.sampling, settings.seed)


def stream(
    opened: OpenTarget,
    drafter: "Drafter | None",
    prompt: str,
    settings: "DecodeSettings",
    marks: Marks | None,
) -> int:
    """Print the answer and its figures; the exit code is 130 when Ctrl-C ended it."""
    from rich.console import Console

    from sparksmith.verify.decode import stream_decode
    from sparksmith.verify.loading import render_prompt
    from sparksmith.verify.response import Step, collect

    out, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    marks = marks or marks_for(out)
    prompt_ids = render_prompt(opened.tokenizer, [{"role": "user", "content": prompt}])
    coming = stream_decode(opened.target, drafter, prompt_ids, settings)
    if marks is not Marks.NONE:
        notes.print(LEGENDS[marks])
    steps: list[Step] = []
    printer = AnswerPrinter(out, opened.tokenizer, marks)
    interrupted = False
    start = time.perf_counter()
    try:
        for step in coming:
            steps.append(step)
            printer.add(step.tokens, step.draft_kept)
    except KeyboardInterrupt:
        interrupted = True
    printer.finish()
    notes.print(figures(collect(steps), time.perf_counter() - start), soft_wrap=True)
    return INTERRUPTED if interrupted else 0


def stream_live(
    choice: EndpointChoice,
    prompt: str,
    how: "tuple[Sampling, int, int]",
    marks: Marks | None,
) -> int:
    """The same from a running server: a piece of several tokens had drafted ones; the figures are
    the server's own, by step."""
    from rich.console import Console
    from rich.text import Text

    from sparksmith.draft.errors import UserError
    from sparksmith.eval.live import LiveSettings, live_result
    from sparksmith.verify.endpoint import RequestError

    out, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    shown = marks or marks_for(out)
    sampling, max_new_tokens, seed = how
    settings = LiveSettings(sampling=sampling, max_new_tokens=max_new_tokens, seed=seed)

    def show(text: str, tokens: int) -> None:
        if shown is Marks.NONE:
            out.file.write(text)
        else:
            text = text.translate(PICTURES)
            drafted = tokens > 1 and bool(text)
            if drafted and shown is Marks.BRACKETS:
                text = f"[{text}]"
            style = STYLES.get(shown, "") if drafted else ""
            out.print(Text(text, style=style), end="", soft_wrap=True)
        out.file.flush()

    with ExitStack() as stack:
        server, facts = open_endpoint(choice, stack)
        if shown is not Marks.NONE:
            notes.print(f"{LEGENDS[shown]}; by pieces of {facts.engine} at {facts.url}")
        start = time.perf_counter()
        try:
            result = live_result(server, prompt, settings, show)
        except RequestError as error:
            raise UserError(
                "--endpoint", facts.url, f"fails: {error}", "Look at its log."
            ) from None
        except KeyboardInterrupt:
            out.file.write("\n")
            return INTERRUPTED
    out.file.write("\n")
    out.file.flush()
    notes.print(figures(result, time.perf_counter() - start), soft_wrap=True)
    return 0


def figures(result: "DecodeResult", seconds: float) -> str:
    """One line: tokens, steps, acceptance length with and without the bonus token, speed.

    Acceptance length is 1 + accepted / steps (bonus counted); tokens/s leave out the first token,
    which comes from the prefill.
    """
    count, steps = len(result.token_ids), len(result.accepted)
    if not steps:
        return f"{count} tokens, {result.finish_reason}, {seconds:.1f} s"
    accepted = sum(result.accepted) / steps
    parts = [f"{count} tokens in {steps} steps ({result.finish_reason})"]
    if sum(result.drafted):
        parts.append(f"acceptance length {1 + accepted:.2f} with the bonus, {accepted:.2f} without")
        if result.draft_seconds:
            drafting = sum(result.draft_seconds) / max(result.decode_seconds, 1e-9)
            parts.append(f"drafting {drafting:.0%} of the time")
    parts.append(f"{(count - 1) / max(result.decode_seconds, 1e-9):.1f} tokens/s")
    parts.append(f"first token after {result.first_token_seconds:.2f} s")
    return "; ".join(parts)
