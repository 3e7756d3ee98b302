"""What leaves the lab: export, prediction, serving."""
