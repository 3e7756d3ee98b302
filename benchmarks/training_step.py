"""One training step (forward, backward, AdamW) of patchloom's and timm's ResMLP, in turns, on whatever device there is.

    python benchmarks/training_step.py                                   # CPU, eager, ResMLP-S12, batch 16
    python benchmarks/training_step.py --device cuda --compile --batch 256 --depth 24

Prints milliseconds a step (median) and, on a GPU, the peak memory of each, as a table and as one line of JSON.
"""

import argparse
import json
import time

import timm
import torch

import patchloom


def make_step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, compiled: bool):
    device = images.device
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return torch.nn.functional.cross_entropy(model(x), y)

    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(images, labels).backward()
        optimizer.step()

    return step


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--depth", type=int, default=12, choices=(12, 24))
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    images = torch.randn(arguments.batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (arguments.batch,), device=device)
    makers = {
        "patchloom": lambda: patchloom.create_model(f"resmlp_s{arguments.depth}"),
        "timm": lambda: timm.create_model(f"resmlp_{arguments.depth}_224"),
    }
    times: dict[str, list[float]] = {name: [] for name in makers}
    peaks: dict[str, float] = {}
    steps = {}
    for name, make in makers.items():
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # what the networks before it hold
        steps[name] = make_step(make(), images, labels, arguments.compile)
        for _ in range(3):
            steps[name]()
        synchronise(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            steps[name]()
            synchronise(device)
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            synchronise(device)
            before = time.perf_counter()
            for _ in range(5 if device.type == "cuda" else 1):
                step()
            synchronise(device)
            times[name].append((time.perf_counter() - before) / (5 if device.type == "cuda" else 1))
    result = {name: {"ms": sorted(of)[len(of) // 2] * 1e3, "peak_mib": peaks.get(name)} for name, of in times.items()}
    for name, row in result.items():
        peak = "" if row["peak_mib"] is None else f"   peak {row['peak_mib']:.0f} MiB"
        print(f"{name:10s} {row['ms']:8.1f} ms a step, {arguments.batch / row['ms'] * 1e3:8.1f} images/s{peak}")
    print(f"patchloom is {result['timm']['ms'] / result['patchloom']['ms']:.2f}× as fast")
    print(json.dumps({"torch": torch.__version__, **vars(arguments), **result}))


if __name__ == "__main__":
    main()
