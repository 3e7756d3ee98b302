"""Forward passes on the CPU against timm's: ResMLP-S12 and Mixer-B/16, plain and absorbed, taking turns.

python benchmarks/forward.py          # the same as the `patchloom bench` line it prints
"""

import subprocess
import sys

COMMAND = (
    "bench resmlp_s12 timm:resmlp_12_224 mixer_b16 timm:mixer_b16_224 --absorb --device cpu --batch 1,8 --seconds 6"
)

print(f"patchloom {COMMAND}")
sys.exit(subprocess.run([sys.executable, "-m", "patchloom.cli", *COMMAND.split()]).returncode)
