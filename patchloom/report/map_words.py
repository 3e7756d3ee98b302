"""What a page says of its maps, by their kind."""

_SIGNED = "Red patches speak for the class, blue ones against it"
ABOUT_MAPS = {
    "evidence": f"{_SIGNED}: each patch's own logit, compared with the other classes. Their mean is the logit of the "
    "picture.",
    "contribution": f"{_SIGNED}, compared with the other classes: what each patch gives to the logit in the last layer "
    "in which the class token reads patches.",
    "attention": "Red patches are read most by the token of the class: the weights of its attention.",
    "share": "Red patches give most to the vector that pictures are compared by.",
    "": "This network tells no places of a picture apart in its answer, so there is no map.",
}
