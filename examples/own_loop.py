"""Write your own training loop with patchloom's parts: data, batches, objective, optimizer, schedule, average."""

# %%
import torch

import patchloom
from patchloom.evaluation.classification import evaluate
from patchloom.recipes import override

torch.manual_seed(0)
device = torch.device("cpu")
data = patchloom.open_data("shapes:count=128,size=32")  # or a folder, arrays, a Dataset …
changes = {"schedule.epochs": 3, "schedule.warmup_epochs": 1, "optim.batch_size": 16, "augment.repeats": 1}
recipe = override(patchloom.get_recipe("small_images"), changes)
model = patchloom.create_model(
    "resmlp_s12", num_classes=len(data.classes), image_size=32, patch_size=4, depth=2, dim=48
).to(device)

# %% Batches depend on seed, epoch and step alone: `train_batches.epoch(epoch, start_step)` continues anywhere.
train_batches, _ = patchloom.make_loader(
    data.train, recipe.augment, 32, batch_size=recipe.optim.batch_size, seed=0, device=device
)
val_batches = patchloom.make_evaluation_loader(data.val, 32, 1.0, batch_size=64, device=device)
objective = patchloom.ClassificationObjective(
    recipe.objective, recipe.augment, num_classes=len(data.classes), seed=0,
    pixel_mean=model.pixel_mean, pixel_std=model.pixel_std,
)  # fmt: skip
optimizer = patchloom.make_optimizer(model, recipe.optim)
schedule = patchloom.Schedule(recipe.optim, recipe.schedule, train_batches.steps_per_epoch)
average = patchloom.Ema(model, decay=0.99)

# %%
step = 0
for epoch in range(recipe.schedule.epochs):
    model.train()
    for number, batch in enumerate(train_batches.epoch(epoch)):
        patchloom.set_rates(optimizer, schedule.lr(step))
        values = objective(model, batch.to(device), epoch=epoch, step=number)
        optimizer.zero_grad()
        values["loss"].backward()
        optimizer.step()
        average.update(step)
        step += 1
    report = evaluate(average.model, val_batches.epoch(0), classes=data.classes.names)
    print(f"epoch {epoch + 1}  loss {values['loss']:.3f}  val {report}")
