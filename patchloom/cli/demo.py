"""`patchloom demo`: the main job on embedded data, from nothing."""


def demo() -> None:
    """Build networks, print what they cost, and classify a drawn picture with random weights."""
    import torch
    from PIL import Image, ImageDraw
    from torchvision.transforms.v2.functional import to_image

    from patchloom.cli.models import models
    from patchloom.models.registry import create_model

    models(["resmlp_s12", "mixer_b16", "smlpnet_t", "deit_s", "cait_xxs24", "patchconvnet_s60", "deit3_s"])
    picture = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(picture).ellipse((50, 50, 174, 174), fill="crimson")
    torch.manual_seed(0)
    network = create_model("resmlp_s12", num_classes=10).eval()
    mean, std = torch.tensor(network.pixel_mean), torch.tensor(network.pixel_std)
    pixels = (to_image(picture).float() / 255 - mean[:, None, None]) / std[:, None, None]
    with torch.inference_mode():
        probabilities = network(pixels[None]).softmax(dim=-1)[0]
    top = probabilities.topk(3)
    answers = ", ".join(f"class {i} {p:.1%}" for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True))
    print(f"resmlp_s12 with random weights on a red disc: {answers}")
