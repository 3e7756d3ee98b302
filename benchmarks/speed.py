"""patchloom beside its peers on one device, forward and training, with the same weights on the same images.

    python benchmarks/speed.py                                   # a GPU: bfloat16, batch 256; a CPU: float32, batch 8
    python benchmarks/speed.py resmlp_s24 cait_s24 --kind training --out speed.json
    python benchmarks/speed.py --warm 6 --kind training          # compile in six processes first, then measure alone

The peer is timm's network, or the authors' layout where timm has none (benchmarks/peers.py). Networks take turns, a
round each, so that noise hits all alike. Outputs are compared first; a row whose outputs differ is not measured.
Shares are of the product of two matrices of 8,192, measured in the same run.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import peers
import timm
import torch
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from torch import Tensor, nn

import patchloom
from patchloom.models.compiled import CompiledByBlock
from patchloom.models.cost import cost
from patchloom.models.cuda_graphs import CapturedNetwork
from patchloom.models.network import absorb
from patchloom.models.pretrained.names import named_as
from patchloom.training.assemble import compiles_by_block

PEERS: dict[str, Callable[[], nn.Module]] = {
    "resmlp_s12": lambda: timm.create_model("resmlp_12_224"),
    "resmlp_s24": lambda: timm.create_model("resmlp_24_224"),
    "resmlp_b24": lambda: MlpMixer(  # timm's own B24 has patches of 8 pixels
        num_blocks=24, embed_dim=768, mlp_ratio=4, block_layer=partial(ResBlock, init_values=1e-6), norm_layer=Affine
    ),
    "mixer_b16": lambda: timm.create_model("mixer_b16_224"),
    "deit_s": lambda: timm.create_model("deit_small_patch16_224"),
    "deit_b": lambda: timm.create_model("deit_base_patch16_224"),
    "cait_s24": lambda: timm.create_model("cait_s24_224"),
    "smlpnet_t": peers.SMLPNet,
    "patchconvnet_s60": peers.PatchConvNet,
}
FORMS = ("peer", "peer compiled", "patchloom", "patchloom compiled")
AGREE = 1e-2  # of the norm of the outputs in float32; or twice as much as the peer, rounded as well, where that is more
Work = Callable[[], Any]


def main() -> None:
    """One row per network, form and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(PEERS))
    parser.add_argument("--kind", choices=("forward", "training", "both"), default="both")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forms", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--warm", type=int, default=0, help="processes that compile everything before it is measured")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kinds = ("forward", "training") if given.kind == "both" else (given.kind,)
    if given.warm:
        works = [(name, kind, form) for kind in kinds for name in given.networks for form in given.forms]
        warm(given.warm, works, given.batch)
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    device, dtype, batch = ("cuda", torch.bfloat16, 256) if cuda else ("cpu", torch.float32, 8)
    batch = given.batch or batch
    ceiling = matmul_ceiling(device, dtype)
    about = {"torch": torch.__version__, "timm": timm.__version__, "device": device, "batch": batch}
    about |= {"name": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores", "ceiling_tflops": ceiling}
    print(json.dumps(about), flush=True)
    rows = []
    for name in given.networks:
        images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)
        for kind in kinds:
            forms = dict(forms_of(name, kind, given.forms))
            rows += measured(name, kind, forms, images, dtype, given.rounds, ceiling)
            if given.out:
                given.out.write_text(json.dumps({**about, "rows": rows}, indent=1))


def warm(processes: int, works: Sequence[tuple[str, str, str]], batch: int | None) -> None:
    """Fill torch's cache of compiled code, each network and form in a process of its own."""

    def compiled(work: tuple[str, str, str]) -> None:
        name, kind, form = work
        command = [sys.executable, __file__, name, "--kind", kind, "--forms", form, "--rounds", "0"]
        command += ["--batch", str(batch)] if batch else []
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"compiled {name}, {kind}, {form}" if not done.returncode else done.stderr[-500:], flush=True)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(compiled, [work for work in works if work[2].endswith("compiled")]))


def same_weights(name: str) -> tuple[nn.Module, nn.Module]:
    """patchloom's network and its peer, which compute the same."""
    torch.manual_seed(0)
    ours, theirs = patchloom.create_model(name), PEERS[name]()
    with torch.no_grad():
        for parameter in ours.parameters():  # what starts at 0 or nearly so would hide what a branch computes
            parameter.add_(0.02 * torch.randn_like(parameter))
    state, _ = named_as(ours, "authors" if name in ("smlpnet_t", "patchconvnet_s60") else "timm")  # type: ignore[arg-type]
    theirs.load_state_dict(state)
    return ours, theirs


