"""The training loop and its parts. Nothing here names a training method.

`loop.train` is the entry point and `run.Run` its argument. Optimizers and schedules are in `optimization`, weight
averages in `ema` and `epoch_average`, ranks and precision in `distribution`, metrics output in `records`, and the state
for an exact resume in `state`.
"""
