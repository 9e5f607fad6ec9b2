"""Is the autoregressive baseline at least as fast as transformers' generate?

A speed-up is only worth what its baseline is worth. The same model, greedy, one stream, the same
number of tokens, in alternation; the model as sparksmith prepares it, and as transformers loads it.

    python benchmarks/baseline.py PATH_OF_A_MODEL --tokens 64 --repeats 5
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.loading import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    target, _ = load_target(options.model, dtype=options.dtype)
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=target.dtype).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(10, target.vocab_size, (options.prompt_tokens,), generator=generator)
    settings = DecodeSettings(
        sampling=Sampling(temperature=0.0),
        max_new_tokens=options.tokens,
        stop_token_ids=frozenset(),
    )

    def run_generate(model) -> list[int]:
        output = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            min_new_tokens=options.tokens,
            max_new_tokens=options.tokens,
        )
        return output[0, len(prompt) :].tolist()

    arms = {
        "sparksmith baseline": lambda: decode(target, None, prompt.tolist(), settings).token_ids,
        "generate, same model": lambda: run_generate(target.model),
        "generate, as loaded": lambda: run_generate(plain),
    }
    wall: dict[str, list[float]] = {name: [] for name in arms}
    busy: dict[str, list[float]] = {name: [] for name in arms}
    texts = {}
    for repeat in range(options.repeats + 1):
        for name, run in arms.items():
            start, start_busy = time.perf_counter(), time.process_time()
            texts[name] = run()
            if repeat:  # the first round warms up
                wall[name].append(time.perf_counter() - start)
                busy[name].append(time.process_time() - start_busy)
    for name in arms:
        print(
            f"{name:22} {options.tokens / statistics.median(wall[name]):6.2f} tokens/s "
            f"(prefill counted); the baseline is {_ratio(wall, name)} times as fast, "
            f"by processor time {_ratio(busy, name)}"
        )
    same = len({tuple(text) for text in texts.values()}) == 1
    print(f"{target.dtype}, {options.threads} threads, {options.repeats} repeats, {same=}")


def _ratio(seconds: dict[str, list[float]], name: str) -> str:
    """Median, least and largest ratio of the rounds."""
    ours, theirs = seconds["sparksmith baseline"], seconds[name]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
