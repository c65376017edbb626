"""torch_npu.profiler, as far as it is called."""

from torch_npu import called


class ProfilerActivity:
    CPU, NPU = "cpu", "npu"


def tensorboard_trace_handler(dir_name=None, worker_name=None, analyse_flag=True, async_mode=False):
    return dir_name, worker_name


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
        self.given = activities, on_trace_ready

    def start(self):
        called.append(f"profile {self.given}")

    def stop(self):
        called.append("profiled")
