"""`megarl accept`: stages that test a machine or cluster before the first run, and a bundle of the results.

How to write a stage
--------------------
A stage is a module in `stages/` with one function, listed in `catalogue.py`:

    def run(context: StageContext) -> None:
        context.doing("all_reduce in the tensor-parallel group")   # a stage that hangs fails with this text
        context.at_most("attention bfloat16 forward", 3e-3, limit=1e-2, unit="relative error", cause="...")
        context.at_least("all_reduce tp", 41.0, limit=30.0, unit="GB/s")
        context.equal("checksum of version 2", digest, expected)
        context.figure("communicator memory", 412.0, unit="MiB")   # reported, no limit
        context.not_run("transport device", "engine and trainer share a device")

- `run` runs in a child process (`stage_main.py`), which may import torch, megarl's platform and Megatron. At its time
  limit the process and all its descendants are killed. Each check is written to disk at once.
- A stage fails if a check fails or `run` raises. The reason is the `cause` of the first failed check: one line that
  names the kernel, rank pair, tensor or tag.
- `context.folder` is the stage's folder. Its files go into the bundle, except files over 1 MiB; logs keep their last
  256 KiB. `context.shared` is the folder of all stages (`tiny_families.py` writes the tiny models there). It is not in the
  bundle.
- Rank processes: `ranks.py` starts a class in one process per rank, on this machine or with Ray on all nodes.
- The same code runs on every kind of device. `megarl.platform` has the differences between the kinds.
- `context.tiny` selects the sizes: True on a CPU, where all stages together take two to three minutes on two cores.
"""
