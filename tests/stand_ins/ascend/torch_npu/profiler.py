"""torch_npu.profiler, limited to the parts that megarl calls."""

from torch_npu import called


class ProfilerActivity:
    CPU, NPU = "cpu", "npu"


class ProfilerLevel:
    Level0, Level1, Level2, Level_none = "Level0", "Level1", "Level2", "Level_none"


class AiCMetrics:
    PipeUtilization, ArithmeticUtilization, Memory, MemoryL0 = (
        "PipeUtilization",
        "ArithmeticUtilization",
        "Memory",
        "MemoryL0",
    )
    MemoryUB, ResourceConflictRatio, L2Cache = "MemoryUB", "ResourceConflictRatio", "L2Cache"
    MemoryAccess, AiCoreNone = "MemoryAccess", "AiCoreNone"


class ExportType:
    Db, Text = "Db", "Text"


class _ExperimentalConfig:
    def __init__(
        self,
        profiler_level=0,
        aic_metrics=1,
        l2_cache=False,
        msprof_tx=False,
        mstx=False,
        data_simplification=True,
        record_op_args=False,
        op_attr=False,
        gc_detect_threshold=None,
        export_type="Text",
        host_sys=None,
        mstx_domain_include=None,
        mstx_domain_exclude=None,
        sys_io=False,
        sys_interconnection=False,
    ):
        self.settings = profiler_level, aic_metrics, export_type, mstx


def tensorboard_trace_handler(dir_name=None, worker_name=None, analyse_flag=True, async_mode=False):
    return (dir_name, worker_name) if analyse_flag else (dir_name, worker_name, "not analysed")


class profile:
    def __init__(
        self,
        *,
        activities=None,
        schedule=None,
        on_trace_ready=None,
        record_shapes=False,
        profile_memory=False,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=None,
        use_cuda=None,
    ):
        contents = [name for name, enabled in (("shapes", record_shapes), ("memory", profile_memory), ("stack", with_stack), ("modules", with_modules)) if enabled]  # fmt: skip
        self.settings = activities, contents, experimental_config.settings, on_trace_ready

    def start(self):
        called.append(f"profile {self.settings}")

    def stop(self):
        called.append("profiled")
