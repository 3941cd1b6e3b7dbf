"""Settings of `baton doctor`."""

from __future__ import annotations

from pydantic import Field

from cli.reach import ClientOptions
from common.settings import Port
from services.runtime.settings import ModelSettings
from services.worker.options import Device, HostSize, Ranks


class DoctorSettings(ModelSettings, ClientOptions):
    """`baton doctor`: checks this machine, and a `baton up` that runs, and says what to fix."""

    device: Device = Field("cpu", description="cpu, or cuda: check torch and the GPUs as well")
    kv_host_mb: HostSize = Field(
        "0", description="as workers get it: what they share, as MB:shared, is compared with the size of /dev/shm"
    )
    tensor_parallel_size: Ranks = Field(1, description="as workers get it: what of the model each rank would have")
    pipeline_parallel_size: Ranks = Field(1, description="as workers get it: which layers each stage would have")
    enable_expert_parallel: bool = Field(
        True, description="as workers get it: ranks have whole experts; off: parts of all"
    )
    host: str = Field("127.0.0.1", description="address of the gateway's port")
    port: Port = Field(8000, description="port that must be free, unless a gateway is known; 0: not checked")
    print_json: bool = Field(False, description="print JSON")
