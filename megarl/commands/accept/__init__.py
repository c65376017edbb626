"""`megarl accept`: stages that prove a machine or cluster before the first run, and a bundle to send back.

How to write a stage
--------------------
A stage is a module in `stages/` with one function, listed in `catalogue.py`:

    def run(context: Context) -> None:
        context.doing("all_reduce in the tensor-parallel group")   # a stage that hangs fails with this text
        context.at_most("attention bfloat16 forward", 3e-3, limit=1e-2, unit="relative error", cause="...")
        context.at_least("all_reduce tp", 41.0, limit=30.0, unit="GB/s")
        context.equal("checksum of version 2", digest, expected)
        context.figure("communicator memory", 412.0, unit="MiB")   # reported, no limit
        context.not_run("transport device", "engine and trainer share a device")

- `run` is called in a process of its own (`stage_main.py`), which may import torch, Megarl's platform and Megatron. The
  process is killed, with everything that it started, when its time is over. Checks are on disk as soon as they are made.
- A stage fails where a check fails or `run` raises. The reason is the `cause` of the first failed check: one line that
  names the kernel, rank pair, tensor or tag.
- `context.folder` is the stage's folder: everything written there goes into the bundle, except files over 1 MiB, of
  which logs keep their last 256 KiB. `context.shared` is the folder of all stages (`families.py` writes the tiny
  models there); it is not part of the bundle.
- Rank processes: `ranks.py` starts a class in one process per rank, on this machine or over Ray on all nodes.
- The same code runs on every kind of device. What differs between kinds is asked of `megarl.platform`.
- Sizes come from `context.tiny`: True on a CPU, where all stages together take about a minute.
"""
