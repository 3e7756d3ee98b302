"""Follow a training with your own callback, and end it."""

# %% Any object with some of the methods `on_step`, `on_epoch`, `on_evaluation` and `on_end`.
import tempfile

import patchloom


class Follow(patchloom.Callback):
    """Collects the loss, and ends the run when val is good enough."""

    def __init__(self, enough):
        self.enough, self.losses = enough, []

    def on_step(self, state):
        self.losses.append(state.values()["loss"])

    def on_evaluation(self, state):
        print(f"epoch {state.epoch} of {state.epochs}: top-1 {state.metrics['top1']:.1f} %")
        if state.metrics["top1"] >= self.enough:
            state.stop()

    def on_end(self, state):
        print(f"ended after {state.step} of {state.total_steps} steps")


# %%
with tempfile.TemporaryDirectory() as folder:
    tiny = {"model.options.depth": 1, "model.options.dim": 32, "model.options.patch_size": 4}
    follow = Follow(enough=1)
    run = patchloom.train(
        "shapes:count=64,size=32", model="resmlp_s12", callbacks=[follow], epochs=5, set=tiny, out=f"{folder}/run",
        device="cpu", workers=0,
    )  # fmt: skip
    print(run.outcome.ended, f"with a loss of {follow.losses[-1]:.2f}")
