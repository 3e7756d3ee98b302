"""Words a second of cached decoding on a CPU: ResMLP, the Transformer in the same frame, and a Marian of its size.

    python benchmarks/decoding.py                    # one thread: greedy and beam 4, batch 1 and 32, 20 and 100 words
    python benchmarks/decoding.py --sentences 0      # without the 1,000 sentences

Random weights and words (32,768), 6 + 6 layers of 512 / 2048. Sources are as long as what is written, and nothing ends
before its length; encoding counts too. Systems take turns, best of the rounds. The 1,000 sentences of 10 to 30 words,
the longest first, in batches of 32 with beam 4, are translated in a process a system, so that a peak of memory is its
own: `weights` is the peak when the network stands and nothing is translated, `peak` that at the end.
Marian is transformers' `MarianMTModel.generate`, left out where transformers is not installed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from peak import peak_mib

from patchloom.models.beam_search import beam_search
from patchloom.models.seq2seq import create_seq2seq
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD, UNKNOWN

WORDS = 32_768
OURS = {"ResMLP": "translation_resmlp_6", "Transformer": "translation_transformer_base"}
Translate = Callable[[torch.Tensor, int, int], int]  # source, words to write, beams → words written


def make_system(name: str) -> Translate:
    torch.manual_seed(0)
    return make_marian() if name == "Marian" else make_ours(OURS[name])


def make_ours(name: str) -> Translate:
    network = create_seq2seq(name, vocabulary=WORDS).eval()

    def translate(source: torch.Tensor, words: int, beams: int) -> int:
        found = beam_search(network, source, beams=beams, max_length_b=words - 1)  # and EOS
        return sum(len(hypotheses[0].tokens) + 1 for hypotheses in found)

    return translate


def make_marian() -> Translate:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import MarianConfig, MarianMTModel

    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    sizes = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "max_position_embeddings": 256}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    hidden = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "relu"}
    config = MarianConfig(
        vocab_size=WORDS, decoder_vocab_size=WORDS, scale_embedding=True, forced_eos_token_id=None,
        **special, **sizes, **heads, **hidden,
    )  # fmt: skip
    model = MarianMTModel(config).eval()

    def translate(source: torch.Tensor, words: int, beams: int) -> int:
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            written = model.generate(
                source,
                attention_mask=source.ne(PAD).long(),
                num_beams=beams,
                do_sample=False,
                min_new_tokens=words,
                max_new_tokens=words,
                length_penalty=0.6,
            )
        return written[:, 1:].numel()

    return translate


def some_words(sentences: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(UNKNOWN + 1, WORDS, (sentences, length), generator=generator)


def words_a_second(systems: dict[str, Translate], sentences: int, length: int, beams: int, rounds: int) -> list[float]:
    """Of each system, the best round; those that write fewer words than asked for are refused."""
    best = dict.fromkeys(systems, 0.0)
    for number in range(rounds):
        source = some_words(sentences, length, seed=number)
        for name, translate in systems.items():
            start = time.perf_counter()
            written = translate(source, length, beams)
            best[name] = max(best[name], written / (time.perf_counter() - start))
            assert written == sentences * length, f"{name} wrote {written} words instead of {sentences * length}"
    return list(best.values())


def translate_many(name: str, count: int) -> dict[str, float]:
    translate = make_system(name)
    weights = peak_mib()
    lengths = torch.randint(10, 31, (count,), generator=torch.Generator().manual_seed(1)).sort(descending=True).values
    start, written = time.perf_counter(), 0
    for number, part in enumerate(lengths.split(32)):
        longest = int(part[0])
        source = some_words(len(part), longest, seed=number)
        source[torch.arange(longest) >= part[:, None]] = PAD
        written += translate(source, longest, 4)
    seconds = time.perf_counter() - start
    return {"words_s": written / seconds, "seconds": seconds, "weights_mib": weights, "peak_mem_mib": peak_mib()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=1000, help="of the run with peak memory; 0: none")
    parser.add_argument("--only", choices=(*OURS, "Marian"), help="the many sentences with one system, for its memory")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.only:
        print(json.dumps(translate_many(given.only, given.sentences)))
        return

    names = [*OURS, "Marian"]
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: Marian is left out")
        names.remove("Marian")
    systems = {name: make_system(name) for name in names}
    print(f"{'words/s':<30}" + "".join(f"{name:>14}" for name in names) + f"{'ResMLP/Transf.':>18}", flush=True)
    for beams in (1, 4):
        for sentences in (1, 32):
            for length in (20, 100):
                speeds = words_a_second(systems, sentences, length, beams, given.rounds)
                setting = f"beam {beams}, batch {sentences}, {length} words"
                numbers = "".join(f"{speed:14,.1f}" for speed in speeds)
                print(f"{setting:<30}{numbers}{speeds[0] / speeds[1]:18.2f}", flush=True)
    for name in names if given.sentences else ():
        line = [sys.executable, __file__, "--only", name, "--threads", f"{given.threads}"]
        line += ["--sentences", f"{given.sentences}"]
        done = json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
        print(
            f"{given.sentences:,} sentences, beam 4, {name:<12}{done['words_s']:8,.1f} words/s {done['seconds']:7.1f} s"
            f"   weights {done['weights_mib']:6,.0f} MiB   peak {done['peak_mem_mib']:6,.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
