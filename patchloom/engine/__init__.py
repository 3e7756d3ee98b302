"""The training loop and what it needs; it knows no method by name.

`loop.train` is the way in, `run.Run` what it is told. Optimisers and schedules are in `optimisation`, the average
of the weights in `ema`, ranks and precision in `distribution`, what is written while training in `records`,
and what an exact resume needs in `state`.
"""