def forms_of(name: str, kind: str, asked: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Label → network: for a forward pass in eval mode, patchloom's absorbed and recorded; for training as it is.

    The peer is compiled as a whole, as one would; patchloom as a run of its own would be, and recorded.
    """
    for label in asked:
        ours, theirs = same_weights(name)
        network = theirs if label.startswith("peer") else absorb(ours) if kind == "forward" else ours  # type: ignore[arg-type]
        network.train(kind == "training")
        if label == "peer compiled":
            network = torch.compile(network)  # type: ignore[assignment]
        elif label == "patchloom compiled":
            by_block = compiles_by_block(network, captured=True)
            network = CapturedNetwork(CompiledByBlock(network) if by_block else torch.compile(network))  # type: ignore[arg-type]
        elif label == "patchloom" and kind == "forward":
            network = CapturedNetwork(network)
        yield label, network


def measured(
    name: str, kind: str, forms: dict[str, nn.Module], images: Tensor, dtype: torch.dtype, rounds: int, ceiling: float
) -> list[dict[str, Any]]:
    """A row per form: images per second, spread, share of the ceiling, memory, seconds to the first result."""
    cuda = images.is_cuda
    works: dict[str, Work] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected = in_float32(name, images) if kind == "forward" else None
    allowed = AGREE
    for label, network in forms.items():
        network.to(images.device)
        work = forward_of(network, images, dtype) if kind == "forward" else step_of(network, images, dtype)
        row: dict[str, Any] = {"network": name, "kind": kind, "form": label}
        _settle(cuda, reset=True)
        held, begun = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
        try:
            found = work()
        except Exception as error:  # one form that fails must not lose the others
            print(json.dumps(row | {"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            continue
        _settle(cuda)
        row["first_s"] = round(time.perf_counter() - begun, 1)
        expected = found if expected is None else expected
        row["difference"] = float((found - expected).norm() / expected.norm())
        allowed = max(allowed, 2 * row["difference"]) if label.startswith("peer") else allowed
        if kind == "forward" and not row["difference"] <= allowed:
            print(json.dumps(row | {"error": "outputs differ"}), flush=True)
            continue
        for _ in range(3):
            work()
        _settle(cuda)
        # From the first call on: a replay of what was recorded allocates nothing any more.
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2) if cuda else None
        works[label], rows[label] = work, row
    if not rounds:
        return []
    took: dict[str, list[float]] = {label: [] for label in works}
    for _ in range(rounds):
        for label, work in works.items():
            took[label].append(seconds_of(work, cuda))
    adds = cost(patchloom.create_model(name), 224).multiply_adds
    for label, row in rows.items():
        median, spread = statistics.median(took[label]), (min(took[label]), max(took[label]))
        row["images_per_s"] = round(len(images) / median, 1)
        row["spread"] = [round(len(images) / s, 1) for s in reversed(spread)]
        work_flop = 2 * adds * len(images) * (1 if kind == "forward" else 3)
        row["share"] = round(100 * work_flop / median / 1e12 / ceiling, 1)
        print(json.dumps(row), flush=True)
    for network in forms.values():
        network.cpu()
    forms.clear()
    works.clear()
    gc.collect()
    torch.compiler.reset()
    return list(rows.values())


def in_float32(name: str, images: Tensor) -> Tensor:
    """What the peer gives without rounding to two bytes: every form is compared with it."""
    _, theirs = same_weights(name)
    with torch.no_grad():
        found = theirs.eval().to(images.device)(images).float()
    theirs.cpu()
    return found


def forward_of(network: nn.Module, images: Tensor, dtype: torch.dtype) -> Work:
    """In `dtype` throughout, as one serves it."""
    network.to(dtype)
    shown = images.to(dtype)

    def work() -> Tensor:
        with torch.no_grad():
            found: Tensor = network(shown)
        return found.float()

    return work


def step_of(network: nn.Module, images: Tensor, dtype: torch.dtype) -> Work:
    """Forward, backward, AdamW; autocast as training does."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=images.is_cuda)
    labels = torch.arange(len(images), device=images.device) % 1000
    low = torch.autocast(images.device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()

    def work() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with low:
            loss = nn.functional.cross_entropy(network(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach().float().reshape(1)

    return work


def seconds_of(work: Work, cuda: bool) -> float:
    """Of one call, of about half a second of them."""
    _settle(cuda)
    begun = time.perf_counter()
    work()
    _settle(cuda)
    calls = max(1, min(50, round(0.4 / max(1e-4, time.perf_counter() - begun))))
    begun = time.perf_counter()
    for _ in range(calls):
        work()
    _settle(cuda)
    return (time.perf_counter() - begun) / calls


def matmul_ceiling(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a large product."""
    side = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = min(seconds_of(lambda: left @ right, device == "cuda") for _ in range(5))
    return round(2 * side**3 / best / 1e12, 2)


def _settle(cuda: bool, *, reset: bool = False) -> None:
    if cuda:
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
