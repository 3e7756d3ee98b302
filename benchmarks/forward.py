"""Forward passes on the CPU: each family beside timm's network, or the authors' layout, and ONNX Runtime.

    python benchmarks/forward.py                               # two threads, batch 1 and 8, every network
    python benchmarks/forward.py resmlp_s12 deit_s --clock cpu --threads 1 --batch 1
    python benchmarks/forward.py --dtype bfloat16              # where the processor multiplies it

The peer has patchloom's weights (benchmarks/peers.py for what timm lacks), ONNX Runtime runs patchloom's absorbed
network (needs onnx, onnxruntime and onnxscript; left out where they are not installed). Outputs are compared first,
and what differs is not measured. Systems take turns; a cell is the median of milliseconds per image with the least and
the most. `--clock cpu` counts processor seconds, which other work on the machine changes less; take one thread with it.
"""

import argparse
import importlib.util
import io
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import peers
import timm
import torch
from torch import Tensor, nn

import patchloom
from patchloom.models.network import Network, absorb
from patchloom.models.pretrained.conversion import converted

PEERS: dict[str, Callable[[], nn.Module]] = {
    "resmlp_s12": lambda: timm.create_model("resmlp_12_224"),
    "mixer_s16": lambda: timm.create_model("mixer_s16_224"),
    "mixer_b16": lambda: timm.create_model("mixer_b16_224"),
    "deit_s": lambda: timm.create_model("deit_small_patch16_224"),
    "cait_xxs24": lambda: timm.create_model("cait_xxs24_224"),
    "cait_s24": lambda: timm.create_model("cait_s24_224"),
    "smlpnet_t": peers.SMLPNet,
    "patchconvnet_s60": peers.PatchConvNet,
}
AUTHORS = ("smlpnet_t", "patchconvnet_s60")
AGREE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the norm of the outputs
Answer = Callable[[Tensor], Tensor]


def same_weights(name: str) -> tuple[Network, nn.Module]:
    """patchloom's network and its peer, which compute the same."""
    torch.manual_seed(0)
    # timm's Mixer has the exact GELU, the authors' that of tanh.
    ours = patchloom.create_model(name, **({"gelu": "exact"} if name.startswith("mixer") else {}))
    theirs = PEERS[name]()
    with torch.no_grad():
        for parameter in ours.parameters():  # what starts at 0 or nearly so would hide what a branch computes
            parameter.add_(0.02 * torch.randn_like(parameter))
    theirs.load_state_dict(converted(ours, "authors" if name in AUTHORS else "timm").state)
    return ours.eval(), theirs.eval()


def systems_of(name: str, dtype: torch.dtype, batch: int, threads: int, *, with_onnx: bool) -> dict[str, Answer]:
    """What answers, by name; the first is the peer."""
    ours, theirs = same_weights(name)
    lean = absorb(ours)
    found: dict[str, Answer] = {
        "peer": theirs.to(dtype),
        "patchloom": ours.to(dtype),
        "absorbed": lean.to(dtype),
    }
    if with_onnx:
        found["ONNX Runtime"] = onnx_session(lean, batch, threads)
    return found


def onnx_session(network: nn.Module, batch: int, threads: int) -> Answer:
    """The network as ONNX Runtime's, on so many threads."""
    import onnxruntime

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(network, (torch.zeros(batch, 3, 224, 224),), dynamo=True, verbose=False)
    assert program is not None
    program.save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Spinning threads of one system would take the cores from the next, which has its turn.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {given: images.numpy()})[0])


def measure(
    systems: dict[str, Answer], images: Tensor, clock: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds per image of every round, of those that agree with the first."""
    expected: Tensor | None = None
    agreeing = {}
    with torch.inference_mode():
        for name, answer in systems.items():
            found = answer(images).float()
            expected = found if expected is None else expected
            difference = float((found - expected).norm() / expected.norm())
            if difference <= AGREE[images.dtype]:
                agreeing[name] = answer
            else:
                print(f"{name}: outputs differ by {difference:.1e} of their norm; not measured", flush=True)
        taken: dict[str, list[float]] = {name: [] for name in agreeing}
        for number in range(rounds + 1):
            for name, answer in agreeing.items():
                begun = clock()
                answer(images)
                if number:  # the first warms up
                    taken[name].append(1000 * (clock() - begun) / len(images))
    return taken


def processor_has_bfloat16() -> bool:
    """Whether its flags name it; without, products in bfloat16 are emulated."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def main() -> None:
    """One row per network and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(PEERS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-onnx", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    if dtype == torch.bfloat16 and not processor_has_bfloat16():
        print("this processor has neither avx512_bf16 nor amx_bf16: bfloat16 is emulated, and slower than float32")
    needed = ("onnx", "onnxruntime", "onnxscript")
    with_onnx = dtype == torch.float32 and not given.no_onnx and all(map(importlib.util.find_spec, needed))
    about = (
        f"torch {torch.__version__}, timm {timm.__version__}, {given.dtype}, threads: {given.threads}, {given.clock}"
    )
    print(f"{about}\n| ms per image | batch | peer | patchloom | absorbed | ONNX Runtime | peer / patchloom |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in given.networks:
        for batch in given.batch:
            images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(dtype)
            systems = systems_of(name, dtype, batch, given.threads, with_onnx=with_onnx)
            taken = measure(systems, images, clock, given.rounds)
            cells = [
                f"{statistics.median(ms):.1f} ({min(ms):.1f} … {max(ms):.1f})" if (ms := taken.get(system)) else "–"
                for system in ("peer", "patchloom", "absorbed", "ONNX Runtime")
            ]
            ratio = (
                statistics.median(taken["peer"]) / statistics.median(taken["patchloom"]) if "patchloom" in taken else 0
            )
            print(f"| {name} | {batch} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
