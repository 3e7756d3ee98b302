"""Build a network, look at its cost, use it at another resolution, absorb what training needed."""

import torch

import patchloom

model = patchloom.create_model("resmlp_s12", num_classes=10, image_size=64, depth=4).eval()
images = torch.randn(2, 3, 64, 64)

print("logits  ", tuple(model(images).shape))
print("tokens  ", tuple(model.features(images).shape))
print("cost    ", patchloom.cost(model))

larger = model.at_resolution(96)
print("at 96 px", tuple(larger(torch.randn(2, 3, 96, 96)).shape))

lean = patchloom.absorb(model)
with torch.no_grad():
    print("absorbed", f"largest difference {(lean(images) - model(images)).abs().max():.1e}")

vit = patchloom.create_model("deit_ti", image_size=64, depth=2).eval()
with torch.no_grad(), patchloom.record_attention(vit) as maps:
    vit(images)
for layer, (weights,) in maps.items():
    print(layer, tuple(weights.shape))  # images, heads, queries, keys
